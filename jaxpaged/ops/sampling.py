"""Drawing tokens, one row a draw, on the device.

The vocabulary is never sorted and no noise is made for it. A threshold on the weights decides which tokens are kept;
it is found by bisection over the bits of a float. The draw is an inverse CDF in two levels. A row of the vocabulary is
viewed as a table [R, C], token r * C + c at (r, c), because sums over R run along contiguous memory.

Every reduction stays inside its row, so that a draw depends on the row alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

COLUMNS = 512
MIN_COLUMNS = 64


class _Filters(NamedTuple):
    """Which tokens may be drawn, by row; each [N], as in `sample`."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    *,
    vocab_size: int | None = None,
) -> jax.Array:
    """Draws one token a row: temperature, then min_p, then top_k, then top_p, then the draw.

    min_p keeps the tokens with at least this share of the most probable token's probability. top_k keeps the k most
    probable of them. top_p keeps a token when the more probable ones of those left hold less than top_p of the mass
    that is left. Tokens of equal weight are kept or dropped together, so ties can leave more than k.

    A row of temperature 0 gets its most probable token, the lowest id of equals. A token of probability 0 is never
    drawn. With one seed, position and row of logits the token is always the same, whatever the other rows are.

    Args:
        logits: [N, V] float32; -inf is probability 0.
        temperature: [N] float32, 0 = greedy.
        top_k: [N] int32, 0 = off.
        top_p: [N] float32, 1 = off.
        min_p: [N] float32, 0 = off.
        seed: [N, 2] uint32, low and high half of a 64-bit seed.
        position: [N] int32; the key of the draw is fold_in(key(seed), position).
        vocab_size: ids from here on are padding and are never drawn; None = V.

    Returns:
        [N] int32 token ids.
    """
    vocab_size = vocab_size or logits.shape[1]
    table = _table(logits, vocab_size)
    top = jnp.max(table, axis=(1, 2))
    greedy = _first_at(table, top)
    filters = _Filters(temperature, top_k, top_p, min_p)
    token = lax.cond(
        jnp.any(temperature > 0), lambda: _draw(table, top, filters, _uniforms(seed, position)), lambda: greedy
    )
    # Logits that are all NaN match nothing; whatever is returned must be an id.
    return jnp.minimum(jnp.where(temperature > 0, token, greedy), vocab_size - 1)


def gather_logprobs(
    logits: jax.Array, token_ids: jax.Array, num_top: int, *, vocab_size: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Log-probabilities under the raw logits, before temperature and filters.

    Args:
        logits: [N, V] float32.
        token_ids: [N] int32.
        num_top: K, static, at most V.
        vocab_size: ids from here on are padding of probability 0; None = V.

    Returns:
        logprobs [N] float32 of `token_ids`; ranks [N] int32, 1 + the number of tokens with a larger logit;
        the K most probable tokens [N, K] int32, best first and lower ids first of equals; and their
        log-probabilities [N, K] float32.
    """
    table = _table(logits, vocab_size or logits.shape[1])
    top = jnp.max(table, axis=(1, 2))
    log_total = top + jnp.log(_sum(jnp.exp(table - top[:, None, None])))
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    ranks = 1 + jnp.sum(table > chosen[:, None], axis=(1, 2), dtype=jnp.int32)
    top_logits, top_ids = lax.top_k(table.reshape(table.shape[0], -1), num_top)
    log_total = log_total[:, None]
    return (chosen - log_total)[:, 0], ranks, top_ids, top_logits - log_total


def _table(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Logits as [N, R, C], with -inf for padding."""
    num_rows, width = logits.shape
    columns = math.gcd(width, COLUMNS)
    if columns < MIN_COLUMNS:
        columns = COLUMNS
        logits = jnp.pad(logits, ((0, 0), (0, -width % columns)), constant_values=-jnp.inf)
    if vocab_size < width:
        logits = jnp.where(jnp.arange(logits.shape[1]) < vocab_size, logits, -jnp.inf)
    return logits.reshape(num_rows, -1, columns)


def _sum(table: jax.Array) -> jax.Array:
    """[N] sums of [N, R, C], in two steps: faster and more exact than in one."""
    return jnp.sum(jnp.sum(table, axis=1), axis=1)


def _first_at(table: jax.Array, value: jax.Array) -> jax.Array:
    """[N] int32, the lowest id at which a row of the table equals its `value` [N]."""
    _, rows, columns = table.shape
    ids = jnp.arange(rows * columns, dtype=jnp.int32).reshape(rows, columns)
    found = jnp.where(table == value[:, None, None], ids, jnp.iinfo(jnp.int32).max)
    return jnp.min(jnp.min(found, axis=1), axis=1)


def _uniforms(seed: jax.Array, position: jax.Array) -> jax.Array:
    """[N, 2] float32 in [0, 1): one for each level of the draw."""

    def draw(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed[::-1], impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position), (2,))

    return jax.vmap(draw)(seed, position)


def _draw(table: jax.Array, top: jax.Array, filters: _Filters, uniforms: jax.Array) -> jax.Array:
    """[N] int32 token ids; anything for greedy rows."""
    greedy = filters.temperature <= 0
    temperature = jnp.where(greedy, 1, filters.temperature)
    # Greedy rows would only prolong the bisections.
    filters = _Filters(
        temperature,
        jnp.where(greedy, 0, filters.top_k),
        jnp.where(greedy, 1, filters.top_p),
        jnp.where(greedy, 0, filters.min_p),
    )
    weights = jnp.exp((table - top[:, None, None]) / temperature[:, None, None])  # the largest is exactly 1
    threshold = _threshold(weights, filters)
    weights = jnp.where(weights >= threshold[:, None, None], weights, 0)
    column = _pick(jnp.sum(weights, axis=1), uniforms[:, 0])
    in_column = jnp.take_along_axis(weights, column[:, None, None], axis=2)[..., 0]
    row = _pick(in_column, uniforms[:, 1])
    return row * table.shape[2] + column


def _pick(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """[N] int32, the first index whose running sum exceeds uniform * total, of those with a weight above 0.

    The running sums of [N, M] are rounded, and need not even grow with each weight: hence the second condition, and
    the last positive weight where no running sum exceeds.
    """
    positive = weights > 0
    sums = jnp.cumsum(weights, axis=1)
    hit = positive & (sums > (uniform * sums[:, -1])[:, None])
    last = weights.shape[1] - 1 - jnp.argmax(positive[:, ::-1], axis=1)
    return jnp.where(jnp.any(hit, axis=1), jnp.argmax(hit, axis=1), last).astype(jnp.int32)


def _threshold(weights: jax.Array, filters: _Filters) -> jax.Array:
    """[N] float32, the least weight that the filters keep; weights [N, R, C] are relative to the largest, 1."""
    floor = filters.min_p

    def after_top_k(floor: jax.Array) -> jax.Array:
        wanted = jnp.where(filters.top_k > 0, filters.top_k, jnp.iinfo(jnp.int32).max)
        return jnp.maximum(floor, _kth_largest(weights, wanted))

    def after_top_p(floor: jax.Array) -> jax.Array:
        left = jnp.where(weights >= floor[:, None, None], weights, 0)
        nucleus = _nucleus(left, filters.top_p * _sum(left))
        return jnp.where(filters.top_p < 1, jnp.maximum(floor, nucleus), floor)

    floor = lax.cond(jnp.any(filters.top_k > 0), after_top_k, lambda floor: floor, floor)
    return lax.cond(jnp.any(filters.top_p < 1), after_top_p, lambda floor: floor, floor)


def _kth_largest(weights: jax.Array, k: jax.Array) -> jax.Array:
    """[N] float32, the k-th largest of each [R, C]; 0 where there are fewer than k."""

    def keeps_enough(value: jax.Array) -> jax.Array:
        at_least = jnp.sum(weights >= value[:, None, None], axis=1, dtype=jnp.int32)
        return jnp.sum(at_least, axis=1) >= k

    return _largest_where(keeps_enough, k.shape)


def _nucleus(weights: jax.Array, mass: jax.Array) -> jax.Array:
    """[N] float32, the least weight such that all larger ones together hold less than `mass` [N]."""

    def above_holds_mass(value: jax.Array) -> jax.Array:
        return _sum(jnp.where(weights >= value[:, None, None], weights, 0)) >= mass

    # The largest value such that it and all above hold the mass: what is above it, then, does not.
    return _largest_where(above_holds_mass, mass.shape)


def _largest_where(holds, shape: tuple[int, ...]) -> jax.Array:
    """The largest float32 in [0, 1] of each row for which `holds`, which is true up to some value and false beyond.

    The bits of floats that are not negative, read as integers, are in the order of the floats: so this is exact.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # holds at low (or low is 0), not at high
        middle = low + (high - low) // 2
        ok = holds(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

    one = lax.bitcast_convert_type(jnp.float32(1), jnp.int32)
    low, high = jnp.zeros(shape, jnp.int32), jnp.full(shape, one + 1)
    low, _ = lax.fori_loop(0, 30, halve, (low, high))
    return lax.bitcast_convert_type(low, jnp.float32)
