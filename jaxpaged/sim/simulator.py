"""Serves traffic with the real scheduler: a clock that a cost model moves on, and a model that draws zeros."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jaxpaged.config import PreemptionMode
from jaxpaged.core.plan import StepPlan, StepResult
from jaxpaged.core.rules import Victim
from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import Request, SamplingParams
from jaxpaged.sim.cost import CostModel, StepLoad
from jaxpaged.sim.memory import MemoryEvent, ReservingKV
from jaxpaged.sim.metrics import Averages, MemoryUse, SimulationResult, StepCount, percentiles
from jaxpaged.sim.systems import System, make_scheduler, scheduler_config
from jaxpaged.sim.traffic import Traffic

__all__ = ["Event", "Setup", "Simulation", "SimulationResult", "simulate"]

Draw = Callable[[StepPlan], StepResult]


@dataclass(frozen=True)
class Setup:
    """The server that is simulated.

    Attributes:
        slots: tokens that the KV memory holds.
        width: outputs of each request.
        shared_prefix: leading tokens that all prompts have in common; longer prompts share that many.
        overlap: plan each step before the results of the last one are known, as the engine does by default.
        params: of every request; the default draws one output. Its length is the traffic's, never this one's.
        prefix_caching: find equal prefixes in memory (paged only).
        host_blocks: blocks that preempted sequences can be swapped to (paged only).
    """

    slots: int
    system: System = "paged"
    block_size: int = 16
    max_model_len: int = 2048
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2560
    watermark: float = 0.0
    victim: Victim = "newest"
    preemption_mode: PreemptionMode = "recompute"
    chunked_prefill: bool = True
    prefix_caching: bool = False
    host_blocks: int = 0
    shared_prefix: int = 0
    overlap: bool = False
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=None, ignore_eos=True))


@dataclass(frozen=True)
class Event:
    """Something that happened to a request.

    Attributes:
        step: number of the step, from 0.
        kind: "admit", "preempt" or "finish".
        tokens: of its first sequence whose KV is in the pool: at "admit" when the step is over, else before it left.
        free_blocks: blocks of the pool (or slots, of a system that reserves) that are free then.
    """

    step: int
    kind: str
    request: str
    tokens: int
    free_blocks: int


def draw_zeros(plan: StepPlan) -> StepResult:
    """Every token is 0."""
    return StepResult(np.zeros(len(plan.sampled), np.int32))


class Simulation:
    """One run. `run` gives the result; `step` goes on by one step, for those who look on.

    Attributes:
        scheduler, kv: the real ones.
        now: seconds.
        steps: planned so far.
        num_finished: requests that have ended.
        events: what happened, if it is kept.
        averages: over the steps so far.
        refused: names of the requests that could never fit.
    """

    def __init__(
        self,
        traffic: Traffic,
        setup: Setup,
        cost: CostModel | None = None,
        *,
        names: list[str] | None = None,
        draw: Draw = draw_zeros,
        keep_events: bool = False,
    ) -> None:
        """
        Args:
            cost: None = every step takes one second.
            names: of the requests; None = their numbers.
            draw: stands for the model.
            keep_events: keep `events`.

        Raises:
            ConfigError: the setup is impossible.
        """
        self.traffic, self.setup, self.cost = traffic, setup, cost
        config = scheduler_config(
            setup.system,
            max_model_len=setup.max_model_len,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            watermark=setup.watermark,
            preemption_mode=setup.preemption_mode,
            chunked_prefill=setup.chunked_prefill,
        )
        self.scheduler, self.kv = make_scheduler(
            setup.system,
            slots=setup.slots,
            block_size=setup.block_size,
            config=config,
            prefix_caching=setup.prefix_caching,
            host_blocks=setup.host_blocks,
            victim=setup.victim,
        )
        self.now = 0.0
        self.steps = 0
        self.num_finished = 0
        self.events: list[Event] = []
        self.averages = Averages()
        self.refused: list[str] = []
        self._names = names
        self._draw = draw
        self._keep_events = keep_events
        self._numbers: dict[str, int] = {}
        self._next = 0
        self._first_token = np.full(len(traffic), np.nan)
        self._finished = np.full(len(traffic), np.nan)
        self._preemptions = np.zeros(len(traffic), np.int32)
        self._ahead: tuple[StepPlan, float] | None = None
        self._running: set[str] = set()
        self._without_token: dict[int, Request] = {}  # admitted, by number
        self._held_back: list[int] = []  # finished, but not their static batch
        self._copied = 0

    def run(self) -> SimulationResult:
        """Until every request has finished."""
        while self.step():
            pass
        return self.result()

    def step(self) -> StepPlan | None:
        """Plans one step, after a wait for the next arrival where nothing is running; None when all is done.

        Its results are known when this returns; with `overlap` those of the one before are.
        """
        plan = self._schedule()
        if plan is None and self._ahead is not None:  # what to compute depends on the results
            self._complete()
            plan = self._schedule()
        while plan is None:
            if self._next == len(self.traffic):
                return None
            self.now = max(self.now, float(self.traffic.arrivals[self._next]))
            plan = self._schedule()
        load = self._load(plan)
        seconds = 1.0 if self.cost is None else self.cost.seconds(load)
        self._count(load, seconds)
        if self._ahead is not None:
            self._complete()
        self._ahead = plan, seconds
        self.steps += 1
        if not self.setup.overlap:
            self._complete()
        return plan

    def result(self) -> SimulationResult:
        """What has come of it so far."""
        done = np.flatnonzero(~np.isnan(self._finished))
        arrivals, outputs = self.traffic.arrivals[done], self.traffic.outputs[done]
        latency = self._finished[done] - arrivals
        ttft = self._first_token[done] - arrivals
        gaps = (latency - ttft) / np.maximum(outputs - 1, 1)
        generated = int(outputs.sum()) * self.setup.params.n
        seconds = self.now - float(self.traffic.arrivals[0]) if len(self.traffic) else 0.0
        return SimulationResult(
            requests=len(self.traffic),
            finished=len(done),
            refused=len(self.refused),
            steps=self.steps,
            seconds=seconds,
            prompt_tokens=int(self.traffic.prompts[done].sum()),
            output_tokens=generated,
            requests_per_s=len(done) / seconds if seconds else 0.0,
            output_tokens_per_s=generated / seconds if seconds else 0.0,
            ttft=percentiles(ttft),
            inter_token=percentiles(gaps[outputs > 1]),
            latency=percentiles(latency),
            normalized_latency=float(np.mean(latency / outputs)) if len(done) else 0.0,
            preemptions=int(self._preemptions.sum()),
            mean_batch=self.averages.batch,
            mean_batch_overall=self.averages.batch_overall,
            peak_batch=self.averages.peak_batch,
            memory=self.averages.memory(self.setup.slots),
            prefix_hit_tokens=self.scheduler.stats().prefix_hits_total,
        )

    # Requests

    def _arrive(self) -> None:
        """Queue all that have arrived by now."""
        arrivals = self.traffic.arrivals
        while self._next < len(arrivals) and arrivals[self._next] <= self.now:
            number = self._next
            self._next += 1
            name = str(number) if self._names is None else self._names[number]
            request = self._request(number, name)
            self._numbers[name] = number
            try:
                if len(request.prompt_token_ids) + request.max_tokens > self.setup.max_model_len:
                    raise InvalidRequestError("longer than max_model_len")
                self.scheduler.add(request)
            except InvalidRequestError:
                self.refused.append(name)

    def _request(self, number: int, name: str) -> Request:
        prompt_len = int(self.traffic.prompts[number])
        # Prompts differ by their tokens, so that the prefix cache finds what is meant to be shared, and no more.
        shared = min(self.setup.shared_prefix, prompt_len)
        prompt = [0] * shared + [number + 1] * (prompt_len - shared)
        output = int(self.traffic.outputs[number])
        arrival = float(self.traffic.arrivals[number])
        return Request(name, prompt, self.setup.params, output, seed=0, arrival_time=arrival)

    # What happens in a step

    def _schedule(self) -> StepPlan | None:
        self._arrive()
        plan = self.scheduler.schedule()
        self._note_planned()
        return plan

    def _complete(self) -> None:
        """The step that is under way ends."""
        assert self._ahead is not None
        (plan, seconds), self._ahead = self._ahead, None
        self.now += seconds
        self.scheduler.update(plan, self._draw(plan))
        self._note_first_tokens()
        self._note_finished()

    def _load(self, plan: StepPlan) -> StepLoad:
        copied = 0
        if isinstance(self.kv, ReservingKV):
            copied, self._copied = self.kv.copied_tokens - self._copied, self.kv.copied_tokens
        return StepLoad.of(plan, self.setup.block_size, copied)

    def _count(self, load: StepLoad, seconds: float) -> None:
        running = len(self._running)
        unfinished = self._next - len(self.refused) - self.num_finished
        memory = _memory_now(self.kv, self.setup, load.context)
        self.averages.add(StepCount(running, unfinished > running, memory), seconds)

    def _note_planned(self) -> None:
        """What `schedule` has done: preempted, then admitted."""
        events = self.kv.events
        for event in events:
            name = event.sequence.request.request_id
            if event.kind == "admit":
                self._running.add(name)
                number = self._numbers[name]
                if np.isnan(self._first_token[number]):
                    self._without_token[number] = event.sequence.request
                self._keep("admit", name, event)
            elif name in self._running:
                self._running.remove(name)
                self._preemptions[self._numbers[name]] += 1
                self._keep("preempt", name, event)
        events.clear()

    def _note_first_tokens(self) -> None:
        for number, request in list(self._without_token.items()):
            if any(sequence.output_token_ids for sequence in request.sequences):
                self._first_token[number] = self.now
                del self._without_token[number]

    def _note_finished(self) -> None:
        """What `update` has done."""
        events = self.kv.events
        for event in events:
            request = event.sequence.request
            if not request.is_finished:
                continue
            number = self._numbers[request.request_id]
            if np.isnan(self._finished[number]):
                self._finished[number] = self.now
                self.num_finished += 1
                self._running.discard(request.request_id)
                self._keep("finish", request.request_id, event)
                if self.setup.system == "static":
                    self._held_back.append(number)
        events.clear()
        # A static batch hands its results over when the last of it is complete.
        if self._held_back and not self._running:
            self._finished[self._held_back] = self.now
            self._held_back.clear()

    def _keep(self, kind: str, name: str, event: MemoryEvent) -> None:
        if self._keep_events:
            step = self.steps - (kind == "finish")
            self.events.append(Event(step, kind, name, event.num_tokens, event.num_free))


def _memory_now(kv: object, setup: Setup, tokens: int) -> MemoryUse:
    """Slots by what they are used for, in the step under way; `tokens` have KV in them."""
    if isinstance(kv, ReservingKV):
        return MemoryUse(
            tokens=tokens,
            reserved=max(kv.to_be_used - tokens, 0),
            internal=kv.reserved - kv.to_be_used,
            external=setup.slots - kv.reserved,
        )
    pool = kv.pool  # type: ignore[attr-defined]
    used = (pool.num_usable - pool.num_free) * setup.block_size
    return MemoryUse(tokens=tokens, reserved=0, internal=max(used - tokens, 0), external=setup.slots - used)


def simulate(
    traffic: Traffic, setup: Setup, cost: CostModel | None = None, *, draw: Draw = draw_zeros
) -> SimulationResult:
    """Serves `traffic` and tells what came of it. The same arguments give the same result.

    Args:
        cost: None = every step takes one second.
        draw: stands for the model.
    """
    return Simulation(traffic, setup, cost, draw=draw).run()
