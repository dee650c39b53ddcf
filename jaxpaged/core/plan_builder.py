"""Turns the scheduled rows of the batch into a `StepPlan`."""

from __future__ import annotations

import numpy as np

from jaxpaged.core.kv_manager import Pair
from jaxpaged.core.plan import IntArray, SampleBatch, StepPlan
from jaxpaged.core.rows import BatchRows
from jaxpaged.request import Sequence


def _pairs(pairs: list[Pair]) -> IntArray:
    return np.array(pairs, np.int32).reshape(-1, 2)


def _concat(parts: list[IntArray]) -> IntArray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, dtype=np.int32)


class PlanBuilder:
    """Builds plans from the rows.

    Decodes are the rows that compute exactly one token and draw exactly one, in order of their rows; so in a plan
    of decodes only, draw i belongs to sequence i and token i. All other rows come behind them.
    """

    def __init__(self, rows: BatchRows) -> None:
        self._rows = rows
        self._members: tuple[Sequence, ...] = ()
        self._member_rows: IntArray = np.zeros(0, np.int32)
        self._members_version = -1

    def build(self, prefills: list[int], copies: list[Pair], swap_out: list[Pair], swap_in: list[Pair]) -> StepPlan:
        """The plan of all scheduled rows.

        Args:
            prefills: scheduled rows that are no decodes, in the order in which they are to appear.
        """
        rows = self._rows
        is_decode = rows.scheduled > 0
        is_decode[prefills] = False
        decodes = np.flatnonzero(is_decode).astype(np.int32)
        num_decodes = len(decodes)
        scheduled = sampled = self._sequences(decodes)
        order, counts = decodes, np.ones(num_decodes, np.int32)
        tokens, positions = [rows.last_token[decodes]], [rows.num_computed[decodes]]
        draws, draw_rows = [np.arange(num_decodes, dtype=np.int32)], [decodes]
        if prefills:
            order = np.concatenate([decodes, prefills], dtype=np.int32)
            counts = rows.scheduled[order]
            end_of = np.cumsum(counts, dtype=np.int32)
            holders = []
            for i, row in enumerate(prefills, start=num_decodes):
                sequence = rows.holder(row)
                holders.append(sequence)
                start, count = int(rows.num_computed[row]), int(counts[i])
                tokens.append(np.array(sequence.tokens(start, start + count), np.int32))
                positions.append(np.arange(start, start + count, dtype=np.int32))
                drawing = self._drawing(sequence, start + count)
                sampled += drawing
                draws.append(np.full(len(drawing), end_of[i] - 1, np.int32))
                draw_rows.append(np.array([s.row for s in drawing], np.int32))
            scheduled += tuple(holders)
        query_starts = np.zeros(len(order) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        width = int(rows.num_blocks[order].max())
        return StepPlan(
            num_decodes=num_decodes,
            token_ids=_concat(tokens),
            positions=_concat(positions),
            query_starts=query_starts,
            kv_lens=rows.num_computed[order] + counts,
            block_tables=rows.block_tables[order, :width],
            sample=self._sample(_concat(draws), _concat(draw_rows), _concat(positions)),
            sampled=sampled,
            scheduled=scheduled,
            copies=_pairs(copies),
            swap_out=_pairs(swap_out),
            swap_in=_pairs(swap_in),
        )

    def _sequences(self, decodes: IntArray) -> tuple[Sequence, ...]:
        """Holders of the rows; the same tuple again while neither rows nor holders change."""
        rows = self._rows
        if self._members_version != rows.version or not np.array_equal(decodes, self._member_rows):
            self._members = tuple([rows.holder(row) for row in decodes.tolist()])
            self._member_rows = decodes
            self._members_version = rows.version
        return self._members

    def _drawing(self, sequence: Sequence, end: int) -> tuple[Sequence, ...]:
        """The sequences that get a token from the logits at the end of a chunk of `sequence`."""
        if end < self._rows.target[sequence.row]:
            return ()
        if not self._rows.leads[sequence.row]:
            return (sequence,)
        if sequence.output_token_ids:  # the siblings have tokens of their own to recompute behind the prompt
            return ()
        return tuple(s for s in sequence.request.sequences if not s.is_finished)

    def _sample(self, token_index: IntArray, rows: IntArray, positions: IntArray) -> SampleBatch:
        batch = self._rows
        return SampleBatch(
            token_index=token_index,
            temperature=batch.temperature[rows],
            top_k=batch.top_k[rows],
            top_p=batch.top_p[rows],
            min_p=batch.min_p[rows],
            seed=batch.seed[rows],
            position=positions[token_index] + 1,
            num_logprobs=int(batch.num_logprobs[rows].max(initial=-1)),
        )
