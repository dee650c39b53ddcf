"""Decides what each step computes: who runs, who waits, and who gives way when blocks run out.

A group (all sequences of a request) is admitted and preempted as a whole. Running groups come first, in the order of
service; then, if nobody had to give way, groups are admitted from the queue for as long as they fit.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import asdict, dataclass, field
from itertools import zip_longest

import numpy as np

from jaxpaged.config import CacheConfig, SchedulerConfig
from jaxpaged.core.admission import Admission
from jaxpaged.core.beam_group import fork_beams, rank_beams
from jaxpaged.core.grammar import MaskFiller
from jaxpaged.core.group import SequenceGroup
from jaxpaged.core.kv_manager import KVManager, Pair, num_blocks_for
from jaxpaged.core.plan import FloatArray, IntArray, StepPlan, StepResult
from jaxpaged.core.plan_builder import PlanBuilder
from jaxpaged.core.rows import BatchRows
from jaxpaged.core.stats import SchedulerStats, Totals
from jaxpaged.core.waiting_queue import WaitingQueue
from jaxpaged.errors import InvalidRequestError, QueueFullError
from jaxpaged.request import FinishReason, Request, Sequence, SequenceStatus

__all__ = ["Scheduler", "SchedulerStats"]


@dataclass
class _Step:
    """The step under way, from `schedule` to `update` or `fail`."""

    plan: StepPlan | None = None
    copies: list[Pair] = field(default_factory=list)
    swap_out: list[Pair] = field(default_factory=list)
    swap_in: list[Pair] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)


class Scheduler:
    """Continuous batching over paged KV memory. Call `schedule`, run the plan, call `update` (or `fail`); repeat.

    Requests may be added, aborted and finished at any time in between. One thread only.

    Args:
        fill_masks: finds what grammars allow; needed only for requests that have one.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, fill_masks: MaskFiller | None = None) -> None:
        self._config = config
        self._block_size = cache.block_size
        self._kv = KVManager(cache)
        self._rows = BatchRows(config.max_num_seqs, num_blocks_for(config.max_model_len, cache.block_size))
        self._builder = PlanBuilder(self._rows, fill_masks)
        self._admission = Admission(config, self._kv, self._rows)
        self._groups: dict[str, SequenceGroup] = {}
        self._running: list[SequenceGroup] = []  # in the order of service
        self._queue = WaitingQueue()
        self._arrivals = itertools.count()
        self._step = _Step()
        self._totals = Totals()

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it could never run, even alone.
            QueueFullError: `max_num_queued_requests` are waiting.
        """
        if request.request_id in self._groups:
            raise InvalidRequestError(
                f"request id {request.request_id!r} is in use; choose another", param="request_id"
            )
        self._admission.check_fits_alone(request)
        limit = self._config.max_num_queued_requests
        if limit is not None and len(self._queue) >= limit:
            raise QueueFullError(
                f"{len(self._queue)} requests are waiting, the limit (max_num_queued_requests) is {limit}; retry later"
            )
        priority = request.priority if self._config.policy == "priority" else 0
        group = SequenceGroup(request, (priority, request.arrival_time, next(self._arrivals)))
        self._groups[request.request_id] = group
        self._queue.push(group)

    def abort(self, request_id: str) -> bool:
        """End a request and free its blocks now. False if there is no such unfinished request."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        self._finish_group(group, FinishReason.ABORT)
        return True

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End one sequence and free its blocks now.

        Of one that has ended nothing changes, save that a stop found in the text of its last possible token is the
        reason why it ended, not its length.
        """
        if sequence.is_finished:
            if reason is FinishReason.STOP and sequence.finish_reason is FinishReason.LENGTH:
                sequence.finish_reason, sequence.stop_reason = reason, stop_reason
            return
        group = self._groups[sequence.request.request_id]
        if sequence.row >= 0 and self._rows.leads[sequence.row] and len(group.unfinished) > 1:
            heir = group.unfinished[1]
            self._kv.fork(sequence, heir)
            self._rows.hand_over(sequence, heir)
        self._kv.free(sequence)
        self._rows.release(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if group.request.is_finished:
            del self._groups[group.request.request_id]
            self._queue.discard(group)
            if group in self._running:
                self._running.remove(group)

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute."""
        if self._step.plan is not None:
            raise RuntimeError("the last plan was neither updated nor failed; schedule() plans one step at a time")
        step = self._step = _Step()
        budget = self._schedule_running()
        # All that could have run may have given way to a prompt that waits for the whole budget: now it has it.
        while step.preempted and not self._rows.scheduled.any():
            budget = self._schedule_running()
        if not step.preempted:
            self._admit(budget)
        if not self._rows.scheduled.any():
            return None
        if self._config.debug_checks:
            self._check_writes()
        step.plan = self._builder.build(self._prefill_rows(), step.copies, step.swap_out, step.swap_in)
        self._totals.copied_blocks_total += len(step.copies)
        self._totals.swapped_out_blocks_total += len(step.swap_out)
        self._totals.swapped_in_blocks_total += len(step.swap_in)
        return step.plan

    def update(self, plan: StepPlan, result: StepResult) -> list[int]:
        """Take in what the step computed; finished sequences are marked and freed.

        Returns:
            The indices into `plan.sampled` whose token was accepted: all but those finished since `schedule`, and those
            of beams: which tokens these have is known when the search is over.
        """
        self._close(plan)
        self._advance()
        for span in plan.prompt_spans:
            span.request.num_prompt_logprobs += len(span.target_ids)
        for pool_span in plan.pool_spans:
            if pool_span.is_last:
                self.finish(pool_span.request.sequences[0], FinishReason.STOP)
        rows, accepted, accepted_rows, ended = self._rows, [], [], []
        stop_ids = rows.stop_ids
        beam_draws: dict[SequenceGroup, list[int]] = {}
        for i, (sequence, token) in enumerate(zip(plan.sampled, result.token_ids.tolist(), strict=True)):
            row = sequence.row
            if row < 0:
                continue
            if sequence.request.beams is not None:
                beam_draws.setdefault(self._group_of(sequence), []).append(i)
                continue
            sequence.output_token_ids.append(token)
            accepted.append(i)
            accepted_rows.append(row)
            matcher = sequence.matcher
            if matcher is not None:
                matcher.accept(token)
            if token in stop_ids[row] or (matcher is not None and matcher.is_finished):
                ended.append(sequence)
        drawn = np.array(accepted_rows, np.int32)
        rows.target[drawn] += 1
        rows.last_token[drawn] = result.token_ids[np.array(accepted, np.int32)]
        ended += [self._rows.holder(row) for row in drawn[rows.target[drawn] >= rows.max_len[drawn]].tolist()]
        for sequence in ended:
            self.finish(sequence, *_why_ended(sequence))
        for group, draws in beam_draws.items():
            self._rank_beams(group, [plan.sampled[i] for i in draws], result.top_of(draws))
        if self._config.debug_checks:
            self.check_invariants()
        return accepted

    def fail(self, plan: StepPlan) -> list[Request]:
        """The step raised: end its requests with ERROR. What it may have half written cannot be found or restored.

        Returns:
            The requests that this has ended.
        """
        self._close(plan)
        self._rows.scheduled[:] = 0
        for group in self._step.preempted:
            if group.request.request_id in self._groups and group.is_swapped:
                self._forget(group)
        ids = dict.fromkeys(s.request.request_id for s in (*plan.scheduled, *plan.sampled))
        groups = [self._groups[i] for i in ids if i in self._groups]
        for group in groups:
            self._finish_group(group, FinishReason.ERROR)
        return [group.request for group in groups]

    def drop_kv(self) -> None:
        """All KV is void (the pool was lost, or the weights have changed): every group computes its tokens again.

        A plan under way counts as never run. The prefix cache and swapped copies are dropped too.
        """
        self._step.plan = None
        for group in self._running:
            for sequence in group.unfinished:
                self._rows.release(sequence)
            self._queue.push(group)
        self._running.clear()
        for group in self._queue:
            self._forget(group)
        self.reset_prefix_cache()

    def has_unfinished(self) -> bool:
        return bool(self._groups)

    def reset_prefix_cache(self) -> None:
        """Let nothing that has been computed so far be reused by a request that is not running yet."""
        self._kv.reset_prefix_cache()
        for group in self._queue:
            for sequence in group.unfinished:
                sequence.block_keys.clear()

    def stats(self) -> SchedulerStats:
        pool, host_pool = self._kv.pool, self._kv.host_pool
        # Looked for only when the host pool holds anything: a long queue would cost time in every step.
        swapping = host_pool.num_free < host_pool.num_usable
        num_swapped = sum(group.is_swapped for group in self._queue) if swapping else 0
        return SchedulerStats(
            num_running=len(self._running),
            num_running_sequences=self._rows.num_used,
            num_waiting=len(self._queue) - num_swapped,
            num_swapped=num_swapped,
            num_free_blocks=pool.num_free,
            num_total_blocks=pool.num_usable,
            num_cached_blocks=pool.num_cached,
            num_free_host_blocks=host_pool.num_free,
            num_total_host_blocks=host_pool.num_usable,
            **asdict(self._totals),
        )

    def check_invariants(self) -> None:
        """Assert the invariants of blocks and tables, and that rows and sequences agree.

        Raises:
            AssertionError: naming what is wrong.
        """
        self._kv.check_invariants(s for group in self._groups.values() for s in group.request.sequences)
        if not self._groups:
            assert self._kv.pool.num_free == self._kv.pool.num_usable, "blocks are owned, but nothing is unfinished"
            assert self._kv.host_pool.num_free == self._kv.host_pool.num_usable, "host blocks leaked"
            assert self._rows.num_used == 0, "rows are in use, but nothing is unfinished"
        self._rows.check()

    # The steps of schedule()

    def _schedule_running(self) -> int:
        """Set how many tokens each running row computes and grow the tables for them. Returns what is left of the
        token budget."""
        rows = self._rows
        remaining = rows.target - rows.num_computed - rows.held
        single = remaining == 1
        rows.scheduled[:] = single
        budget = self._config.max_num_batched_tokens - int(np.count_nonzero(single))
        if (remaining > 1).any():
            budget = self._cut_prefills(np.flatnonzero(remaining > 1).tolist(), budget)
        end = rows.num_computed + rows.scheduled
        short = (rows.scheduled > 0) & ((end > rows.num_blocks * self._block_size) | rows.may_share)
        if short.any():
            groups = {self._group_of(self._rows.holder(row)) for row in np.flatnonzero(short).tolist()}
            for group in sorted(groups, key=lambda g: g.key):
                if group.unfinished[0].row >= 0:
                    self._grow_or_preempt(group)
        return budget

    def _cut_prefills(self, prefilling: list[int], budget: int) -> int:
        """Share the budget among rows with more than one token to compute, in the order of service."""
        rows = self._rows
        for row in self._in_order(prefilling):
            count = self._admission.chunk(int(rows.target[row] - rows.num_computed[row] - rows.held[row]), budget)
            if count == 0:
                return 0  # whoever is behind must not overtake
            rows.scheduled[row] = count
            budget -= count
        return budget

    def _grow_or_preempt(self, group: SequenceGroup) -> None:
        """Give `group` the blocks its step needs, all or none, at the cost of the last groups in the order.

        Groups are grown in order, so a victim has not been grown in this step (unless it is the group itself, which
        then gives way before anything was done for it).
        """
        rows = self._rows
        scheduled = [s for s in group.unfinished if rows.scheduled[s.row]]
        writes = [(s, s.num_computed + int(rows.scheduled[s.row])) for s in scheduled]
        needed = self._kv.blocks_to_write(writes)
        while needed > self._kv.pool.num_free:
            victim = self._running.pop()
            self._preempt(victim)
            if victim is group:
                return
        self._grow(writes)

    def _grow(self, writes: list[tuple[Sequence, int]]) -> None:
        for sequence, end in writes:
            last = max(len(sequence.block_table) - 1, 0)
            copy = self._kv.grow(sequence, end)
            if copy is not None:
                self._step.copies.append(copy)
            self._rows.set_table(sequence, start=last)
            self._rows.may_share[sequence.row] = False

    def _preempt(self, group: SequenceGroup) -> None:
        sequences = group.unfinished
        for sequence in sequences:
            self._rows.release(sequence)
        pairs = None
        if self._config.preemption_mode == "swap" and group.forked:
            pairs = self._kv.swap_out(sequences)
        if pairs is None:
            self._forget(group)
        else:
            self._step.swap_out += pairs
            for sequence in sequences:
                sequence.status = SequenceStatus.SWAPPED
        group.request.num_preemptions += 1
        self._totals.preemptions_total += 1
        self._step.preempted.append(group)
        self._queue.push(group)

    def _forget(self, group: SequenceGroup) -> None:
        """Free what the group has computed (the prefix cache may still find it); it starts again as a new one."""
        for sequence in reversed(group.unfinished):
            self._kv.free(sequence)
            sequence.status = SequenceStatus.WAITING

    def _admit(self, budget: int) -> None:
        """Admit from the head of the queue while it fits; nobody overtakes a head that does not."""
        while budget > 0 and (group := self._queue.peek()) is not None:
            if not group.is_swapped:
                group.forked = len(group.unfinished) == 1  # one alone computes prompt and output in one go
            offer = self._admission.consider(group, budget)
            if offer is None:
                return
            self._queue.pop()
            bisect.insort(self._running, group, key=lambda g: g.key)
            sequences = group.unfinished
            if group.is_swapped:
                pairs = self._kv.swap_in(sequences)
                assert pairs is not None, "the host pool holds more than was counted"
                self._step.swap_in += pairs
            else:
                self._kv.attach(sequences[0], offer.hits)
                if not group.started and group.reads_prefix_cache:
                    group.request.num_cached_tokens = sequences[0].num_computed
                    self._totals.prefix_queries_total += group.target(sequences[0])
                    self._totals.prefix_hits_total += sequences[0].num_computed
            group.started = True
            for sequence in sequences:
                self._rows.assign(sequence, max_model_len=self._config.max_model_len)
                self._take_over(sequence, group, num_cached=len(offer.hits))
            for sequence, end in offer.writes:
                self._rows.scheduled[sequence.row] = end - sequence.num_computed
                budget -= end - sequence.num_computed
            self._grow(offer.writes)

    def _take_over(self, sequence: Sequence, group: SequenceGroup, *, num_cached: int) -> None:
        """Bring the row of `sequence` up to its block table and target."""
        rows, target = self._rows, group.target(sequence)
        rows.set_table(sequence)
        rows.set_target(sequence, target, leads=not group.forked and target > 0)
        rows.held[sequence.row] = group.waits_for_beams
        rows.num_cached[sequence.row] = num_cached
        rows.may_share[sequence.row] = self._kv.shares_next_write(sequence)

    def _prefill_rows(self) -> list[int]:
        """The scheduled rows that are more, or less, than a decode: one token in, one draw out."""
        rows = self._rows
        is_decode = (rows.target - rows.num_computed == 1) & ~(rows.leads | rows.pools)
        others = np.flatnonzero((rows.scheduled > 0) & ~is_decode)
        return self._in_order(others.tolist()) if len(others) else []

    # The steps of update()

    def _close(self, plan: StepPlan) -> None:
        if self._step.plan is not plan:
            raise RuntimeError("this is not the plan that schedule() returned last")
        self._step.plan = None

    def _advance(self) -> None:
        """Count the scheduled tokens as computed, make full blocks findable, and fork from leaders that are through."""
        rows = self._rows
        live = np.flatnonzero(rows.scheduled).tolist()
        rows.num_computed += rows.scheduled
        rows.scheduled[:] = 0
        computed = rows.num_computed.tolist()
        for row in live:
            self._rows.holder(row).num_computed = computed[row]
        full = rows.num_computed // self._block_size
        for row in np.flatnonzero(full > rows.num_cached).tolist():
            self._kv.cache_blocks(self._rows.holder(row), int(rows.num_cached[row]))
        rows.num_cached[:] = full
        if rows.leads.any():
            for row in np.flatnonzero(rows.leads & (rows.num_computed == rows.target)).tolist():
                self._fork(self._group_of(self._rows.holder(row)))
        if rows.held.any():
            for group in {self._group_of(rows.holder(row)) for row in np.flatnonzero(rows.held).tolist()}:
                rows.held[[s.row for s in group.unfinished]] = group.waits_for_beams

    def _fork(self, group: SequenceGroup) -> None:
        leader, *children = group.unfinished
        for child in children:
            self._kv.fork(leader, child)
        group.forked = True
        for sequence in (leader, *children):
            self._take_over(sequence, group, num_cached=leader.num_computed // self._block_size)

    def _rank_beams(self, group: SequenceGroup, drawn: list[Sequence], top: tuple[IntArray, FloatArray]) -> None:
        """Let the best continuations of a group's beams go on: they fork, and the blocks of the others are freed.

        Args:
            drawn, top: as in `rank_beams`.
        """
        request, row = group.request, drawn[0].row
        max_tokens = int(self._rows.max_len[row]) - len(request.prompt_token_ids)
        going_on = rank_beams(request, drawn, top, stop_ids=self._rows.stop_ids[row], max_tokens=max_tokens)
        if not going_on:
            self._finish_beams(request)
            return
        fork_beams(self._kv, request.sequences, going_on)
        for sequence in request.sequences:
            self._take_over(sequence, group, num_cached=sequence.num_computed // self._block_size)

    def _finish_beams(self, request: Request) -> None:
        """End all beams of a search that is over; they take the hypotheses' tokens, the best one's first."""
        assert request.beams is not None
        for sequence, hypothesis in zip_longest(request.sequences, request.beams.hypotheses):
            sequence.block_keys = []
            sequence.output_token_ids = [] if hypothesis is None else hypothesis.token_ids
            # The model's logits may leave fewer outputs than there are beams.
            self.finish(sequence, *((FinishReason.ERROR,) if hypothesis is None else _why_ended(sequence)))

    def _finish_group(self, group: SequenceGroup, reason: FinishReason) -> None:
        for sequence in reversed(group.unfinished):  # the leader last, so that it hands its work to nobody
            self.finish(sequence, reason)

    def _group_of(self, sequence: Sequence) -> SequenceGroup:
        return self._groups[sequence.request.request_id]

    def _in_order(self, rows: list[int]) -> list[int]:
        """Rows in the order of service, siblings by index."""
        holders = [self._rows.holder(row) for row in rows]
        return [s.row for s in sorted(holders, key=lambda s: (self._group_of(s).key, s.index))]

    def _check_writes(self) -> None:
        for row in np.flatnonzero(self._rows.scheduled).tolist():
            self._kv.check_write(self._rows.holder(row), int(self._rows.num_computed[row] + self._rows.scheduled[row]))


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
