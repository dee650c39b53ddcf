"""Watches a scheduler and says, step by step, what has changed in memory and in the queue.

It only reads: the scheduler does not know that it is watched. All that has been recorded of the unfinished requests is
kept, to compare with; nothing is kept of the finished ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from jaxpaged.request import Request, Sequence, SequenceStatus
from jaxpaged.trace.format import (
    Admission,
    Decode,
    Finish,
    NewRequest,
    Preemption,
    PreemptionWay,
    Prefill,
    Record,
    TableChange,
    clean,
)

if TYPE_CHECKING:
    from jaxpaged.core.block_pool import BlockPool
    from jaxpaged.core.group import SequenceGroup
    from jaxpaged.core.plan import StepPlan
    from jaxpaged.core.scheduler import Scheduler

Key = tuple[int, int]


class _Seen:
    """What has been recorded of a sequence.

    Attributes:
        full, full_before: its full blocks at the last record, and at the one before: where blocks may have become
            findable since.
    """

    __slots__ = ("full", "full_before", "host_blocks", "is_finished", "sequence", "table")

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.table: list[int] = []
        self.host_blocks: list[int] = []
        self.is_finished = False
        self.full = self.full_before = 0

    def is_as_before(self, full: int) -> bool:
        """Nothing has changed that could be told. The common case: most steps fill no block.

        Args:
            full: its full blocks now.
        """
        sequence = self.sequence
        return (
            full == self.full == self.full_before
            and sequence.block_table == self.table
            and sequence.host_blocks == self.host_blocks
            and sequence.is_finished is self.is_finished
        )


class _SeenRequest:
    __slots__ = ("is_running", "num_preemptions", "number", "request", "sequences")

    def __init__(self, number: int, request: Request) -> None:
        self.number = number
        self.request = request
        self.is_running = False
        self.num_preemptions = request.num_preemptions
        self.sequences = [_Seen(s) for s in request.sequences]

    @property
    def holds_blocks(self) -> bool:
        return any(s.table or s.host_blocks for s in self.sequences)


class Recorder:
    """Call it after every `schedule()` of one scheduler, with the plan; and with None when nothing is left to do.

    Args:
        sink: takes the records; it must not call the scheduler.
        clock: never goes back; None = the time is the number of steps.
        by_priority: the scheduler serves by priority; else the requests' priorities count for nothing.
        joins_late: the scheduler has been at work before: what it did then is no event of the first record.
    """

    def __init__(
        self,
        sink: Callable[[Record], None],
        *,
        clock: Callable[[], float] | None = time.monotonic,
        by_priority: bool = False,
        joins_late: bool = False,
    ) -> None:
        self._sink = sink
        self._clock = clock
        self._start = 0.0 if clock is None else clock()
        self._by_priority = by_priority
        self._first_is_reset = joins_late
        self._requests: dict[Request, _SeenRequest] = {}
        # Those in the batch or with blocks: of the others nothing changes unless they are scheduled, or end.
        self._active: dict[Request, _SeenRequest] = {}
        self._findable: set[int] = set()
        self._next_number = 0
        self._step = 0
        self._was_idle = True
        # The plan's sequences and their lengths at the last record, and of each that decodes its length less the number
        # of records so far, which stays the same while it goes on.
        self._scheduled: tuple[Sequence, ...] = ()
        self._kv_lens: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._decodes: dict[Key, int] = {}
        self._num_records = 0

    def __call__(self, scheduler: Scheduler, plan: StepPlan | None) -> None:
        """Records what has changed."""
        pool = scheduler.kv.pool
        t = float(self._step) if self._clock is None else round(self._clock() - self._start, 6)
        record = Record(self._step, t, pool.num_free, pool.num_cached, idle=plan is None, reset=self._first_is_reset)
        self._find_new(record, scheduler.groups)
        touched: list[int] = []
        for seen in self._changing(scheduler.groups, plan):
            self._compare(record, seen, plan, touched, scheduler.kv.block_size)
        self._note_findable(record, pool, touched)
        self._note_work(record, plan)
        self._first_is_reset = False
        if plan is not None:
            self._step += 1
        elif self._was_idle and not record.has_events:
            return
        self._was_idle = plan is None
        self._num_records += 1
        self._sink(record)

    def restart(self) -> None:
        """Let the next record hold the whole state: those before it have been lost."""
        self._first_is_reset = True
        self._requests, self._active, self._findable = {}, {}, set()
        self._scheduled, self._decodes = (), {}

    def _find_new(self, record: Record, groups: Mapping[str, SequenceGroup]) -> None:
        """Takes up the requests that have come; they are the last of all."""
        new: list[Request] = []
        for group in reversed(groups.values()):  # type: ignore[call-overload]
            if group.request in self._requests:
                break
            new.append(group.request)
        for request in reversed(new):
            self._begin(record, request)
        if record.reset:
            self._active.update(self._requests)

    def _changing(self, groups: Mapping[str, SequenceGroup], plan: StepPlan | None) -> list[_SeenRequest]:
        """The requests of which something may have changed, in the order of their numbers."""
        requests, active = self._requests, self._active
        if plan is not None and plan.scheduled is not self._scheduled:
            active.update((s.request, requests[s.request]) for s in plan.scheduled if s.request in requests)
        num_ended = sum(seen.request.request_id not in groups for seen in active.values())
        if len(requests) - num_ended != len(groups):  # some have ended without having been admitted
            active.update((r, seen) for r, seen in requests.items() if r.is_finished)
        return sorted(active.values(), key=lambda seen: seen.number)

    def _begin(self, record: Record, request: Request) -> None:
        seen = self._requests[request] = _SeenRequest(self._next_number, request)
        self._next_number += 1
        arrived = float(request.arrival_time) - self._start
        record.new.append(
            NewRequest(
                seen.number,
                clean(request.request_id),
                len(request.prompt_token_ids),
                request.max_tokens,
                len(request.sequences),
                request.priority if self._by_priority else 0,
                round(arrived, 6),
            )
        )

    def _compare(
        self, record: Record, seen: _SeenRequest, plan: StepPlan | None, touched: list[int], block_size: int
    ) -> None:
        """Notes what has changed of a request; `touched` gets the blocks whose keys may have changed."""
        request, is_running = seen.request, False
        for of in seen.sequences:
            is_running = is_running or of.sequence.status is SequenceStatus.RUNNING
            full = of.sequence.num_computed // block_size
            if not of.is_as_before(full):
                self._note_sequence(record, seen.number, of, full, touched)
        if is_running is not seen.is_running:
            self._note_status(record, seen, is_running, plan)
        seen.num_preemptions = request.num_preemptions
        if is_running:
            return
        if request.is_finished:
            del self._requests[request], self._active[request]
        elif not seen.holds_blocks:
            del self._active[request]

    def _note_sequence(self, record: Record, number: int, of: _Seen, full: int, touched: list[int]) -> None:
        sequence, table = of.sequence, of.sequence.block_table
        if sequence.is_finished and not of.is_finished:
            of.is_finished = True
            reason = sequence.finish_reason.value if sequence.finish_reason is not None else ""
            record.finished.append(Finish(number, sequence.index, reason))
        touched += of.table[of.full_before :] if len(table) < len(of.table) else table[of.full_before : full]
        of.full_before, of.full = of.full, full
        if table != of.table:
            keep = _common(of.table, table)
            touched += table[keep:]
            of.full_before = min(of.full_before, keep)
            of.table = list(table)
            record.tables.append(TableChange(number, sequence.index, keep, table[keep:]))
        if sequence.host_blocks != of.host_blocks:
            keep = _common(of.host_blocks, sequence.host_blocks)
            of.host_blocks = list(sequence.host_blocks)
            record.host_tables.append(TableChange(number, sequence.index, keep, of.host_blocks[keep:]))

    def _note_status(self, record: Record, seen: _SeenRequest, is_running: bool, plan: StepPlan | None) -> None:
        request = seen.request
        if record.reset and is_running:
            record.running.append(seen.number)
        elif is_running:
            leader = next(s for s in request.sequences if not s.is_finished)
            hits = 0 if _comes_from_host(record, seen) else _computed_before(plan, leader)
            record.admitted.append(Admission(seen.number, hits, leader.num_tokens))
        elif not request.is_finished:
            way: PreemptionWay = "reset"
            if request.num_preemptions > seen.num_preemptions:
                way = "swap" if any(s.host_blocks for s in seen.sequences) else "recompute"
            record.preempted.append(Preemption(seen.number, way))
        seen.is_running = is_running

    def _note_findable(self, record: Record, pool: BlockPool, touched: Iterable[int]) -> None:
        """Compares the blocks that may have changed; all of them where the pool counts others than are known then."""
        known = self._findable
        changed = {block for block in touched if (block in known) is not pool.is_cached(block)}
        if len(known) + sum(1 if block not in known else -1 for block in changed) != pool.num_cached:
            changed = known ^ set(pool.cached_blocks())
        record.cached = sorted(changed - known)
        record.uncached = sorted(changed & known)
        known ^= changed

    def _note_work(self, record: Record, plan: StepPlan | None) -> None:
        if plan is None:
            record.decodes_ended = list(self._decodes)
            self._scheduled, self._decodes = (), {}
            return
        record.copies = _pairs(plan.copies.tolist())
        record.swapped_out = _pairs(plan.swap_out.tolist())
        record.swapped_in = _pairs(plan.swap_in.tolist())
        same = plan.scheduled is self._scheduled and plan.num_decodes == len(plan.scheduled)
        if not same or not np.array_equal(plan.kv_lens, self._kv_lens + 1):
            self._compare_work(record, plan)
        self._scheduled, self._kv_lens = plan.scheduled, plan.kv_lens

    def _compare_work(self, record: Record, plan: StepPlan) -> None:
        decodes: dict[Key, int] = {}
        starts, kv_lens = plan.query_starts.tolist(), plan.kv_lens.tolist()
        for i, sequence in enumerate(plan.scheduled):
            seen = self._requests.get(sequence.request)
            if seen is None:
                continue
            if i < plan.num_decodes:
                decodes[seen.number, sequence.index] = kv_lens[i] - self._num_records
            else:
                num_tokens = starts[i + 1] - starts[i]
                record.prefills.append(Prefill(seen.number, sequence.index, num_tokens, kv_lens[i]))
        before = self._decodes
        record.decodes = [Decode(*k, v + self._num_records) for k, v in decodes.items() if before.get(k) != v]
        record.decodes_ended = [key for key in before if key not in decodes]
        self._decodes = decodes


def _comes_from_host(record: Record, seen: _SeenRequest) -> bool:
    return any(change.request == seen.number and change.keep == 0 for change in record.host_tables)


def _computed_before(plan: StepPlan | None, sequence: Sequence) -> int:
    """Tokens of a sequence of the plan that are in the pool already."""
    if plan is None or sequence not in plan.scheduled:
        return 0
    return int(plan.positions[plan.query_starts[plan.scheduled.index(sequence)]])


def _common(before: list[int], after: list[int]) -> int:
    """Leading entries that are equal."""
    if after[: len(before)] == before:
        return len(before)
    for i, (old, new) in enumerate(zip(before, after, strict=False)):
        if old != new:
            return i
    return min(len(before), len(after))


def _pairs(rows: list[list[int]]) -> list[tuple[int, int]]:
    return [(a, b) for a, b in rows]
