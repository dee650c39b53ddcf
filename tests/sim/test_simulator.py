"""The simulator: schedules worked by hand, laws of conservation, and the engine's own schedule of a real model."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from flax import nnx

from jaxpaged.config import EngineConfig
from jaxpaged.core.plan import StepPlan
from jaxpaged.engine.engine import Engine
from jaxpaged.request import SamplingParams
from jaxpaged.sim import (
    DATASETS,
    SYSTEMS,
    CostModel,
    Setup,
    Simulation,
    System,
    Traffic,
    find_device,
    poisson,
    simulate,
)
from jaxpaged.sim.shapes import opt_shape

NAMES = list("ABCD")
LENGTHS = [(40, 40), (30, 24), (60, 30), (20, 16)]
SMALL = Setup(slots=12 * 16, max_model_len=128, max_num_seqs=16, max_num_batched_tokens=256)


def at_once(lengths: list[tuple[int, int]]) -> Traffic:
    prompts, outputs = np.array(lengths, np.int32).T
    return Traffic(np.zeros(len(lengths)), prompts, outputs)


def events(setup: Setup, lengths: list[tuple[int, int]] = LENGTHS) -> list[tuple[int, str, str, int, int]]:
    simulation = Simulation(at_once(lengths), setup, names=NAMES[: len(lengths)], keep_events=True)
    simulation.run()
    return [(e.step, e.kind, e.request, e.tokens, e.free_blocks) for e in simulation.events]


ADMITTED = [(0, "admit", "A", 40, 9), (0, "admit", "B", 30, 7), (0, "admit", "C", 60, 3), (0, "admit", "D", 20, 1)]


def test_the_newest_gives_way() -> None:
    """By hand: 3 + 2 + 4 + 2 of 12 blocks at the start, and each sequence takes one when its last is full.

    At step 3 B writes token 33 into the last free block. At step 5 C writes token 65: D gives its 2 blocks up, and C
    takes one. At 9 A takes the other; at 19 B has 48 tokens and needs a block: C goes, with 5. B finishes at step 23
    with 4 blocks, C is back at 24 with 5 of the 8 that are free; D waits until a spare block for each can be had.
    """
    assert events(SMALL) == [
        *ADMITTED,
        (5, "preempt", "D", 24, 2),
        (19, "preempt", "C", 78, 5),
        (23, "finish", "B", 53, 8),
        (24, "admit", "C", 79, 3),
        (34, "finish", "C", 89, 7),
        (35, "admit", "D", 25, 5),
        (39, "finish", "A", 79, 10),
        (45, "finish", "D", 35, 12),
    ]


def test_the_oldest_gives_way() -> None:
    """By hand: at step 5 it is A that goes, with 44 tokens in 3 blocks; D ends after 16 steps, B after 24."""
    assert events(replace(SMALL, victim="oldest")) == [
        *ADMITTED,
        (5, "preempt", "A", 44, 3),
        (15, "finish", "D", 35, 4),
        (23, "finish", "B", 53, 6),
        (24, "admit", "A", 45, 3),
        (29, "finish", "C", 89, 8),
        (58, "finish", "A", 79, 12),
    ]


def test_a_larger_pool_and_a_watermark() -> None:
    assert not any(kind == "preempt" for _, kind, *_ in events(replace(SMALL, slots=20 * 16)))
    # Of 12 blocks 3 are kept free: D, which would leave 1, waits until A, B and C leave enough.
    watched = events(replace(SMALL, watermark=0.25))
    assert watched[:3] == ADMITTED[:3] and watched[3][1:3] != ("admit", "D")


def test_reserving_systems_by_hand() -> None:
    """192 slots are chunks of 128 and 64. Of A (80 slots, rounded to 128), B (54: 64) and C (90: 128), D (36: 64)."""
    oracle = events(replace(SMALL, system="oracle"))
    assert oracle[:2] == [(0, "admit", "A", 40, 64), (0, "admit", "B", 30, 0)]
    assert (23, "finish", "B", 53, 64) in oracle and (39, "finish", "A", 79, 192) in oracle, "D must not overtake C"
    assert (40, "admit", "C", 60, 64) in oracle and (40, "admit", "D", 20, 0) in oracle
    # The longest sequence has 128 tokens, for which there is one chunk: one after the other.
    longest = events(replace(SMALL, system="max"))
    assert [(step, kind, name) for step, kind, name, *_ in longest] == [
        (0, "admit", "A"), (39, "finish", "A"), (40, "admit", "B"), (63, "finish", "B"),
        (64, "admit", "C"), (93, "finish", "C"), (94, "admit", "D"), (109, "finish", "D"),
    ]  # fmt: skip


def test_a_static_batch_ends_as_a_whole() -> None:
    setup = replace(SMALL, slots=256, system="static")  # two chunks of 128: A and B, then C and D
    result = simulate(at_once(LENGTHS), setup)
    assert result.finished == 4 and result.seconds == 40 + 30
    # A and B end after the 40 steps of A, C and D after the 30 of C.
    assert result.latency["mean"] == pytest.approx((40 + 40 + 70 + 70) / 4)


@pytest.mark.parametrize("system", SYSTEMS)
def test_nothing_is_lost(system: System) -> None:
    traffic = poisson(DATASETS["alpaca"], 40, 2, seed=3, max_model_len=256)
    cost = CostModel(opt_shape("OPT-13B", 40, 5120), find_device("a100-40gb"))
    setup = Setup(slots=2048, system=system, max_model_len=256, max_num_seqs=32, max_num_batched_tokens=512)
    drawn = 0
    simulation = Simulation(traffic, setup, cost)
    free = simulation.kv.num_free
    while (plan := simulation.step()) is not None:
        drawn += len(plan.sampled)
        simulation.scheduler.check_invariants()
    result = simulation.result()
    assert result.finished == result.requests == len(traffic) and result.refused == 0
    assert result.output_tokens == traffic.outputs.sum() == drawn
    assert simulation.kv.num_free == free, "a block has leaked"
    memory = result.memory
    assert memory.tokens + memory.reserved + memory.internal + memory.external == pytest.approx(1)
    assert min(memory.tokens, memory.reserved, memory.internal, memory.external) >= 0
    assert result.latency["mean"] >= result.ttft["mean"] > 0
    assert result == simulate(traffic, setup, cost), "the same again must come out the same"


@pytest.mark.parametrize("victim", ["newest", "oldest"])
@pytest.mark.parametrize(("mode", "host_blocks"), [("recompute", 0), ("swap", 8), ("swap", 100)])
@pytest.mark.parametrize("width", [1, 3])
def test_all_finish_whoever_gives_way(
    victim: Literal["newest", "oldest"], mode: Literal["recompute", "swap"], host_blocks: int, width: int
) -> None:
    """A pool that is far too small: requests give way many times, and still every output gets its tokens."""
    rng = np.random.default_rng(5)
    lengths = [(int(prompt), int(output)) for prompt, output in rng.integers(1, 60, (25, 2))]
    setup = replace(
        SMALL,
        slots=24 * 16,
        victim=victim,
        preemption_mode=mode,
        host_blocks=host_blocks,
        params=SamplingParams(n=width, max_tokens=None, ignore_eos=True),
    )
    simulation = Simulation(at_once(lengths), setup)
    drawn = 0
    while (plan := simulation.step()) is not None:
        drawn += len(plan.sampled)
        simulation.scheduler.check_invariants()
    result = simulation.result()
    assert drawn == result.output_tokens == width * sum(output for _, output in lengths)
    assert result.finished == 25 and simulation.kv.num_free == 24
    assert result.preemptions == simulation.scheduler.stats().preemptions_total > 0


def test_shared_prefixes_are_computed_once() -> None:
    """Four requests with 32 tokens in common, one after the other: the later three find its two blocks."""
    traffic = Traffic(np.arange(4) * 100.0, np.full(4, 40, np.int32), np.full(4, 10, np.int32))
    found = simulate(traffic, replace(SMALL, prefix_caching=True, shared_prefix=32))
    assert found.prefix_hit_tokens == 3 * 32
    assert simulate(traffic, replace(SMALL, prefix_caching=True)).prefix_hit_tokens == 0


def test_parallel_outputs_share_the_prompt() -> None:
    """Two outputs of a 32-token prompt: 2 blocks in common and, behind them, one each; without sharing 2 chunks."""
    params = SamplingParams(n=2, max_tokens=None, ignore_eos=True)
    paged = Simulation(at_once([(32, 10)]), replace(SMALL, params=params))
    assert paged.step() is not None and paged.kv.num_free == 12 - 2
    assert paged.step() is not None and paged.kv.num_free == 12 - 4
    reserved = Simulation(at_once([(32, 10)]), replace(SMALL, params=params, system="oracle"))
    assert reserved.step() is not None and reserved.kv.num_free == 192 - 2 * 64
    assert paged.run().output_tokens == reserved.run().output_tokens == 20
    assert reserved.kv.num_free == 192


def test_a_request_that_never_fits_is_refused_and_disturbs_nobody() -> None:
    result = simulate(at_once([(100, 100), (40, 10)]), SMALL)
    assert (result.refused, result.finished) == (1, 1)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_schedule_is_that_of_the_engine(tiny_model: nnx.Module, overlap: bool) -> None:
    """Every plan, block tables included, with a pool so small that requests give way."""
    lengths = [(40, 30), (9, 21), (40, 20), (20, 16), (33, 33), (5, 40)]
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=32,
        num_blocks=13,
        enable_prefix_caching=False,
        warmup=False,
        async_scheduling=overlap,
    )
    engine = Engine(tiny_model, None, config)
    theirs: list[object] = []
    engine._loop.observers.append(lambda _, plan: None if plan is None else theirs.append(_facts(plan)))
    for number, (prompt, output) in enumerate(lengths):
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        engine.add_request(str(number), [number + 1] * prompt, params, arrival_time=0.0)
    while engine.has_unfinished_requests():
        engine.step()
    setup = Setup(slots=12 * 16, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32, overlap=overlap)
    simulation = Simulation(at_once(lengths), setup)
    ours: list[object] = []
    while (plan := simulation.step()) is not None:
        ours.append(_facts(plan))
    assert ours == theirs
    assert simulation.result().preemptions == engine.stats().scheduler.preemptions_total > 0


def _facts(plan: StepPlan) -> tuple[object, ...]:
    who = [s.request.request_id for s in plan.scheduled]
    arrays = (plan.positions, plan.query_starts, plan.kv_lens, plan.block_tables)
    return (who, *(array.tolist() for array in arrays))
