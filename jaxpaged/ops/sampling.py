"""Drawing tokens, one row a draw, on the device.

The vocabulary is neither sorted nor covered with noise: a draw is an inverse CDF in two levels. A row of the vocabulary
is viewed as a table [R, C], token r * C + c at (r, c): first a column is drawn by its sum, then a token in the column.

Every reduction stays inside its row, so that a draw depends on the row alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged.ops.filters import apply_filters, sum_rows

COLUMNS = 512
MIN_COLUMNS = 64
# Drawn where no token has a probability above 0.
NOTHING = -1


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
    adjust: Callable[[], jax.Array] | None = None,
    adjusts: jax.Array | bool = False,
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
        adjust: gives other logits [N, V] to draw from.
        adjusts: [] bool, whether to draw from those.

    Returns:
        [N] int32 token ids, NOTHING where all logits are -inf.
    """
    vocab_size = vocab_size or logits.shape[1]

    def draw(table: jax.Array, top: jax.Array, most_probable: jax.Array) -> jax.Array:
        weights = _weights(table, top, temperature)
        drawn = temperature > 0  # the filters of other rows are not worth their time
        kept = apply_filters(
            table, weights, jnp.where(drawn, top_k, 0), jnp.where(drawn, top_p, 1), jnp.where(drawn, min_p, 0)
        )
        return jnp.where(drawn & (top > -jnp.inf), _draw(kept, _uniforms(seed, position)), most_probable)

    plain = _most_probable(logits, vocab_size)
    # A draw from other logits is a way of its own: one for both would copy those that nobody adjusts.
    ways = [lambda: plain[2], lambda: draw(*plain)]
    way = jnp.any(temperature > 0).astype(jnp.int32)
    if adjust is not None:
        ways.append(lambda: draw(*_most_probable(adjust(), vocab_size)))
        way = jnp.where(adjusts, 2, way)
    token = lax.switch(way, ways)
    # Logits that are all NaN match nothing; whatever is returned must be an id.
    return jnp.minimum(token, vocab_size - 1)


def gather_logprobs(
    logits: jax.Array,
    token_ids: jax.Array,
    num_top: int,
    *,
    vocab_size: int | None = None,
    num_drawable: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Log-probabilities under the raw logits, before temperature and filters.

    Args:
        logits: [N, V] float32.
        token_ids: [N] or [N, M] int32; of the M columns the last ones, where all ids are negative, cost nothing and
            give anything.
        num_top: K, static, at most V.
        vocab_size: ids from here on are padding of probability 0; None = V.
        num_drawable: ids from here on are never drawn, and neither ranked nor among the most probable ones; None =
            vocab_size.

    Returns:
        logprobs float32 of `token_ids`, in their shape; ranks int32, 1 + the number of tokens with a larger logit;
        the K most probable tokens [N, K] int32, best first and lower ids first of equals; and their
        log-probabilities [N, K] float32.
    """
    table = _table(logits, vocab_size or logits.shape[1])
    top = jnp.max(table, axis=(1, 2))
    log_total = (top + jnp.log(sum_rows(jnp.exp(table - top[:, None, None]))))[:, None]
    ids = token_ids.reshape(len(logits), -1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(ids, 0), axis=1)
    drawable = table if num_drawable is None else _table(logits, num_drawable)
    ranks = _ranks(drawable, chosen, ids >= 0)
    top_logits, top_ids = lax.top_k(drawable.reshape(len(logits), -1), num_top)
    logprobs = chosen - log_total
    return logprobs.reshape(token_ids.shape), ranks.reshape(token_ids.shape), top_ids, top_logits - log_total


def _ranks(table: jax.Array, chosen: jax.Array, is_used: jax.Array) -> jax.Array:
    """[N, M] int32, 1 + the number of entries of a row of `table` larger than each of `chosen` [N, M]; 1 where a whole
    column is not used, nor any after it.
    """

    def rank(i: jax.Array, ranks: jax.Array) -> jax.Array:
        larger = table > lax.dynamic_slice_in_dim(chosen, i, 1, axis=1)[:, None]
        count = jnp.sum(larger, axis=(1, 2), dtype=jnp.int32)[:, None]
        return lax.dynamic_update_slice_in_dim(ranks, 1 + count, i, axis=1)

    num_columns = chosen.shape[1]
    num_used = jnp.max(jnp.where(is_used, 1 + jnp.arange(num_columns, dtype=jnp.int32), 0))
    return lax.fori_loop(0, 1 if num_columns == 1 else num_used, rank, jnp.ones(chosen.shape, jnp.int32))


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


def _most_probable(logits: jax.Array, vocab_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits as a table, the largest of each row [N], and the lowest id [N] that has it, NOTHING for -inf."""
    table = _table(logits, vocab_size)
    top = jnp.max(table, axis=(1, 2))
    return table, top, jnp.where(top == -jnp.inf, NOTHING, _first_at(table, top))


def _first_at(table: jax.Array, value: jax.Array) -> jax.Array:
    """[N] int32, the lowest id at which a row of the table equals its `value` [N]."""
    _, rows, columns = table.shape
    ids = jnp.arange(rows * columns, dtype=jnp.int32).reshape(rows, columns)
    found = jnp.where(table == value[:, None, None], ids, rows * columns)
    return jnp.min(jnp.min(found, axis=1), axis=1)


def _uniforms(seed: jax.Array, position: jax.Array) -> jax.Array:
    """[N, 2] float32 in [0, 1): one for each level of the draw."""

    def draw(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed[::-1], impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position), (2,))

    return jax.vmap(draw)(seed, position)


def _weights(table: jax.Array, top: jax.Array, temperature: jax.Array) -> jax.Array:
    """[N, R, C] float32, each token's probability in units of the most probable one's."""
    divisor = jnp.where(temperature > 0, temperature, 1)
    weights = jnp.exp((table - top[:, None, None]) / divisor[:, None, None])
    # They are compared with each other: computed twice, in different fusions, they could differ in their last bit.
    return lax.optimization_barrier(weights)


def _draw(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    """[N] int32 token ids drawn by `weights` [N, R, C]."""
    column = _pick(jnp.sum(weights, axis=1), uniforms[:, 0])
    in_column = jnp.take_along_axis(weights, column[:, None, None], axis=2)[..., 0]
    row = _pick(in_column, uniforms[:, 1])
    return row * weights.shape[2] + column


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
