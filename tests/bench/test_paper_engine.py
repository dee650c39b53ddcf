"""The paper's figure 12 on the real engine: the same tokens from all allocators, as many rows as each has room for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from bench.bench_scripts import load_script
from flax import nnx
from support import random_model, tiny_config

from jaxpaged.sim import Dataset, Fixed, LogNormal, Setup, StepLoad, System, Traffic
from jaxpaged.sim.calibration import MeasuredStep, read_calibration, write_calibration

bench = load_script("paper_engine")
SERVING, PAGE = bench.serve.__globals__, bench.write_engine_page.__globals__
SETUP = Setup(256, block_size=16, max_model_len=64, max_num_seqs=16, max_num_batched_tokens=64)
Runs = dict[System, Any]
RESERVING: tuple[System, ...] = ("max", "pow2", "oracle")


@pytest.fixture(scope="module")
def model() -> nnx.Module:
    return random_model(tiny_config(max_position_embeddings=64, dtype="float32"))


@pytest.fixture(scope="module")
def experiment(model: nnx.Module) -> Iterator[Any]:
    """Its engines serve all tests: they take long to compile."""
    lengths = Dataset(LogNormal(10, 0.5), LogNormal(8, 0.5))
    experiment = bench.Experiment(model, SETUP, lengths, num_full=24, seconds=0.5, warmup=False)
    yield experiment
    experiment.close()


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    """Twelve requests at once: 24 tokens and less of prompt, 20 and less of output."""
    rng = np.random.default_rng(3)
    return Traffic(np.zeros(12), rng.integers(4, 25, 12).astype(np.int32), rng.integers(4, 21, 12).astype(np.int32))


@pytest.fixture(scope="module")
def served(experiment: Any, traffic: Traffic) -> Runs:
    found = {}
    for system, engine in experiment.engines.items():
        found[system] = bench.serve(engine, traffic)
        engine._scheduler.check_invariants()
        assert engine._scheduler.kv.pool.num_free == SETUP.slots // 16, "everything has been given back"
    return found


def test_every_system_draws_what_the_model_draws_alone(served: Runs, model: nnx.Module, traffic: Traffic) -> None:
    """Greedy, from dense logits without paging."""
    forward = jax.jit(lambda ids: model(ids[None])[0])
    rng = np.random.default_rng(0)
    for i, (prompt_len, output_len) in enumerate(zip(traffic.prompts.tolist(), traffic.outputs.tolist(), strict=True)):
        ids = rng.integers(0, model.config.vocab_size, prompt_len).tolist()
        for _ in range(output_len):
            padded = np.zeros(64, np.int32)
            padded[: len(ids)] = ids
            ids.append(int(np.argmax(forward(padded)[len(ids) - 1])))
        for system, run in served.items():
            assert run.tokens[i] == ids[prompt_len:], f"request {i} on {system}"


def test_reserved_memory_bounds_the_batch(served: Runs) -> None:
    """256 slots are four pieces of 64, the longest sequence. A request of 5 to 44 tokens rarely needs that many."""
    assert served["max"].peak_batch == 256 // 64
    assert all(served[system].preemptions == 0 for system in RESERVING)
    assert served["max"].peak_batch < served["oracle"].peak_batch <= served["paged"].peak_batch
    assert served["max"].batch < served["oracle"].batch < served["paged"].batch


def test_pieces_of_the_buddy_allocator_never_exceed_the_pool(experiment: Any) -> None:
    """Equal requests of 10 + 8 tokens: 18 are 32 slots for Oracle and Pow2 (10 + 8), so eight run at once."""
    equal = Traffic(np.zeros(20), np.full(20, 10, np.int32), np.full(20, 8, np.int32))
    for system, expected in (("oracle", 256 // 32), ("pow2", 256 // 32), ("max", 4)):
        assert bench.serve(experiment.engines[system], equal).peak_batch == expected, system


def test_a_request_waits_for_its_arrival(experiment: Any) -> None:
    engine = experiment.engines["paged"]
    late = Traffic(np.array([0.0, 0.5]), np.array([5, 5], np.int32), np.array([2, 2], np.int32))
    bench.warm_up(engine, Dataset(Fixed(5), Fixed(2)))
    run = bench.serve(engine, late)
    assert run.seconds >= 0.5 and run.peak_batch == 1 and len(run.steps) == 4
    assert run.latencies[1] == pytest.approx(run.seconds - 0.5)


def test_steps_with_equal_loads_are_merged() -> None:
    one, other = StepLoad(1, 1, 10, 10), StepLoad(2, 2, 20, 20)
    steps = [MeasuredStep(one, t) for t in (3.0, 1.0, 2.0)] + [MeasuredStep(other, 5.0)]
    assert SERVING["merge_steps"](steps) == (MeasuredStep(one, 2.0), MeasuredStep(other, 5.0))


def test_what_is_written(experiment: Any, tmp_path: Path) -> None:
    experiment.calibrate()
    experiment.measure(None)
    experiment.measure(20.0)
    calibration = experiment.calibration("a machine")
    write_calibration(tmp_path / "steps.json", calibration)
    kept = read_calibration(tmp_path / "steps.json")
    assert kept.model == experiment.shape and len(kept.steps) == len(calibration.steps)
    assert "a machine" in kept.about
    found = json.loads(json.dumps(bench.as_json(experiment, experiment.points(calibration), calibration, 1)))
    points = {(point["system"], point["rate"]): point for point in found["points"]}
    assert points.keys() == {(system, rate) for system in bench.SYSTEMS for rate in (None, 20.0)}
    assert "fit error" in found["constants"] and found["repeats"] == 1
    for point in points.values():
        for kind in ("measured", "simulated"):
            numbers = point[kind]
            assert numbers["requests_per_s"] > 0 and numbers["normalized_latency"] > 0
            assert 0 < numbers["batch"] <= numbers["peak_batch"] <= 16
        low, high = point["normalized_latency_range"]
        assert low <= point["measured"]["normalized_latency"] <= high
    # What follows from memory alone is the same in the simulator: it has the same allocators.
    full = points["max", None]
    assert full["measured"]["peak_batch"] == full["simulated"]["peak_batch"] == 4


def test_the_page_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers(rate: float, latency: float) -> dict[str, float]:
        return {
            "requests_per_s": rate, "output_tokens_per_s": 10 * rate, "normalized_latency": latency, "batch": 4.0,
            "peak_batch": 5, "preemptions": 0,
        }  # fmt: skip

    def point(system: str, rate: float | None, measured: float, simulated: float) -> dict[str, object]:
        return {
            "system": system, "rate": rate, "measured": numbers(measured, 0.02), "simulated": numbers(simulated, 0.03),
            "normalized_latency_range": (0.01, 0.03), "requests": 12,
        }  # fmt: skip

    points = [point("max", None, 2.0, 2.2), point("paged", None, 5.0, 4.4), point("max", 3.0, 2.0, 2.0)]
    points.append(point("paged", 3.0, 2.0, 2.0))
    found = {
        "machine": "a machine", "model": "a model", "slots": 2048, "max_model_len": 512, "lengths": "some",
        "repeats": 2, "constants": "fitted", "points": points,
    }  # fmt: skip
    errors = PAGE["prediction_errors"](points)
    assert errors == pytest.approx({"throughput": (0.1 + 0.12) / 2, "latency": 0.5, "batch": 0.0})
    monkeypatch.setitem(PAGE, "_plot", lambda *_: None)  # matplotlib is not everywhere
    bench.write_engine_page(found, tmp_path)
    text = (tmp_path / "engine.md").read_text()
    assert "| Orca (Max) | 2.00 (2.20) | 2.50 (2.00) | 20 (22) | 4.0 (4.0) | 5 (5) | 0 (0) |" in text
    assert "| 3 | 12 | 20.0 (30.0) | 20.0 (30.0) |" in text
    assert "11.0% off in the throughputs, 50.0% in the latencies" in text
