"""Plots and the page of bench/paper.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxpaged.sim import Constants
from paper_setups import Figure

_INTRO = """\
# The paper's experiments

Figures of *Efficient Memory Management for Large Language Model Serving with PagedAttention* (Kwon et al., SOSP 2023),
made with this project's scheduler and block manager. The systems that it compares with are the same scheduler with
another allocator (`jaxpaged/sim/systems.py`), so what differs is how memory is handed out, and nothing else.

**No figure was measured on the paper's GPUs.** *Counted*: blocks and tokens of the real block manager, exact for the
lengths assumed. *Simulated*: the same, with the time of each step from a cost model. *Measured* is the small-scale twin
of figure 12 on this project's real engine, on a page of its own: [engine.md](engine.md).

- The paper's data sets are not used: it gives the mean lengths, and lengths here are lognormal with these means. Their
  sigmas were chosen so that the batches come near the paper's, that of the paged system included: figures 2 and 13
  show that one set of lengths explains all systems, not a prediction.
- The shares of a device's peak that the cost model assumes were set with Alpaca's paged batch of figure 13 in view.
- Step times: {constants}.

This page was written by

    {command}
"""


def write_page(figures: list[Figure], constants: Constants, folder: Path, command: str) -> None:
    """README.md in `folder`: each figure's numbers beside the paper's."""
    parts = [_INTRO.format(constants=constants, command=command)]
    for figure in sorted(figures, key=lambda figure: int(figure.number.rstrip("ab"))):
        parts.append(f"## Figure {figure.number}: {figure.title}\n\n*{figure.kind.capitalize()}.*\n")
        parts.append(f"![Figure {figure.number}](figure{figure.number}.png)\n")
        rows = "\n".join(f"| {name} | {ours} | {paper} |" for name, ours, paper in figure.rows)
        parts.append(f"| | ours | paper |\n| --- | ---: | ---: |\n{rows}\n")
        parts.append("\n".join(f"- {line}" for line in figure.about) + "\n")
    (folder / "README.md").write_text("\n".join(parts), encoding="utf-8")


def plot(figure: Figure, folder: Path) -> None:
    """figureN.png in `folder`."""
    from matplotlib.figure import Figure as Canvas

    folder.mkdir(parents=True, exist_ok=True)
    panels = list(figure.curves.items())
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    canvas = Canvas(figsize=(5.5 * columns, 3.6 * rows), layout="constrained")
    axes = canvas.subplots(rows, columns, squeeze=False).flat
    for axis, (panel, lines) in zip(axes, panels, strict=False):
        draw = _bars if not figure.axes[0] else _lines
        draw(axis, lines, figure)
        axis.set_title(panel, fontsize=10)
        axis.set_ylabel(figure.axes[1])
        axis.grid(alpha=0.3)
        if figure.number != "2" and (panel == panels[0][0] or figure.number != "12"):
            axis.legend(fontsize=8, loc="upper right" if figure.number == "12" else "best")
    canvas.suptitle(f"Figure {figure.number}: {figure.title} ({figure.kind})", fontsize=11)
    canvas.savefig(folder / f"figure{figure.number}.png", dpi=110)


def _lines(axis: Any, lines: dict[str, list[tuple[float, float]]], figure: Figure) -> None:
    for name, points in lines.items():
        xs, ys = zip(*points, strict=True)
        axis.plot(xs, ys, marker="o", markersize=3, label=name)
    axis.set_xlabel(figure.axes[0])
    if figure.number in ("18b", "19"):
        axis.set_xscale("log", base=2)
    if figure.number in ("12", "18b", "19"):
        axis.set_yscale("log")


def _bars(axis: Any, lines: dict[str, list[tuple[float, float]]], figure: Figure) -> None:
    """A group of bars a line: ours, and the paper's where there is a second point; figure 2 is stacked by system."""
    if figure.number == "2":
        _stack(axis, figure)
        return
    count = min(len(points) for points in lines.values())
    width = 0.8 / count
    for shift, label in enumerate(("ours", "paper")[:count]):
        places = [i + width * shift for i in range(len(lines))]
        axis.bar(places, [points[shift][1] for points in lines.values()], width=0.95 * width, label=label)
    axis.set_xticks([i + width * (count - 1) / 2 for i in range(len(lines))], list(lines), fontsize=8)


def _stack(axis: Any, figure: Figure) -> None:
    (systems,) = figure.ours.values()
    bottom = [0.0] * len(systems)
    for part in next(iter(systems.values())):
        heights = [values[part] for values in systems.values()]
        axis.bar(list(systems), heights, bottom=bottom, label=part.replace("_", " "))
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axis.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
