"""Separates a model's reasoning, between <think> and </think>, from its answer."""

from __future__ import annotations

from enum import Enum, auto

from jaxpaged.server.tools.events import Content, Reasoning
from jaxpaged.server.tools.json_scanner import SPACE
from jaxpaged.server.tools.machine import Machine, MalformedError, Steps

OPEN, CLOSE = "<think>", "</think>"


class Start(Enum):
    """How an answer begins.

    Attributes:
        THINKING: inside the reasoning; another <think> at the very beginning is left out.
        ANSWER: after the reasoning, or without any.
        UNDECIDED: with reasoning if the text opens with <think>.
    """

    THINKING = auto()
    ANSWER = auto()
    UNDECIDED = auto()


def thinking_at_end(prompt: str) -> Start:
    """What the end of a prompt says: it opens the reasoning, or shows it as closed, or neither.

    Only its very end counts: messages before it may be about these tags.
    """
    end = prompt.rstrip(SPACE)
    if end.endswith(OPEN):
        return Start.THINKING
    return Start.ANSWER if end.endswith(CLOSE) else Start.UNDECIDED


def thinking_within(message: str) -> Start:
    """What the beginning of an answer, which is to be continued, says."""
    opened, closed = message.rfind(OPEN), message.rfind(CLOSE)
    if opened == closed:  # neither is there
        return Start.ANSWER if message.strip(SPACE) else Start.UNDECIDED
    return Start.THINKING if opened > closed else Start.ANSWER


class ThinkParser(Machine):
    """Reasoning up to </think>, then content; both verbatim, without the tags."""

    words = (OPEN, CLOSE)

    def __init__(self, start: Start) -> None:
        super().__init__()
        self._start = start

    def _run(self) -> Steps[None]:
        if self._start is not Start.ANSWER:
            thinks = yield from self._opened()
            if thinks or self._start is Start.THINKING:
                self._reason(self._take_held())
                _, tail = yield from self._until((CLOSE,), self._reason)
                self._reason(tail)
        self._answer(self._take_held())
        while (yield from self._peek()):
            self._answer(self._consume(len(self._text)))

    def _opened(self) -> Steps[bool]:
        """Drops white space and <think>; holds the white space if no <think> comes."""
        yield from self._skip_space()
        try:
            yield from self._one_of((OPEN,))
        except MalformedError:
            return False
        self._held.clear()
        return True

    def _reason(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))

    def _answer(self, text: str) -> None:
        if text:
            self._events.append(Content(text))
