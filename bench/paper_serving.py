"""Serves timed arrivals on the real engine, with another owner of the KV memory where a system of the paper has one."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from flax import nnx

from jaxpaged.config import CacheConfig, EngineConfig
from jaxpaged.core.plan import StepPlan
from jaxpaged.core.rules import Rules
from jaxpaged.engine.engine import Engine
from jaxpaged.request import SamplingParams
from jaxpaged.sim import Dataset, Setup, StepLoad, System, Traffic
from jaxpaged.sim.calibration import MeasuredStep
from jaxpaged.sim.memory import ReservingKV
from jaxpaged.sim.systems import final_length, reservation
from jaxpaged.sim.traffic import saturating


@dataclass(frozen=True)
class Served:
    """A run of one system.

    Attributes:
        seconds: from the start to the last token.
        latencies: of each request, from its arrival to its last token, in seconds.
        tokens: of each output.
        steps: each with its time.
        batch: sequences in a step, averaged over time.
        peak_batch: most in a step.
        preemptions: requests that gave way.
    """

    seconds: float
    latencies: list[float]
    tokens: list[list[int]]
    steps: list[MeasuredStep]
    batch: float
    peak_batch: int
    preemptions: int


def rules_of(system: System, slots: int, max_model_len: int) -> Rules:
    """The engine's own for "paged". Else KV memory is granted as the simulator's baselines grant it: each request
    reserves a piece of a buddy allocator, at least a block, which bounds how many run. The blocks that they write to
    are the same pool's.
    """
    if system == "paged":
        return Rules()
    reserve = reservation(system, max_model_len)

    def make(cache: CacheConfig) -> ReservingKV:
        return ReservingKV(cache, slots=slots, reserve=lambda s: max(reserve(s), cache.block_size), final=final_length)

    return Rules(make)


def start_engine(model: nnx.Module, setup: Setup, *, warmup: bool = True) -> Engine:
    """An engine with the memory and the limits of `setup`. It takes its steps in turn, so that each can be timed."""
    config = EngineConfig(
        max_model_len=setup.max_model_len,
        block_size=setup.block_size,
        num_blocks=1 + setup.slots // setup.block_size,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        enable_prefix_caching=False,
        async_scheduling=False,
        warmup=warmup,
    )
    return Engine(model, None, config, rules=rules_of(setup.system, setup.slots, setup.max_model_len))


def serve(engine: Engine, traffic: Traffic, *, seed: int = 0) -> Served:
    """Serves `traffic`, each request when it arrives."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, engine.model_config.vocab_size, n).tolist() for n in traffic.prompts.tolist()]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in traffic.outputs.tolist()]
    arrivals: list[float] = traffic.arrivals.tolist()
    plans: list[StepPlan] = []
    engine.observers.append(lambda _, plan: None if plan is None else plans.append(plan))
    ends, tokens = [0.0] * len(prompts), [[0]] * len(prompts)
    steps: list[MeasuredStep] = []
    before = engine.stats().scheduler.preemptions_total
    start, following = time.perf_counter(), 0
    while following < len(prompts) or engine.has_unfinished_requests():
        now = time.perf_counter() - start
        while following < len(prompts) and arrivals[following] <= now:
            engine.add_request(str(following), prompts[following], params[following])
            following += 1
        if not engine.has_unfinished_requests():
            time.sleep(arrivals[following] - now)
            continue
        began = time.perf_counter()
        outputs = engine.step()
        ended = time.perf_counter()
        steps.append(MeasuredStep(StepLoad.of(plans[-1], engine.cache_config.block_size), ended - began))
        for output in outputs:
            if output.finished:
                ends[int(output.request_id)] = ended - start
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    engine.observers.pop()
    batches = np.array([len(plan.kv_lens) for plan in plans])
    return Served(
        max(ends),
        [end - arrival for end, arrival in zip(ends, arrivals, strict=True)],
        tokens,
        steps,
        float(np.average(batches, weights=[step.seconds for step in steps])),
        int(batches.max()),
        engine.stats().scheduler.preemptions_total - before,
    )


def calibration_steps(engine: Engine, *, outputs: int = 16) -> list[MeasuredStep]:
    """Steps of groups of equal requests that are there together: from one sequence to all rows, short and long."""
    limits, slots = engine.scheduler_config, (engine.cache_config.num_blocks - 1) * engine.cache_config.block_size
    longest = limits.max_model_len - outputs
    steps: list[MeasuredStep] = []
    rows = 1
    while rows <= limits.max_num_seqs:
        for prompt in (16, min(96, longest // 2), longest):
            if rows * (prompt + outputs) <= slots:
                equal = Traffic(np.zeros(rows), np.full(rows, prompt, np.int32), np.full(rows, outputs, np.int32))
                steps += serve(engine, equal, seed=rows).steps
        rows *= 2
    return steps


def merge_steps(steps: Iterable[MeasuredStep]) -> tuple[MeasuredStep, ...]:
    """The median of those with equal loads."""
    seconds: dict[StepLoad, list[float]] = defaultdict(list)
    for step in steps:
        seconds[step.load].append(step.seconds)
    return tuple(MeasuredStep(load, statistics.median(values)) for load, values in seconds.items())


def warm_up(engine: Engine, dataset: Dataset) -> None:
    serve(engine, saturating(dataset, 8, seed=9, max_model_len=engine.scheduler_config.max_model_len))
