"""A parser of text that comes in pieces."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

from jaxpaged.server.tools.events import Event
from jaxpaged.server.tools.json_scanner import SPACE

T = TypeVar("T")
Steps = Generator[None, None, T]


class MalformedError(Exception):
    """The text does not go on as the format wants; nothing of what does not fit was consumed."""


class CutOffError(MalformedError):
    """The text ended inside the format."""


class Machine(ABC):
    """Turns text into events; how the text was cut into pieces does not show in what they say together.

    A parser is a generator, `_run`, that consumes text and yields whenever it needs more of it. What it cannot decide
    on yet, it keeps in `_held`.
    """

    def __init__(self) -> None:
        self._text = ""
        self._pos = 0
        self._ended = False
        self._held: list[str] = []
        self._events: list[Event] = []
        self._steps = self._run()

    @abstractmethod
    def _run(self) -> Steps[None]:
        """Consumes the whole text."""

    def feed(self, text: str) -> list[Event]:
        """What `text`, the next piece, made certain."""
        self._text, self._pos = text, 0
        next(self._steps)
        return self._take_events()

    def finish(self) -> list[Event]:
        """What the end of the text made certain. Nothing may be fed afterwards."""
        self._text, self._pos, self._ended = "", 0, True
        next(self._steps, None)
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _peek(self) -> Steps[str]:
        """The next character, unconsumed; "" at the end of the text."""
        while self._pos == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._pos]

    def _consume(self, end: int) -> str:
        piece = self._text[self._pos : end]
        self._pos = end
        return piece

    def _take_held(self) -> str:
        held = "".join(self._held)
        self._held.clear()
        return held

    def _skip_space(self) -> Steps[str]:
        """Holds white space; returns the character after it, unconsumed."""
        while (char := (yield from self._peek())) and char in SPACE:
            self._held.append(char)
            self._pos += 1
        return char

    def _one_of(self, words: Sequence[str]) -> Steps[str]:
        """Holds one of `words`, none of which starts another one, and returns it.

        Raises:
            MalformedError: none of them comes; what had begun like one is unconsumed.
        """
        seen = ""
        while seen not in words:
            char = yield from self._peek()
            if not char or not any(w.startswith(seen + char) for w in words):
                self._unread(seen)
                raise MalformedError if char else CutOffError
            seen += char
            self._pos += 1
        self._held.append(seen)
        return seen

    def _unread(self, text: str) -> None:
        if self._pos < len(text):  # it began in an earlier piece
            self._text, self._pos = text[: len(text) - self._pos] + self._text, len(text)
        self._pos -= len(text)

    def _until(self, words: Sequence[str], sink: Callable[[str], None]) -> Steps[tuple[str, str]]:
        """Consumes text up to and with the first of `words`; what is before it goes to `sink`.

        Returns:
            (the word, ""); or at the end of the text ("", what was held back as it may have begun a word).
        """
        pattern, tail = _any_of(tuple(words)), ""
        while (yield from self._peek()):
            if tail:
                self._text, self._pos = tail + self._text[self._pos :], 0
            found = pattern.search(self._text, self._pos)
            if found is not None:
                sink(self._consume(found.start()))
                return self._consume(found.end()), ""
            sink(self._consume(min(_begun(self._text, self._pos, word) for word in words)))
            tail = self._consume(len(self._text))
        return "", tail


@lru_cache
def _any_of(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(word) for word in words))


def _begun(text: str, pos: int, word: str) -> int:
    """Where, not before `pos`, the longest end of `text` lies that is a beginning of `word`; or the end of `text`."""
    for start in range(max(pos, len(text) - len(word) + 1), len(text)):
        if word.startswith(text[start:]):
            return start
    return len(text)
