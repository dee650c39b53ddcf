"""How the answers to one chat request are to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from jaxpaged.errors import InvalidRequestError
from jaxpaged.server.chat_protocol import ChatCompletionRequest, NamedToolChoice, ToolDefinition
from jaxpaged.server.chat_template import message_text
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.tools.calls import ToolSchemas
from jaxpaged.server.tools.registry import PLAIN_CALLS, REASONING_PARSERS, TOOL_PARSERS, CallFormat
from jaxpaged.server.tools.reply import Reply
from jaxpaged.server.tools.thinking import Start, ThinkParser, thinking_at_end, thinking_within
from jaxpaged.structured_outputs import StructuredOutputs, json_text
from jaxpaged.tokenizer import backend_tokenizer

# What a grammar has to let pass before the answer.
_BEFORE_ANSWER = {Start.THINKING: "open", Start.UNDECIDED: "optional"}


@dataclass(frozen=True)
class AnswerFormat:
    """
    Attributes:
        calls: format of tool calls, None = they are not looked for.
        schemas: of the request's tools.
        thinking: how an answer begins, None = reasoning is not looked for.
        forced: calls that have to be made, None = none.
        is_named: the request names the function to call.
    """

    calls: CallFormat | None
    schemas: ToolSchemas
    thinking: Start | None
    include_reasoning: bool
    parallel_calls: bool
    forced: StructuredOutputs | None
    is_named: bool

    def form(self, asked: StructuredOutputs | None) -> StructuredOutputs | None:
        """The form of an answer, from what the request asks for beside calls; it does not count for reasoning."""
        form = self.forced or asked
        if form is None or self.thinking not in _BEFORE_ANSWER:
            return form
        return replace(form, thinking=_BEFORE_ANSWER[self.thinking])

    def needs_special_tokens(self, tokenizer: Any) -> bool:
        """Whether a marker of the format is a special token, which answers would leave out."""
        words = (self.calls.words if self.calls is not None else ()) + (ThinkParser.words if self.thinking else ())
        return bool(words) and not _special_tokens(tokenizer).isdisjoint(words)

    def new_reply(self) -> Reply:
        """The reader of one choice."""
        return Reply(
            ThinkParser(self.thinking) if self.thinking is not None else None,
            self.calls.make(self.schemas) if self.calls is not None else None,
            include_reasoning=self.include_reasoning,
            parallel_calls=self.parallel_calls,
            tells_calls=not self.is_named,
        )


def call_format(body: ChatCompletionRequest, config: ServerConfig) -> CallFormat | None:
    """The format of the tool calls to look for in answers to `body`; None = none.

    Raises:
        InvalidRequestError: `tool_choice` cannot be honoured.
    """
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if choice == "none":
        return None
    if not body.tools:
        raise InvalidRequestError("tool_choice needs tools; give some, or leave it out", param="tool_choice")
    if choice != "auto":
        own = TOOL_PARSERS.get(config.tool_call_parser or "", PLAIN_CALLS)
        return own if own.written is not None else PLAIN_CALLS
    if not config.enable_auto_tool_choice or config.tool_call_parser is None:
        raise InvalidRequestError(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set; start the server '
            'with them, or ask with tool_choice "none"',
            param="tool_choice",
        )
    return TOOL_PARSERS[config.tool_call_parser]


def answer_format(
    body: ChatCompletionRequest, config: ServerConfig, calls: CallFormat | None, prompt: str
) -> AnswerFormat:
    """How answers to `body` are to be read.

    Args:
        calls: from `call_format`.
        prompt: text that the body's messages became.
    """
    return AnswerFormat(
        calls,
        {t.function.name: _properties(t) for t in body.tools or ()},
        _thinking(body, config, prompt),
        body.include_reasoning,
        body.parallel_tool_calls is not False,
        _forced_calls(body, calls),
        isinstance(body.tool_choice, NamedToolChoice),
    )


def _forced_calls(body: ChatCompletionRequest, calls: CallFormat | None) -> StructuredOutputs | None:
    """The form of the calls that `body` demands."""
    choice, tools = body.tool_choice, body.tools or []
    if choice in (None, "none", "auto"):
        return None
    assert calls is not None and calls.written is not None, "call_format chooses one that can be forced"
    if body.structured_outputs is not None:
        raise InvalidRequestError(
            "structured_outputs and a tool_choice that demands a call exclude each other; leave one of them out",
            param="structured_outputs",
        )
    if isinstance(choice, NamedToolChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise InvalidRequestError(
                f"tool_choice names {choice.function.name!r}, which is none of the tools", param="tool_choice"
            )
    functions = tuple(
        (
            tool.function.name,
            json_text(f"tool {tool.function.name}", {"type": "object", **(tool.function.parameters or {})}),
            tool.function.strict is True,
        )
        for tool in tools
    )
    is_one = isinstance(choice, NamedToolChoice) or body.parallel_tool_calls is False
    form = replace(calls.written, functions=functions)
    return StructuredOutputs(tool_calls=replace(form, separator=None) if is_one else form)


def _thinking(body: ChatCompletionRequest, config: ServerConfig, prompt: str) -> Start | None:
    if config.reasoning_parser is None:
        return None
    said = thinking_within(message_text(body.messages[-1])) if body.continue_final_message else thinking_at_end(prompt)
    return REASONING_PARSERS[config.reasoning_parser] if said is Start.UNDECIDED else said


def _properties(tool: ToolDefinition) -> Mapping[str, Any]:
    properties = (tool.function.parameters or {}).get("properties")
    return properties if isinstance(properties, dict) else {}


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: Any) -> frozenset[str]:
    added = backend_tokenizer(tokenizer).get_added_tokens_decoder()
    return frozenset(token.content for token in added.values() if token.special)
