"""Decides what each step computes: who runs, who waits, and who gives way when blocks run out.

A group (all sequences of a request) is admitted and preempted as a whole. Running groups come first, in the order of
service; then, if nobody had to give way, groups are admitted from the queue for as long as they fit.

A plan takes effect twice: what is certain (lengths, forks, which blocks are full) as soon as the next one is made, its
tokens when they are known. So one plan can be made ahead of the results of the last.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from jaxpaged.config import CacheConfig, SchedulerConfig
from jaxpaged.core.batch import Batch
from jaxpaged.core.grammar import MaskFiller
from jaxpaged.core.group import SequenceGroup
from jaxpaged.core.kv_manager import KVManager
from jaxpaged.core.plan import StepPlan, StepResult
from jaxpaged.core.plan_builder import PlanBuilder
from jaxpaged.core.progress import accept, advance
from jaxpaged.core.rules import Rules
from jaxpaged.core.stats import SchedulerStats, Totals
from jaxpaged.core.step_maker import Moves, StepMaker
from jaxpaged.errors import InvalidRequestError, QueueFullError
from jaxpaged.request import FinishReason, Request, Sequence

__all__ = ["Scheduler", "SchedulerStats"]


@dataclass
class _Step:
    """A step under way, from `schedule` to `update` or `fail`.

    Attributes:
        version: of the rows when it was planned.
        is_advanced: what is certain of it has been counted.
    """

    plan: StepPlan
    moves: Moves
    version: int
    is_advanced: bool = False


class Scheduler:
    """Continuous batching over paged KV memory. Call `schedule`, run the plan, call `update` (or `fail`); repeat.

    `schedule` may be called once more before `update` of the last plan: then the new plan must run after it, and takes
    the tokens that it draws from the device (see `StepPlan.token_ids`). At most two plans are under way, and the older
    one is updated first.

    Requests may be added, aborted and finished at any time in between. One thread only.

    Args:
        fill_masks: finds what grammars allow; needed only for requests that have one.
        rules: what a simulation of another system swaps; None = the engine's own.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        fill_masks: MaskFiller | None = None,
        rules: Rules | None = None,
    ) -> None:
        rules = rules or Rules()
        self._config = config
        self._totals = Totals()
        self._batch = Batch(config, rules.make_kv(cache))
        self._maker = StepMaker(config, self._batch, self._totals, rules)
        self._builder = PlanBuilder(self._batch.rows, fill_masks)
        self._arrivals = itertools.count()
        self._steps: deque[_Step] = deque()  # under way, the oldest first

    @property
    def kv(self) -> KVManager:
        """The owner of the pools, to look at."""
        return self._batch.kv

    @property
    def groups(self) -> Mapping[str, SequenceGroup]:
        """All requests that are running or waiting, by id, in the order in which they came; to look at."""
        return self._batch.groups

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it could never run, even alone.
            QueueFullError: `max_num_queued_requests` are waiting.
        """
        batch = self._batch
        if request.request_id in batch.groups:
            raise InvalidRequestError(
                f"request id {request.request_id!r} is in use; choose another", param="request_id"
            )
        self._maker.admission.check_fits_alone(request)
        limit = self._config.max_num_queued_requests
        if limit is not None and len(batch.queue) >= limit:
            raise QueueFullError(
                f"{len(batch.queue)} requests are waiting, the limit (max_num_queued_requests) is {limit}; retry later"
            )
        priority = request.priority if self._config.policy == "priority" else 0
        group = SequenceGroup(request, (priority, request.arrival_time, next(self._arrivals)))
        batch.groups[request.request_id] = group
        batch.queue.push(group)

    def abort(self, request_id: str) -> bool:
        """End a request and free its blocks now. False if there is no such unfinished request."""
        group = self._batch.groups.get(request_id)
        if group is None:
            return False
        self._batch.finish_group(group, FinishReason.ABORT)
        return True

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End one sequence and free its blocks now. What plans under way still draw for it is dropped.

        Of one that has ended nothing changes, save that a stop found in the text of its last token is the reason why it
        ended, not its length nor the end of its grammar.
        """
        self._batch.finish(sequence, reason, stop_reason)

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute.

        With a plan under way None also means that its results must be known first, as someone has to give way, or the
        draws of someone in it (a beam, or a request with a grammar or bad words) depend on them: call `update`, then
        `schedule` again.
        """
        if len(self._steps) > 1:
            raise RuntimeError("two plans are under way; update or fail the older one before the next schedule()")
        if self._steps:
            ahead = self._steps[0]
            if self._batch.rows.waits[ahead.plan.sample.row].any():
                return None
            self._advance(ahead)
        moves = self._maker.make(may_preempt=not self._steps)
        if moves is None or not self._batch.rows.scheduled.any():
            return None
        plan = self._builder.build(self._maker.prefill_rows(), moves.copies, moves.swap_out, moves.swap_in)
        self._steps.append(_Step(plan, moves, self._batch.rows.version))
        self._totals.copied_blocks_total += len(moves.copies)
        self._totals.swapped_out_blocks_total += len(moves.swap_out)
        self._totals.swapped_in_blocks_total += len(moves.swap_in)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[int]:
        """Take in what the oldest step under way computed; finished sequences are marked and freed.

        Returns:
            The indices into `plan.sampled` whose token was accepted: all but those finished since `schedule`, and those
            of beams: which tokens these have is known when the search is over.
        """
        step = self._close(plan)
        self._advance(step)
        for span in plan.prompt_spans:
            span.request.num_prompt_logprobs += len(span.target_ids)
        for pool_span in plan.pool_spans:
            if pool_span.is_last:
                self.finish(pool_span.request.sequences[0], FinishReason.STOP)
        accepted = accept(self._batch, plan, result, same_rows=step.version == self._batch.rows.version)
        if self._config.debug_checks:
            self.check_invariants()
        return accepted

    def fail(self, plan: StepPlan) -> list[Request]:
        """The oldest step under way raised: end its requests with ERROR. What it may have half written cannot be found
        or restored. If a plan has been made behind it, that one counts as never run, as after `drop_kv`.

        Returns:
            The requests that this has ended.
        """
        step, batch = self._close(plan), self._batch
        for group in step.moves.preempted:
            if batch.groups.get(group.request.request_id) is group and group.is_swapped:
                batch.forget(group)
        requests = dict.fromkeys(s.request for s in (*plan.scheduled, *plan.sampled))
        groups = [g for r in requests if (g := batch.groups.get(r.request_id)) is not None and g.request is r]
        for group in groups:
            batch.finish_group(group, FinishReason.ERROR)
        batch.rows.scheduled[:] = 0
        if step.is_advanced:  # others may build on what it wrote
            self.drop_kv()
        return [group.request for group in groups]

    def drop_kv(self) -> None:
        """All KV is void (the pool was lost, or the weights have changed): every group computes its tokens again.

        Plans under way count as never run. The prefix cache and swapped copies are dropped too.
        """
        self._steps.clear()
        self._batch.forget_all()
        self.reset_prefix_cache()

    def has_unfinished(self) -> bool:
        return bool(self._batch.groups)

    def rest(self) -> None:
        """Let go of requests that have ended: there may be no next plan for long."""
        self._builder.reset()

    def reset_prefix_cache(self) -> None:
        """Let nothing that has been computed so far be reused by a request that is not running yet."""
        self._batch.kv.reset_prefix_cache()
        for group in self._batch.queue:
            for sequence in group.unfinished:
                sequence.block_keys.clear()

    def stats(self) -> SchedulerStats:
        batch = self._batch
        pool, host_pool = batch.kv.pool, batch.kv.host_pool
        # Looked for only when the host pool holds anything: a long queue would cost time in every step.
        swapping = host_pool.num_free < host_pool.num_usable
        num_swapped = sum(group.is_swapped for group in batch.queue) if swapping else 0
        return SchedulerStats(
            num_running=len(batch.running),
            num_running_sequences=batch.rows.num_used,
            num_waiting=len(batch.queue) - num_swapped,
            num_swapped=num_swapped,
            num_free_blocks=pool.num_free,
            num_total_blocks=pool.num_usable,
            num_cached_blocks=pool.num_cached,
            num_free_host_blocks=host_pool.num_free,
            num_total_host_blocks=host_pool.num_usable,
            **vars(self._totals),
        )

    def check_invariants(self) -> None:
        """Assert the invariants of blocks and tables, and that rows and sequences agree.

        Raises:
            AssertionError: naming what is wrong.
        """
        self._batch.check()

    def _advance(self, step: _Step) -> None:
        if not step.is_advanced:
            advance(self._batch, step.plan)
            step.is_advanced = True

    def _close(self, plan: StepPlan) -> _Step:
        if not self._steps or self._steps[0].plan is not plan:
            raise RuntimeError("this is not the oldest plan that schedule() has returned and that is still under way")
        return self._steps.popleft()
