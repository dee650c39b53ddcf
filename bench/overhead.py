"""Host time of a step, with a model that costs nothing.

    python bench/overhead.py [--rows 1 16 64 256] [--steps 300] [--json FILE]
    python bench/overhead.py --against vllm --vllm-python PATH    # and the same of vLLM's scheduler

Each row is a request that decodes; now and then one takes a new block, as in service. Times are medians (and 99th
percentiles) in microseconds a step, of processor time, so that other work on the machine counts as little as may be:

    schedule  plan the next step
    pack      make the plan one array for the device
    update    take in the drawn tokens: all that planning further depends on
    output    make the outputs that callers get (without text), in a run of its own

vLLM (0.32) is driven the same way, in an environment of its own: `Scheduler.schedule` and `update_from_output`, which
makes what its front end makes outputs of. It packs in its model runner, which is not measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
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
from jaxpaged.engine.collector import Collector
from jaxpaged.request import OutputKind, Request, SamplingParams

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
VOCAB = 32_000
STAGES = ("schedule", "pack", "update", "output")
# Those that have a counterpart in vLLM's.
COMPARED = ("schedule", "pack", "update")
VLLM_SCRIPT = Path(__file__).with_name("overhead_vllm.py")


@dataclass(frozen=True)
class Overhead:
    """Microseconds of each stage at a number of rows: stage -> median, stage -> 99th percentile."""

    engine: str
    rows: int
    steps: int
    median_us: dict[str, float]
    p99_us: dict[str, float]

    @classmethod
    def of(cls, engine: str, rows: int, times: dict[str, list[float]]) -> Overhead:
        return cls(
            engine,
            rows,
            steps=min(map(len, times.values())),
            median_us={stage: float(np.median(values)) for stage, values in times.items()},
            p99_us={stage: float(np.percentile(values, 99)) for stage, values in times.items()},
        )

    @property
    def compared(self) -> float:
        """Sum of medians of the stages that are compared."""
        return sum(self.median_us.get(stage, 0.0) for stage in COMPARED)


def make_packer(scheduler: SchedulerConfig, cache: CacheConfig) -> Callable[[StepPlan], None]:
    """The runner's packing, into the smallest program that holds a plan."""
    from jaxpaged.runner.buckets import Buckets
    from jaxpaged.runner.pack import Layout, Packer

    buckets = Buckets(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    max_blocks = -(-scheduler.max_model_len // cache.block_size)
    packers = {p: Packer(Layout(p, max_blocks, cache.block_size, cache.num_blocks)) for p in buckets.programs}

    def pack(plan: StepPlan) -> None:
        packer = packers[buckets.pick(plan)]
        packer.give_back(packer.pack(plan))

    return pack


def measure(rows: int, steps: int, prompt_len: int) -> Overhead:
    """Decode `rows` requests for `steps` steps and time each stage."""
    times = _run(rows, steps, prompt_len, with_outputs=False)
    # Outputs in a run of their own, as vLLM makes them in another process: they would push the rest out of the caches.
    return Overhead.of("jaxpaged", rows, times | _run(rows, steps, prompt_len, with_outputs=True))


def _run(rows: int, steps: int, prompt_len: int, *, with_outputs: bool) -> dict[str, list[float]]:
    """Microseconds of each step that is nothing but decodes: of "output", or of all other stages."""
    rng = np.random.default_rng(0)
    config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=rows, max_num_batched_tokens=max(rows, 2048))
    num_blocks = 1 + rows * -(-(2 * prompt_len + steps) // BLOCK_SIZE)
    cache = CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE)
    scheduler = Scheduler(config, cache)
    collector = Collector(scheduler, tokenizer=None)
    pack = make_packer(config, cache)
    for i in range(rows):
        # Prompts of unlike length, so that rows come to the end of a block in different steps.
        prompt = rng.integers(0, VOCAB, prompt_len + int(rng.integers(0, prompt_len))).tolist()
        params = SamplingParams(max_tokens=steps, output_kind=OutputKind.DELTA)
        collector.add(Request(f"r{i}", prompt, params, steps, seed=i))
    clock = time.thread_time
    times: dict[str, list[float]] = {stage: [] for stage in STAGES if (stage == "output") == with_outputs}
    while scheduler.has_unfinished():
        begin = clock()
        plan = scheduler.schedule()
        planned = clock()
        assert plan is not None
        pack(plan)
        packed = clock()
        result = StepResult(rng.integers(0, VOCAB, len(plan.sampled)).astype(np.int32))
        drawn = clock()
        step = collector.accept(plan, result)
        updated = clock()
        if with_outputs:
            collector.collect(step)
        took = {"schedule": planned - begin, "pack": packed - planned, "update": updated - drawn}
        took["output"] = clock() - updated
        if plan.num_decodes == rows:
            for stage, values in times.items():
                values.append(took[stage] * 1e6)
    return times


def measure_vllm(python: Path | None, rows: list[int], steps: int, prompt_len: int) -> list[Overhead]:
    """The same of vLLM's scheduler.

    Raises:
        SystemExit: there is no such Python, it has no vLLM, or the script failed there.
    """
    if python is None or not python.exists():
        sys.exit(f"{python or 'no Python'} given for vLLM; name that of an environment with vLLM: --vllm-python PATH")
    setup = {
        "rows": rows,
        "steps": steps,
        "prompt_len": prompt_len,
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "vocab": VOCAB,
    }
    # -P: this folder's own modules must not stand in for that environment's.
    command = [str(python), "-P", str(VLLM_SCRIPT), json.dumps(setup)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        sys.exit(f"{VLLM_SCRIPT.name} failed in {python}: {reason}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return [Overhead.of("vllm", f["rows"], {stage: f[stage] for stage in ("schedule", "update")}) for f in found]


def print_table(results: list[Overhead]) -> None:
    table = Table(title="host time a step, µs: median (p99)")
    for column in ("engine", "rows", *STAGES, "+".join(COMPARED)):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for r in results:
        cells = [f"{r.median_us[s]:.0f} ({r.p99_us[s]:.0f})" if s in r.median_us else "-" for s in STAGES]
        table.add_row(r.engine, str(r.rows), *cells, f"{r.compared:.0f}")
    Console().print(table)
    for ours in (r for r in results if r.engine == "jaxpaged"):
        for theirs in (r for r in results if r.engine != "jaxpaged" and r.rows == ours.rows):
            print(f"{ours.rows} rows: {theirs.compared / ours.compared:.1f}x less than {theirs.engine}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=300, help="output tokens of each request")
    parser.add_argument("--prompt-len", type=int, default=64, help="prompts have this many tokens, up to twice as many")
    parser.add_argument("--against", choices=["vllm"], help="measure this scheduler as well")
    parser.add_argument("--vllm-python", type=Path, metavar="PATH", help="Python of an environment that has vLLM")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    args = parser.parse_args()
    theirs = measure_vllm(args.vllm_python, args.rows, args.steps, args.prompt_len) if args.against else []
    results = [measure(rows, args.steps, args.prompt_len) for rows in args.rows] + theirs
    print_table(results)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
