"""Host time of a step: schedule, pack and update, with a model that costs nothing.

    python bench/overhead.py [--rows 1 16 64 256] [--steps 300] [--json FILE]

Each row is a request that decodes; now and then one takes a new block, as in service. Times are medians (and 99th
percentiles) in microseconds a step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxpaged.config import CacheConfig, SchedulerConfig
from jaxpaged.core.plan import StepPlan, StepResult
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.request import Request, SamplingParams

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
VOCAB = 32_000
STAGES = ("schedule", "pack", "update")


@dataclass(frozen=True)
class Overhead:
    """Microseconds of each stage at a number of rows: stage -> median, stage -> 99th percentile."""

    rows: int
    steps: int
    median_us: dict[str, float]
    p99_us: dict[str, float]


def make_packer(scheduler: SchedulerConfig, cache: CacheConfig) -> Callable[[StepPlan], object]:
    """The runner's packing, into the smallest program that holds a plan."""
    from jaxpaged.runner.buckets import Buckets
    from jaxpaged.runner.pack import Layout, pack

    buckets = Buckets(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    max_blocks = -(-scheduler.max_model_len // cache.block_size)
    layouts = {p: Layout(p, max_blocks, cache.block_size, cache.num_blocks) for p in buckets.programs}

    def packer(plan: StepPlan) -> object:
        return pack(plan, layouts[buckets.pick(plan)])

    return packer


def measure(rows: int, steps: int, prompt_len: int) -> Overhead:
    """Decode `rows` requests for `steps` steps and time each stage."""
    rng = np.random.default_rng(0)
    config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=rows, max_num_batched_tokens=max(rows, 2048))
    num_blocks = 1 + rows * -(-(2 * prompt_len + steps) // BLOCK_SIZE)
    cache = CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE)
    scheduler = Scheduler(config, cache)
    pack = make_packer(config, cache)
    for i in range(rows):
        # Prompts of unlike length, so that rows come to the end of a block in different steps.
        prompt = rng.integers(0, VOCAB, prompt_len + int(rng.integers(0, prompt_len))).tolist()
        scheduler.add(Request(f"r{i}", prompt, SamplingParams(max_tokens=steps), steps, seed=i))
    times: dict[str, list[float]] = {stage: [] for stage in STAGES}
    while (plan := scheduler.schedule()) is not None and plan.num_decodes < rows:
        scheduler.update(plan, _draw(plan, rng))
    while plan is not None and plan.num_decodes == rows:
        marks = [time.perf_counter()]
        pack(plan)
        marks.append(time.perf_counter())
        result = _draw(plan, rng)
        marks.append(time.perf_counter())
        scheduler.update(plan, result)
        marks.append(time.perf_counter())
        plan = scheduler.schedule()
        marks.append(time.perf_counter())
        for stage, start in (("pack", 0), ("update", 2), ("schedule", 3)):
            times[stage].append((marks[start + 1] - marks[start]) * 1e6)
    return Overhead(
        rows=rows,
        steps=len(times["pack"]),
        median_us={stage: float(np.median(values)) for stage, values in times.items()},
        p99_us={stage: float(np.percentile(values, 99)) for stage, values in times.items()},
    )


def _draw(plan: StepPlan, rng: np.random.Generator) -> StepResult:
    return StepResult(token_ids=rng.integers(0, VOCAB, len(plan.sampled)).astype(np.int32))


def print_table(results: list[Overhead]) -> None:
    table = Table(title="host time a step, µs: median (p99)")
    table.add_column("rows", justify="right")
    for stage in (*STAGES, "sum of medians"):
        table.add_column(stage, justify="right")
    for r in results:
        cells = [f"{r.median_us[stage]:.0f} ({r.p99_us[stage]:.0f})" for stage in STAGES]
        table.add_row(str(r.rows), *cells, f"{sum(r.median_us.values()):.0f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=300, help="output tokens of each request")
    parser.add_argument("--prompt-len", type=int, default=64, help="prompts have this many tokens, up to twice as many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    args = parser.parse_args()
    results = [measure(rows, args.steps, args.prompt_len) for rows in args.rows]
    print_table(results)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
