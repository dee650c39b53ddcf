"""The two types that the scheduler and the runner share: what a step computes, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from jaxpaged.request import Sequence

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

# Drawn where the logits are not numbers.
NO_TOKEN = -1


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
        num_logprobs: most log-probabilities that a row asks for; -1 = none wants any, 0 = only the drawn token's.
    """

    token_index: IntArray
    temperature: FloatArray
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray
    seed: npt.NDArray[np.uint32]
    position: IntArray
    num_logprobs: int


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What one step computes, for S sequences with T tokens in all, unpadded.

    Order of work on the device: swap_out, swap_in, copies, then the step itself (which writes KV, attends, draws).

    Attributes:
        num_decodes: leading sequences with exactly one token each.
        token_ids: [T] int32, flat, the decodes first.
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

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class StepResult:
    """What came of a step's N draws.

    Attributes:
        token_ids: [N] int32, or NO_TOKEN.
        logprobs: [N] float32, of the drawn tokens, or None when no row asked.
        ranks: [N] int32, rank of the drawn token, 1 = most probable, or None.
        top_token_ids: [N, K] int32, the most probable tokens, best first, or None; K >= the plan's num_logprobs.
        top_logprobs: [N, K] float32, or None.
    """

    token_ids: IntArray
    logprobs: FloatArray | None = None
    ranks: IntArray | None = None
    top_token_ids: IntArray | None = None
    top_logprobs: FloatArray | None = None
