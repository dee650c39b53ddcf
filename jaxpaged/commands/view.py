"""`jaxpaged view`: a trace as a page, or as pictures."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from jaxpaged.commands.options import add_command
from jaxpaged.errors import ConfigError

_RANGE = re.compile(r"(\d{1,15})?:(\d{1,15})?")


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "view",
        run,
        summary="show a trace of the engine's steps",
        description=(
            "Turn a trace (of `jaxpaged trace`, or of --trace) into one HTML file that needs nothing else: the pool\n"
            "as a map of blocks, block tables, queue, preemptions and prefix hits, step by step. Or into PNG pictures."
        ),
        example=(
            "  jaxpaged trace smollm2-135m-instruct -o steps.jsonl\n"
            "  jaxpaged view steps.jsonl                              writes steps.html\n"
            "  jaxpaged view steps.jsonl --png moment.png --step 40 --timeline-png timeline.png"
        ),
    )
    parser.add_argument("trace", metavar="FILE", help="the trace")
    parser.add_argument(
        "-o", "--out", metavar="HTML", help="where the page goes (default: FILE with .html, unless a PNG is asked for)"
    )
    parser.add_argument("--steps", type=_range, metavar="A:B", help="only steps A to B (default: all)")
    parser.add_argument("--png", metavar="PNG", help="a picture of one moment; needs matplotlib")
    parser.add_argument("--step", type=int, metavar="N", help="of --png (default: where most blocks are in use)")
    parser.add_argument("--timeline-png", metavar="PNG", help="a picture of all steps; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    from jaxpaged.trace.cut import MAX_RECORDS, cut
    from jaxpaged.trace.format import open_trace

    first, last = args.steps or (0, None)
    with open_trace(args.trace) as (header, records):
        # The page replays what it gets; one that does not replay here is refused here.
        chosen = cut(header, records, first, last)
    pictures = args.png is not None or args.timeline_png is not None
    if pictures:
        from jaxpaged.trace.png import moment_png, timeline_png

        if args.png is not None:
            _write(args.png, moment_png(header, chosen, args.step))
        if args.timeline_png is not None:
            _write(args.timeline_png, timeline_png(header, chosen))
    if args.out is not None or not pictures:
        if len(chosen) > MAX_RECORDS:
            raise ConfigError(
                f"{args.trace} has {len(chosen):,} records, a page shows {MAX_RECORDS:,}; choose some, for example "
                f"--steps {chosen[0].step}:{chosen[0].step + MAX_RECORDS - 1}"
            )
        from jaxpaged.trace.html import trace_page

        _write(args.out or Path(args.trace).with_suffix(".html"), trace_page(header, chosen).encode())
    return 0


def _write(path: str | Path, content: bytes) -> None:
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    print(path)


def _range(text: str) -> tuple[int, int | None]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of steps such as 100:200, 100: or :200")
    first, last = int(match[1] or 0), None if match[2] is None else int(match[2])
    if last is not None and last < first:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it begins")
    return first, last
