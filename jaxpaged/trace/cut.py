"""Part of a trace, as a trace of its own."""

from __future__ import annotations

from collections.abc import Iterable

from jaxpaged.trace.format import Header, Record, TraceError
from jaxpaged.trace.replay import Replay

# More of them are slow to load in a browser.
MAX_RECORDS = 50_000


def cut(header: Header, records: Iterable[Record], first: int = 0, last: int | None = None) -> list[Record]:
    """The records of steps `first` to `last`, each replayed; the first one holds the whole state if others are missing.

    Raises:
        TraceError: a record does not fit those before it, or there is none of these steps.
    """
    replay = Replay(header)
    chosen: list[Record] = []
    latest = -1
    for record in records:
        if last is not None and record.step > last:
            break
        replay.apply(record)
        latest = record.step
        if record.step < first:
            continue
        chosen.append(replay.snapshot() if first > 0 and not chosen else record)
    if not chosen:
        where = f"none from {first} on; its last is {latest}" if latest >= 0 else "none at all"
        raise TraceError(f"the trace has no steps to show: {where}")
    return chosen
