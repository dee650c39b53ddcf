"""Messages of a chat, in OpenAI's forms, brought to the one form that chat templates are written for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.errors import InvalidRequestError
from jaxpaged.tokenizer import Message

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of `messages`: content as text, arguments of calls as mappings, and results that name their functions.

    Raises:
        InvalidRequestError: content that is not text, or calls that are malformed.
    """
    copies = [_template_message(message) for message in messages]
    names: dict[str, str] = {}
    for message in copies:
        for call in message.get("tool_calls", ()):
            if isinstance(call.get("id"), str):
                names[call["id"]] = call["function"]["name"]
        call_id = message.get("tool_call_id")
        if message.get("role") == "tool" and isinstance(call_id, str) and call_id in names:
            message.setdefault("name", names[call_id])  # some templates demand it
    return copies


def content_text(content: object) -> str:
    """The text of a message's content; "" where it has none.

    Args:
        content: text, or a list of texts and of parts such as {"type": "text", "text": ...}.

    Raises:
        InvalidRequestError: content that is not text.
    """
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        return "\n".join(_part_text(part) for part in content)
    if content is not None and not isinstance(content, str):
        raise InvalidRequestError(
            f"a message has content of type {type(content).__name__}; give text or a list of parts", param="messages"
        )
    return content or ""


def parse_arguments(arguments: object) -> dict[str, Any]:
    """Arguments of a call as a mapping.

    Args:
        arguments: a mapping, the text of a JSON object, or nothing.

    Raises:
        ValueError: something else.
    """
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments of a function call must be a JSON object: {error}") from None
    if not isinstance(arguments, Mapping):
        raise ValueError("the arguments of a function call must be a JSON object")
    return dict(arguments)


def _template_message(message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{message!r:.80} is no message; give a mapping", param="messages")
    fields = dict(message)
    fields["content"] = content_text(fields.get("content"))
    if fields.get("tool_calls"):
        fields["tool_calls"] = [_template_call(call) for call in fields["tool_calls"]]
    else:  # templates ask whether the field is there, and then take a first call for granted
        fields.pop("tool_calls", None)
    if isinstance(fields.get("reasoning"), str):
        fields.setdefault("reasoning_content", fields["reasoning"])  # the name that templates know
    return fields


def _template_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f'{call!r:.80} is no tool call; it needs a "function" with a "name" and "arguments"', param="messages"
        )
    try:
        arguments = parse_arguments(function.get("arguments"))
    except ValueError as error:
        raise InvalidRequestError(str(error), param="messages") from None
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in _TEXT_PARTS:
        raise InvalidRequestError(
            f"a message has content of type {kind!r}, but this model takes text only", param="messages"
        )
    assert isinstance(part, Mapping)
    text = part.get("text", part.get("refusal"))
    if not isinstance(text, str):
        raise InvalidRequestError(f"a message has a part of type {kind!r} without a text", param="messages")
    return text
