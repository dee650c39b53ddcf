"""Makes a page of what `compare.py --json` wrote: FOLDER/README.md, and FOLDER/rates.png where there are rates of W4.

    python bench/compare_page.py bench/results/cpu

All FOLDER/*.json are shown together, in the order of their names; of a workload that two of them have, the repeats are
taken together. They must come from one machine and one set of versions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers.plot import plot_rates, why_not
from peers.records import Record, read_runs
from peers.tables import QUIET_CPUS, Comparison, Run, markdown
from peers.workloads import WORKLOADS

# Facts that must be the same in all files, and the words for them.
SAME = {
    "cpu": "processor",
    "cpu_flags": "its instructions",
    "processors": "processors",
    "memory_gib": "memory, GiB",
    "model": "model",
    "python": "Python of jaxpaged",
}
PICTURE = "rates.png"


def together(records: Sequence[Record]) -> Comparison:
    """All runs, with the repeats of each file numbered after those of the file before."""
    runs: list[Run] = []
    repeats = 0
    for record in records:
        runs += [replace(run, repeat=run.repeat + repeats) for run in record.runs]
        repeats += record.facts["settings"]["repeats"]
    return Comparison(runs, repeats)


def versions(records: Sequence[Record]) -> dict[str, dict[str, str]]:
    """By contestant.

    Raises:
        ValueError: two files name different ones.
    """
    merged: dict[str, dict[str, str]] = {}
    for record in records:
        for name, told in record.facts["versions"].items():
            if merged.setdefault(name, told) != told:
                raise ValueError(f"{name} is {merged[name]} in one file and {told} in another: measure both again")
    return merged


def circumstances(records: Sequence[Record]) -> str:
    """Machine, model, dates and versions, as a list.

    Raises:
        ValueError: two files come from different machines, or with different versions.
    """
    lines = []
    for key, words in SAME.items():
        values = {_words(record.facts[key]) for record in records}
        if len(values) > 1:
            raise ValueError(f"the files differ in {key}: {', '.join(sorted(values))}; make a folder for each")
        lines.append(f"{words}: {values.pop()}")
    lines.append(f"measured from: {', '.join(sorted(record.facts['date'] for record in records))}")
    for name, told in versions(records).items():
        lines.append(f"{name}: {', '.join(f'{package} {version}' for package, version in told.items())}")
    return "\n".join(f"- {line}" for line in lines)


def _words(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


def command_of(record: Record) -> str:
    """Of the settings that shape the figures."""
    settings = record.facts["settings"]
    names = ["peers", "workloads", "dtype", "repeats", "threads", "max_num_seqs", "max_model_len", "time_limit", "seed"]
    if "W4" in settings["workloads"]:
        names += ["rates", "rate_seconds", "latency_limit"]
    options = [f"--{name.replace('_', '-')} {_option(settings[name])}" for name in names]
    small = ["--small"] if settings["small"] else []
    return " ".join(["python bench/compare.py --model MODEL", *options, *small])


def _option(value: Any) -> str:
    return " ".join(
        f"{v:.3g}" if isinstance(v, float) else str(v) for v in (value if isinstance(value, list) else [value])
    )


def noise(comparison: Comparison) -> str:
    disturbed = comparison.disturbances()
    if not disturbed:
        return f"Other programs took no more than {QUIET_CPUS:g} processors from any measurement."
    return f"Other programs took processors from {', '.join(disturbed)}: these figures are to be taken with care."


def page(records: Sequence[Record]) -> str:
    """The page in Markdown.

    Raises:
        ValueError: the records are not of one machine and one set of versions.
    """
    comparison = together(records)
    measured = {workload for record in records for workload in record.facts["settings"]["workloads"]}
    workloads = [name for name in WORKLOADS if name in measured]
    parts = [
        "# jaxpaged and others on a CPU",
        "Written by `bench/compare_page.py` from the JSON files beside it. [`peers.md`](../../peers.md) says how each "
        "is installed and set up, and `bench/compare.py` how they are measured: one at a time, the others paused, with "
        "the same prompts as token ids, greedy, with outputs of given lengths.",
        "Medians of the repeats, in parentheses the least and the most. int8 and int4 stand for each one's own weight "
        "format of that width. Programs that jaxpaged has compiled once are in its cache on disk; `bench/startup.py` "
        "also starts without it.",
        circumstances(records),
        noise(comparison),
        markdown(comparison, workloads, PICTURE if "W4" in measured else None),
    ]
    if errors := comparison.errors():
        parts += ["## What failed", "\n".join(f"- {line}" for line in errors)]
    parts += ["## Commands", "```sh\n" + "\n".join(command_of(record) for record in records) + "\n```"]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder: Path = parser.parse_args(argv).folder
    if not (files := sorted(folder.glob("*.json"))):
        parser.error(f"{folder} has no *.json; write some with compare.py --json")
    records = [read_runs(file) for file in files]
    try:
        text = page(records)
    except ValueError as error:
        parser.error(str(error))
    runs = [run for record in records for run in record.runs]
    if any("W4" in run.results for run in runs):
        if reason := why_not():
            parser.error(f"no picture of W4: {reason}")
        plot_rates(runs, folder / PICTURE)
    (folder / "README.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
