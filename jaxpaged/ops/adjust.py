"""What changes logits before a token is drawn: allowed tokens, single additions, penalties for what was said.

All of it costs work of the size of the vocabulary, so a step goes here only when one of its draws asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

# Tokens of each row that one round of counting takes.
COUNTED_AT_ONCE = 256
# Marks tokens of the prompt in a table of counts; no output has as many tokens.
IN_PROMPT = 1 << 24


@dataclass(frozen=True)
class History:
    """The tokens of each of N rows, in blocks like their KV.

    Attributes:
        tokens: [blocks, block_size] int32.
        block_tables: [N, P] int32.
        lengths: [N] int32.
    """

    tokens: jax.Array
    block_tables: jax.Array
    lengths: jax.Array


def write_tokens(tokens: jax.Array, token_ids: jax.Array, slots: jax.Array) -> jax.Array:
    """`tokens` [blocks, block_size] with `token_ids` [T] in their `slots` [T]; slots outside are dropped."""
    return tokens.reshape(-1).at[slots].set(token_ids, mode="drop").reshape(tokens.shape)


def mask_logits(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """`logits` [N, V] with -inf where the mask has no bit.

    Args:
        masks: [N, W] uint32, W >= V / 32; bit b of word w stands for token 32 * w + b.
    """
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return jnp.where(bits.reshape(len(masks), -1)[:, : logits.shape[1]] == 1, logits, -jnp.inf)


def edit_logits(logits: jax.Array, rows: jax.Array, token_ids: jax.Array, values: jax.Array) -> jax.Array:
    """`logits` [N, V] with `values` [E] added at (rows, token_ids), both [E] int32; what is outside is dropped."""
    return logits.at[rows, token_ids].add(values, mode="drop")


def unless_empty(logits: jax.Array, before: jax.Array) -> jax.Array:
    """`logits` [N, V], but a row in which nothing is left to draw as it was `before`."""
    is_empty = jnp.max(logits, axis=1, keepdims=True) == -jnp.inf
    return jnp.where(is_empty, before, logits)


def penalize(
    logits: jax.Array,
    history: History,
    prompt_len: jax.Array,
    repetition: jax.Array,
    frequency: jax.Array,
    presence: jax.Array,
) -> jax.Array:
    """Penalties in this order; each leaves a row as it is, to the bit, where it is neutral.

    Args:
        logits: [N, V] float32.
        prompt_len: [N] int32, tokens of the history that are no output.
        repetition: [N] float32, divides positive and multiplies negative logits of all tokens of the history; 1 = off.
        frequency: [N] float32, taken off once for each time that the output has the token; 0 = off.
        presence: [N] float32, taken off if the output has the token; 0 = off.

    Returns:
        [N, V] float32.
    """
    repeats = repetition != 1
    counts = repeats | (frequency != 0) | (presence != 0)
    table = _counts(logits.shape, history, prompt_len, jnp.where(repeats, 0, prompt_len), counts)
    factor = jnp.where(table > 0, repetition[:, None], 1)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    count = table % IN_PROMPT
    logits -= frequency[:, None] * count
    return logits - presence[:, None] * (count > 0)


def _counts(
    shape: tuple[int, ...], history: History, prompt_len: jax.Array, start: jax.Array, counts: jax.Array
) -> jax.Array:
    """[N, V] int32, how often the output has a token, plus IN_PROMPT where the prompt has it from position `start` on.

    Args:
        counts: [N] bool, rows to count at all.
    """
    vocab_size, block_size = shape[1], history.tokens.shape[1]
    row = jnp.arange(shape[0], dtype=jnp.int32)[:, None]
    last_block = history.block_tables.shape[1] - 1
    stop = jnp.where(counts, history.lengths, 0)

    def count(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        done, table = state
        position = start[:, None] + done + jnp.arange(COUNTED_AT_ONCE, dtype=jnp.int32)
        block = jnp.take_along_axis(history.block_tables, jnp.minimum(position // block_size, last_block), axis=1)
        token_ids = history.tokens[block, position % block_size]
        in_prompt, is_known = position < prompt_len[:, None], position < stop[:, None]
        # A row's prompt is through before its output begins, so that no mark undoes a count.
        marked = jnp.where(in_prompt & is_known, token_ids, vocab_size)
        counted = jnp.where(is_known & ~in_prompt, token_ids, vocab_size)
        table = table.at[row, marked].set(IN_PROMPT, mode="drop").at[row, counted].add(1, mode="drop")
        return done + COUNTED_AT_ONCE, table

    longest = jnp.max(stop - start)
    return lax.while_loop(lambda state: state[0] < longest, count, (jnp.int32(0), jnp.zeros(shape, jnp.int32)))[1]
