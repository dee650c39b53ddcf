"""Turns the scheduled rows of the batch into a `StepPlan`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from jaxpaged.core.constraints import Constraints
from jaxpaged.core.grammar import MaskFiller, Masks
from jaxpaged.core.kv_manager import Pair
from jaxpaged.core.plan import Adjustments, IntArray, Penalties, PoolSpan, PromptSpan, SampleBatch, StepPlan
from jaxpaged.core.rows import CONSTRAINED, MATCHED, PENALIZED, BatchRows
from jaxpaged.request import Sequence

_NO_PAIRS = np.zeros((0, 2), np.int32)


def _pairs(pairs: list[Pair]) -> IntArray:
    return np.array(pairs, np.int32).reshape(-1, 2)


@dataclass(frozen=True)
class _Decodes:
    """What stays as it is from step to step while the same rows decode.

    Attributes:
        version: of the rows.
        mask: [R] bool, as bytes.
        rows: [N] int32.
        index: `rows`, as a slice where they are the first N of all.
        query_starts: as of a plan of nothing else.
        sample: likewise, but for the positions.
    """

    version: int
    mask: bytes
    rows: IntArray
    index: IntArray | slice
    sequences: tuple[Sequence, ...]
    query_starts: IntArray
    sample: SampleBatch


class PlanBuilder:
    """Builds plans from the rows.

    Decodes are the rows that compute exactly one token and draw exactly one, in order of their rows; so in a plan
    of decodes only, draw i belongs to sequence i and token i. All other rows come behind them.
    """

    def __init__(self, rows: BatchRows, fill_masks: MaskFiller | None = None) -> None:
        self._rows = rows
        self._fill_masks = fill_masks
        self._last_decodes: _Decodes | None = None

    def build(self, prefills: list[int], copies: list[Pair], swap_out: list[Pair], swap_in: list[Pair]) -> StepPlan:
        """The plan of all scheduled rows.

        Args:
            prefills: scheduled rows that are no decodes, in the order in which they are to appear.
        """
        is_decode = self._rows.scheduled > 0
        if prefills:
            is_decode[prefills] = False
        decodes = self._decodes(is_decode)
        plan = self._mixed(decodes, prefills) if prefills else self._decodes_only(decodes)
        if not (copies or swap_out or swap_in):
            return plan
        return replace(plan, copies=_pairs(copies), swap_out=_pairs(swap_out), swap_in=_pairs(swap_in))

    def reset(self) -> None:
        """Let go of the sequences of the last plan."""
        self._last_decodes = None

    def _decodes_only(self, decodes: _Decodes) -> StepPlan:
        rows, index = self._rows, decodes.index
        positions = rows.num_computed[index].copy()
        kv_lens = positions + np.int32(1)
        sample = decodes.sample.at(kv_lens)
        return StepPlan(
            num_decodes=len(decodes.rows),
            token_ids=rows.last_token[index].copy(),
            positions=positions,
            query_starts=decodes.query_starts,
            kv_lens=kv_lens,
            block_tables=rows.block_tables[index, : int(rows.num_blocks[index].max())].copy(),
            sample=sample,
            sampled=decodes.sequences,
            scheduled=decodes.sequences,
            copies=_NO_PAIRS,
            swap_out=_NO_PAIRS,
            swap_in=_NO_PAIRS,
            adjustments=self._adjustments(decodes.sequences, sample),
        )

    def _mixed(self, decodes: _Decodes, prefills: list[int]) -> StepPlan:
        rows, num_decodes = self._rows, len(decodes.rows)
        order = np.concatenate([decodes.rows, prefills], dtype=np.int32)
        counts = rows.scheduled[order]
        query_starts = np.zeros(len(order) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        tokens, positions = [rows.last_token[decodes.rows]], [rows.num_computed[decodes.rows]]
        draws, draw_rows, sampled = [decodes.sample.token_index], [decodes.rows], decodes.sequences
        spans: list[PromptSpan] = []
        pool_spans: list[PoolSpan] = []
        for row, first, end in zip(
            prefills, query_starts[num_decodes:-1].tolist(), query_starts[num_decodes + 1 :].tolist(), strict=True
        ):
            sequence = rows.holder(row)
            start = int(rows.num_computed[row])
            stop = start + end - first
            tokens.append(np.array(sequence.tokens(start, stop), np.int32))
            positions.append(np.arange(start, stop, dtype=np.int32))
            drawing = self._drawing(sequence, stop)
            sampled += drawing
            draws.append(np.full(len(drawing), end - 1, np.int32))
            draw_rows.append(np.array([s.row for s in drawing], np.int32))
            if sequence.request.params.prompt_logprobs is not None:
                spans += _prompt_span(sequence, start, stop, first)
            if rows.pools[row]:
                pool_spans += _pool_span(sequence, start, stop, first)
        all_positions = np.concatenate(positions, dtype=np.int32)
        sample = self._sample(np.concatenate(draws), np.concatenate(draw_rows), all_positions)
        return StepPlan(
            num_decodes=num_decodes,
            token_ids=np.concatenate(tokens, dtype=np.int32),
            positions=all_positions,
            query_starts=query_starts,
            kv_lens=rows.num_computed[order] + counts,
            block_tables=rows.block_tables[order, : int(rows.num_blocks[order].max())],
            sample=sample,
            sampled=sampled,
            scheduled=decodes.sequences + tuple(rows.holder(row) for row in prefills),
            copies=_NO_PAIRS,
            swap_out=_NO_PAIRS,
            swap_in=_NO_PAIRS,
            adjustments=self._adjustments(sampled, sample),
            prompt_spans=tuple(spans),
            pool_spans=tuple(pool_spans),
        )

    def _decodes(self, is_decode: npt.NDArray[np.bool_]) -> _Decodes:
        """Of these rows; the very same again while neither rows nor holders change."""
        rows, last, mask = self._rows, self._last_decodes, is_decode.tobytes()
        if last is not None and last.version == rows.version and last.mask == mask:
            return last
        order = is_decode.nonzero()[0].astype(np.int32)
        starts = np.arange(len(order) + 1, dtype=np.int32)
        self._last_decodes = _Decodes(
            rows.version,
            mask,
            order,
            slice(len(order)) if is_decode[: len(order)].all() else order,
            tuple([rows.holder(row) for row in order.tolist()]),
            query_starts=starts,
            sample=self._sample(starts[:-1], order, rows.num_computed[order]),
        )
        return self._last_decodes

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
            row=rows,
            num_logprobs=int(batch.num_logprobs[rows].max(initial=-1)),
        )

    def _adjustments(self, sampled: tuple[Sequence, ...], sample: SampleBatch) -> Adjustments | None:
        """What the draws of `sampled` change in their logits or have reported."""
        adjusts = self._rows.adjusts[sample.row]
        if not adjusts.any():
            return None
        penalized = (adjusts & PENALIZED).any()
        of: list[tuple[int, Constraints]] = []
        for draw in np.flatnonzero(adjusts & CONSTRAINED).tolist():
            constraints = sampled[draw].request.constraints
            assert constraints is not None, f"{sampled[draw]} has no constraints, but its row says so"
            of.append((draw, constraints))
        num_output = sample.position - self._rows.prompt_len[sample.row]
        edits = [(draw, e) for draw, c in of if len(e := c.edits(sampled[draw], int(num_output[draw])))]
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
        penalties = self._penalties(sample.row) if penalized else None
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
