"""Whether a group may join the batch now, or could ever."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpaged.config import SchedulerConfig
from jaxpaged.core.group import SequenceGroup
from jaxpaged.core.kv_manager import KVManager, group_blocks, num_blocks_for
from jaxpaged.core.rows import BatchRows
from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import Request, Sequence


@dataclass(frozen=True)
class Offer:
    """What a group starts with.

    Attributes:
        hits: blocks of the prefix cache that its leader's table starts with.
        writes: (sequence, end): tokens up to `end` are computed in the first step.
    """

    hits: list[int]
    writes: list[tuple[Sequence, int]]


class Admission:
    """The rules of admission. It only looks: the scheduler acts."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, rows: BatchRows) -> None:
        self._config = config
        self._kv = kv
        self._rows = rows

    def check_fits_alone(self, request: Request) -> None:
        """Refuse a request that would not fit even with everything to itself.

        The last token drawn is never written, so a sequence of L tokens takes the blocks of L - 1. A request that
        passes always completes alone in the pool, which is what makes preemption end.

        Raises:
            InvalidRequestError: naming the limit and the remedies.
        """
        config, pool = self._config, self._kv.pool
        prompt_len, n = len(request.prompt_token_ids), request.params.n
        if n > config.max_num_seqs:
            raise InvalidRequestError(
                f"n is {n}, but at most {config.max_num_seqs} sequences run at once; lower n or raise max_num_seqs",
                param="n",
            )
        if prompt_len + (request.pooling is None) > config.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {prompt_len} tokens, which leaves no room for output in the {config.max_model_len} "
                "of max_model_len; shorten the prompt",
                param="prompt",
            )
        longest = max(prompt_len, min(prompt_len + request.max_tokens, config.max_model_len) - 1)
        needed = group_blocks(prompt_len, [longest] * n, self._kv.block_size)
        if needed > pool.num_usable:
            raise InvalidRequestError(
                f"the request can need {needed} KV blocks ({prompt_len} prompt tokens, up to {request.max_tokens} "
                f"output tokens, n = {n}, {self._kv.block_size} tokens a block), but the pool has {pool.num_usable}; "
                "lower max_tokens or n, shorten the prompt, or give the pool more memory (kv_cache_memory)",
                param="max_tokens",
            )

    def chunk(self, remaining: int, budget: int) -> int:
        """Tokens of a sequence with `remaining` to compute that go into a step with `budget` left.

        Without chunked prefill that is all or none; the config sees to it that the budget of an empty step holds the
        longest sequence.
        """
        if not self._config.enable_chunked_prefill:
            return remaining if remaining <= budget else 0
        return min(remaining, budget, self._config.long_prefill_token_threshold or remaining)

    def consider(self, group: SequenceGroup, budget: int) -> Offer | None:
        """What `group` would start with, or None if it has to wait."""
        sequences = group.unfinished
        if len(sequences) > self._rows.num_free:
            return None
        hits: list[int] = []
        if not group.is_swapped:
            sequences = sequences[:1]
            if group.reads_prefix_cache:
                hits = self._kv.match_prefix(sequences[0], group.target(sequences[0]))
        writes = []
        held = group.waits_for_beams
        for sequence in sequences:
            start = sequence.num_computed + len(hits) * self._kv.block_size
            remaining = group.target(sequence) - held - start
            if remaining == 0:
                continue
            count = self.chunk(remaining, budget)
            if count == 0:
                break
            writes.append((sequence, start + count))
            budget -= count
        if group.request.beams is not None and not held and len(writes) < len(sequences):
            return None  # all beams in one step, or none
        if not writes or not self._has_room(group, hits, writes[0][1]):
            return None
        return Offer(hits, writes)

    def _has_room(self, group: SequenceGroup, hits: list[int], end: int) -> bool:
        pool, block_size = self._kv.pool, self._kv.block_size
        if self._config.reserve_full_prompt or group.is_swapped:
            needed = group.blocks_now(block_size)
        else:
            needed = num_blocks_for(end, block_size)
        # A hit saves a block, but a hit on a free block takes that block out of the free ones.
        needed -= sum(pool.ref_counts[block] > 0 for block in hits)
        # With nothing running the head of the queue must get in, or it would wait forever.
        if self._rows.num_used:
            needed += self._margin(group)
        return self._kv.has_room(group.unfinished, needed)

    def _margin(self, group: SequenceGroup) -> int:
        """Free blocks that must be left over after admission for those who run."""
        config, rows, block_size = self._config, self._rows, self._kv.block_size
        margin = int(config.watermark * self._kv.pool.num_usable)
        if config.reserve_full_prompt:
            margin += self._promised()
        if group.started:
            # A group that gave way must not come back only to give way again. Each sequence takes at most one block
            # in `block_size` steps, so with one spare block for each, its own included, all make that many steps
            # (plus those that recomputing takes) before anyone can be short.
            sequences = group.unfinished
            todo = sum(s.num_tokens - s.num_computed for s in sequences)
            spare = 1 + todo // (config.max_num_batched_tokens * block_size)
            margin += spare * (rows.num_used + len(sequences))
        return margin

    def _promised(self) -> int:
        """Blocks that running groups still take until they have computed all tokens they know."""
        rows, block_size = self._rows, self._kv.block_size
        missing = -(-rows.target // block_size) - rows.num_blocks
        promised = int(np.maximum(missing, 0).sum()) + int(np.count_nonzero(rows.may_share))
        for row in np.flatnonzero(rows.leads).tolist():
            request = rows.holder(row).request
            lengths = [s.num_tokens for s in request.sequences if not s.is_finished]
            prompt_len = len(request.prompt_token_ids)
            promised += group_blocks(prompt_len, lengths, block_size) - num_blocks_for(prompt_len, block_size)
        return promised
