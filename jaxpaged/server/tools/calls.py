"""Parsers of tool calls, one a family of formats."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxpaged.server.tools.call_object import CallObject, Verdict
from jaxpaged.server.tools.events import Arguments, Content, ToolEnd, ToolStart
from jaxpaged.server.tools.json_scanner import SPACE
from jaxpaged.server.tools.machine import CutOffError, Machine, MalformedError, Steps
from jaxpaged.server.tools.xml_values import ParameterValue, json_string

Properties = Mapping[str, Any]
ToolSchemas = Mapping[str, Properties]


class CallParser(Machine):
    """What parsers of tool calls have in common.

    Text that is no call is content, character by character, and so is what is left of a call that turns out to be
    malformed. A call that has begun stays one: what was sent cannot be taken back. White space around calls belongs
    to neither.

    Args:
        tools: JSON schema of each parameter ("properties"), by function name.

    Attributes:
        words: what marks calls. Where a tokenizer has special tokens for them, these must not be skipped.
    """

    words: ClassVar[tuple[str, ...]]

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__()
        self._tools = tools
        self._space: list[str] = []  # white space that is content only if content follows
        self._after_call = False  # nothing but white space has followed the last call

    def _run(self) -> Steps[None]:
        while True:
            word, tail = yield from self._until(self.words, self._say)
            if not word:
                break
            yield from self._marked(word)
        if not self._after_call:
            self._say(tail)
            space = "".join(self._space)
            if space and not self._after_call:
                self._events.append(Content(space))

    @abstractmethod
    def _marked(self, word: str) -> Steps[None]:
        """Goes on after a marker."""

    def _say(self, text: str) -> None:
        said = text.rstrip(SPACE)
        if said:
            self._events.append(Content("".join(self._space) + said))
            self._space.clear()
            self._after_call = False
        if len(said) < len(text):
            self._space.append(text[len(said) :])

    def _begin(self, name: str) -> None:
        self._events.append(ToolStart(name))
        self._held.clear()
        self._space.clear()

    def _end(self) -> None:
        self._events.append(ToolEnd())
        self._after_call = True

    def _object(self, call: CallObject) -> Steps[None]:
        """Reads a JSON object: a call, or content."""
        while not call.ended and (yield from self._peek()):
            before = call.verdict
            self._held.append(self._consume(call.feed(self._text, self._pos)))
            if call.verdict is Verdict.CALL:
                self._held.clear()
                if before is Verdict.OPEN:
                    self._space.clear()
                self._events += call.take_events()
            elif call.verdict is Verdict.OTHER:
                self._say(self._take_held())
        self._after_call = call.verdict is Verdict.CALL
        if call.verdict is Verdict.CALL and not call.ended:
            self._events.append(ToolEnd())
        self._say(self._take_held())


class TaggedCalls(CallParser):
    """Calls between <tool_call> and </tool_call>: JSON objects (Hermes), or XML (Qwen 3 Coder).

    XML may come without <tool_call>, which Qwen 3 Coder forgets at times, if the function is one that was given.

    Args:
        json: take JSON objects.
        xml: take XML.
    """

    words = ("<tool_call>", "</tool_call>", "<function=")

    def __init__(self, tools: ToolSchemas, *, json: bool, xml: bool) -> None:
        super().__init__(tools)
        self._json = json
        self._xml = xml

    def _marked(self, word: str) -> Steps[None]:
        if word == "</tool_call>" and self._after_call:
            self._space.clear()
            return
        self._held.append(word)
        first = (yield from self._skip_space()) if word == "<tool_call>" else ""
        if first == "{" and self._json:
            yield from self._object(CallObject(lambda _name: True, other_keys=True))
        elif self._xml and (first == "<" or word == "<function="):
            yield from self._function(tagged=word == "<tool_call>")
        else:
            self._say(self._take_held())

    def _function(self, *, tagged: bool) -> Steps[None]:
        try:
            if tagged:
                yield from self._one_of(("<function=",))
            name = yield from self._name()
            if not tagged and name not in self._tools:
                raise MalformedError
            parameter = yield from self._parameter()
        except MalformedError:
            self._say(self._take_held())
            return
        self._begin(name)
        try:
            yield from self._parameters(parameter, self._tools.get(name, {}))
        except CutOffError:
            self._consume(len(self._text))
            self._held.clear()
        except MalformedError:
            pass
        self._end()
        self._say(self._take_held())

    def _name(self) -> Steps[str]:
        """Holds a name and the ">" after it; returns the name."""
        chars: list[str] = []
        while (char := (yield from self._peek())) != ">":
            if not char or char in '<"\n':
                raise MalformedError if char else CutOffError
            chars.append(char)
            self._held.append(char)
            self._pos += 1
        name = "".join(chars).strip()
        if not name:
            raise MalformedError
        self._held.append(char)
        self._pos += 1
        return name

    def _parameter(self) -> Steps[str]:
        """Holds the start of the next parameter and returns its name; "" at the end of the function."""
        yield from self._skip_space()
        word = yield from self._one_of(("<parameter=", "</function>", "</tool_call>"))
        return (yield from self._name()) if word == "<parameter=" else ""

    def _parameters(self, name: str, properties: Properties) -> Steps[None]:
        separator = "{"
        while name:
            value = ParameterValue(properties.get(name))
            self._events.append(Arguments(f"{separator}{json_string(name)}: {value.opening}"))
            separator = ", "
            yield from self._value(value)
            name = yield from self._parameter()
            self._held.clear()
        self._events.append(Arguments("{}" if separator == "{" else "}"))

    def _value(self, value: ParameterValue) -> Steps[None]:
        def pass_on(text: str) -> None:
            if written := value.feed(text):
                self._events.append(Arguments(written))

        word, _ = yield from self._until(("</parameter>",), pass_on)
        rest = value.end() if word else value.cut()
        if rest:
            self._events.append(Arguments(rest))


class Llama3Calls(CallParser):
    """JSON objects that name a function that was given, anywhere in the text; <|python_tag|> may stand before them."""

    words = ("<|python_tag|>", "{", ";")

    def _marked(self, word: str) -> Steps[None]:
        if word == ";" and self._after_call:
            self._space.append(word)
            return
        self._held.append(word)
        if word == "<|python_tag|>" and (yield from self._skip_space()) == "{":
            word = self._consume(self._pos + 1)
            self._held.append(word)
        if word == "{":
            call = CallObject(self._tools.__contains__, other_keys=False)
            call.feed(word, 0)
            yield from self._object(call)
        else:
            self._say(self._take_held())
