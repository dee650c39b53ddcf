"""Page and plot of bench/paper_engine.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paper_setups

NAMES = {**paper_setups.NAMES, "paged": "paged"}

_PAGE = """\
# Figure 12 in small, on the real engine

*Measured* on {machine}; the model has {model}. All systems have the same kernels, compiled programs, pool
({slots:,} tokens) and requests ({lengths}; at most {max_model_len} tokens each). Only who owns the KV memory
differs: the engine's block manager, or the simulator's baselines, which reserve a piece of a buddy allocator for each
request. The engine takes its steps in turn, without planning one ahead. Medians of {repeats} repeats of the same
arrivals, in which the systems took turns.

*Simulated*, in brackets: the same arrivals served by the simulator. Its step times: {constants}. The steps of the fit
are of other requests than those of this page, which it therefore predicts: {errors}

![Normalized latency against request rate](engine.png)

## A full queue

| | requests/s | paged over it | tokens/s | requests running | at most | preemptions |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
{full}

## Normalized latency by request rate

Milliseconds of a request's latency for each token of its output, on average over the requests of the rate.

| requests/s | requests | {names} |
| --- | ---: |{columns}
{rates}

Written by `python bench/paper_engine.py --out bench/paper`.
"""


def prediction_errors(points: list[dict[str, Any]]) -> dict[str, float]:
    """Mean of |simulated / measured - 1|: of the throughput with a full queue, and of latency and batch everywhere."""

    def mean(name: str, of: list[dict[str, Any]]) -> float:
        return sum(abs(p["simulated"][name] / p["measured"][name] - 1) for p in of) / len(of)

    full = [point for point in points if point["rate"] is None]
    return {
        "throughput": mean("requests_per_s", full),
        "latency": mean("normalized_latency", points),
        "batch": mean("batch", points),
    }


def explain_errors(points: list[dict[str, Any]]) -> str:
    errors = prediction_errors(points)
    return (
        f"on average it is {errors['throughput']:.1%} off in the throughputs, {errors['latency']:.1%} in the latencies "
        f"and {errors['batch']:.1%} in the batches."
    )


def write_engine_page(found: dict[str, Any], folder: Path) -> None:
    """engine.md and engine.png in `folder`, of what engine.json holds."""
    points = found["points"]
    systems = list(dict.fromkeys(point["system"] for point in points))
    of = {(point["system"], point["rate"]): point for point in points}
    rates = sorted({point["rate"] for point in points if point["rate"] is not None})
    text = _PAGE.format(
        **{name: value for name, value in found.items() if name != "points"},
        errors=explain_errors(points),
        full="\n".join(_full_row(of[system, None], of["paged", None]) for system in systems),
        names=" | ".join(NAMES[system] for system in systems),
        columns=" ---: |" * len(systems),
        rates="\n".join(_rate_row(rate, [of[system, rate] for system in systems]) for rate in rates),
    )
    (folder / "engine.md").write_text(text, encoding="utf-8")
    _plot(points, systems, found["machine"], folder / "engine.png")


def _full_row(point: dict[str, Any], paged: dict[str, Any]) -> str:
    m, s = point["measured"], point["simulated"]
    ratios = [paged[kind]["requests_per_s"] / point[kind]["requests_per_s"] for kind in ("measured", "simulated")]
    cells = [
        NAMES[point["system"]],
        f"{m['requests_per_s']:.2f} ({s['requests_per_s']:.2f})",
        f"{ratios[0]:.2f} ({ratios[1]:.2f})",
        f"{m['output_tokens_per_s']:.0f} ({s['output_tokens_per_s']:.0f})",
        f"{m['batch']:.1f} ({s['batch']:.1f})",
        f"{m['peak_batch']} ({s['peak_batch']})",
        f"{m['preemptions']} ({s['preemptions']})",
    ]
    return f"| {' | '.join(cells)} |"


def _rate_row(rate: float, points: list[dict[str, Any]]) -> str:
    cells = [
        f"{1e3 * p['measured']['normalized_latency']:.1f} ({1e3 * p['simulated']['normalized_latency']:.1f})"
        for p in points
    ]
    return f"| {' | '.join([f'{rate:g}', str(points[0]['requests']), *cells])} |"


def _plot(points: list[dict[str, Any]], systems: list[str], machine: str, path: Path) -> None:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(7, 4.4), layout="constrained")
    axis = canvas.subplots()
    for system in systems:
        own = sorted((p for p in points if p["system"] == system and p["rate"] is not None), key=lambda p: p["rate"])
        rates = [p["rate"] for p in own]
        measured = [p["measured"]["normalized_latency"] for p in own]
        ranges = [p["normalized_latency_range"] for p in own]
        around = [
            [m - low for m, (low, _) in zip(measured, ranges, strict=True)],
            [high - m for m, (_, high) in zip(measured, ranges, strict=True)],
        ]
        (line, *_) = axis.errorbar(rates, measured, around, marker="o", markersize=4, capsize=3, label=NAMES[system])
        simulated = [p["simulated"]["normalized_latency"] for p in own]
        axis.plot(rates, simulated, linestyle="--", linewidth=1, color=line.get_color())
    axis.plot([], [], linestyle="--", linewidth=1, color="grey", label="simulated")
    axis.set_yscale("log")
    axis.set_xlabel("requests/s")
    axis.set_ylabel("s a token")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    axis.set_title(f"Normalized latency, measured on {machine}", fontsize=9)
    canvas.savefig(path, dpi=110)
