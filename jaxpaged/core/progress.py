"""What a step brings its sequences: first what is certain once it is planned, then the tokens that it drew."""

from __future__ import annotations

from itertools import zip_longest

import numpy as np

from jaxpaged.core.batch import Batch
from jaxpaged.core.beam_group import fork_beams, rank_beams
from jaxpaged.core.group import SequenceGroup
from jaxpaged.core.plan import FloatArray, IntArray, StepPlan, StepResult
from jaxpaged.request import FinishReason, Request, Sequence


def advance(batch: Batch, plan: StepPlan) -> None:
    """Count the scheduled tokens as computed, make full blocks findable, fork from leaders that are through, and count
    the draws, whose tokens are not known yet.

    Whatever is planned after this runs after `plan` on the device, so it may read what `plan` writes.
    """
    rows, kv, holders = batch.rows, batch.kv, batch.rows.sequences
    live = rows.scheduled.nonzero()[0]
    rows.num_computed += rows.scheduled
    rows.scheduled[:] = 0
    for row, num_computed in zip(live.tolist(), rows.num_computed[live].tolist(), strict=True):
        holders[row].num_computed = num_computed  # type: ignore[union-attr]  # a row that is scheduled is held
    full = rows.num_computed // kv.block_size
    for row in (full > rows.num_cached).nonzero()[0].tolist():
        kv.cache_blocks(rows.holder(row), int(rows.num_cached[row]))
    rows.num_cached[:] = full
    if rows.leads.any():
        for row in np.flatnonzero(rows.leads & (rows.num_computed == rows.target)).tolist():
            _fork(batch, batch.group_of(rows.holder(row)))
    if rows.held.any():
        for group in {batch.group_of(rows.holder(row)) for row in np.flatnonzero(rows.held).tolist()}:
            rows.held[[s.row for s in group.unfinished]] = group.waits_for_beams
    _count_draws(batch, plan)


def _count_draws(batch: Batch, plan: StepPlan) -> None:
    rows = batch.rows
    draws = np.zeros(len(rows.target), np.bool_)
    draws[plan.sample.row] = True
    draws &= rows.target > 0  # the rows of sequences that have been finished since are free
    if (draws & rows.waits).any():  # the tokens of beams are known when all have been ranked
        draws[[s.row for s in plan.sampled if s.row >= 0 and s.request.beams is not None]] = False
    rows.target += draws
    np.copyto(rows.last_token, rows.on_device, where=draws)
    rows.ended |= draws & (rows.target >= rows.max_len)


def accept(batch: Batch, plan: StepPlan, result: StepResult, *, same_rows: bool) -> list[int]:
    """Append the tokens that an advanced plan drew, and end the sequences that are complete.

    Args:
        same_rows: no row has changed hands since the plan was made.

    Returns:
        As `Scheduler.update`.
    """
    rows, sequences = batch.rows, plan.sampled
    # -1 where a sequence has ended since
    drawn = plan.sample.row if same_rows else np.array([s.row for s in sequences], np.int32)
    accepted = list(range(len(drawn)))
    searches: dict[SequenceGroup, list[int]] = {}
    token_ids = result.token_ids
    if drawn.min(initial=0) < 0 or rows.waits[drawn].any():
        accepted = [i for i in accepted if sequences[i].row >= 0]
        for i in accepted:
            if sequences[i].request.beams is not None:
                searches.setdefault(batch.group_of(sequences[i]), []).append(i)
        accepted = [i for i in accepted if sequences[i].request.beams is None]
        sequences = tuple([sequences[i] for i in accepted])
        drawn, token_ids = drawn[accepted], token_ids[accepted]
    rows.last_token[drawn] = token_ids
    tokens = token_ids.tolist()
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.output_token_ids.append(token)
    for sequence in _complete(batch, sequences, drawn, tokens):
        batch.finish(sequence, *_why_ended(sequence))
    for group, draws in searches.items():
        _rank_beams(batch, group, [plan.sampled[i] for i in draws], result.top_of(draws))
    return accepted


def _complete(batch: Batch, sequences: tuple[Sequence, ...], drawn: IntArray, tokens: list[int]) -> list[Sequence]:
    """Those of `sequences`, which hold the rows `drawn`, that their newest token ends."""
    rows, complete = batch.rows, []
    if rows.waits[drawn].any():
        for sequence, token in zip(sequences, tokens, strict=True):
            if (matcher := sequence.matcher) is not None:
                matcher.accept(token)
                if matcher.is_finished:
                    complete.append(sequence)
    if stops := rows.any_stop_ids().intersection(tokens):
        found = zip(sequences, tokens, strict=True)
        complete += [s for s, token in found if token in stops and token in rows.stop_ids[s.row]]
    if rows.ended.any():
        complete += [rows.holder(row) for row in drawn[rows.ended[drawn]].tolist()]
    return complete


def _fork(batch: Batch, group: SequenceGroup) -> None:
    leader, *children = group.unfinished
    for child in children:
        batch.kv.fork(leader, child)
    group.forked = True
    for sequence in (leader, *children):
        batch.take_over(sequence, group, num_cached=leader.num_computed // batch.kv.block_size)


def _rank_beams(batch: Batch, group: SequenceGroup, drawn: list[Sequence], top: tuple[IntArray, FloatArray]) -> None:
    """Let the best continuations of a group's beams go on: they fork, and the blocks of the others are freed.

    Args:
        drawn, top: as in `rank_beams`.
    """
    request, row = group.request, drawn[0].row
    max_tokens = int(batch.rows.max_len[row]) - len(request.prompt_token_ids)
    going_on = rank_beams(request, drawn, top, stop_ids=batch.rows.stop_ids[row], max_tokens=max_tokens)
    if not going_on:
        _finish_beams(batch, request)
        return
    fork_beams(batch.kv, request.sequences, going_on)
    for sequence in request.sequences:
        batch.take_over(sequence, group, num_cached=sequence.num_computed // batch.kv.block_size)


def _finish_beams(batch: Batch, request: Request) -> None:
    """End all beams of a search that is over; they take the hypotheses' tokens, the best one's first."""
    assert request.beams is not None
    for sequence, hypothesis in zip_longest(request.sequences, request.beams.hypotheses):
        sequence.block_keys = []
        sequence.output_token_ids = [] if hypothesis is None else hypothesis.token_ids
        # The model's logits may leave fewer outputs than there are beams.
        batch.finish(sequence, *((FinishReason.ERROR,) if hypothesis is None else _why_ended(sequence)))


def _why_ended(sequence: Sequence) -> tuple[FinishReason, int | None]:
    """Reason and stop reason of a sequence that ended with its last token: a stop token or the end of its grammar goes
    before the length."""
    request, token, matcher = sequence.request, sequence.output_token_ids[-1], sequence.matcher
    if token in request.eos_token_ids and not request.params.ignore_eos:
        return FinishReason.STOP, None
    if token in request.params.stop_token_ids:
        return FinishReason.STOP, token
    if matcher is not None and matcher.is_finished:
        return (FinishReason.STOP if matcher.error is None else FinishReason.ERROR), None
    return FinishReason.LENGTH, None
