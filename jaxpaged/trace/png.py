"""Pictures of a trace for pages and slides, drawn with matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jaxpaged.errors import ConfigError
from jaxpaged.trace.format import Header, Record, TraceError
from jaxpaged.trace.replay import Replay

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEXT, MUTED, LINE, EMPTY = "#14181d", "#5d6773", "#c9d0d8", "#eceff3"
CACHED, PREFILL, DECODE, WARN, ACCENT = "#9db2d3", "#2f6fdb", "#2f9e77", "#e8890c", "#d6336c"
DPI = 110
# More block tables than these do not fit a picture of one moment.
MAX_TABLES = 24
MAX_MAP_ROWS = 512
MIN_SHOWN = 24


def colour_of(request: int) -> tuple[float, float, float]:
    """Of a request, 0 to 1 in red, green and blue: hues far apart for neighbours, at equal lightness (OKLCH)."""
    hue = math.radians((request * 137.508 + 255) % 360)
    lightness, chroma = 0.7 + (0.0, 0.07, -0.06)[request // 6 % 3], 0.135
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3
    red, green, blue = (
        _encoded(4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short),
        _encoded(-1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short),
        _encoded(-0.0041960863 * long - 0.7034186147 * medium + 1.707614701 * short),
    )
    return red, green, blue


def _encoded(linear: float) -> float:
    value = 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055
    return min(max(value, 0.0), 1.0)


def new_figure(width: float, height: float) -> Figure:
    """
    Args:
        width, height: in inches.

    Raises:
        ConfigError: there is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("PNG pictures need matplotlib; install it with: pip install 'jaxpaged[bench]'") from error
    return Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")


def to_png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def moment_png(header: Header, records: Sequence[Record], step: int | None = None) -> bytes:
    """The pool and the block tables at `step`; None = where most blocks are in use.

    Raises:
        ConfigError: there is no matplotlib.
        TraceError: no record of this step.
    """
    figure = new_figure(11.5, 5.2)
    if step is None:
        step = min(records, key=lambda r: r.free).step
    if all(record.step != step for record in records):
        raise TraceError(f"the trace has no step {step}; it goes from {records[0].step} to {records[-1].step}")
    replay = state_at(header, records, step)
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    draw_pool(left, replay)
    draw_tables(right, replay)
    used = replay.num_usable - replay.num_free
    saved = sum(replay.references.values()) - used
    figure.suptitle(
        f"{printable(header.model) or 'KV memory'}, step {step}: {used} of {replay.num_usable} blocks in use"
        + (f", {saved} saved by sharing" if saved else ""),
        fontsize=12, fontweight="bold", color=TEXT,
    )  # fmt: skip
    return to_png(figure)


def state_at(header: Header, records: Iterable[Record], step: int) -> Replay:
    """The state that the record of `step` leaves (the last one of it that planned anything)."""
    replay = Replay(header)
    for record in records:
        if record.step > step or (record.step == step and record.idle):
            break
        replay.apply(record)
    return replay


def timeline_png(header: Header, records: Sequence[Record]) -> bytes:
    """The pool, what is in use, tokens and requests over all steps.

    Raises:
        ConfigError: there is no matplotlib.
    """
    figure = new_figure(11.5, 7.2)
    top, memory, tokens, requests = figure.subplots(4, 1, sharex=True, height_ratios=(2.4, 1, 1, 1))
    draw_map(top, header, records)
    draw_counts(memory, tokens, requests, header, records)
    requests.set_xlabel("step", color=MUTED)
    title = printable(header.model) or "KV memory"
    size = f"{header.num_blocks - 1} blocks of {header.block_size} tokens"
    figure.suptitle(f"{title}: {size}", fontsize=12, fontweight="bold", color=TEXT)
    return to_png(figure)


def draw_map(axes: Axes, header: Header, records: Sequence[Record]) -> None:
    """Who owns which block, over time; triangles where a request was preempted."""
    import numpy as np

    named = (b for record in records for b in (*record.cached, *(b for change in record.tables for b in change.blocks)))
    usable = _shown(max(named, default=0), header.num_blocks - 1)
    rows = min(usable, MAX_MAP_ROWS)
    blocks = [1 + row * usable // rows for row in range(rows)]
    image = np.empty((rows, len(records), 3))
    replay = Replay(header)
    free, findable = _rgb(EMPTY), _rgb(CACHED)
    owner: dict[int, int] = {}
    for column, record in enumerate(records):
        replay.apply(record)
        if record.tables or record.reset:
            owner = {b: r for (r, _), table in reversed(replay.tables.items()) for b in table}
        for row, block in enumerate(blocks):
            image[row, column] = (
                colour_of(owner[block]) if block in owner else findable if block in replay.findable else free
            )
    last = len(records) - 0.5
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=(-0.5, last, usable + 0.5, 0.5))
    _ticks(axes, records)
    tidy(axes, "block id")
    marks = [i for i, record in enumerate(records) if record.preempted]
    if marks:
        axes.plot(marks, [0.5] * len(marks), "v", color=WARN, clip_on=False, markersize=8, label="preemption")
        axes.legend(loc="lower right", fontsize=8, framealpha=0.9)


def draw_counts(memory: Axes, tokens: Axes, requests: Axes, header: Header, records: Sequence[Record]) -> None:
    """Blocks in use, tokens of each step, and requests, over time."""
    replay = Replay(header)
    used, shared, prefill, decode, running, waiting = ([] for _ in range(6))  # type: ignore[var-annotated]
    for record in records:
        replay.apply(record)
        used.append(replay.num_usable - replay.num_free)
        shared.append(len(replay.shared))
        for values, count in zip((prefill, decode), replay.num_tokens, strict=True):
            values.append(count)
        running.append(sum(status == "running" for status in replay.status.values()))
        waiting.append(len(replay.status) - running[-1])
    x = range(len(records))
    memory.bar(x, used, width=1, color=DECODE, label="in use")
    memory.bar(x, shared, width=1, color=TEXT, label="of them shared")
    if max(used) > 0.25 * (header.num_blocks - 1):
        memory.axhline(header.num_blocks - 1, color=MUTED, linewidth=0.8)
    tidy(memory, "blocks")
    tokens.bar(x, decode, width=1, color=DECODE, label="decode")
    tokens.bar(x, prefill, width=1, bottom=decode, color=PREFILL, label="prefill")
    tidy(tokens, "tokens a step")
    requests.bar(x, running, width=1, color=DECODE, label="running")
    requests.bar(x, waiting, width=1, bottom=running, color=WARN, label="waiting")
    tidy(requests, "requests")
    for axes in (memory, tokens, requests):
        axes.legend(loc="upper right", ncols=2, fontsize=8, framealpha=0.9)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.25)


def draw_pool(axes: Axes, replay: Replay) -> None:
    """Every block in the order of the ids, as high as it is filled."""
    usable = _shown(max((*replay.references, *replay.findable), default=0), replay.num_usable)
    per_row = max(min(usable, 6), math.ceil(math.sqrt(usable * 1.25)))
    owners: dict[int, list[tuple[int, int]]] = {}
    for (r, s), table in replay.tables.items():
        for block in table:
            owners.setdefault(block, []).append((r, s))
    levels = fill_levels(replay)
    for block in range(1, usable + 1):
        x, y = (block - 1) % per_row, (block - 1) // per_row
        draw_block(axes, x, y, owners.get(block, []), levels.get(block, 0.0), block in replay.findable)
        if usable <= 160:
            axes.text(x + 0.07, y + 0.1, str(block), fontsize=6.5, color=MUTED, va="top")
        held = owners.get(block, [])
        if len(held) == 1 and usable <= 80:
            axes.text(x + 0.47, y + 0.72, sequence_label(replay, *held[0]), fontsize=8.5, ha="center", va="center",
                      color=TEXT, fontweight="bold")  # fmt: skip
    axes.set_xlim(-0.1, per_row + 0.1)
    axes.set_ylim(math.ceil(usable / per_row) + 0.1, -0.1)
    axes.set_aspect("equal", anchor="NW")
    axes.set_axis_off()
    hidden = replay.num_usable - usable
    more = f"; {hidden:,} more are not in use" if hidden else ""
    axes.set_title(
        f"the pool: each square is a block, as high as it is filled{more}", fontsize=10, color=MUTED, loc="left"
    )


def draw_block(
    axes: Axes, x: float, y: float, owners: list[tuple[int, int]], level: float, findable: bool, size: float = 0.92
) -> None:
    """
    Args:
        owners: (request, sequence) of each reference.
        level: share of the block that is filled.
    """
    from matplotlib.patches import Rectangle

    if not owners:
        style: dict[str, Any] = {"facecolor": EMPTY, "linewidth": 0}
        if findable:
            style = {"facecolor": "#dfe6f1", "edgecolor": CACHED, "hatch": "////", "linewidth": 0}
        axes.add_patch(Rectangle((x, y), size, size, **style))
        return
    requests = list(dict.fromkeys(r for r, _ in owners))[:4]
    width = size / len(requests)
    for i, request in enumerate(requests):
        colour = colour_of(request)
        axes.add_patch(Rectangle((x + i * width, y), width, size, facecolor=colour, alpha=0.3, linewidth=0))
        height = size * max(level, 0.06)
        axes.add_patch(Rectangle((x + i * width, y + size - height), width, height, facecolor=colour, linewidth=0))
    if len(owners) > 1:
        axes.add_patch(Rectangle((x, y), size, size, fill=False, edgecolor=TEXT, linewidth=1.4))
        axes.text(x + size - 0.05, y + size - 0.07, f"×{len(owners)}", fontsize=7, ha="right", va="bottom",
                  color="white", fontweight="bold",
                  bbox={"facecolor": TEXT, "pad": 1.2, "linewidth": 0})  # fmt: skip


def draw_tables(axes: Axes, replay: Replay) -> None:
    """The block tables of the running sequences, in order."""
    rows = sorted(replay.tables.items())
    levels = fill_levels(replay)
    longest = max((len(table) for _, table in rows[:MAX_TABLES]), default=1)
    per_line = min(max(longest, 8), 16)
    owned = {block: [key for key, table in rows if block in table] for _, table in rows[:MAX_TABLES] for block in table}
    y = 0.0
    for key, table in rows[:MAX_TABLES]:
        axes.text(-0.3, y + 0.46, sequence_label(replay, *key), ha="right", va="center", fontsize=9, color=TEXT,
                  fontweight="bold")  # fmt: skip
        axes.text(-1.7, y + 0.46, f"{replay.kv_lens.get(key, 0)} tokens", ha="right", va="center", fontsize=8,
                  color=MUTED)  # fmt: skip
        for i, block in enumerate(table):
            bx, by = i % per_line, y + i // per_line
            draw_block(axes, bx, by, owned[block], levels[block], False)
            axes.text(bx + 0.07, by + 0.1, str(block), fontsize=6.5, color=TEXT, va="top")
        y += math.ceil(len(table) / per_line) + 0.25
    if len(rows) > MAX_TABLES:
        axes.text(0, y + 0.4, f"and {len(rows) - MAX_TABLES} more", fontsize=8.5, color=MUTED)
        y += 1
    axes.set_xlim(-4.2, per_line + 0.1)
    axes.set_ylim(max(y, 6.0), -0.1)
    axes.set_aspect("equal", anchor="NW")
    axes.set_axis_off()
    axes.set_title("block tables", fontsize=10, color=MUTED, loc="left")


def _shown(highest: int, usable: int) -> int:
    """How many blocks are drawn of a pool that is used up to `highest`: blocks are handed out from the lowest on."""
    return min(usable, max(MIN_SHOWN, math.ceil(1.1 * highest)))


def fill_levels(replay: Replay) -> dict[int, float]:
    """Share of each owned block that holds tokens."""
    size = replay.header.block_size
    levels: dict[int, float] = {}
    for key, table in replay.tables.items():
        for i, block in enumerate(table):
            held = min(max(replay.kv_lens.get(key, 0) - i * size, 0), size) / size
            levels[block] = max(levels.get(block, 0.0), held)
    return levels


def sequence_label(replay: Replay, request: int, sequence: int) -> str:
    """The request's id where that is short, else its number; and which of its sequences."""
    new = replay.requests.get(request)
    name = printable(new.id) if new is not None and len(new.id) <= 6 else f"#{request}"
    return f"{name}.{sequence}" if new is not None and new.n > 1 else name


def printable(text: str) -> str:
    """`text` as matplotlib shows it literally: a pair of dollar signs would be taken for mathematics."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text).replace("$", r"\$")[:80]


def tidy(axes: Axes, label: str) -> None:
    """Light axes, with the quantity's name."""
    axes.set_ylabel(label, color=MUTED, fontsize=9)
    axes.tick_params(colors=MUTED, labelsize=8)
    for side in axes.spines.values():
        side.set_color(LINE)


def _ticks(axes: Axes, records: Sequence[Record]) -> None:
    count = min(len(records), 9)
    at = sorted({round(i * (len(records) - 1) / max(count - 1, 1)) for i in range(count)})
    axes.set_xticks(at, [str(records[i].step) for i in at])


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue
