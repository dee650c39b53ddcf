"""Which tokens may be drawn: min_p, top_k and top_p, exactly and without sorting the vocabulary.

Each filter keeps the tokens at or above a threshold. Mostly it lies among the most probable `CANDIDATES` tokens of the
row, which are found first; a row whose threshold lies below them gets it by bisection over the bits of a float. Which
of the two ways a row goes depends on that row alone.

A row of the vocabulary is a table [R, C]: sums over R run along contiguous memory, which is several times faster.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

CANDIDATES = 256


def apply_filters(
    logits: jax.Array, weights: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """`weights` with 0 for the tokens that are not kept. Equal tokens are kept or dropped together.

    min_p keeps the tokens with at least this share of the largest weight; top_k the k most probable; top_p, after
    these two, each token of which the more probable ones hold less than top_p of the weight that is left.

    Args:
        logits: [N, R, C] float32, in the order of the weights.
        weights: [N, R, C] float32, probabilities in units of the row's largest.
        top_k: [N] int32, 0 = off.
        top_p: [N] float32, 1 = off.
        min_p: [N] float32, 0 = off.

    Returns:
        [N, R, C] float32.
    """
    weights = jnp.where(weights >= min_p[:, None, None], weights, 0)
    return lax.cond(
        jnp.any((top_k > 0) | (top_p < 1)),
        lambda: _top_k_top_p(logits, weights, top_k, top_p),
        lambda: weights,
    )


def sum_rows(table: jax.Array) -> jax.Array:
    """[N] sums of [N, R, C], in two steps: faster and more exact than in one."""
    return jnp.sum(jnp.sum(table, axis=1), axis=1)


def _top_k_top_p(logits: jax.Array, weights: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    num_rows, width = logits.shape[0], logits.shape[1] * logits.shape[2]
    candidates, ids = lax.top_k(logits.reshape(num_rows, width), min(CANDIDATES, width))
    kth = _kth_largest(logits, candidates, jnp.where(top_k > 0, top_k, width))
    weights = jnp.where(logits >= kth[:, None, None], weights, 0)
    candidates = jnp.take_along_axis(weights.reshape(num_rows, width), ids, axis=1)
    nucleus = _nucleus(weights, candidates, top_p)
    return jnp.where(weights >= nucleus[:, None, None], weights, 0)


def _kth_largest(logits: jax.Array, candidates: jax.Array, k: jax.Array) -> jax.Array:
    """[N] float32, the k-th largest logit of each row, -inf where k is all of them or more.

    Args:
        candidates: [N, M], the largest logits of each row, sorted.
    """
    num_candidates = candidates.shape[1]
    off = k >= logits.shape[1] * logits.shape[2]
    near = k <= num_candidates
    kth = jnp.take_along_axis(candidates, jnp.minimum(k, num_candidates)[:, None] - 1, axis=1)[:, 0]

    def at_least_k(value: jax.Array) -> jax.Array:
        # Counted in float32, which is faster here, and exact up to 16 million.
        return sum_rows(jnp.where(logits >= value[:, None, None], 1.0, 0.0)) >= k

    kth = lax.cond(
        jnp.all(near | off),
        lambda: kth,
        lambda: jnp.where(near, kth, _largest_float(at_least_k, -jnp.inf, jnp.inf, k.shape)),
    )
    return jnp.where(off, -jnp.inf, kth)


def _nucleus(weights: jax.Array, candidates: jax.Array, top_p: jax.Array) -> jax.Array:
    """[N] float32, the largest weight which, with all larger ones, holds top_p of the row's sum; 0 where it is off.

    Args:
        candidates: [N, M], the largest weights of each row, sorted.
    """
    off = top_p >= 1
    mass = top_p * sum_rows(weights)
    reached = jnp.cumsum(candidates, axis=1) >= mass[:, None]
    near = jnp.any(reached, axis=1)
    nucleus = jnp.take_along_axis(candidates, jnp.argmax(reached, axis=1)[:, None], axis=1)[:, 0]

    def holds_mass(value: jax.Array) -> jax.Array:
        return sum_rows(jnp.where(weights >= value[:, None, None], weights, 0)) >= mass

    nucleus = lax.cond(
        jnp.all(near | off),
        lambda: nucleus,
        lambda: jnp.where(near, nucleus, _largest_float(holds_mass, 0.0, 1.0, mass.shape)),
    )
    return jnp.where(off, 0, nucleus)


def _largest_float(
    holds: Callable[[jax.Array], jax.Array], low: float, high: float, shape: tuple[int, ...]
) -> jax.Array:
    """The largest float32 from `low` to `high` at which `holds`, by row; `low` where it holds nowhere.

    `holds` takes and gives [N]; it is true up to some value and false beyond. Floats have the order of their bits (of
    the negative ones the bits are reversed to make it so), therefore halving an interval of bits ends with the
    exact float.
    """

    def key(value: float) -> jax.Array:
        bits = lax.bitcast_convert_type(jnp.float32(value), jnp.int32)
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)

    def value(key: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        below, above = bounds  # holds at `below`, unless that is `low`; not at `above`
        middle = (below & above) + ((below ^ above) >> 1)  # the mean; a sum could overflow
        ok = holds(value(middle))
        return jnp.where(ok, middle, below), jnp.where(ok, above, middle)

    bounds = jnp.full(shape, key(low)), jnp.full(shape, key(high) + 1)
    below, _ = lax.while_loop(lambda bounds: jnp.any(bounds[0] + 1 < bounds[1]), halve, bounds)
    return value(below)
