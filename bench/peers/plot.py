"""The picture of W4: normalized latency over request rate."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from peers.tables import Run
from peers.workloads import LATENCIES_MS

# Of the vertical axis, in seconds a token: a line that leaves the picture is one that does not keep up.
MOST_S = 0.55


def why_not() -> str | None:
    """What is missing for a picture, and the remedy."""
    return (
        None
        if find_spec("matplotlib")
        else "matplotlib is not installed; install the extra: pip install 'jaxpaged[bench]'"
    )


def plot_rates(runs: Sequence[Run], path: Path) -> None:
    """One line for each run of W4; repeats of a contestant share their colour."""
    # An optional dependency, and slow to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    colours: dict[str, str] = {}
    for run in runs:
        points = run.results.get("W4", {}).get("points", [])
        if not points:
            continue
        name = f"{run.contestant} {run.dtype}"
        is_first = name not in colours
        colour = colours.setdefault(name, f"C{len(colours)}")
        rates = [point["rate"] for point in points]
        latencies = [point["mean_norm_ms"] / 1000 for point in points]
        axes.plot(rates, latencies, marker=".", color=colour, label=name if is_first else None)
    for limit in LATENCIES_MS:
        axes.axhline(limit / 1000, color="grey", linestyle=":", linewidth=1)
    axes.set(
        xlabel="requests/s (Poisson)",
        ylabel="normalized latency, s per output token (mean)",
        ylim=(0, MOST_S),
        title="Open loop, mixed lengths",
    )
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    if colours:
        axes.legend()
    figure.savefig(path, dpi=150)
