"""A trace says what the block manager did: rebuilt from its records alone, the state is the manager's at every step."""

from __future__ import annotations

import pytest
from core.test_schedules import Arrival, Disturbance, Drive, arrivals, configs, disturbances
from hypothesis import HealthCheck, given, settings

from jaxpaged.config import CacheConfig, SchedulerConfig
from jaxpaged.core.plan import StepPlan
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.request import Request, SequenceStatus
from jaxpaged.trace import Header, Record, Recorder, Replay


def is_running(request: Request) -> bool:
    return any(s.status is SequenceStatus.RUNNING for s in request.sequences)


def state_of(scheduler: Scheduler, policy: str) -> dict[str, object]:
    """What the scheduler's own objects say, by request id and sequence index."""

    def order(request: Request) -> tuple[int, float]:
        return request.priority if policy == "priority" else 0, request.arrival_time

    pool = scheduler.kv.pool
    requests = [group.request for group in scheduler.groups.values()]
    sequences = [s for r in requests for s in r.sequences]
    return {
        "tables": {(s.request.request_id, s.index): s.block_table for s in sequences if s.block_table},
        "host": {(s.request.request_id, s.index): s.host_blocks for s in sequences if s.host_blocks},
        "references": {b: n for b, n in enumerate(pool.ref_counts) if n},
        "findable": {b for b in range(pool.num_blocks) if pool._keys[b] is not None},
        "running": {r.request_id for r in requests if is_running(r)},
        "waiting": [r.request_id for r in sorted(requests, key=order) if not is_running(r)],
        "free": pool.num_free,
    }


def state_in(replay: Replay) -> dict[str, object]:
    name = {r: new.id for r, new in replay.requests.items()}
    return {
        "tables": {(name[r], s): table for (r, s), table in replay.tables.items()},
        "host": {(name[r], s): table for (r, s), table in replay.host_tables.items()},
        "references": dict(replay.references),
        "findable": replay.findable,
        "running": {name[r] for r, status in replay.status.items() if status == "running"},
        "waiting": [name[r] for r in replay.queue],
        "free": replay.num_free,
    }


class Watch:
    """Records a drive through a file's text and compares after each record."""

    def __init__(self, drive: Drive, cache: CacheConfig, policy: str) -> None:
        self.scheduler = drive.scheduler
        self.policy = policy
        self.replay = Replay(Header.of(cache))
        self.late: Replay | None = None
        self.lines: list[str] = []
        self.work: list[dict[tuple[str, int], tuple[int, int]]] = []
        self.recorder = Recorder(self.take, clock=None, by_priority=policy == "priority")
        self._schedule = drive.scheduler.schedule
        drive.scheduler.schedule = self.schedule  # type: ignore[method-assign]

    def schedule(self) -> StepPlan | None:
        plan = self._schedule()
        if plan is None and self.scheduler.has_unfinished():  # what to compute depends on a step under way
            return None
        before = len(self.lines)
        self.recorder(self.scheduler, plan)
        if len(self.lines) > before:
            self.check(plan)
        return plan

    def take(self, record: Record) -> None:
        self.lines.append(record.to_json())
        self.replay.apply(record)
        if len(self.lines) == 5:
            self.late = Replay(self.replay.header)
            self.late.apply(self.replay.snapshot())
        elif self.late is not None:
            self.late.apply(record)

    def check(self, plan: StepPlan | None) -> None:
        assert state_in(self.replay) == state_of(self.scheduler, self.policy)
        if self.late is not None:
            assert state_in(self.late) == state_in(self.replay)
        if plan is None:
            assert not self.replay.decodes and not self.replay.prefills
            return
        counts = plan.query_starts[1:] - plan.query_starts[:-1]
        planned = {
            (s.request.request_id, s.index): (int(counts[i]), int(plan.kv_lens[i]))
            for i, s in enumerate(plan.scheduled)
        }
        name = {r: new.id for r, new in self.replay.requests.items()}
        work = {(name[p.request], p.sequence): (p.tokens, p.kv_len) for p in self.replay.prefills}
        work |= {(name[r], s): (1, kv_len) for (r, s), kv_len in self.replay.decodes.items()}
        assert work == planned
        assert sum(self.replay.num_tokens) == plan.num_tokens


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "one ahead"])
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(configs(), arrivals(), disturbances)
def test_a_replay_is_the_block_manager_at_every_step(
    ahead: bool,
    configured: tuple[SchedulerConfig, CacheConfig],
    coming: list[Arrival],
    troubles: list[Disturbance],
) -> None:
    config, cache = configured
    drive = Drive(config, cache, ahead=ahead)
    watch = Watch(drive, cache, config.policy)
    step, last = 0, max(a.step for a in coming)
    while True:
        for arrival in coming:
            if arrival.step == step:
                drive.add(arrival.request)
        if not drive.step([t for t in troubles if t.step == step]) and step > last:
            break
        step += 1
    totals, stats = watch.replay.totals, drive.scheduler.stats()
    assert totals.preemptions == stats.preemptions_total
    assert totals.copies == stats.copied_blocks_total
    assert totals.swapped_blocks == stats.swapped_out_blocks_total + stats.swapped_in_blocks_total
    assert watch.replay.num_free == watch.replay.num_usable
