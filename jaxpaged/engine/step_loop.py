"""The loop of an engine: plan a step, launch it, take in what came of the one before.

    in turn      plan 1  launch 1  fetch 1  collect 1  plan 2  launch 2  fetch 2  ...
    overlapped   plan 1  launch 1  plan 2  launch 2  fetch 1  collect 1  plan 3  launch 3  fetch 2  ...

Overlapped, the host plans a step, and makes text of the last one's tokens, while the device computes. The results of
requests are the same.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxpaged.core.plan import StepPlan
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine.collector import Accepted, Collector
from jaxpaged.outputs import RequestOutput
from jaxpaged.runner.runner import Launched, Runner

StepObserver = Callable[[Scheduler, StepPlan | None], None]


class StepLoop:
    """Runs the steps of one scheduler on one runner.

    Attributes:
        num_steps: launched so far.
        observers: called with each plan before it runs, and with None when nothing is left; they only look.
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
        self._ahead: Launched | None = None
        self._pool_may_be_lost = False

    def step(self) -> list[RequestOutput]:
        """Launches one step, and returns the news of the one that has been completed meanwhile.

        A failure on the device ends the requests of its step with finish_reason "error" and leaves the others.
        """
        if self._pool_may_be_lost:
            self._restore_pool()
        news: list[RequestOutput] = []
        done: Accepted | None = None
        plan = self._schedule()
        ahead, self._ahead = self._ahead, None
        if plan is None and ahead is not None:  # nothing is left to compute, or what to compute depends on this one
            done, ahead = self._complete(ahead, news), None
            if done is None:
                return news
            plan = self._schedule()
        launched = None if plan is None else self._launch(plan)
        if ahead is not None:
            done = self._complete(ahead, news)
            if done is None:  # with it failed whatever was launched behind it
                return news
        if isinstance(launched, Launched):
            if self._overlap:
                self._ahead = launched
            else:
                done = self._complete(launched, news)
        if done is not None:
            news += self._collector.collect(done)
        if plan is not None and isinstance(launched, Exception):
            news += self._collector.fail(plan, launched)
        return news

    def note_idle(self) -> None:
        """Tells the observers, if nothing is left to compute: there may be no next step for long."""
        if self.observers and not self._scheduler.has_unfinished():
            for observer in self.observers:
                observer(self._scheduler, None)

    def close(self) -> None:
        """Waits for the step under way: arrays must not be let go while the device writes them."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._complete(ahead, [])

    def drop_kv(self) -> None:
        """All KV is void; steps under way count as never run."""
        self._ahead = None
        self._scheduler.drop_kv()

    def _schedule(self) -> StepPlan | None:
        plan = self._scheduler.schedule()
        if plan is not None:
            for observer in self.observers:
                observer(self._scheduler, plan)
        return plan

    def _launch(self, plan: StepPlan) -> Launched | Exception:
        self.num_steps += 1
        self._collector.note_scheduled(plan)
        try:
            launched = self._runner.launch(plan)
        except Exception as error:
            self._pool_may_be_lost = True
            return error
        except BaseException:
            self._interrupted()
            raise
        return launched

    def _complete(self, step: Launched, news: list[RequestOutput]) -> Accepted | None:
        """Waits for the results of `step`; None if it has failed, and then `news` says so."""
        try:
            result = self._runner.fetch(step)
        except Exception as error:
            self._pool_may_be_lost = True
            news += self._collector.fail(step.plan, error)
            return None
        except BaseException:
            self._interrupted()
            raise
        return self._collector.accept(step.plan, result)

    def _interrupted(self) -> None:
        """Such as by Ctrl-C: the requests stay, and compute again what steps may have half done."""
        self._pool_may_be_lost = True
        self.drop_kv()

    def _restore_pool(self) -> None:
        """After a step that failed or was interrupted: if it took the pool, whoever had KV in it computes it again."""
        if self._runner.restore_pools():
            self.drop_kv()
        self._pool_may_be_lost = False
