"""The experiments of the PagedAttention paper (Kwon et al., SOSP 2023), with this project's scheduler.

    python bench/paper.py [--figures 2,13] [--scale 1] [--json FILE] [--out bench/paper]

Every system is the same scheduler and block manager; only how memory is handed out and when the batch is open differ.
Nothing here ran on the paper's GPUs: what is counted (blocks, tokens) is exact for the lengths that are assumed, and
what takes time is simulated with a cost model. The page that --out writes says which is which, figure by figure.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jaxpaged.sim import Constants
from paper_blocks import figure_18b, figure_19
from paper_memory import figure_2, figure_13, figure_15
from paper_page import plot, write_page
from paper_rates import figure_12, figure_14, figure_16, figure_17
from paper_setups import Figure, paper_constants

FIGURES: dict[str, Callable[[Constants, float, int], Figure]] = {
    "2": figure_2,
    "12": figure_12,
    "13": figure_13,
    "14": figure_14,
    "15": figure_15,
    "16": figure_16,
    "17": figure_17,
    "18b": figure_18b,
    "19": figure_19,
}


def as_json(figures: list[Figure]) -> dict[str, object]:
    """Number -> trace -> system -> ours; beside the traces what the paper has, and what kind of figure it is."""
    return {f.number: {**f.ours, "paper": f.paper, "kind": f.kind, "about": f.about} for f in figures}


def parse_figures(text: str) -> list[str]:
    numbers = [part.strip() for part in text.split(",")]
    for number in numbers:
        if number not in FIGURES:
            raise argparse.ArgumentTypeError(f"there is no figure {number!r} here; these are {', '.join(FIGURES)}")
    return numbers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=parse_figures, default=list(FIGURES), help="which (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests and the time simulated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the page and its plots here")
    args = parser.parse_args()
    if not 0 < args.scale <= 100:
        parser.error(f"--scale is {args.scale:g}, but must be above 0 and at most 100")
    if args.out is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--out needs matplotlib for the plots: pip install 'jaxpaged[bench]'")
    constants = paper_constants()
    figures = []
    for number in args.figures:
        start = time.perf_counter()
        figure = FIGURES[number](constants, args.scale, args.seed)
        figure.about.append(f"Made with --scale {args.scale:g}.")
        figures.append(figure)
        print(f"Figure {figure.number}: {figure.title} ({figure.kind}, {time.perf_counter() - start:.0f} s)")
        for name, ours, paper in figure.rows:
            print(f"  {name:<64}{ours:>10}{paper:>20}")
        for line in figure.about:
            print(f"  {line}")
        sys.stdout.flush()
        if args.json is not None:
            args.json.write_text(json.dumps(as_json(figures), indent=1) + "\n", encoding="utf-8")
        if args.out is not None:
            plot(figure, args.out)
    if args.out is not None:
        write_page(figures, constants, args.out, " ".join(["python", "bench/paper.py", *sys.argv[1:]]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
