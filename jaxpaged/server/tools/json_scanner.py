"""Checks a JSON object that comes in pieces."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_TOKEN = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null", re.ASCII)
_SCALAR_STARTS = frozenset("-0123456789tfn")
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSERS = {"{": "}", "[": "]"}


class Boundary(Enum):
    """Where `JsonScanner.feed` pauses: around the members of the outermost object."""

    KEY_END = auto()
    VALUE_START = auto()
    VALUE_END = auto()


class _State(Enum):
    OBJECT = auto()  # the outermost "{"
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    VALUE_OR_END = auto()
    AFTER_VALUE = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    SCALAR = auto()  # a number, true, false or null


class JsonScanner:
    """Reads one JSON object, strictly but for raw control characters in strings, which it replaces by their escapes.

    Memory is that of the open brackets and of one number, time is linear in the text, whatever its pieces.

    Attributes:
        done: the object is complete.
        failed: the text is no JSON object; the character that `feed` stopped at is the first that does not fit.
        inner_begun: a value has begun inside the value of the current member of the outermost object.
        boundary: why the last `feed` stopped, None where the text ended, was complete or failed.
    """

    def __init__(self) -> None:
        self.done = self.failed = self.inner_begun = False
        self.boundary: Boundary | None = None
        self._state = _State.OBJECT
        self._closers: list[str] = []
        self._is_key = False
        self._value_announced = False
        self._digits = 0  # hexadecimal digits of an escape so far
        self._token: list[str] = []

    def feed(self, text: str, start: int, out: list[str]) -> int:
        """Reads `text` from `start` to the next boundary; what it takes goes to `out`. Returns where it stopped."""
        self.boundary = None
        pos = start
        while pos < len(text) and not (self.done or self.failed or self.boundary):
            match self._state:
                case _State.STRING:
                    pos = self._string(text, pos, out)
                case _State.SCALAR:
                    pos = self._scalar(text, pos, out)
                case _State.ESCAPE | _State.HEX:
                    pos = self._escape(text, pos, out)
                case _:
                    pos = self._structure(text, pos, out)
        return pos

    def _string(self, text: str, pos: int, out: list[str]) -> int:
        plain = _PLAIN.match(text, pos)
        assert plain is not None
        end = plain.end()
        if end == len(text):
            out.append(text[pos:])
            return end
        char = text[end]
        out.append(text[pos:end] + (char if char in '"\\' else json.dumps(char)[1:-1]))
        if char == "\\":
            self._state = _State.ESCAPE
        elif char == '"' and self._is_key:
            self._state = _State.COLON
            self._pause(Boundary.KEY_END)
        elif char == '"':
            self._end_value()
        return end + 1

    def _escape(self, text: str, pos: int, out: list[str]) -> int:
        char = text[pos]
        if self._state is _State.ESCAPE:
            self.failed = char not in '"\\/bfnrtu'
            self._digits = 0
            self._state = _State.HEX if char == "u" else _State.STRING
        else:
            self.failed = char not in _HEX
            self._digits += 1
            if self._digits == 4:
                self._state = _State.STRING
        if self.failed:
            return pos
        out.append(char)
        return pos + 1

    def _scalar(self, text: str, pos: int, out: list[str]) -> int:
        run = _TOKEN.match(text, pos)
        assert run is not None
        end = run.end()
        self._token.append(text[pos:end])
        out.append(text[pos:end])
        if end < len(text):
            self.failed = not _SCALAR.fullmatch("".join(self._token))
            self._token.clear()
            self._end_value()
        return end

    def _structure(self, text: str, pos: int, out: list[str]) -> int:
        char, state = text[pos], self._state
        if char in SPACE and state is not _State.OBJECT:
            pass
        elif state is _State.VALUE and len(self._closers) == 1 and not self._value_announced:
            self._value_announced, self.inner_begun = True, False
            self.boundary = Boundary.VALUE_START
            return pos
        elif not self._accept(char, state):
            self.failed = True
            return pos
        if self._state is not _State.SCALAR:  # whose first character is read with the others
            out.append(char)
            pos += 1
        return pos

    def _accept(self, char: str, state: _State) -> bool:
        """Whether `char` may stand here; if so, goes to the state after it."""
        if state in (_State.VALUE, _State.VALUE_OR_END):
            return self._accept_value(char, state)
        match state:
            case _State.OBJECT:
                return char == "{" and self._open(char)
            case _State.KEY_OR_END | _State.KEY if char == '"':
                self._state, self._is_key = _State.STRING, True
            case _State.COLON if char == ":":
                self._state, self._value_announced = _State.VALUE, False
            case _State.KEY_OR_END if char == "}":
                self._close()
            case _State.AFTER_VALUE if char == ",":
                self._state = _State.KEY if self._closers[-1] == "}" else _State.VALUE
            case _State.AFTER_VALUE if char == self._closers[-1]:
                self._close()
            case _:
                return False
        return True

    def _accept_value(self, char: str, state: _State) -> bool:
        is_inner = len(self._closers) > 1
        if char == '"':
            self._state, self._is_key = _State.STRING, False
        elif char in _CLOSERS:
            self._open(char)
        elif char in _SCALAR_STARTS:
            self._state = _State.SCALAR
        elif char == "]" and state is _State.VALUE_OR_END:
            self._close()
            return True
        else:
            return False
        self.inner_begun |= is_inner
        return True

    def _open(self, char: str) -> bool:
        self._closers.append(_CLOSERS[char])
        self._state = _State.KEY_OR_END if char == "{" else _State.VALUE_OR_END
        return True

    def _close(self) -> None:
        self._closers.pop()
        if self._closers:
            self._end_value()
        else:
            self.done = True

    def _end_value(self) -> None:
        self._state = _State.AFTER_VALUE
        self._pause(Boundary.VALUE_END)

    def _pause(self, boundary: Boundary) -> None:
        if len(self._closers) == 1 and not self.failed:
            self.boundary = boundary
