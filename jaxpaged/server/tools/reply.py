"""From the text of an answer to what the API says of it: the same for streamed and whole answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxpaged.server.responses import Delta, FunctionDelta, ToolCallDelta
from jaxpaged.server.state import random_id
from jaxpaged.server.tools.calls import CallParser
from jaxpaged.server.tools.events import Arguments, Content, Event, Reasoning, ToolEnd, ToolStart
from jaxpaged.server.tools.thinking import ThinkParser


class Reply:
    """One choice's answer.

    Args:
        thinking: parser of its reasoning, None where it has none.
        calls: parser of its tool calls, None where it has none.
        include_reasoning: False leaves the reasoning out.
        parallel_calls: False keeps the first call only.
        tells_calls: the API says "tool_calls" of an answer with calls, and not how the text ended.

    Attributes:
        num_calls: calls so far.
    """

    def __init__(
        self,
        thinking: ThinkParser | None,
        calls: CallParser | None,
        *,
        include_reasoning: bool = True,
        parallel_calls: bool = True,
        tells_calls: bool = True,
    ) -> None:
        self.num_calls = 0
        self._thinking = thinking
        self._calls = calls
        self._tells_calls = tells_calls
        self._include_reasoning = include_reasoning
        self._max_calls = None if parallel_calls else 1
        self._is_dropped = False  # the call that is being read

    def take(self, text: str, *, finished: bool) -> Delta:
        """What the next piece of the text adds; of a text in one piece it is the whole answer.

        A call's first entry has its id, type and name, and all its entries in one delta are one.
        """
        if self._thinking is None and self._calls is None:
            return Delta(content=text)
        content: list[str] = []
        reasoning: list[str] = []
        calls: dict[int, ToolCallDelta] = {}
        arguments: dict[int, list[str]] = {}
        for event in self.events(text, finished=finished):
            match event:
                case Content(piece):
                    content.append(piece)
                case Reasoning(piece):
                    reasoning.append(piece)
                case ToolStart(name):
                    calls[self.num_calls - 1] = _new_call(self.num_calls - 1, name)
                case Arguments(piece):
                    index = self.num_calls - 1
                    if index not in calls:
                        calls[index] = ToolCallDelta(index=index, function=FunctionDelta(arguments=""))
                    arguments.setdefault(index, []).append(piece)
        for index, pieces in arguments.items():
            calls[index].function.arguments = "".join(pieces)
        delta = Delta()  # fields that were never set are not sent
        if content:
            delta.content = "".join(content)
        if reasoning:
            delta.reasoning = "".join(reasoning)
        if calls:
            delta.tool_calls = list(calls.values())
        return delta

    def events(self, text: str, *, finished: bool) -> Iterator[Event]:
        """What the next piece of the text makes certain, in order, without what the request does not want."""
        for event in self._parse(text, finished):
            match event:
                case Reasoning() if not self._include_reasoning:
                    continue
                case ToolStart():
                    self._is_dropped = self.num_calls == self._max_calls
                    if self._is_dropped:
                        continue
                    self.num_calls += 1
                case Arguments() | ToolEnd() if self._is_dropped:
                    continue
            yield event

    def finish_reason(self, reason: str) -> str:
        """What the API says of an answer that the engine ended for `reason`."""
        return "tool_calls" if self.num_calls and self._tells_calls and reason == "stop" else reason

    def _parse(self, text: str, finished: bool) -> Iterable[Event]:
        for event in self._split(text, finished):
            if self._calls is not None and isinstance(event, Content):
                yield from self._calls.feed(event.text)
            else:
                yield event
        if finished and self._calls is not None:
            yield from self._calls.finish()

    def _split(self, text: str, finished: bool) -> list[Event]:
        if self._thinking is None:
            return [Content(text)]
        return self._thinking.feed(text) + (self._thinking.finish() if finished else [])


def new_call_id() -> str:
    return f"call_{random_id()[:24]}"


def _new_call(index: int, name: str) -> ToolCallDelta:
    function = FunctionDelta(name=name, arguments="")
    return ToolCallDelta(index=index, id=new_call_id(), type="function", function=function)
