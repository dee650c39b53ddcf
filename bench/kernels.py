"""Paged attention on the device that is here: microseconds, bytes/s and TFLOP/s over a grid of shapes.

    python bench/kernels.py [--grid quick|full] [--output-dir DIR] [--json FILE]

Bytes are those that must move: K and V of the true lengths (and their scales), the queries and the result, each once.
`of copy` sets bytes/s against a plain device-to-device copy measured in the same run (read and written bytes counted).
KV lies in random blocks; a chain of calls goes round copies of it that are several times a GPU's L2 cache together.
Calls are chained on the device, each taking the result of the one before as its queries, inside a lax.fori_loop;
`loop` is what an empty call of such a chain takes, and is part of every figure.

Beside our implementations, where they run: plain XLA (gather the blocks, then dense attention), JAX's own
paged_attention op (GPU, decode), and torch's scaled_dot_product_attention over contiguous keys (no paging).
Every result but torch's is compared with that of our "xla" implementation; one that differs is marked, not left out.

Writes kernels.csv and, with matplotlib (`pip install 'jaxpaged[bench]'`), kernels.png to the output folder, after every
case, so that an interrupted run leaves what it has. The exit code is 1 if a result is wrong, or an implementation of
ours fails.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged_kernels.api import IMPLEMENTATIONS
from kernel_cases import GRIDS, Case, Inputs, make_inputs
from kernel_contestants import Contestant, UnavailableError, contestants, set_up, time_torch
from timing import METHOD, Timing, copy_bandwidth, time_chain

DEFAULT_OUTPUT = Path(__file__).parent / "results"
# How far, relative to the norm, another implementation may be from ours: a few times the rounding of 16-bit values.
MOST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}


@dataclass(frozen=True)
class Effort:
    """How long a timing takes: see `timing.time_chain`."""

    length: int
    min_seconds: float
    repeats: int


EFFORTS = {"cpu": Effort(2, 0.1, 3), "gpu": Effort(16, 0.02, 5)}


@dataclass(frozen=True)
class Row:
    """One implementation in one case; the figures are None where there is none, and `status` says why.

    Attributes:
        gb_per_s: 1e9 bytes that must move, a second.
        of_copy: the same over a plain copy's.
        tflops: of the keys that each query sees.
        difference: from our "xla" implementation, relative to its norm.
    """

    case: Case
    implementation: str
    status: str = "ok"
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    calls: int | None = None
    gb_per_s: float | None = None
    of_copy: float | None = None
    tflops: float | None = None
    difference: float | None = None

    def flat(self) -> dict[str, Any]:
        """Everything, the case's fields first, under one level of names."""
        fields = asdict(self)
        case = fields.pop("case")
        sizes = {"bytes": self.case.bytes_to_move(), "flops": self.case.flops()}
        return {**case, **sizes, **fields}

    def line(self) -> str:
        name = f"{self.case.label():<44} {self.implementation:<10}"
        if self.us is None or self.gb_per_s is None:
            return f"{name} {self.status}"
        note = "" if self.status == "ok" else f"  {self.status}"
        return (
            f"{name} {self.us:>10.1f} us {self.gb_per_s:>8.1f} GB/s {self.of_copy:>6.1%} {self.tflops:>8.3f} TF/s{note}"
        )


@dataclass
class Report:
    """All of a run.

    Attributes:
        copy_gb_per_s: of a plain copy, read and written.
        loop_us: a call that does nothing but hand its queries on.
        unfinished: labels of cases that the time limit left out.
    """

    device: str
    jax_version: str
    grid: str
    copy_gb_per_s: float
    loop_us: float
    method: str = METHOD
    rows: list[Row] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        rows = [{**row.flat(), "label": row.case.label()} for row in self.rows]
        return json.dumps({**asdict(self), "rows": rows}, indent=1)

    def save(self, folder: Path, json_file: Path | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self.rows:
            with (folder / "kernels.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(self.rows[0].flat()))
                writer.writeheader()
                writer.writerows(row.flat() for row in self.rows)
        if json_file is not None:
            json_file.write_text(self.to_json() + "\n")


class Bench:
    """Times cases, one after another, on the default device."""

    def __init__(self, grid: str) -> None:
        self.platform = jax.default_backend()
        self.effort = EFFORTS.get(self.platform, EFFORTS["gpu"])
        empty = time_chain(lambda q, i, _: q + i.astype(q.dtype), jnp.zeros((8, 128)), (), **asdict(self.effort))
        self.report = Report(
            device=jax.devices()[0].device_kind,
            jax_version=jax.__version__,
            grid=grid,
            copy_gb_per_s=copy_bandwidth() / 1e9,
            loop_us=empty.us,
        )

    def run(self, case: Case) -> list[Row]:
        """Every contestant of a case; what fails is a row that says why."""
        names = contestants(case, self.platform)
        try:
            inputs = make_inputs(case, self.platform)
            expected = _first_call(set_up("xla", case, inputs)).astype(jnp.float32)
        except Exception as error:  # a case that does not fit must not end the others
            rows = [Row(case, name, status=_failed(error)) for name in names]
        else:
            rows = [self._attempt(name, case, inputs, expected) for name in names]
        self.report.rows += rows
        return rows

    def _attempt(self, name: str, case: Case, inputs: Inputs, expected: jax.Array) -> Row:
        try:
            if name == "torch_sdpa":
                seconds, repeats = self.effort.min_seconds, self.effort.repeats
                timing = time_torch(case, self.platform, min_seconds=seconds, repeats=repeats)
                return self._row(name, case, timing, None)
            contestant = set_up(name, case, inputs)
            difference = _relative_difference(_first_call(contestant), expected)
            timing = time_chain(contestant.step, contestant.carry, contestant.operands, **asdict(self.effort))
            return self._row(name, case, timing, difference)
        except UnavailableError as reason:
            return Row(case, name, status=f"not run: {reason}")
        except Exception as error:  # one that does not compile or does not fit must not end the others
            return Row(case, name, status=_failed(error))

    def _row(self, name: str, case: Case, timing: Timing, difference: float | None) -> Row:
        wrong = difference is not None and not difference <= MOST_DIFFERENCE[case.dtype]
        gb_per_s = case.bytes_to_move() / timing.us / 1e3
        return Row(
            case,
            name,
            status=f"WRONG: differs by {difference:.1e}" if wrong else "ok",
            **asdict(timing),
            gb_per_s=gb_per_s,
            of_copy=gb_per_s / self.report.copy_gb_per_s,
            tflops=case.flops() / timing.us / 1e6,
            difference=difference,
        )


def _failed(error: Exception) -> str:
    return " ".join(f"failed: {type(error).__name__}: {error}".split())[:200]


def _first_call(contestant: Contestant) -> jax.Array:
    return jax.jit(contestant.step)(contestant.carry, jnp.int32(0), contestant.operands)


def _relative_difference(found: jax.Array, expected: jax.Array) -> float:
    return float(jnp.linalg.norm(found.astype(jnp.float32) - expected) / jnp.linalg.norm(expected))


def _is_fault(row: Row) -> bool:
    """A peer that fails, as one that does not fit, is no fault of ours; a wrong result is always looked into."""
    return row.status.startswith("WRONG") or (row.status.startswith("failed") and row.implementation in IMPLEMENTATIONS)


def plot(report: Report, path: Path) -> str | None:
    """Decode as share of a copy's speed, prefill as TFLOP/s; returns why there is none, or None."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed (pip install 'jaxpaged[bench]')"
    panels = [
        (kind, value, title)
        for kind, value, title in (
            ("decode", "of_copy", "decode: bytes/s over those of a plain copy"),
            ("prefill", "tflops", "prefill: TFLOP/s"),
        )
        if any(row.case.kind == kind and row.us for row in report.rows)
    ]
    if not panels:
        return "no plot: nothing was timed"
    rows_of = {kind: [row for row in report.rows if row.case.kind == kind and row.us] for kind, _, _ in panels}
    heights = [len({row.case for row in rows_of[kind]}) + 2 for kind, _, _ in panels]
    figure = Figure(figsize=(10, 0.5 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    names = list(dict.fromkeys(row.implementation for row in report.rows))
    for ax, (kind, value, title) in zip(axes, panels, strict=True):
        cases = list(dict.fromkeys(row.case for row in rows_of[kind]))
        for j, name in enumerate(names):
            mine = [row for row in rows_of[kind] if row.implementation == name]
            y = [cases.index(row.case) + 0.8 * (j / len(names) - 0.4) for row in mine]
            ax.barh(y, [getattr(row, value) for row in mine], 0.8 / len(names), label=name, color=f"C{j}")
        ax.set_yticks(range(len(cases)), [case.label().removeprefix(f"{kind} ") for case in cases], fontsize=7)
        ax.invert_yaxis()
        ax.set_title(title)
        ax.legend(fontsize=7)
    figure.suptitle(f"{report.device}, jax {report.jax_version}, copy {report.copy_gb_per_s:.0f} GB/s")
    figure.savefig(path, dpi=120)
    return None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", choices=tuple(GRIDS), default="quick", help="which shapes (default: quick)")
    parser.add_argument("--output-dir", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="for CSV and plot")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything here")
    parser.add_argument("--time-limit", type=float, metavar="S", help="begin no case after so many seconds")
    parser.add_argument("--max-cases", type=int, metavar="N", help="only the first N shapes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    start = time.perf_counter()
    bench = Bench(args.grid)
    report = bench.report
    print(
        f"{report.device}, jax {report.jax_version}: copy {report.copy_gb_per_s:.1f} GB/s, loop {report.loop_us:.1f} us"
    )
    for case in GRIDS[args.grid](bench.platform)[: args.max_cases]:
        if args.time_limit is not None and time.perf_counter() - start > args.time_limit:
            report.unfinished.append(case.label())
            continue
        for row in bench.run(case):
            print(row.line(), flush=True)
        report.save(args.output_dir, args.json)
    report.save(args.output_dir, args.json)
    if report.unfinished:
        print(f"time limit: {len(report.unfinished)} cases left out, from {report.unfinished[0]!r} on")
    problem = plot(report, args.output_dir / "kernels.png")
    print(problem or f"wrote kernels.csv and kernels.png to {args.output_dir}")
    return int(any(_is_fault(row) for row in report.rows))


if __name__ == "__main__":
    raise SystemExit(main())
