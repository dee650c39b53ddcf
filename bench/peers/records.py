"""What a comparison leaves behind: JSON files of facts and runs, small enough to be kept beside the code."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peers.tables import Run

DIGITS = 5
# Of /proc/cpuinfo, what decides how fast products are.
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")


@dataclass(frozen=True)
class Record:
    """A file that `write_runs` wrote.

    Attributes:
        facts: all in it but the runs.
    """

    facts: Mapping[str, Any]
    runs: Sequence[Run]


def machine() -> dict[str, Any]:
    cpu: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        cpu.setdefault(key.strip(), value.strip())
    flags = cpu.get("flags", "").split()
    return {
        "cpu": cpu.get("model name", platform.machine()),
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
        "processors": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
    }


def write_runs(path: Path, facts: Mapping[str, Any], runs: Sequence[Run]) -> None:
    """One line for each run; floats with `DIGITS` digits, errors without the logs below them."""
    lines = [json.dumps(rounded(replace(run, error=run.error.partition("\n")[0]).as_json())) for run in runs]
    head = json.dumps(rounded(facts), indent=1).removesuffix("\n}")
    # All or nothing: whoever cuts a long comparison short still has what it had.
    part = path.with_name(f"{path.name}.part")
    part.write_text(f'{head},\n "runs": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")
    part.replace(path)


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def read_runs(path: Path) -> Record:
    facts = json.loads(path.read_text(encoding="utf-8"))
    return Record(facts, [Run(**run) for run in facts.pop("runs")])
