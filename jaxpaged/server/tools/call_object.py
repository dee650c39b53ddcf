"""A call written as a JSON object with the function's name and its arguments."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum, auto

from jaxpaged.server.tools.events import Arguments, Event, ToolEnd, ToolStart
from jaxpaged.server.tools.json_scanner import Boundary, JsonScanner

_ARGUMENTS_KEYS = ("arguments", "parameters")
_KNOWN_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS_KEYS})


def _is_sound(name: str) -> bool:
    """Whether `name` can be sent: not empty, and no half of a surrogate pair in it."""
    return bool(name) and not any("\ud800" <= char <= "\udfff" for char in name)


class Verdict(Enum):
    """
    Attributes:
        OPEN: it may become a call yet.
        CALL: it is one, and what it lacks to be well-formed later does not change that.
        OTHER: it is none, whatever follows.
    """

    OPEN = auto()
    CALL = auto()
    OTHER = auto()


class _Part(Enum):
    STRUCTURE = auto()
    NAME = auto()
    ARGUMENTS = auto()
    OTHER = auto()


class CallObject:
    """Reads `{"name": ..., "arguments": {...}}` in pieces; "parameters" may stand for "arguments".

    The call begins as soon as the name is known and a first value of the arguments has begun (or they have none); then
    the arguments are passed on as they come.
    Members may be in any order; arguments that are null or missing are {}, any other than an object make no call.

    Args:
        is_tool: whether a name is one of a function.
        other_keys: members beside name, arguments, parameters, type and id are ignored; else they make it no call.

    Attributes:
        verdict: what the object is, so far.
        ended: nothing more belongs to it.
    """

    def __init__(self, is_tool: Callable[[str], bool], *, other_keys: bool) -> None:
        self.verdict = Verdict.OPEN
        self._is_tool = is_tool
        self._other_keys = other_keys
        self._scanner = JsonScanner()
        self._name: str | None = None
        self._arguments: str | None = None
        self._part = _Part.STRUCTURE
        self._buffer: list[str] = []  # of the key, or of the value, that is being read
        self._events: list[Event] = []

    @property
    def ended(self) -> bool:
        return self._scanner.done or self._scanner.failed

    def feed(self, text: str, start: int) -> int:
        """Reads `text` from `start`; returns where it stopped: at the end of the text or of the object."""
        pos = start
        while pos < len(text) and not self.ended:
            out: list[str] = []
            pos = self._scanner.feed(text, pos, out)
            if self.verdict is not Verdict.OTHER:
                self._take("".join(out))
        if self.ended:
            self._end()
        return pos

    def take_events(self) -> list[Event]:
        """What became known since the last call."""
        events, self._events = self._events, []
        return events

    def _take(self, text: str) -> None:
        if self._part is _Part.ARGUMENTS and self.verdict is Verdict.CALL:
            if text:
                self._events.append(Arguments(text))
        elif self._part is not _Part.OTHER:
            self._buffer.append(text)
            if self._part is _Part.ARGUMENTS and self._name is not None and self._has_begun():
                self._start("".join(self._buffer))
        match self._scanner.boundary:
            case Boundary.KEY_END:
                written = "".join(self._buffer)
                self._part = self._part_of(json.loads(written[written.index('"') :]))
            case Boundary.VALUE_START:
                self._buffer.clear()
            case Boundary.VALUE_END:
                self._end_value("".join(self._buffer))
                self._buffer.clear()
                self._part = _Part.STRUCTURE

    def _part_of(self, key: str) -> _Part:
        if self.verdict is Verdict.CALL:  # all is said; a second name or second arguments change nothing
            return _Part.OTHER
        if key not in _KNOWN_KEYS and not self._other_keys:
            self.verdict = Verdict.OTHER
        if key == "name":
            return _Part.NAME
        return _Part.ARGUMENTS if key in _ARGUMENTS_KEYS else _Part.OTHER

    def _has_begun(self) -> bool:
        """Whether the value in the buffer is an object with a value in it."""
        return self._scanner.inner_begun and next((p for p in self._buffer if p), "").startswith("{")

    def _end_value(self, value: str) -> None:
        if self._part is _Part.NAME:
            name = json.loads(value) if value.startswith('"') else ""
            if _is_sound(name) and self._is_tool(name):
                self._name = name
                self._start(self._arguments)
            else:
                self.verdict = Verdict.OTHER
        elif self._part is _Part.ARGUMENTS and self.verdict is Verdict.OPEN:
            if value == "null" or value.startswith("{"):
                self._arguments = "{}" if value == "null" else value
                self._start(self._arguments)
            else:
                self.verdict = Verdict.OTHER

    def _end(self) -> None:
        if self.verdict is Verdict.OPEN and self._scanner.done:
            self._start("{}")
        if self.verdict is Verdict.CALL:
            self._events.append(ToolEnd())
        else:
            self.verdict = Verdict.OTHER

    def _start(self, arguments: str | None) -> None:
        """Begins the call with the first of its arguments, once they and the name are known."""
        if self._name is not None and arguments is not None:
            self.verdict = Verdict.CALL
            self._events += [ToolStart(self._name), Arguments(arguments)]
