"""The two types that the scheduler and the runner share: what a step computes, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from jaxpaged.request import Request, Sequence

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

# Drawn where the logits are not numbers.
NO_TOKEN = -1
# Drawn where no token is allowed.
NONE_ALLOWED = -2


@dataclass(frozen=True, eq=False)
class SampleBatch:
    """The N draws of a step. Several draws may use one token's logits (siblings of a request at their first token).

    Attributes:
        token_index: [N] int32, index into the plan's tokens of the one whose logits are drawn from.
        temperature: [N] float32, 0 = greedy.
        top_k: [N] int32, 0 = off.
        top_p: [N] float32, 1 = off.
        min_p: [N] float32, 0 = off.
        seed: [N, 2] uint32, low and high half of the sequence's 64-bit seed.
        position: [N] int32, position of the token to be drawn; the key of the draw is fold_in(key(seed), position).
        row: [N] int32, where the drawn token is kept on the device; it is the sequence's own while it runs.
        num_logprobs: most log-probabilities that a row asks for; -1 = none wants any, 0 = only the drawn token's.
    """

    token_index: IntArray
    temperature: FloatArray
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray
    seed: npt.NDArray[np.uint32]
    position: IntArray
    row: IntArray
    num_logprobs: int

    def at(self, position: IntArray) -> SampleBatch:
        """The same draws at other positions."""
        return SampleBatch(
            self.token_index,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seed,
            position,
            self.row,
            self.num_logprobs,
        )

    def draws_as(self, other: SampleBatch) -> bool:
        """Whether the same rows draw in the same way, from the same tokens of their plans; at any positions.

        Compares identities: where nothing changes from step to step, plans share their arrays.
        """
        return self.seed is other.seed and self.token_index is other.token_index


@dataclass(frozen=True, eq=False)
class Penalties:
    """Of the N draws of a step; 1, 0 and 0 where there is none.

    Attributes:
        repetition, frequency, presence: [N] float32.
        prompt_len: [N] int32, tokens before the sequence's output.
    """

    repetition: FloatArray
    frequency: FloatArray
    presence: FloatArray
    prompt_len: IntArray


@dataclass(frozen=True, eq=False)
class Adjustments:
    """What some of the draws of a step change in their logits, or have reported of them; most steps have none.

    Attributes:
        edit_draws: [E] int32, draws in whose logits single ones are changed.
        edit_token_ids: [E] int32, which ones.
        edit_values: [E] float32, what is added; -inf forbids the token.
        masks: draw -> [W] uint32, tokens that may be drawn: bit b of word w stands for token 32 * w + b.
        penalties: None where no draw has any.
        logprob_token_ids: draw -> [L] int32, tokens whose log-probabilities are reported.
    """

    edit_draws: IntArray
    edit_token_ids: IntArray
    edit_values: FloatArray
    masks: dict[int, npt.NDArray[np.uint32]]
    penalties: Penalties | None
    logprob_token_ids: dict[int, IntArray]


@dataclass(frozen=True, eq=False)
class PromptSpan:
    """Tokens of a plan that are part of a prompt whose log-probabilities are wanted.

    Attributes:
        start: index of the first of them among the plan's tokens.
        target_ids: [M] int32, the token of the prompt that follows each; its log-probability is wanted.
    """

    request: Request
    start: int
    target_ids: IntArray


@dataclass(frozen=True, eq=False)
class PoolSpan:
    """Tokens of a plan whose hidden states are summed for a prompt's embedding.

    Attributes:
        start: index of the first of them among the plan's tokens.
        is_first: the sum begins here; else it goes on from the last step's.
        is_last: the prompt ends here, and the sum is complete.
    """

    request: Request
    start: int
    count: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What one step computes, for S sequences with T tokens in all, unpadded.

    Order of work on the device: swap_out, swap_in, copies, then the step itself (which writes KV, attends, draws).

    Attributes:
        num_decodes: leading sequences with exactly one token each.
        token_ids: [T] int32, flat, the decodes first; -1 - row stands for the token last drawn for `row`, which the
            device has, but not yet the host.
        positions: [T] int32, position of each token in its sequence.
        query_starts: [S + 1] int32, sequence s owns tokens query_starts[s] to query_starts[s + 1].
        kv_lens: [S] int32, tokens of each sequence in the pool once this step has written its own.
        block_tables: [S, W] int32, block ids, padded with 0 (the null block); W = blocks of the longest table.
        sample: the draws; row i belongs to `sampled[i]`.
        sampled: the N sequences that get a token.
        scheduled: the S sequences, in order.
        copies: [C, 2] int32, (source, destination) device blocks: copy-on-write.
        swap_out: [C, 2] int32, (device block, host block).
        swap_in: [C, 2] int32, (host block, device block).
        adjustments: None where the draws are from the plain logits.
        prompt_spans: where log-probabilities of prompts are wanted.
        pool_spans: where embeddings of prompts are wanted; each of another request.
    """

    num_decodes: int
    token_ids: IntArray
    positions: IntArray
    query_starts: IntArray
    kv_lens: IntArray
    block_tables: IntArray
    sample: SampleBatch
    sampled: tuple[Sequence, ...]
    scheduled: tuple[Sequence, ...]
    copies: IntArray
    swap_out: IntArray
    swap_in: IntArray
    adjustments: Adjustments | None = None
    prompt_spans: tuple[PromptSpan, ...] = ()
    pool_spans: tuple[PoolSpan, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class PositionLogprobs:
    """Log-probabilities of one token, and of the most probable ones, at each of M positions.

    Attributes:
        logprobs: [M] float32.
        ranks: [M] int32, 1 = most probable.
        top_token_ids: [M, K] int32, the most probable tokens, best first.
        top_logprobs: [M, K] float32.
    """

    logprobs: FloatArray
    ranks: IntArray
    top_token_ids: IntArray
    top_logprobs: FloatArray


@dataclass(frozen=True, eq=False)
class StepResult:
    """What came of a step's N draws.

    Attributes:
        token_ids: [N] int32, or NO_TOKEN or NONE_ALLOWED.
        logprobs: [N] float32, of the drawn tokens, or None when no row asked.
        ranks: [N] int32, rank of the drawn token, 1 = most probable, or None.
        top_token_ids: [N, K] int32, the most probable tokens, best first, or None; K >= the plan's num_logprobs.
        top_logprobs: [N, K] float32, or None.
        id_logprobs: [N, L] float32, of the plan's `logprob_token_ids` in their order, or None when no row has any.
        id_ranks: [N, L] int32, or None.
        prompt: of the tokens of the plan's `prompt_spans`, one span after the other; None where there is no span.
        pooled: [len(pool_spans), E] float32, sums of the hidden states of the plan's `pool_spans`; None without any.
    """

    token_ids: IntArray
    logprobs: FloatArray | None = None
    ranks: IntArray | None = None
    top_token_ids: IntArray | None = None
    top_logprobs: FloatArray | None = None
    id_logprobs: FloatArray | None = None
    id_ranks: IntArray | None = None
    prompt: PositionLogprobs | None = None
    pooled: FloatArray | None = None

    def top_of(self, draws: list[int]) -> tuple[IntArray, FloatArray]:
        """The most probable tokens of some draws, which must have asked for them, and their log-probabilities."""
        assert self.top_token_ids is not None and self.top_logprobs is not None, "the step reports no log-probabilities"
        return self.top_token_ids[draws], self.top_logprobs[draws]
