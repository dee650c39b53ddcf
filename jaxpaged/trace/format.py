"""The trace format, version 1: one JSON object a line. The first line is the header, every other one a record.

A record is a moment of the scheduler: right after a step was planned, or (`idle`) when nothing is left to do. It holds
what has changed since the record before it; an empty field is left out. Requests are numbered from 0 in the order in
which they appear, so their ids, which may be long, are written once; a sequence is named by its request's number and
its own index. Blocks are named by their ids in the pool, 0 being the null block that nobody owns.

What the block manager counts itself (`free`, `findable`) stands in each record too, so that a reader which rebuilds
the tables can tell a complete trace from a damaged one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from jaxpaged.config import CacheConfig
from jaxpaged.errors import JaxpagedError

VERSION = 1
# Of a line; a record of a pool of a million blocks stays below it.
MAX_LINE_BYTES = 64 << 20
MAX_ID_CHARS = 200

T = TypeVar("T")

_STRICT = ConfigDict(extra="forbid", strict=True)
Count = Annotated[int, Field(ge=0)]
Block = Annotated[int, Field(ge=0, lt=1 << 24)]
Blocks = list[Block]
Pairs = list[tuple[Block, Block]]
Unit = Literal["s", "step"]
PreemptionWay = Literal["recompute", "swap", "reset"]


class TraceError(JaxpagedError, ValueError):
    """A trace cannot be read or written."""


@dataclass(frozen=True)
class Header:
    """
    Attributes:
        model: what the trace is of, for titles.
        num_blocks: of the device pool, the null block included.
        unit: of the times: seconds, or steps where there is no clock.
        started: Unix time of the start, in seconds; 0 where there is none.
    """

    __pydantic_config__ = _STRICT

    block_size: Annotated[int, Field(ge=1, le=1 << 20)]
    num_blocks: Annotated[int, Field(ge=2, le=1 << 24)]
    num_host_blocks: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    prefix_caching: bool = True
    model: str = ""
    unit: Unit = "s"
    started: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    trace: Literal["jaxpaged"] = "jaxpaged"
    version: Literal[1] = 1

    @classmethod
    def of(cls, cache: CacheConfig, *, model: str = "", unit: Unit = "s", started: float = 0.0) -> Header:
        return cls(
            block_size=cache.block_size,
            num_blocks=cache.num_blocks,
            num_host_blocks=cache.num_host_blocks,
            prefix_caching=cache.enable_prefix_caching,
            model=clean(model),
            unit=unit,
            started=started,
        )

    def to_json(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        first = {name: values.pop(name) for name in ("trace", "version")}
        return _dump(first | values)


class NewRequest(NamedTuple):
    """A request that the trace has not named before. `n` is the number of its sequences, `arrived` in the unit of the
    times; what is served first has the lower priority, then the earlier arrival.
    """

    request: Count
    id: str
    prompt_tokens: Count
    max_tokens: Count
    n: Annotated[int, Field(ge=1, le=1 << 20)]
    priority: int
    arrived: Annotated[float, Field(allow_inf_nan=False)]


class Admission(NamedTuple):
    """A request joins the batch with `tokens` tokens to have in the pool, `hits` of them from the prefix cache."""

    request: Count
    hits: Count
    tokens: Count


class Preemption(NamedTuple):
    """A request gives way: its KV is dropped ("recompute"), goes to the host ("swap"), or was lost ("reset")."""

    request: Count
    way: PreemptionWay


class Finish(NamedTuple):
    request: Count
    sequence: Count
    reason: str


class TableChange(NamedTuple):
    """The first `keep` entries of a block table stay, `blocks` follow them."""

    request: Count
    sequence: Count
    keep: Count
    blocks: Blocks


class Prefill(NamedTuple):
    """`tokens` tokens of a sequence are computed in this step, which then has `kv_len` in the pool."""

    request: Count
    sequence: Count
    tokens: Count
    kv_len: Count


class Decode(NamedTuple):
    """A sequence computes one token a step from this step on, and has `kv_len` in the pool after this one."""

    request: Count
    sequence: Count
    kv_len: Count


@dataclass
class Record:
    """What has changed since the last record, in the order in which a reader applies it.

    Attributes:
        step: steps planned before this one.
        t: time since the start of the trace, in the header's unit.
        free, findable: blocks of the pool that could be handed out, and that the prefix cache can find; as the pool
            counts them.
        idle: no step was planned; what ran before has ended.
        reset: everything that came before is void; this record holds the whole state.
        new: in the order of their numbers.
        running: requests that are in the batch although no record says when they joined it. Only with `reset`.
        tables, host_tables: block tables on the device and on the host.
        cached, uncached: blocks that can be found by prefix from now on, or no longer.
        copies: (source, destination): copied before this step writes.
        swapped_out: (device block, host block); swapped_in: (host block, device block).
        decodes: sequences that start to decode, or whose length has jumped.
        decodes_ended: (request, sequence) of those that have stopped. Between the two, a sequence goes on in every
            record, one token longer each time, and is not mentioned.
    """

    __pydantic_config__ = _STRICT

    step: Count
    t: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    free: Count
    findable: Count
    idle: bool = False
    reset: bool = False
    new: list[NewRequest] = field(default_factory=list)
    running: list[Count] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    tables: list[TableChange] = field(default_factory=list)
    host_tables: list[TableChange] = field(default_factory=list)
    cached: Blocks = field(default_factory=list)
    uncached: Blocks = field(default_factory=list)
    copies: Pairs = field(default_factory=list)
    swapped_out: Pairs = field(default_factory=list)
    swapped_in: Pairs = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    decodes: list[Decode] = field(default_factory=list)
    decodes_ended: list[tuple[Count, Count]] = field(default_factory=list)

    def to_json(self) -> str:
        return _dump({name: value for name in _RECORD_FIELDS if (value := getattr(self, name)) or name in _ALWAYS})

    @property
    def has_events(self) -> bool:
        """Something has changed but the time."""
        return any(getattr(self, name) for name in _RECORD_FIELDS if name not in _ALWAYS and name != "idle")


_RECORD_FIELDS = tuple(f.name for f in fields(Record))
_ALWAYS = frozenset({"step", "t", "free", "findable"})
_HEADER = TypeAdapter(Header)
_RECORD = TypeAdapter(Record)


@contextmanager
def open_trace(path: str | Path) -> Iterator[tuple[Header, Iterator[Record]]]:
    """The header and the records of a trace file, which are read as they are asked for.

    A last line that is cut off, as that of a process that was killed, is left out.

    Raises:
        TraceError: it cannot be read or is no trace; names the line. The records raise it too.
    """
    path = Path(path)
    try:
        file = path.open("rb")
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror or error}") from error
    with file:
        lines = _lines(file, path)
        first = next(lines, None)
        if first is None:
            raise TraceError(f"{path} is empty; give a file that `jaxpaged trace` or --trace has written")
        yield _header(first[1], path), _records(lines, path)


def _lines(file: Any, path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    while True:
        try:
            line = file.readline(MAX_LINE_BYTES)
        except OSError as error:
            raise TraceError(f"cannot read the trace {path}: {error.strerror or error}") from error
        if not line.endswith(b"\n"):
            if len(line) == MAX_LINE_BYTES:
                raise TraceError(f"line {number + 1} of {path} is longer than {MAX_LINE_BYTES >> 20} MiB")
            if number == 0 and line:
                yield 1, line
            return
        number += 1
        yield number, line


def _header(line: bytes, path: Path) -> Header:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("trace") != "jaxpaged":
        raise TraceError(f"{path} is no trace; give a file that `jaxpaged trace` or --trace has written")
    if found.get("version") != VERSION:
        raise TraceError(f"{path} has trace version {found.get('version')!r:.40}; this program reads version {VERSION}")
    return _parsed(_HEADER, line, 1, path)


def _records(lines: Iterator[tuple[int, bytes]], path: Path) -> Iterator[Record]:
    for number, line in lines:
        yield _parsed(_RECORD, line, number, path)


def _parsed(adapter: TypeAdapter[T], line: bytes, number: int, path: Path) -> T:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise TraceError(f"line {number} of {path}: {where + ': ' if where else ''}{first['msg']}") from error


def clean(text: str) -> str:
    """`text` as valid Unicode, and not longer than names in a picture can be."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_ID_CHARS else text[: MAX_ID_CHARS - 1] + "…"


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
