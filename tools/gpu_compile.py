"""Compile the kernels, and an engine's whole steps, for NVIDIA GPUs on a machine that has none."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gpu_cases import Case, Lowered, all_cases
from gpu_program import Kernel, Measured, compile_and_measure, layer_launches
from gpu_targets import TARGETS, GpuTarget, find_ptxas, missing

# How the names of jaxpaged_kernels' own kernels begin.
_OWN_KERNELS = ("paged_", "rotate_and_write_kv")
# Bytes a thread that one of XLA's own kernels may spill: a few, in a reduction that runs once a step, cost nothing. A
# product with a bad tile spills hundreds.
_XLA_MAY_SPILL = 64

_EPILOG = f"""\
XLA compiles for a GPU from its description alone, so this needs no GPU; it needs JAX's CUDA plugin and ptxas:
  pip install --no-deps jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION     VERSION as of jax, about 414 MB
  a CUDA 13 toolkit (or NVIDIA's wheels, pip install 'jax[cuda13]')

It proves that a program compiles, that no kernel spills registers, that the KV pool is updated in place, and how many
kernels a step launches. It proves nothing about results or speed: those need the device.

targets
  {", ".join(TARGETS)}

columns
  registers   of a thread, and shared memory of a block: the most that a kernel of jaxpaged_kernels takes (of XLA's
              own kernels where a program has none of those)
  spills      bytes of a thread, over all kernels, that are kept in memory because registers ran out. It fails if one of
              jaxpaged_kernels spills at all, or one of XLA's more than {_XLA_MAY_SPILL}
  launches    kernels, copies and fills of one run, loops and branches left out, which are added as "+n": what they
              hold, each counted once
  a layer     launches from one layer to the next, in the middle of the model
  temporary   MiB beside arguments and results
  in place    whether the KV pool is updated where it is; "no" fails
  compile     seconds that XLA took

exit status
  0  all well (a variant that a target must refuse, such as fp8 on an A100, was refused)
  1  a spill, a copy of the pool or a compile error
  2  a bad argument, or something is not installed

examples
  python tools/gpu_compile.py                                    everything, for every target: half an hour or more
  python tools/gpu_compile.py --targets h200,a100 --only 'decode-*-d128-*'
  python tools/gpu_compile.py --targets h200 --only step-smollm2-135m-decode32 --layer
  python tools/gpu_compile.py --list
"""

# Columns of a report that goes into a file or a pipe.
_WIDTH = 150


@dataclass(frozen=True)
class Result:
    """A variant on a target.

    Attributes:
        status: "ok", "refused" (as it must be) or "failed".
        reason: why it was refused or failed; what is worth knowing of one that is ok.
        donated_bytes: of the pools, which the program must update in place; 0 for one that only reads them.
        array_bytes: of one array of the KV pool.
        layer: names of what one layer launches; empty for a program that is no model.
    """

    variant: str
    target: str
    status: str
    reason: str = ""
    measured: Measured | None = None
    donated_bytes: int = 0
    array_bytes: int = 0
    layer: tuple[str, ...] = ()

    @property
    def in_place(self) -> bool | None:
        """Whether the pool is updated where it is; None where it is only read, or nothing was compiled."""
        if self.measured is None or not self.donated_bytes:
            return None
        return self.measured.aliased_bytes >= self.donated_bytes and not _copies_pool(self.measured, self.array_bytes)

    @property
    def own_kernels(self) -> tuple[Kernel, ...]:
        """Those of jaxpaged_kernels; all where there are none."""
        kernels = self.measured.kernels if self.measured else ()
        return tuple(kernel for kernel in kernels if kernel.name.startswith(_OWN_KERNELS)) or kernels

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        row: dict[str, Any] = {
            "variant": self.variant,
            "target": self.target,
            "status": self.status,
            "reason": self.reason,
        }
        if (measured := self.measured) is None:
            return row
        return row | {
            "kernels": [asdict(kernel) for kernel in self.own_kernels],
            "spilled": sum(kernel.spilled for kernel in self.own_kernels),
            "spilled_in_all_kernels": sum(kernel.spilled for kernel in measured.kernels),
            "launches": measured.num_launches,
            "launches_in_loops_and_branches": len(measured.launches) - measured.num_launches,
            "layer": list(self.layer),
            "temporary_bytes": measured.temporary_bytes,
            "donated_bytes": self.donated_bytes,
            "array_bytes": self.array_bytes,
            "aliased_bytes": measured.aliased_bytes,
            "in_place": self.in_place,
            "compile_seconds": round(measured.seconds, 2),
        }


def run_case(case: Case, target_name: str, target: GpuTarget, mesh: jax.sharding.Mesh, ptxas: str) -> Result:
    """Compiles `case` for a target and judges what came out."""
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    must_refuse = target.capability < case.min_capability
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = case.lower(target, sharding)
            if must_refuse:
                return Result(case.name, target_name, "failed", f"{target.name} cannot do this, but nothing refused it")
            measured = compile_and_measure(lowered.program, target.arch, ptxas)
    except Exception as error:  # whatever a variant raises is its failure, and the others still run
        is_refusal = must_refuse and isinstance(error, ValueError)
        return Result(case.name, target_name, "refused" if is_refusal else "failed", _one_line(error))
    return _judge(case, target_name, lowered, measured)


def _judge(case: Case, target_name: str, lowered: Lowered, measured: Measured) -> Result:
    problems: list[str] = []
    notes: list[str] = []
    for kernel in measured.kernels:
        if kernel.spilled:
            is_bad = kernel.name.startswith(_OWN_KERNELS) or kernel.spilled > _XLA_MAY_SPILL
            (problems if is_bad else notes).append(f"{kernel.name} spills {kernel.spilled} bytes")
    if measured.spills_in_xla and not problems and not notes:
        problems.append("a kernel spills in XLA, though not in ptxas: are they of different CUDA versions?")
    if measured.aliased_bytes < lowered.donated_bytes:
        aliased, donated = measured.aliased_bytes, lowered.donated_bytes
        problems.append(f"only {aliased} of the pools' {donated} bytes are updated in place")
    if _copies_pool(measured, lowered.array_bytes):
        problems.append("the temporaries hold a copy of an array of the pool")
    return Result(
        case.name,
        target_name,
        "failed" if problems else "ok",
        "; ".join(problems + notes),
        measured,
        lowered.donated_bytes,
        lowered.array_bytes,
        tuple(layer_launches(measured.launches, lowered.num_layers)),
    )


def _copies_pool(measured: Measured, array_bytes: int) -> bool:
    """Whether a temporary is as large as an array of the pool, in its own dtype or one of 16 or 32 bits."""
    return any(array_bytes * factor in measured.value_bytes for factor in (1, 2, 4))


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _table(results: list[Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("variant", no_wrap=True)
    table.add_column("target")
    for name in ("registers", "spills", "shared KiB", "launches", "a layer", "temporary MiB", "in place", "compile s"):
        table.add_column(name, justify="right")
    for _, rows in groupby(results, key=lambda result: result.variant):
        for result in rows:
            table.add_row(result.variant, result.target, *_cells(result))
    return table


def _cells(result: Result) -> list[str]:
    if (measured := result.measured) is None:
        style = {"refused": "yellow", "failed": "bold red"}[result.status]
        return [f"[{style}]{result.status}[/]"]
    spilled = sum(kernel.spilled for kernel in measured.kernels)
    dynamic = len(measured.launches) - measured.num_launches
    return [
        str(max((kernel.registers for kernel in result.own_kernels), default=0)),
        f"[{'yellow' if result.status == 'ok' else 'bold red'}]{spilled}[/]" if spilled else "0",
        f"{max((kernel.shared_memory for kernel in result.own_kernels), default=0) / 1024:.1f}",
        f"{measured.num_launches}" + (f" +{dynamic}" if dynamic else ""),
        str(len(result.layer)) if result.layer else "",
        f"{measured.temporary_bytes / 2**20:.1f}",
        {None: "", True: "yes", False: "[bold red]no[/]"}[result.in_place],
        f"{measured.seconds:.1f}",
    ]


def _report(results: list[Result], *, layer: bool) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(_table(results))
    for result in results:
        if layer and result.layer:
            console.print(f"\n{result.variant} on {result.target}, one layer:", highlight=False)
            for i, name in enumerate(result.layer, 1):
                console.print(f"  {i:2} {name}", highlight=False, markup=False)
    for result in results:
        if result.reason:
            label = "note" if result.status == "ok" else result.status
            line = f"{label}: {result.variant} on {result.target}: {result.reason}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    counts = {status: sum(result.status == status for result in results) for status in ("ok", "refused", "failed")}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()), highlight=False)


def _selected(patterns: list[str]) -> list[Case]:
    cases = all_cases()
    if not patterns:
        return cases
    return [case for case in cases if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)]


def _targets(text: str) -> list[str]:
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TARGETS:
            raise argparse.ArgumentTypeError(f"{name!r} is not known; targets are {', '.join(TARGETS)}")
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no target; targets are {', '.join(TARGETS)}")
    return names


def _run(cases: list[Case], target_names: list[str], *, quiet: bool) -> Iterator[Result]:
    ptxas = find_ptxas()
    assert ptxas is not None  # `missing` looked
    meshes = {name: TARGETS[name].mesh() for name in target_names}
    work = [(case, name) for case in cases for name in target_names]
    for case, name in track(work, "Compiling", console=Console(stderr=True), disable=quiet, transient=True):
        yield run_case(case, name, TARGETS[name], meshes[name], ptxas)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--targets",
        type=_targets,
        default=list(TARGETS),
        metavar="NAMES",
        help="comma-separated targets; default all",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="variants whose name matches this shell pattern; repeat it for more",
    )
    parser.add_argument("--layer", action="store_true", help="also list what one layer of each step launches")
    parser.add_argument("--json", action="store_true", help="print JSON, one object for each variant and target")
    parser.add_argument("--list", action="store_true", help="print the names of the variants and stop")
    args = parser.parse_args(argv)
    cases = _selected(args.only)
    if not cases:
        parser.error(f"no variant is called {' or '.join(args.only)}; --list prints all names")
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    # The plugin looks for a GPU's libraries unless JAX is told to run on the CPU.
    jax.config.update("jax_platforms", "cpu")
    try:
        results = list(_run(cases, args.targets, quiet=args.json))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps([result.as_dict() for result in results], indent=1))
    else:
        _report(results, layer=args.layer)
    return int(any(result.status == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
