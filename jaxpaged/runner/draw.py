"""The end of a step: from logits to tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged.core.plan import NO_TOKEN, NONE_ALLOWED
from jaxpaged.ops.adjust import History, edit_logits, mask_logits, penalize, unless_empty
from jaxpaged.ops.sampling import NOTHING, gather_logprobs, sample

Batch = dict[str, jax.Array]
# Prompt tokens whose logits are in memory at once, unless the batch has more rows.
MIN_PROMPT_CHUNK = 32


class Logprobs(NamedTuple):
    """As `jaxpaged.core.plan.PositionLogprobs`: [M], [M], [M, K] and [M, K]."""

    logprobs: jax.Array
    ranks: jax.Array
    top_token_ids: jax.Array
    top_logprobs: jax.Array


class Drawn(NamedTuple):
    """Results of N draws; of log-probabilities zeros, unless the plan asked for them.

    Attributes:
        token_ids: [N] int32, NO_TOKEN where the logits are NaN, NONE_ALLOWED where they are all -inf.
        logprobs: of these tokens.
        id_logprobs: [N, L] float32, of `logprob_ids`.
        id_ranks: [N, L] int32.
    """

    token_ids: jax.Array
    logprobs: Logprobs
    id_logprobs: jax.Array
    id_ranks: jax.Array


def draw_tokens(
    logits: jax.Array, batch: Batch, optional: dict[str, Batch], tokens: jax.Array, *, vocab_size: int, num_top: int
) -> Drawn:
    """Draws from `logits` [N, V] float32 and reports their log-probabilities.

    Args:
        batch: fields of the step's blob.
        optional: fields of the optional inputs.
        tokens: [blocks, block_size] int32, the history of all rows.
        num_top: K.
    """

    def adjust() -> jax.Array:
        return _adjusted(logits, batch, optional, tokens, vocab_size)

    adjusts = sum(optional[name]["count"][0] for name in ("penalties", "edits", "many_edits", "masks")) > 0
    token_ids = sample(
        logits,
        batch["temperature"],
        batch["top_k"],
        batch["top_p"],
        batch["min_p"],
        batch["seed"],
        batch["draw_position"],
        vocab_size=vocab_size,
        adjust=adjust,
        adjusts=adjusts,
    )
    token_ids = jnp.where(token_ids == NOTHING, NONE_ALLOWED, token_ids)
    token_ids = jnp.where(jnp.isnan(jnp.max(logits, axis=1)), NO_TOKEN, token_ids)
    return _with_logprobs(logits, token_ids, batch, optional["logprob_ids"], num_top, vocab_size)


def prompt_logprobs(
    hidden: jax.Array,
    make_logits: Callable[[jax.Array], jax.Array],
    prompt: Batch,
    *,
    num_rows: int,
    num_top: int,
    vocab_size: int,
) -> Logprobs:
    """Log-probabilities of prompt tokens, from the hidden states [T, E] of the tokens before them.

    The logits are made for some tokens at a time, so that they take no more memory than those of the draws.

    Args:
        prompt: fields of the optional input; M = T, its first `count` are in use, and the other results are anything.
        num_rows: draws of the step.
        vocab_size: ids that can be drawn; others are neither ranked nor among the most probable ones, as in draws.
    """
    T = len(prompt["target_ids"])
    size = min(T, max(num_rows, MIN_PROMPT_CHUNK))
    num_padded = -(-T // size) * size
    token_index, targets = (jnp.pad(prompt[name], (0, num_padded - T)) for name in ("token_index", "target_ids"))

    def chunk(state: tuple[jax.Array, Logprobs]) -> tuple[jax.Array, Logprobs]:
        start, out = state
        index, target = (lax.dynamic_slice_in_dim(x, start, size) for x in (token_index, targets))
        found = Logprobs(*gather_logprobs(make_logits(hidden[index]), target, num_top, num_drawable=vocab_size))
        return start + size, jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, start, 0), out, found)

    state = jnp.int32(0), _no_logprobs(num_padded, num_top)
    return lax.while_loop(lambda state: state[0] < prompt["count"][0], chunk, state)[1]


def _adjusted(
    logits: jax.Array, batch: Batch, optional: dict[str, Batch], tokens: jax.Array, vocab_size: int
) -> jax.Array:
    """The logits to draw from: allowed tokens, then additions, then penalties."""
    masks, penalties = optional["masks"], optional["penalties"]
    # Padding must not look like a token that is left.
    logits = jnp.where(jnp.arange(logits.shape[1]) < vocab_size, logits, -jnp.inf)
    allowed = lax.cond(masks["count"][0] > 0, lambda: mask_logits(logits, masks["words"]), lambda: logits)
    edited = allowed
    for edits in (optional["edits"], optional["many_edits"]):
        edited = lax.cond(
            edits["count"][0] > 0,
            lambda logits, edits=edits: edit_logits(logits, edits["draws"], edits["token_ids"], edits["values"]),
            lambda logits: logits,
            edited,
        )
    edited = unless_empty(edited, allowed)
    row = jnp.searchsorted(batch["query_starts"], batch["token_index"], side="right") - 1
    history = History(tokens, batch["block_tables"][row], batch["draw_position"])
    names = ("prompt_len", "repetition", "frequency", "presence")
    return lax.cond(
        penalties["count"][0] > 0,
        lambda: penalize(edited, history, *(penalties[name] for name in names)),
        lambda: edited,
    )


def _with_logprobs(
    logits: jax.Array, token_ids: jax.Array, batch: Batch, ids: Batch, num_top: int, vocab_size: int
) -> Drawn:
    N, L = ids["token_ids"].shape

    def with_logprobs() -> Drawn:
        asked = jnp.where(ids["count"][0] > 0, ids["token_ids"], -1)
        all_ids = jnp.concatenate([jnp.maximum(token_ids, 0)[:, None], asked], axis=1)
        logprobs, ranks, *top = gather_logprobs(logits, all_ids, num_top, num_drawable=vocab_size)
        return Drawn(token_ids, Logprobs(logprobs[:, 0], ranks[:, 0], *top), logprobs[:, 1:], ranks[:, 1:])

    def without_logprobs() -> Drawn:
        return Drawn(token_ids, _no_logprobs(N, num_top), jnp.zeros((N, L)), jnp.zeros((N, L), jnp.int32))

    return lax.cond(batch["num_logprobs"][0] >= 0, with_logprobs, without_logprobs)


def _no_logprobs(size: int, num_top: int) -> Logprobs:
    empty = jnp.zeros((size, num_top))
    return Logprobs(jnp.zeros(size), jnp.zeros(size, jnp.int32), empty.astype(jnp.int32), empty)
