"""Draws the pictures of docs/paged-attention.md from traces of the engine's own scheduler.

    python docs/pictures/make.py [NAME ...]

Needs matplotlib (the `bench` extra), and no model and no JAX. The traces are made on the spot, by `scenarios.py`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import scenarios
from scenarios import BLOCK_SIZE, FORTY_BLOCKS, FORTY_MAX_LEN, Trace

from jaxpaged.trace.png import (
    ACCENT,
    DECODE,
    EMPTY,
    MUTED,
    TEXT,
    WARN,
    colour_of,
    draw_counts,
    draw_map,
    draw_pool,
    draw_tables,
    new_figure,
    state_at,
    tidy,
    to_png,
)
from jaxpaged.trace.replay import Replay

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = Path(__file__).parent
# At which the two pools of 40 requests are compared: all prompts are computed, few outputs have ended.
FORTY_STEP = 40


def forty() -> bytes:
    """The same requests with room set aside for the longest possible output, and paged."""
    paged, reserved = scenarios.forty_paged(), reserve(scenarios.forty_lengths())
    figure = new_figure(11.5, 7.6)
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.65, 1))
    left, right = top.subplots(1, 2)
    draw_reserved(left, reserved, FORTY_STEP)
    now = state_at(paged.header, paged.records, FORTY_STEP)
    draw_pool(right, now)
    running = sum(status == "running" for status in now.status.values())
    right.set_title(f"paged: {running} requests", fontsize=11, color=TEXT, loc="left", fontweight="bold")
    used, counts = bottom.subplots(1, 2)
    compare(used, counts, paged, reserved)
    figure.suptitle(
        f"40 requests in {FORTY_BLOCKS} blocks of {BLOCK_SIZE} tokens, at step {FORTY_STEP}",
        fontsize=12, color=TEXT, fontweight="bold",
    )  # fmt: skip
    return to_png(figure)


class Reserved:
    """First come, first served, in slots of the longest possible length.

    Attributes:
        spans: of each request, its slot and the steps [start, end) in which it has it.
    """

    def __init__(self, lengths: list[tuple[int, int]], spans: list[tuple[int, int, int]]) -> None:
        self.lengths = lengths
        self.spans = spans

    @property
    def num_steps(self) -> int:
        return max(end for _, _, end in self.spans)

    def held(self, request: int, step: int) -> int:
        """Tokens of it in the pool at `step`."""
        _, start, end = self.spans[request]
        return self.lengths[request][0] + step - start if start <= step < end else 0

    def running(self, step: int) -> list[int]:
        return [i for i, (_, start, end) in enumerate(self.spans) if start <= step < end]


def reserve(lengths: list[tuple[int, int]]) -> Reserved:
    """Every request has a contiguous room of FORTY_MAX_LEN tokens from its first step to its last.

    As in the engine, the step that computes a prompt draws the first token: an output of k tokens takes k steps.
    """
    free_at = [0] * (FORTY_BLOCKS * BLOCK_SIZE // FORTY_MAX_LEN)
    spans = []
    for _, output in lengths:
        slot = min(range(len(free_at)), key=lambda s: free_at[s])
        spans.append((slot, free_at[slot], free_at[slot] + output))
        free_at[slot] += output
    return Reserved(lengths, spans)


def draw_reserved(axes: Axes, reserved: Reserved, step: int) -> None:
    """The pool as rows of one reservation each: what holds a token, what still will, and what never does."""
    from matplotlib.patches import Patch, Rectangle

    slots = FORTY_BLOCKS * BLOCK_SIZE // FORTY_MAX_LEN
    for slot in range(slots):
        axes.add_patch(Rectangle((0, slot + 0.08), FORTY_MAX_LEN, 0.84, facecolor=EMPTY, linewidth=0))
    for request in reserved.running(step):
        slot, held, total = reserved.spans[request][0], reserved.held(request, step), sum(reserved.lengths[request])
        colour, box = colour_of(request), {"height": 0.84, "linewidth": 0.0}
        room: dict[str, Any] = box | {"fill": False, "edgecolor": colour, "hatch": "////"}
        axes.add_patch(Rectangle((0, slot + 0.08), FORTY_MAX_LEN, **room))
        axes.add_patch(Rectangle((0, slot + 0.08), total, facecolor="white", **box))
        axes.add_patch(Rectangle((0, slot + 0.08), total, facecolor=colour, alpha=0.3, **box))
        axes.add_patch(Rectangle((0, slot + 0.08), held, facecolor=colour, **box))
    axes.set_xlim(-4, FORTY_MAX_LEN + 4)
    axes.set_ylim(slots, 0)
    axes.set_yticks([])
    tidy(axes, f"{slots} reservations")
    axes.set_xlabel(f"tokens of a reservation of {FORTY_MAX_LEN}", fontsize=9, color=MUTED)
    count = len(reserved.running(step))
    axes.set_title(f"reserved: {count} requests", fontsize=11, color=TEXT, loc="left", fontweight="bold")
    shades = [
        Patch(facecolor=MUTED, label="holds a token"),
        Patch(facecolor=MUTED, alpha=0.3, label="will hold one"),
        Patch(facecolor="white", edgecolor=MUTED, hatch="////", label="never will"),
    ]
    axes.legend(handles=shades, loc="lower right", fontsize=8, framealpha=0.95)


def compare(used: Axes, counts: Axes, paged: Trace, reserved: Reserved) -> None:
    """Share of the pool that holds tokens, and requests that run, over the steps of both."""
    slots = FORTY_BLOCKS * BLOCK_SIZE
    replay = Replay(paged.header)
    share, running = [], []
    for record in paged.records:
        replay.apply(record)
        share.append(100 * sum(replay.kv_lens.values()) / slots)
        running.append(sum(status == "running" for status in replay.status.values()))
    steps = range(reserved.num_steps)
    held = [100 * sum(reserved.held(i, s) for i in reserved.running(s)) / slots for s in steps]
    for axes, ours, theirs, label in (
        (used, share, held, "% of the pool holds tokens"),
        (counts, running, [len(reserved.running(s)) for s in steps], "requests running"),
    ):
        axes.plot(ours, color=DECODE, linewidth=2, label=f"paged: all done after {len(paged.records) - 1} steps")
        axes.plot(theirs, color=WARN, linewidth=2, label=f"reserved: after {reserved.num_steps} steps")
        axes.axvline(FORTY_STEP, color=MUTED, linewidth=0.8, linestyle=":")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step", color=MUTED, fontsize=9)
        tidy(axes, label)
        axes.legend(fontsize=8, loc="upper right", framealpha=0.95)


def prefix_sharing() -> bytes:
    return moments(scenarios.prefix_sharing(), [14], "One system prompt of 96 tokens, eight requests")


def parallel_sampling() -> bytes:
    return moments(scenarios.parallel_sampling(), [0, 1, 20], "Four outputs of one prompt of 40 tokens")


def beam_search() -> bytes:
    trace = scenarios.beam_search()
    return moments(trace, [1, 9, 24], "Four beams of one prompt of 40 tokens")


def moments(trace: Trace, steps: list[int], title: str) -> bytes:
    """Pool and block tables at some steps, one row each; arrows are copies."""
    figure = new_figure(11.5 if len(steps) == 1 else 9.4, 0.5 + (4.6 if len(steps) == 1 else 1.75 * len(steps)))
    rows = figure.subfigures(len(steps), 1, squeeze=False)[:, 0]
    records = {record.step: record for record in reversed(trace.records)}
    for row, step in zip(rows, steps, strict=True):
        left, right = row.subplots(1, 2, width_ratios=(1, 1))
        replay = state_at(trace.header, trace.records, step)
        draw_pool(left, replay)
        draw_tables(right, replay)
        per_row = round(left.get_xlim()[1] - 0.1)
        for source, destination in records[step].copies:
            start, end = (((b - 1) % per_row + 0.46, (b - 1) // per_row + 0.46) for b in (source, destination))
            arrow = {"arrowstyle": "-|>", "color": ACCENT, "linewidth": 2, "connectionstyle": "arc3,rad=-0.25"}
            left.annotate("", xy=end, xytext=start, arrowprops=arrow)
        used = replay.num_usable - replay.num_free
        entries, copies = sum(replay.references.values()), len(records[step].copies)
        text = f"step {step}: {used} blocks"
        if entries > used:
            text += f" instead of {entries}"
        if copies:
            text += f"; {copies} {'copy' if copies == 1 else 'copies'} on write"
        left.set_title(text, fontsize=10.5, color=TEXT, loc="left", fontweight="bold")
        right.set_title("block tables", fontsize=9.5, color=MUTED, loc="left")
    figure.suptitle(title, fontsize=12, color=TEXT, fontweight="bold")
    return to_png(figure)


def preemption() -> bytes:
    trace = scenarios.preemption()
    figure = new_figure(11.5, 6.6)
    pool, memory, tokens, requests = figure.subplots(4, 1, sharex=True, height_ratios=(2.6, 1, 1, 1))
    draw_map(pool, trace.header, trace.records)
    draw_counts(memory, tokens, requests, trace.header, trace.records)
    label_map(pool, trace)
    requests.set_xlabel("step", color=MUTED, fontsize=9)
    figure.suptitle("Four requests in twelve blocks of 16 tokens", fontsize=12, color=TEXT, fontweight="bold")
    return to_png(figure)


def label_map(axes: Axes, trace: Trace) -> None:
    """Writes each request's name on the blocks it has held longest, once for each time that it was admitted."""
    replay = Replay(trace.header)
    names: dict[int, str] = {}
    since: dict[int, tuple[int, list[int]]] = {}
    for i, record in enumerate(trace.records):
        names |= {new.request: new.id for new in record.new}
        replay.apply(record)
        now = {r: table for (r, _), table in replay.tables.items()}
        for r in [r for r in since if r not in now]:
            start, table = since.pop(r)
            middle = sum(table[: max(1, math.ceil(len(table) / 2))]) / max(1, math.ceil(len(table) / 2))
            axes.text(start + 0.2, middle, names[r], fontsize=11, fontweight="bold", color=TEXT, va="center")
        for r, table in now.items():
            since.setdefault(r, (i, table[:2]))
    axes.tick_params(labelbottom=False)


PICTURES: dict[str, Callable[[], bytes]] = {
    f.__name__.replace("_", "-"): f for f in (forty, prefix_sharing, parallel_sampling, beam_search, preemption)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)} (default: all)")
    args = parser.parse_args()
    for name in args.names or PICTURES:
        if name not in PICTURES:
            parser.error(f"{name} is none of {', '.join(PICTURES)}")
        (FOLDER / f"{name}.png").write_bytes(PICTURES[name]())
        print(f"docs/pictures/{name}.png")


if __name__ == "__main__":
    main()
