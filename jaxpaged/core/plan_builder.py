"""Turns the scheduled rows of the batch into a `StepPlan`."""

from __future__ import annotations

import numpy as np

from jaxpaged.core.constraints import Constraints
from jaxpaged.core.grammar import MaskFiller, Masks
from jaxpaged.core.kv_manager import Pair
from jaxpaged.core.plan import Adjustments, IntArray, Penalties, PoolSpan, PromptSpan, SampleBatch, StepPlan
from jaxpaged.core.rows import CONSTRAINED, MATCHED, PENALIZED, BatchRows
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

    def __init__(self, rows: BatchRows, fill_masks: MaskFiller | None = None) -> None:
        self._rows = rows
        self._fill_masks = fill_masks
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
        spans: list[PromptSpan] = []
        pool_spans: list[PoolSpan] = []
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
                if sequence.request.params.prompt_logprobs is not None:
                    spans += _prompt_span(sequence, start, start + count, int(end_of[i]) - count)
                if rows.pools[row]:
                    pool_spans += _pool_span(sequence, start, start + count, int(end_of[i]) - count)
            scheduled += tuple(holders)
        query_starts = np.zeros(len(order) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        width = int(rows.num_blocks[order].max())
        all_draw_rows = _concat(draw_rows)
        return StepPlan(
            num_decodes=num_decodes,
            token_ids=_concat(tokens),
            positions=_concat(positions),
            query_starts=query_starts,
            kv_lens=rows.num_computed[order] + counts,
            block_tables=rows.block_tables[order, :width],
            sample=self._sample(_concat(draws), all_draw_rows, _concat(positions)),
            sampled=sampled,
            scheduled=scheduled,
            copies=_pairs(copies),
            swap_out=_pairs(swap_out),
            swap_in=_pairs(swap_in),
            adjustments=self._adjustments(sampled, all_draw_rows),
            prompt_spans=tuple(spans),
            pool_spans=tuple(pool_spans),
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
        if end < self._rows.target[sequence.row] or self._rows.pools[sequence.row]:
            return ()
        if not self._rows.leads[sequence.row]:
            return (sequence,)
        if sequence.output_token_ids:  # the siblings have tokens of their own to recompute behind the prompt
            return ()
        if sequence.request.beams is not None:  # the first tokens of all beams come from one ranking
            return (sequence,)
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

    def _adjustments(self, sampled: tuple[Sequence, ...], draw_rows: IntArray) -> Adjustments | None:
        """What the draws of `sampled` change in their logits or have reported."""
        adjusts = self._rows.adjusts[draw_rows]
        if not adjusts.any():
            return None
        penalized = (adjusts & PENALIZED).any()
        of: list[tuple[int, Constraints]] = []
        for draw in np.flatnonzero(adjusts & CONSTRAINED).tolist():
            constraints = sampled[draw].request.constraints
            assert constraints is not None, f"{sampled[draw]} has no constraints, but its row says so"
            of.append((draw, constraints))
        edits = [(draw, e) for draw, c in of if len(e := c.edits(sampled[draw]))]
        masks = {draw: c.allowed for draw, c in of if c.allowed is not None}
        matched = np.flatnonzero(adjusts & MATCHED).tolist()
        if matched:
            masks |= self._grammar_masks(sampled, matched, masks)
        logprob_token_ids = {draw: c.logprob_token_ids for draw, c in of if len(c.logprob_token_ids)}
        if not (edits or masks or logprob_token_ids or penalized):
            return None
        draws, ids, values = np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)
        if edits:
            draws = np.repeat(np.array([d for d, _ in edits], np.int32), [len(e) for _, e in edits])
            ids = np.concatenate([e.token_ids for _, e in edits])
            values = np.concatenate([e.values for _, e in edits])
        penalties = self._penalties(draw_rows) if penalized else None
        return Adjustments(draws, ids, values, masks, penalties, logprob_token_ids)

    def _grammar_masks(
        self, sampled: tuple[Sequence, ...], matched: list[int], allowed: dict[int, Masks]
    ) -> dict[int, Masks]:
        """What the grammars of the draws `matched` allow, of what is `allowed` besides."""
        assert self._fill_masks is not None, "a request has a grammar, but the scheduler was given no fill_masks"
        matchers = [matcher for draw in matched if (matcher := sampled[draw].matcher) is not None]
        masks = dict(zip(matched, self._fill_masks(matchers), strict=True))
        for draw in allowed.keys() & masks.keys():
            width = min(len(allowed[draw]), len(masks[draw]))
            masks[draw] = masks[draw][:width] & allowed[draw][:width]
        return masks

    def _penalties(self, rows: IntArray) -> Penalties:
        batch = self._rows
        return Penalties(batch.repetition[rows], batch.frequency[rows], batch.presence[rows], batch.prompt_len[rows])


def _prompt_span(sequence: Sequence, start: int, stop: int, index: int) -> list[PromptSpan]:
    """Of tokens [start, stop) of `sequence`, those of the prompt whose next token's log-probability is not known yet.

    Args:
        index: of token `start` among the plan's tokens.
    """
    request = sequence.request
    # The log-probability of token i + 1 comes with token i, and that of the first is of no interest.
    first = max(start, request.num_prompt_logprobs)
    last = min(stop, len(request.prompt_token_ids) - 1)
    if first >= last:
        return []
    targets = np.array(request.prompt_token_ids[first + 1 : last + 1], np.int32)
    return [PromptSpan(request, index + first - start, targets)]


def _pool_span(sequence: Sequence, start: int, stop: int, index: int) -> list[PoolSpan]:
    """Of tokens [start, stop) of the prompt of `sequence`, those that its embedding is made of.

    Args:
        index: of token `start` among the plan's tokens.
    """
    request = sequence.request
    assert request.pooling is not None
    is_last = stop == len(request.prompt_token_ids)
    if request.pooling.pooling == "mean":
        return [PoolSpan(request, index, stop - start, is_first=start == 0, is_last=is_last)]
    return [PoolSpan(request, index + stop - start - 1, 1, is_first=True, is_last=True)] if is_last else []
