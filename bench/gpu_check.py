"""Checks and measures jaxpaged on the device that is here, in one go: `bench/gpu_check.sh` runs it.

    bench/gpu_check.sh [--small] [--output-dir DIR] [--parts numerics kernels engine]

Needs jax, flax, numpy and transformers, and no network. Three parts, each a process of its own with a time limit, so
that a slow or failing one leaves the others their time and the device's memory; together under 8 minutes on an H200:

    numerics   every kernel against float64 numpy on the real device                     (gpu_numerics.py)
    kernels    attention over the quick grid: microseconds and share of a copy's speed   (kernels.py)
    engine     a Llama-3-8B shape with random weights: decode step against the roofline  (gpu_engine.py)

Each part writes its JSON as it goes (what it had when it was stopped is kept); what they print goes to gpu_check.log.
The end is a table of at most 60 lines. The exit code is 1 if the numerics are wrong or incomplete, 2 if only another
part failed. `--small` has tiny shapes, for trying all of it on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent
LOG = "gpu_check.log"
MOST_LINES = 60
MOST_FAILURES_SHOWN = 8


@dataclass(frozen=True)
class Part:
    """A part's script, its arguments and its limit in seconds; `small` replaces or adds arguments for a CPU."""

    script: str
    limit_s: float
    full: tuple[str, ...] = ()
    small: tuple[str, ...] = ("--small",)


# 460 s in all. The kernels part ends by itself in time to draw its plot.
PARTS = {
    "numerics": Part("gpu_numerics.py", 140),
    "kernels": Part("kernels.py", 130, ("--time-limit", "100"), ("--max-cases", "2")),
    "engine": Part("gpu_engine.py", 190),
}


@dataclass(frozen=True)
class Outcome:
    """How a part ended.

    Attributes:
        status: "ok", "failed (exit code N)" or "stopped after N s".
        content: its JSON; what it had written by then if it did not end by itself.
        last_lines: of what it printed.
    """

    name: str
    status: str
    seconds: float
    content: dict[str, Any]
    last_lines: list[str]

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def run_part(name: str, folder: Path, *, small: bool) -> Outcome:
    """Runs a part to its end or its limit; its output is added to gpu_check.log."""
    part = PARTS[name]
    result = folder / f"{name}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, str(BENCH / part.script), "--json", str(result), *(part.small if small else part.full)]
    if name == "kernels":
        command += ["--output-dir", str(folder)]
    start = time.perf_counter()
    log_path = folder / LOG
    begin = log_path.stat().st_size if log_path.exists() else 0
    with log_path.open("a") as log:
        try:
            limit = part.limit_s * (4 if small else 1)  # a CPU compiles slowly, and time is not what is tried there
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=limit).returncode
            status = "ok" if code == 0 else f"failed (exit code {code})"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit:.0f} s"
    try:
        content = json.loads(result.read_text())
    except (OSError, ValueError):
        content = {}
    output = log_path.read_bytes()[begin:].decode(errors="replace").splitlines()
    last_lines = [line for line in output if line.strip()][-3:]
    return Outcome(name, status, time.perf_counter() - start, content, last_lines)


def device_lines() -> list[str]:
    """What nvidia-smi says of the GPU and its driver, where there is one."""
    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm"
    if shutil.which("nvidia-smi") is None:
        return ["no nvidia-smi here"]
    done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=60)
    return done.stdout.strip().splitlines()[:2] or ["nvidia-smi failed"]


def numerics_lines(content: dict[str, Any]) -> list[str]:
    checks = content.get("checks", [])
    lines = []
    for implementation in dict.fromkeys(check["implementation"] for check in checks):
        mine = [check for check in checks if check["implementation"] == implementation]
        ran = [check for check in mine if check["error"] is not None]
        good = sum(check["ok"] for check in ran)
        worst = max(ran, key=lambda check: check["error"] / check["limit"] if check["limit"] else 0, default=None)
        of_limit = (
            f"; nearest to its limit: {worst['name']}, {worst['error']:.1e} of {worst['limit']:.1e}" if worst else ""
        )
        declined = sum(check["note"].startswith("not run") for check in mine)
        lines.append(f"  {implementation:<10}{good} of {len(mine) - declined} right, {declined} not run{of_limit}")
    wrong = [check for check in checks if not check["ok"]]
    for check in wrong[:MOST_FAILURES_SHOWN]:
        found = "" if check["error"] is None else f"error {check['error']:.1e}, limit {check['limit']:.1e} "
        lines.append(f"  WRONG {check['implementation']} {check['name']}: {found}{check['note']}"[:140])
    if len(wrong) > MOST_FAILURES_SHOWN:
        lines.append(f"  and {len(wrong) - MOST_FAILURES_SHOWN} more, see numerics.json")
    return lines


def kernels_lines(content: dict[str, Any]) -> list[str]:
    rows = content.get("rows", [])
    if not rows:
        return []
    lines = [
        f"  copy {content['copy_gb_per_s']:.0f} GB/s, an empty call {content['loop_us']:.1f} us; us, others after it"
    ]
    for label in dict.fromkeys(row["label"] for row in rows):
        mine = [row for row in rows if row["label"] == label]
        first, others = mine[0], [row for row in mine[1:] if not row["status"].startswith("not run")]
        line = f"  {label:<44} {first['implementation']} "
        if first["us"] is None:
            line += first["status"][:60]
        else:
            line += f"{first['us']:.1f} {first['gb_per_s']:.0f} GB/s {first['of_copy']:.1%} {first['tflops']:.1f} TF/s"
        parts = [
            f"{row['implementation']} {row['us']:.1f}" if row["us"] else f"{row['implementation']} failed"
            for row in others
        ]
        lines.append(f"{line} | {', '.join(parts)}" if parts else line)
    bad = [row for row in rows if row["status"].startswith(("WRONG", "failed"))]
    lines += [f"  {row['label']} {row['implementation']}: {row['status']}"[:140] for row in bad[:MOST_FAILURES_SHOWN]]
    if content["unfinished"]:
        lines.append(f"  {len(content['unfinished'])} cases left out for lack of time")
    return lines


def engine_lines(content: dict[str, Any]) -> list[str]:
    if not content:
        return []
    lines = [
        f"  {content['weights_gb']:.2f} GB read a step, copy {content['copy_gb_per_s']:.0f} GB/s, ready after "
        f"{content['start_s']:.0f} s; {content['prompt_len']} tokens in, {content['output_len']} out; compiled after "
        f"warm-up: {content['compiles_after_warmup']}, failed requests: {content['failed']}",
        f"  {'batch':>6} {'decode ms':>10} {'p90':>8} {'roofline':>9} {'ratio':>6} {'prefill s':>10} {'tokens/s':>10}",
    ]
    lines += [
        f"  {b['batch']:>6} {b['decode_ms']:>10.2f} {b['decode_p90_ms']:>8.2f} {b['roofline_ms']:>9.2f} "
        f"{b['ratio']:>6.2f} {b['prefill_s']:>10.2f} {b['output_tokens_per_s']:>10.0f}"
        for b in content["batches"]
    ]
    return lines


SUMMARIES = {"numerics": numerics_lines, "kernels": kernels_lines, "engine": engine_lines}


def table(outcomes: list[Outcome], seconds: float, folder: Path) -> list[str]:
    """At most MOST_LINES lines; where there is too much, the middle of the longest part gives way."""
    device = next((o.content["device"] for o in outcomes if "device" in o.content), "no part reached the device")
    version = next((o.content["jax_version"] for o in outcomes if "jax_version" in o.content), "?")
    sections = []
    for outcome in outcomes:
        lines = SUMMARIES[outcome.name](outcome.content) if outcome.content else []
        if not outcome.ok:
            lines += [f"  | {line[:136]}" for line in outcome.last_lines]
        sections.append([f"{outcome.name}: {outcome.status}, {outcome.seconds:.0f} s", *lines])
    head = [f"jaxpaged on {device}, jax {version}, {seconds:.0f} s in all", *device_lines()]
    foot = [f"all of it: {folder}"]
    excess = len(head) + len(foot) + sum(map(len, sections)) - MOST_LINES
    if excess > 0:
        longest = max(sections, key=len)
        middle = len(longest) // 2
        cut = math.ceil(excess / 2) + 1
        longest[middle - cut : middle + cut] = ["  ..."]
    return [*head, *(line for section in sections for line in section), *foot]


def exit_code(outcomes: list[Outcome]) -> int:
    """1: numerics wrong or incomplete; 2: another part failed; 0: all well."""
    if any(o.name == "numerics" and not (o.ok and o.content.get("complete")) for o in outcomes):
        return 1
    return 0 if all(o.ok for o in outcomes) else 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny shapes, for trying it on a CPU")
    parser.add_argument("--output-dir", type=Path, default=BENCH / "results", metavar="DIR", help="for all results")
    parser.add_argument(
        "--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="which ones (default: all)"
    )
    args = parser.parse_args()
    folder: Path = args.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOG).unlink(missing_ok=True)
    start = time.perf_counter()
    outcomes = []
    for name in args.parts:
        print(f"{name} ...", flush=True)
        outcomes.append(run_part(name, folder, small=args.small))
        print(f"{name}: {outcomes[-1].status}, {outcomes[-1].seconds:.0f} s", flush=True)
    lines = table(outcomes, time.perf_counter() - start, folder)
    code = exit_code(outcomes)
    summary = {"exit_code": code, "table": lines, "parts": [asdict(outcome) for outcome in outcomes]}
    (folder / "gpu_check.json").write_text(json.dumps(summary, indent=1) + "\n")
    print("\n".join(["", *lines]))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
