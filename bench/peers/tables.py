"""From runs to figures: medians, spreads, ratios to jaxpaged, Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from peers.contestants import BY_NAME, DTYPES, OWN
from peers.workloads import WORKLOADS

# Processors that other programs may take without spoiling a figure.
QUIET_CPUS = 0.1
COUNTS = ("completed", "failed", "other_cpus")


@dataclass
class Run:
    """One contestant in one repeat.

    Attributes:
        first_token_s: from the start of its process to its first token; None in repeats for which it ran already.
        peak_rss: bytes, of all its processes together, the most since its start.
        results: figures by workload.
        error: why it did not start, or ended early; the end of its log below the first line.
    """

    contestant: str
    dtype: str
    repeat: int
    first_token_s: float | None = None
    peak_rss: int = 0
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def figure(self, workload: str, key: str) -> float | None:
        """None where it was not measured. Where a request failed there are only counts: less was done than asked."""
        result = self.results.get(workload)
        if not result or key not in result:
            return None
        good = result["completed"] and not result["failed"]
        return float(result[key]) if good or key in COUNTS else None


@dataclass(frozen=True)
class Spread:
    """Of repeated runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        present = _present(values)
        return cls(statistics.median(present), min(present), max(present)) if present else None

    def show(self, digits: int, suffix: str = "") -> str:
        text = f"{self.median:.{digits}f}{suffix}"
        low, high = f"{self.low:.{digits}f}", f"{self.high:.{digits}f}"
        return text if low == high else f"{text} ({low} to {high})"


def _present(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def paired_ratio(
    own: Sequence[float | None], peer: Sequence[float | None], *, less_is_better: bool = False
) -> Spread | None:
    """How many times better the own figures are, repeat by repeat: host noise that lasts meets both of a pair.

    A repeat that either lacks, or with a zero, is left out.
    """
    ratios: list[float | None] = []
    for ours, theirs in zip(own, peer, strict=True):
        if ours and theirs:
            ratios.append(theirs / ours if less_is_better else ours / theirs)
    return Spread.of(ratios)


class Comparison:
    """All runs, found by contestant."""

    def __init__(self, runs: Sequence[Run], repeats: int) -> None:
        self._runs = {(run.contestant, run.dtype, run.repeat): run for run in runs}
        self._repeats = repeats

    def entries(self) -> Iterator[tuple[str, str]]:
        """Contestants and dtypes, precision by precision, servers before libraries."""
        names = list(BY_NAME)
        seen = {(name, dtype) for name, dtype, _ in self._runs}
        yield from sorted(seen, key=lambda entry: (DTYPES.index(entry[1]), names.index(entry[0])))

    def figures(self, name: str, dtype: str, workload: str, key: str) -> list[float | None]:
        """One for each repeat."""
        runs = [self._runs.get((name, dtype, repeat)) for repeat in range(self._repeats)]
        return [run.figure(workload, key) if run else None for run in runs]

    def spread(self, name: str, dtype: str, workload: str, key: str) -> Spread | None:
        return Spread.of(self.figures(name, dtype, workload, key))

    def starts(self, name: str, dtype: str) -> list[float | None]:
        runs = [self._runs.get((name, dtype, repeat)) for repeat in range(self._repeats)]
        return [run.first_token_s if run else None for run in runs]

    def memory(self, name: str, dtype: str) -> list[float | None]:
        """GB."""
        runs = [self._runs.get((name, dtype, repeat)) for repeat in range(self._repeats)]
        return [run.peak_rss / 1e9 if run and run.peak_rss else None for run in runs]

    def was_measured(self, name: str, dtype: str, workload: str) -> bool:
        return any(
            run.results.get(workload) for run in self._runs.values() if (run.contestant, run.dtype) == (name, dtype)
        )

    def ratio(self, name: str, dtype: str, workload: str) -> Spread | None:
        """To jaxpaged's own of the same kind (server or in process) and precision; None for jaxpaged itself."""
        own = OWN[BY_NAME[name].is_server]
        if name == own:
            return None
        kind = WORKLOADS[workload]
        return paired_ratio(
            self.figures(own, dtype, workload, kind.figure),
            self.figures(name, dtype, workload, kind.figure),
            less_is_better=kind.less_is_better,
        )

    def disturbances(self) -> list[str]:
        """What was measured while other programs took more than `QUIET_CPUS`, the worst first, each with how much."""
        loads = [
            (result["other_cpus"], f"{run.contestant} {run.dtype} {workload}")
            for run in self._runs.values()
            for workload, result in run.results.items()
            if result.get("other_cpus", 0.0) > QUIET_CPUS
        ]
        return [f"{name} ({cpus:.2f})" for cpus, name in sorted(loads, reverse=True)]

    def errors(self) -> list[str]:
        """What did not start or ended early, and requests that failed."""
        lines = []
        for run in self._runs.values():
            who = f"{run.contestant} {run.dtype}, repeat {run.repeat + 1}"
            if run.error:
                lines.append(f"{who}: {run.error}")
            for workload, result in run.results.items():
                if result["failed"]:
                    total = result["completed"] + result["failed"]
                    reasons = "; ".join(result["errors"])
                    lines.append(f"{who}: {result['failed']} of {total} requests of {workload} failed: {reasons}")
        return lines


def markdown(comparison: Comparison, workloads: Sequence[str], picture: str | None = None) -> str:
    """Every table, and the picture of W4 below its own."""
    parts = [ratio_table(comparison, workloads), cost_table(comparison)]
    for workload in workloads:
        parts.append(workload_table(comparison, workload))
        if workload == "W4" and picture:
            parts.append(f"![normalized latency over request rate]({picture})")
    return "\n\n".join(parts)


def ratio_table(comparison: Comparison, workloads: Sequence[str]) -> str:
    rows = [
        [name, dtype, *(_show(comparison.ratio(name, dtype, workload), 2, "x") for workload in workloads)]
        for name, dtype in comparison.entries()
        if name not in OWN.values()
    ]
    return (
        "## jaxpaged against each\n\n"
        "How many times better jaxpaged is (throughput: ours over theirs; time: theirs over ours), median of the "
        "repeats' own ratios (least to most). Servers are compared with `jaxpaged serve`, libraries with jaxpaged in "
        "process.\n\n" + table(["peer", "dtype", *workloads], rows)
    )


def cost_table(comparison: Comparison) -> str:
    rows = [
        [
            name,
            dtype,
            "server" if BY_NAME[name].is_server else "in process",
            _show(Spread.of(comparison.starts(name, dtype)), 1),
            _show_most(comparison.memory(name, dtype), 2),
        ]
        for name, dtype in comparison.entries()
    ]
    return "## Start and memory\n\n" + table(["", "dtype", "", "s to the first token", "peak GB resident"], rows)


def workload_table(comparison: Comparison, workload: str) -> str:
    """A row for each contestant that was measured: its figure, the ratio to ours, and the columns of the workload."""
    kind = WORKLOADS[workload]
    rows = []
    for name, dtype in comparison.entries():
        if not comparison.was_measured(name, dtype, workload):
            continue
        main = comparison.spread(name, dtype, workload, kind.figure)
        cells = []
        for column in kind.columns:
            figures = [_present(comparison.figures(name, dtype, workload, key)) for key in column.keys]
            cells.append(" / ".join(f"{column.of_repeats(f):.{column.digits}f}" if f else "-" for f in figures))
        ratio = _show(comparison.ratio(name, dtype, workload), 2, "x")
        rows.append([name, dtype, _show(main, kind.digits) or "failed", ratio, *cells])
    headings = ["", "dtype", f"{kind.heading}", "jaxpaged is", *(column.heading for column in kind.columns)]
    return f"## {workload}: {kind.title}\n\n" + table(headings, rows)


def _show(spread: Spread | None, digits: int, suffix: str = "") -> str:
    return spread.show(digits, suffix) if spread else ""


def _show_most(values: Sequence[float | None], digits: int) -> str:
    return f"{max(present):.{digits}f}" if (present := _present(values)) else ""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all but the first column to the right."""
    align = ["---", *["---:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, align, *rows))
