"""The loop of an engine: plan a step, launch it, take in what came of the one before.

    in turn      plan 1  launch 1  fetch 1  collect 1  plan 2  launch 2  fetch 2  ...
    overlapped   plan 1  launch 1  plan 2  launch 2  fetch 1  collect 1  plan 3  launch 3  fetch 2  ...

Overlapped, the host plans a step, and makes text of the last one's tokens, while the device computes. The results of
requests are the same.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import jax

from jaxpaged.core.plan import StepPlan
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine.collector import Accepted, Collector
from jaxpaged.outputs import RequestOutput
from jaxpaged.runner.runner import Launched, Runner

logger = logging.getLogger(__name__)

StepObserver = Callable[[Scheduler, StepPlan | None], None]


class StepLoop:
    """Runs the steps of one scheduler on one runner.

    Attributes:
        num_steps: launched so far.
        observers: called with each plan before it runs, and with None when nothing is left; they only look. One
            that raises is told no more.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, collector: Collector, *, overlap: bool) -> None:
        """
        Args:
            overlap: launch a step before the results of the last one are known.
        """
        self.num_steps = 0
        self.observers: list[StepObserver] = []
        self._scheduler = scheduler
        self._runner = runner
        self._collector = collector
        self._overlap = overlap
        self._under_way: deque[Launched] = deque()  # the oldest first
        self._done: Accepted | None = None  # its results are taken in, but not collected yet
        self._news: list[RequestOutput] = []  # not returned yet
        self._failed_observers: list[StepObserver] = []
        self._pool_may_be_lost = False

    def step(self) -> list[RequestOutput]:
        """Launches one step, and returns the news of the one that has been completed meanwhile.

        A failure on the device ends the requests of its step with finish_reason "error" and leaves the others. Whatever
        else is raised on the way is raised here, and the next call goes on as after an interrupt.
        """
        if self._pool_may_be_lost:
            self._restore_pool()
        with self._breaking_off():
            self._step()
            if not self._scheduler.has_unfinished():  # before the news are taken: what is raised must not lose them
                self._settle()
        news, self._news = self._news, []
        return news

    def note_idle(self) -> None:
        """If nothing is left to compute, lets go of what the last steps hold, and tells the observers: there may be no
        next step for long."""
        if self._scheduler.has_unfinished():
            return
        with self._breaking_off():
            self._settle()
        self._scheduler.rest()
        self._collector.rest()
        self._notify(None)

    def discard(self, request_id: str) -> None:
        """Nobody waits for the news of this request any more."""
        if self._news:
            self._news = [output for output in self._news if output.request_id != request_id]

    def close(self) -> None:
        """Waits for the steps under way, and forgets what came of them."""
        with self._breaking_off():
            self._settle()
        self._news.clear()

    def drop_kv(self) -> None:
        """All KV is void; steps under way count as never run, but are waited for: their inputs and the pool are in use
        until then."""
        void, self._under_way = self._under_way, deque()
        self._scheduler.drop_kv()
        self._wait(void)

    def _step(self) -> None:
        plan = self._schedule()
        if plan is None and self._under_way:  # nothing is left to compute, or what to compute depends on this one
            if not self._complete():
                return
            plan = self._schedule()
        is_behind = bool(self._under_way)
        failure = None if plan is None else self._launch(plan)
        if is_behind and not self._complete():  # with it failed whatever was launched behind it
            if failure is not None:
                logger.error("the launch of the step behind it failed too", exc_info=failure)
            return
        if self._under_way and not self._overlap:
            self._complete()
        self._collect()
        if plan is not None and failure is not None:
            self._news += self._collector.fail(plan, failure)

    def _settle(self) -> None:
        while self._under_way and self._complete():
            self._collect()

    def _schedule(self) -> StepPlan | None:
        plan = self._scheduler.schedule()
        if plan is not None:
            self._notify(plan)
        return plan

    def _notify(self, plan: StepPlan | None) -> None:
        for observer in self.observers:
            if any(observer is failed for failed in self._failed_observers):
                continue
            try:
                observer(self._scheduler, plan)
            except Exception:
                logger.exception("an observer of the steps (%r) failed; it is told no more", observer)
                # It stays in `observers`, from where its owner removes it.
                self._failed_observers = [o for o in self._failed_observers if o in self.observers]
                self._failed_observers.append(observer)

    def _launch(self, plan: StepPlan) -> Exception | None:
        """The error with which the launch failed, if it did."""
        self.num_steps += 1
        self._collector.note_scheduled(plan)
        try:
            launched = self._runner.launch(plan)
        except Exception as error:
            self._pool_may_be_lost = True
            return error
        self._under_way.append(launched)
        return None

    def _complete(self) -> bool:
        """Waits for the results of the oldest step and has them taken in; False if it has failed."""
        step = self._under_way[0]  # it stays there if this is interrupted
        try:
            result = self._runner.fetch(step)
        except Exception as error:
            self._pool_may_be_lost = True
            self._news += self._collector.fail(step.plan, error)
            void, self._under_way = self._under_way, deque()
            self._wait(void)
            return False
        self._under_way.popleft()
        self._done = self._collector.accept(step.plan, result)
        return True

    def _wait(self, void: Iterable[Launched]) -> None:
        for step in void:
            with suppress(Exception):  # of a step that counts as never run
                jax.block_until_ready(step.wanted)

    def _collect(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            self._news += self._collector.collect(done)

    @contextmanager
    def _breaking_off(self) -> Iterator[None]:
        """Whatever is raised within, such as by Ctrl-C: the requests stay, and compute again what steps may have half
        done. Those that cannot be told all their tokens end with an error."""
        try:
            yield
        except BaseException:
            self._pool_may_be_lost = True
            try:
                self._collect()
                self._news += self._collector.end_lost()
            except Exception:
                logger.exception("the outputs of a step that broke off are lost")
            finally:
                self.drop_kv()
            raise

    def _restore_pool(self) -> None:
        """After a step that failed or was interrupted: if it took the pool, whoever had KV in it computes it again."""
        if self._runner.restore_pools():
            self.drop_kv()
        self._pool_may_be_lost = False
