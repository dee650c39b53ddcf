"""Parsers by the names that the command line takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from jaxpaged.server.tools.calls import CallParser, Llama3Calls, TaggedCalls, ToolSchemas
from jaxpaged.server.tools.thinking import Start
from jaxpaged.structured_outputs import CallForm


@dataclass(frozen=True)
class CallFormat:
    """
    Attributes:
        make: a parser for one answer, by the tools' schemas.
        words: markers that must not be skipped as special tokens.
        written: how calls are written that have to be made, as JSON, but for their functions; None: not as JSON.
    """

    make: Callable[[ToolSchemas], CallParser]
    words: tuple[str, ...]
    written: CallForm | None


_TAGGED = CallForm((), "<tool_call>", "</tool_call>", "\n", "arguments", "\n")
_XML = CallFormat(partial(TaggedCalls, json=False, xml=True), TaggedCalls.words, None)

TOOL_PARSERS: Mapping[str, CallFormat] = {
    "hermes": CallFormat(partial(TaggedCalls, json=True, xml=False), TaggedCalls.words, _TAGGED),
    "llama3_json": CallFormat(Llama3Calls, Llama3Calls.words, CallForm((), separator="; ")),
    "qwen": CallFormat(partial(TaggedCalls, json=True, xml=True), TaggedCalls.words, _TAGGED),
    "qwen3_coder": _XML,
    "qwen3_xml": _XML,
}

# Of calls that have to be made where the model's own format is not known, or is not JSON.
PLAIN_CALLS = TOOL_PARSERS["llama3_json"]

# How an answer begins where the prompt does not say.
REASONING_PARSERS: Mapping[str, Start] = {"deepseek_r1": Start.THINKING, "qwen3": Start.UNDECIDED}
