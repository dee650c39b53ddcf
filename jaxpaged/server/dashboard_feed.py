"""What the dashboard shows, gathered so that no browser, however slow, can hold the engine or its memory."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from jaxpaged.trace.format import Header, Record, TraceError
from jaxpaged.trace.recorder import Recorder
from jaxpaged.trace.replay import Replay

if TYPE_CHECKING:
    from jaxpaged.engine.engine import Engine
    from jaxpaged.engine.stats import EngineStats

logger = logging.getLogger(__name__)

# Records that wait to be taken out of the engine's thread: about a minute of a fast engine.
MAX_INBOX = 4096
# Records that a browser may be behind before it gets the state as it is now instead.
MAX_BEHIND = 256
RATE_S = 10.0
HIT_RATE_S = 60.0
LATENCY_S = 300.0
MAX_LATENCIES = 1024


class StepFeed:
    """The latest records of an engine's steps. The engine's thread puts them in; all else is the event loop's.

    It records only while it is open, which it is while anybody looks. A request's id opens its answer to whoever has
    it, so none leaves here: a request's number stands in its place.
    """

    def __init__(self, engine: Engine, max_inbox: int = MAX_INBOX) -> None:
        self.header = Header.of(engine.cache_config, model=engine.model_name, started=round(time.time(), 3))
        self._engine = engine
        self._max_inbox = max_inbox
        self._inbox: deque[Record] = deque()
        self._recorder: Recorder | None = None
        self._replay = Replay(self.header)
        self._recent: deque[str] = deque(maxlen=MAX_BEHIND)
        self._count = 0  # records so far
        # The state after so many records: of a large pool it is costly to write, and many may ask for it.
        self._snapshot: tuple[int, str] | None = None
        self._has_failed = False

    def open(self) -> None:
        """Starts to record, from the next step on."""
        # Its own inbox: a recorder that was closed a moment ago may be about to put something into the old one.
        inbox = self._inbox = deque()
        recorder = self._recorder = Recorder(
            lambda record: self._put(inbox, recorder, record),
            by_priority=self._engine.scheduler_config.policy == "priority",
            joins_late=True,
        )
        self._engine.observers.append(recorder)

    def close(self) -> None:
        """Stops recording and forgets what there was; who has a cursor may keep it."""
        if self._recorder is not None:
            self._engine.observers.remove(self._recorder)
            self._recorder = None
        self._inbox = deque()
        self._replay = Replay(self.header)
        self._recent.clear()
        self._snapshot = None

    def since(self, cursor: int | None) -> tuple[list[str], int | None, int]:
        """What has come since an earlier call.

        Args:
            cursor: the earlier call's; None = this is the first.

        Returns:
            Records as JSON, the cursor for the next call, and how many records the caller is not shown: then the first
            one holds the whole state.
        """
        self._drain()
        if not self._recent or cursor == self._count:
            return [], cursor, 0
        if cursor is not None and self._count - cursor <= len(self._recent):
            return self._latest(self._count - cursor), self._count, 0
        if self._snapshot is None or self._count - self._snapshot[0] > len(self._recent):
            self._snapshot = self._count, self._replay.snapshot().to_json()
        at, state = self._snapshot
        return [state, *self._latest(self._count - at)], self._count, 0 if cursor is None else at - cursor - 1

    def _latest(self, num: int) -> list[str]:
        return list(self._recent)[len(self._recent) - num :]

    def _put(self, inbox: deque[Record], recorder: Recorder, record: Record) -> None:
        """In the engine's thread. If nobody takes them out: forget them all, and describe the state anew."""
        if len(inbox) >= self._max_inbox:
            inbox.clear()
            recorder.restart()
        else:
            inbox.append(record)

    def _drain(self) -> None:
        while self._inbox:
            try:
                record = self._inbox.popleft()
            except IndexError:  # the engine's thread has just emptied it
                return
            record.new = [new._replace(id=f"#{new.request}") for new in record.new]
            try:
                self._replay.apply(record)
            except TraceError as error:
                self._begin_anew(error)
                return
            self._recent.append(record.to_json())
            self._count += 1

    def _begin_anew(self, error: TraceError) -> None:
        """A new recorder, whose first record holds the whole state: the old one is the engine's thread's."""
        if not self._has_failed:
            logger.warning("the dashboard starts to record anew, and will again without a word: %s", error)
            self._has_failed = True
        self.close()
        self.open()


# The server's histograms that figures come from.
_LATENCIES = {
    "time_to_first_token_seconds": "ttft",
    "inter_token_latency_seconds": "itl",
    "e2e_request_latency_seconds": "e2e",
}


@dataclass(frozen=True)
class Figures:
    """Figures of the server now.

    Attributes:
        prompt_tokens_per_s, output_tokens_per_s: over the last ten seconds.
        prompt_tokens_total, output_tokens_total: since the engine's start.
        finished_total: sequences that have ended since then.
        hit_rate: share of looked-up prompt tokens that the prefix cache had, over the last minute; None = none was.
        ttft_ms, itl_ms, e2e_ms: median and 95th percentile of the last five minutes; None = there was none.
        skipped: steps that this browser was too slow for.
    """

    running: int
    waiting: int
    pool_use: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    prompt_tokens_total: int
    output_tokens_total: int
    finished_total: int
    hit_rate: float | None
    ttft_ms: tuple[float, float] | None
    itl_ms: tuple[float, float] | None
    e2e_ms: tuple[float, float] | None
    skipped: int = 0

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class FigureSource:
    """Rates and percentiles over sliding windows; of bounded size.

    It takes samples whenever something is observed, so that who comes to look sees the last seconds at once.
    """

    def __init__(self, stats: Callable[[], EngineStats], clock: Callable[[], float] = time.monotonic) -> None:
        self._stats = stats
        self._clock = clock
        self._samples: deque[tuple[float, EngineStats]] = deque(maxlen=256)
        self._latencies: dict[str, deque[tuple[float, float]]] = {
            name: deque(maxlen=MAX_LATENCIES) for name in _LATENCIES.values()
        }

    def observe(self, name: str, seconds: float) -> None:
        """Takes what the server's histograms take."""
        short = _LATENCIES.get(name)
        if short is not None:
            now = self._clock()
            self._latencies[short].append((now, seconds))
            self._sample(now)

    def figures(self, skipped: int = 0) -> Figures:
        now, stats = self._clock(), self._stats()
        self._sample(now)
        while now - self._samples[0][0] > HIT_RATE_S + 1:
            self._samples.popleft()
        then, before = self._sample_after(now - RATE_S)
        seconds = max(now - then, 1e-9)
        has_rate = now - then >= 0.5
        _, minute_ago = self._sample_after(now - HIT_RATE_S)
        scheduler, earlier = stats.scheduler, minute_ago.scheduler
        queries = scheduler.prefix_queries_total - earlier.prefix_queries_total
        hits = scheduler.prefix_hits_total - earlier.prefix_hits_total
        return Figures(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + scheduler.num_swapped,
            pool_use=1 - scheduler.num_free_blocks / max(scheduler.num_total_blocks, 1),
            prompt_tokens_per_s=(stats.prompt_tokens_total - before.prompt_tokens_total) / seconds if has_rate else 0.0,
            output_tokens_per_s=(stats.generation_tokens_total - before.generation_tokens_total) / seconds
            if has_rate
            else 0.0,
            prompt_tokens_total=stats.prompt_tokens_total,
            output_tokens_total=stats.generation_tokens_total,
            finished_total=sum(stats.finished.values()),
            hit_rate=hits / queries if queries > 0 else None,
            ttft_ms=self._quantiles("ttft", now),
            itl_ms=self._quantiles("itl", now),
            e2e_ms=self._quantiles("e2e", now),
            skipped=skipped,
        )

    def _sample(self, now: float) -> None:
        if not self._samples or now - self._samples[-1][0] >= 0.5:
            self._samples.append((now, self._stats()))

    def _sample_after(self, moment: float) -> tuple[float, EngineStats]:
        return next((sample for sample in self._samples if sample[0] >= moment), self._samples[-1])

    def _quantiles(self, name: str, now: float) -> tuple[float, float] | None:
        values = sorted(seconds for at, seconds in self._latencies[name] if now - at <= LATENCY_S)
        if not values:
            return None
        p50, p95 = (values[max(-(-len(values) * percent // 100) - 1, 0)] for percent in (50, 95))
        return round(1000 * p50, 2), round(1000 * p95, 2)
