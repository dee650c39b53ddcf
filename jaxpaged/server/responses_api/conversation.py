"""From a request to /v1/responses to the chat that it means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jaxpaged.errors import InvalidRequestError
from jaxpaged.server.body import parse
from jaxpaged.server.chat_protocol import ChatCompletionRequest, ContentPart
from jaxpaged.server.errors import ApiError
from jaxpaged.server.protocol import GenerationRequest
from jaxpaged.server.responses_api.protocol import (
    InputCall,
    InputCallOutput,
    InputItem,
    InputMessage,
    InputReasoning,
    NamedFunction,
    ResponsesRequest,
)

LOGPROBS = "message.output_text.logprobs"

# What a response has no place for, with the values that ask for nothing, besides None.
REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "response_format": ({"type": "text"},),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_prompt_text": (False,),
    "echo": (False,),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}
_HINTS = {"response_format": "use text.format", "conversation": "use previous_response_id"}
# Names of a chat's fields in a response's terms.
NAMES = {
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}


def chat_request(body: ResponsesRequest, items: Sequence[InputItem]) -> ChatCompletionRequest:
    """The chat that `body` means.

    Args:
        items: of the conversation so far, the body's input included.

    Raises:
        ApiError, InvalidRequestError: 400, it cannot be a chat.
    """
    for name, neutral in REFUSED.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            hint = _HINTS.get(name, "leave it out")
            raise InvalidRequestError(f"{name} is not supported in responses; {hint}", param=name)
    fields: dict[str, Any] = body.model_dump(include=set(GenerationRequest.model_fields), exclude_unset=True)
    for name in ("stream_options", *REFUSED):
        fields.pop(name, None)
    fields |= _own_fields(body)
    fields["messages"] = _messages(body.instructions, items)
    try:
        return parse(ChatCompletionRequest, fields)
    except ApiError as error:
        raise _renamed(error) from None


def _renamed(error: ApiError) -> ApiError:
    param = (error.param or "").replace("body.messages", "body.input")
    return ApiError(error.message.replace("messages.", "input.", 1), param=param, type=error.type)


def _own_fields(body: ResponsesRequest) -> dict[str, Any]:
    """Fields of the chat that a response has in another form or place."""
    fields: dict[str, Any] = {
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "include_reasoning": body.include_reasoning,
        "chat_template_kwargs": body.chat_template_kwargs,
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
    }
    if body.tools:
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude_unset=True, exclude={"type"})}
            for tool in body.tools
        ]
    if isinstance(body.tool_choice, NamedFunction):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    elif body.tools or body.tool_choice != "auto":  # which is also the name of the default without tools
        fields["tool_choice"] = body.tool_choice
    if LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    elif body.top_logprobs:
        raise InvalidRequestError(f'top_logprobs needs "{LOGPROBS}" in include', param="top_logprobs")
    if body.truncation == "auto":
        fields["truncate_prompt_tokens"] = -1
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format.model_dump(exclude_unset=True))
    return fields


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    """A chat has the schema and its name one level deeper."""
    kind = given.pop("type", "text")
    return {"type": kind, "json_schema": given} if kind == "json_schema" else {"type": kind}


def _messages(instructions: str | None, items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """Messages of a chat: reasoning, text and calls of one turn of the model's become one message."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    turn: dict[str, Any] | None = None  # the model's, as long as it goes on
    for item in items:
        if isinstance(item, InputCallOutput):
            turn = None
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
        elif isinstance(item, InputMessage) and item.role != "assistant":
            turn = None
            # Templates know no "developer".
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _content(item.content)})
        else:
            if turn is None or (not isinstance(item, InputCall) and ("content" in turn or "tool_calls" in turn)):
                turn = {"role": "assistant"}
                messages.append(turn)
            _extend(turn, item)
    return messages


def _extend(turn: dict[str, Any], item: InputMessage | InputCall | InputReasoning) -> None:
    if isinstance(item, InputMessage):
        turn["content"] = _content(item.content)
    elif isinstance(item, InputCall):
        function = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    else:
        thoughts = "".join(thought.text for thought in item.content or item.summary or ())
        turn["reasoning"] = turn.get("reasoning", "") + thoughts


def _content(content: str | list[ContentPart | str]) -> Any:
    if isinstance(content, str):
        return content
    return [part if isinstance(part, str) else part.model_dump(exclude_unset=True) for part in content]
