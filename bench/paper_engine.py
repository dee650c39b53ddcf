"""Figure 12 in small, measured: the real engine, paged against reserved, with a pool that is too small for all.

    python bench/paper_engine.py [--requests 48] [--json FILE] [--steps FILE]

Same model (random weights), kernels, pool and requests. Reserved, each request keeps room for the longest possible
sequence, so that only slots / max_model_len run at once: that is what `max_num_seqs` is set to. Paged, as many run as
there are blocks for. All requests are there from the start; each system is warmed up with a few others first.

--steps keeps the time of each paged step for the simulator, which then predicts both runs from the paged one's steps:
the predictions are printed beside what was measured, with the error of the fit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.core.plan import StepPlan
from jaxpaged.engine.engine import Engine
from jaxpaged.request import SamplingParams
from jaxpaged.sim import CostModel, Dataset, Device, LogNormal, ModelShape, Setup, StepLoad, Traffic, simulate
from jaxpaged.sim.calibration import Calibration, MeasuredStep, write_calibration
from jaxpaged.sim.traffic import saturating

VOCAB = 8192
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 512,
    "dtype": "float32",
}
MAX_MODEL_LEN, BLOCK_SIZE, SLOTS = 512, 16, 2048
LENGTHS = Dataset(LogNormal(48, 0.8), LogNormal(64, 0.8))
# Round figures of a server's core, so that the shares that are fitted can be read; they decide nothing.
CPU = Device("cpu", 16 << 30, bandwidth=20e9, flops=100e9, host_link=20e9)


@dataclass(frozen=True)
class Run:
    """One system, measured and predicted.

    Attributes:
        normalized_latency: mean over requests of latency / output tokens, in seconds.
        predicted_s: by the simulator.
    """

    system: str
    max_num_seqs: int
    seconds: float
    output_tokens_per_s: float
    normalized_latency: float
    steps: int
    preemptions: int
    predicted_s: float = 0.0
    fit_error: float = 0.0


def start_engine(max_num_seqs: int) -> Engine:
    config = EngineConfig(
        load_format="dummy",
        block_size=BLOCK_SIZE,
        num_blocks=1 + SLOTS // BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        async_scheduling=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(MODEL))
        return Engine.from_pretrained(str(path), config)


def serve(engine: Engine, traffic: Traffic, name: str) -> tuple[float, list[float], list[MeasuredStep]]:
    """Seconds in all, latency of each request, and the steps."""
    rng = np.random.default_rng(0)
    plans: list[StepPlan] = []
    engine._loop.observers.append(lambda _, plan: None if plan is None else plans.append(plan))
    for i, (prompt, output) in enumerate(zip(traffic.prompts.tolist(), traffic.outputs.tolist(), strict=True)):
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        engine.add_request(f"{name}-{i}", rng.integers(0, VOCAB, prompt).tolist(), params)
    latencies, steps = [0.0] * len(traffic), []
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        before = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        steps.append(MeasuredStep(StepLoad.of(plans[-1], BLOCK_SIZE), now - before))
        for output in outputs:
            if output.finished:
                latencies[int(output.request_id.rpartition("-")[2])] = now - start
    engine._loop.observers.pop()
    return time.perf_counter() - start, latencies, steps


def measure(system: str, max_num_seqs: int, traffic: Traffic) -> tuple[Run, list[MeasuredStep], ModelShape]:
    engine = start_engine(max_num_seqs)
    serve(engine, saturating(LENGTHS, 6, seed=9, max_model_len=128), "warm")
    before = engine.stats().scheduler.preemptions_total
    seconds, latencies, steps = serve(engine, traffic, "run")
    preemptions = engine.stats().scheduler.preemptions_total - before
    normalized = float(np.mean(np.array(latencies) / traffic.outputs))
    tokens = int(traffic.outputs.sum())
    run = Run(system, max_num_seqs, seconds, tokens / seconds, normalized, len(steps), preemptions)
    shape = ModelShape.of(engine.model_config, name="a small Llama")
    engine.shutdown()
    return run, steps, shape


def predict(run: Run, traffic: Traffic, calibration: Calibration) -> Run:
    """`run` with what the simulator makes of it."""
    constants = calibration.constants()
    cost = CostModel(calibration.model, calibration.device, constants)
    setup = Setup(
        SLOTS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=run.max_num_seqs,
        max_num_batched_tokens=256,
    )
    seconds = simulate(traffic, setup, cost).seconds
    return Run(**{**asdict(run), "predicted_s": seconds, "fit_error": constants.error or 0.0})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--steps", type=Path, metavar="FILE", help="write the measured steps of the paged run here")
    args = parser.parse_args()
    traffic = saturating(LENGTHS, args.requests, seed=0, max_model_len=MAX_MODEL_LEN)
    reserved, _, _ = measure("reserved", SLOTS // MAX_MODEL_LEN, traffic)
    paged, steps, shape = measure("paged", 32, traffic)
    about = f"{len(steps)} steps of bench/paper_engine.py on a CPU"
    calibration = Calibration(CPU, shape, tuple(steps), about)
    if args.steps is not None:
        write_calibration(args.steps, calibration)
    runs = [predict(run, traffic, calibration) for run in (reserved, paged)]
    for run in runs:
        print(
            f"{run.system:<10}{run.max_num_seqs:>4} at most {run.output_tokens_per_s:>8.1f} tokens/s "
            f"{run.normalized_latency * 1e3:>8.1f} ms a token, {run.seconds:.2f} s "
            f"(simulated {run.predicted_s:.2f} s), {run.preemptions} preemptions"
        )
    ratio = runs[1].output_tokens_per_s / runs[0].output_tokens_per_s
    print(f"paged over reserved: {ratio:.2f} x; fit error {runs[1].fit_error:.1%} a step; {LENGTHS}")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
