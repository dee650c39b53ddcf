"""Figure 12 in small, measured: the real engine under Poisson arrivals, with paged memory and with reserved memory.

    python bench/paper_engine.py --out bench/paper      (about five minutes)

One model (random weights), the same kernels, programs, pool and requests for all systems; the pool is too small for all
requests. Only who owns the KV memory differs: the engine's block manager, or the simulator's baselines, which reserve a
piece of a buddy allocator for each request. Every system first serves a full queue, then several request rates; all of
it is repeated, the systems in turn, and medians are reported.

Between these runs the time of single steps is measured on equal requests. The cost model is fitted to them
(calibration-cpu.json), and the simulator then serves the same arrivals: what it predicts stands beside what was
measured, of runs that it was not fitted to.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpaged.config import ModelConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.sim import CostModel, Dataset, Device, LogNormal, ModelShape, Setup, System, Traffic, poisson, simulate
from jaxpaged.sim.calibration import Calibration, MeasuredStep, write_calibration
from jaxpaged.sim.traffic import saturating
from jaxpaged.weights import dummy_model
from paper_engine_page import explain_errors, write_engine_page
from paper_serving import Served, calibration_steps, merge_steps, serve, start_engine, warm_up
from paper_setups import SYSTEMS

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1408,
    num_layers=8,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    max_position_embeddings=512,
    dtype="bfloat16",
)
SETUP = Setup(2048, block_size=16, max_model_len=512, max_num_seqs=32, max_num_batched_tokens=256)
LENGTHS = Dataset(LogNormal(48, 0.8), LogNormal(64, 0.8))
# Of the paged engine's throughput with a full queue.
RATE_SHARES = (0.2, 0.35, 0.5, 0.7, 0.9)
# That arrive at each rate, about: a slow machine takes longer for them.
LEAST_REQUESTS = 12
# Round figures, so that the shares that are fitted can be read; they decide nothing.
CPU = Device("cpu", 16 << 30, bandwidth=20e9, flops=100e9, host_link=20e9)


@dataclass(frozen=True)
class Numbers:
    """Of one run, or medians of several.

    Attributes:
        normalized_latency: mean over requests of latency / output tokens, in seconds.
        batch: sequences in a step, averaged over time.
    """

    requests_per_s: float
    output_tokens_per_s: float
    normalized_latency: float
    batch: float
    peak_batch: int
    preemptions: int


@dataclass(frozen=True)
class Point:
    """A system at one rate.

    Attributes:
        rate: requests a second; None = a queue that is full from the start.
        normalized_latency_range: of the repeats.
    """

    system: System
    rate: float | None
    requests: int
    measured: Numbers
    normalized_latency_range: tuple[float, float]
    simulated: Numbers


def numbers_of(run: Served, traffic: Traffic) -> Numbers:
    return Numbers(
        len(traffic) / run.seconds,
        float(traffic.outputs.sum()) / run.seconds,
        float(np.mean(np.array(run.latencies) / traffic.outputs)),
        run.batch,
        run.peak_batch,
        run.preemptions,
    )


def median_of(runs: list[Numbers]) -> Numbers:
    return Numbers(
        statistics.median(run.requests_per_s for run in runs),
        statistics.median(run.output_tokens_per_s for run in runs),
        statistics.median(run.normalized_latency for run in runs),
        statistics.median(run.batch for run in runs),
        statistics.median_high(run.peak_batch for run in runs),
        statistics.median_high(run.preemptions for run in runs),
    )


def predict(traffic: Traffic, setup: Setup, calibration: Calibration) -> Numbers:
    """The same requests on the simulator."""
    result = simulate(traffic, setup, CostModel(calibration.model, calibration.device, calibration.constants()))
    return Numbers(
        result.requests_per_s,
        result.output_tokens_per_s,
        result.normalized_latency,
        result.mean_batch_overall,
        result.peak_batch,
        result.preemptions,
    )


class Experiment:
    """All systems of one model, each with an engine that is compiled and warm.

    Attributes:
        runs: (system, rate) -> what each repeat gave.
    """

    def __init__(
        self, model: nnx.Module, setup: Setup, lengths: Dataset, *, num_full: int, seconds: float, warmup: bool = True
    ) -> None:
        """
        Args:
            num_full: requests of the full queue.
            seconds: for which requests arrive at each rate, or longer for a few of them.
            warmup: compile every program first.
        """
        self.setup, self.lengths = setup, lengths
        self.shape = ModelShape.of(model.config, name="a small Llama")
        self.engines: dict[System, Engine] = {
            system: start_engine(model, replace(setup, system=system), warmup=warmup) for system in SYSTEMS
        }
        for engine in self.engines.values():
            warm_up(engine, lengths)
        self.runs: dict[tuple[System, float | None], list[Numbers]] = {}
        self._full = saturating(lengths, num_full, seed=0, max_model_len=setup.max_model_len)
        self._seconds = seconds
        self._steps: list[MeasuredStep] = []

    def traffic(self, rate: float | None) -> Traffic:
        if rate is None:
            return self._full
        seconds = max(self._seconds, LEAST_REQUESTS / rate)
        return poisson(self.lengths, rate, seconds, seed=1, max_model_len=self.setup.max_model_len)

    def measure(self, rate: float | None) -> None:
        """All systems, one after the other."""
        traffic = self.traffic(rate)
        for system, engine in self.engines.items():
            numbers = numbers_of(serve(engine, traffic), traffic)
            self.runs.setdefault((system, rate), []).append(numbers)

    def calibrate(self) -> None:
        self._steps += calibration_steps(self.engines["paged"])

    def calibration(self, machine: str) -> Calibration:
        steps = merge_steps(self._steps)
        about = f"fitted to {len(steps)} kinds of steps (bench/paper_engine.py) on {machine}"
        return Calibration(CPU, self.shape, steps, about)

    def points(self, calibration: Calibration) -> list[Point]:
        points = []
        for (system, rate), runs in self.runs.items():
            traffic, latencies = self.traffic(rate), [run.normalized_latency for run in runs]
            simulated = predict(traffic, replace(self.setup, system=system), calibration)
            spread = min(latencies), max(latencies)
            points.append(Point(system, rate, len(traffic), median_of(runs), spread, simulated))
        return points

    def close(self) -> None:
        for engine in self.engines.values():
            engine.shutdown()


def machine_name() -> str:
    """The processor, the cores that this process may use, and JAX's version."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a CPU")
    return f"{len(os.sched_getaffinity(0))} cores of {name}, jax {jax.__version__}"


def as_json(experiment: Experiment, points: list[Point], calibration: Calibration, repeats: int) -> dict[str, Any]:
    setup, shape = experiment.setup, experiment.shape
    return {
        "machine": machine_name(),
        "model": f"{shape.params / 1e6:.0f} million parameters in {8 * shape.dtype_bytes} bits, random",
        "slots": setup.slots,
        "max_model_len": setup.max_model_len,
        "lengths": str(experiment.lengths),
        "repeats": repeats,
        "constants": str(calibration.constants()),
        "points": [asdict(point) for point in points],
    }


def print_points(points: list[Point]) -> None:
    print("system   rate/s  requests     requests/s        ms a token          batch     preemptions   (simulated)")
    for p in points:
        m, s = p.measured, p.simulated
        rate = "full" if p.rate is None else f"{p.rate:g}"
        print(
            f"{p.system:<8}{rate:>7}{p.requests:>10}{m.requests_per_s:>9.2f} ({s.requests_per_s:5.2f})"
            f"{m.normalized_latency * 1e3:>9.1f} ({s.normalized_latency * 1e3:6.1f})"
            f"{m.batch:>8.1f} ({s.batch:4.1f}){m.preemptions:>8} ({s.preemptions})"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100, help="of the full queue (default: 100)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of arrivals at each rate (default: 4)")
    parser.add_argument("--repeats", type=int, default=2, help="(default: 2)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write the page, its data and the measured steps here"
    )
    args = parser.parse_args()
    if args.out is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--out needs matplotlib for the plot: pip install 'jaxpaged[bench]'")
    began = time.perf_counter()
    model = dummy_model(MODEL)
    experiment = Experiment(model, SETUP, LENGTHS, num_full=args.requests, seconds=args.seconds)
    print(f"{machine_name()}: engines are ready after {time.perf_counter() - began:.0f} s", flush=True)
    rates: list[float] = []
    for _ in range(args.repeats):
        experiment.calibrate()
        experiment.measure(None)
        if not rates:
            full = experiment.runs["paged", None][0].requests_per_s
            rates = [round(share * full, 1) for share in RATE_SHARES]
        for rate in rates:
            experiment.measure(rate)
        print(f"measured until {time.perf_counter() - began:.0f} s", flush=True)
    calibration = experiment.calibration(machine_name())
    points = experiment.points(calibration)
    experiment.close()
    print_points(points)
    found = as_json(experiment, points, calibration, args.repeats)
    print(f"Step times: {calibration.constants()}.\nThe simulator: {explain_errors(found['points'])}")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        write_calibration(args.out / "calibration-cpu.json", calibration)
        (args.out / "engine.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        write_engine_page(found, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
