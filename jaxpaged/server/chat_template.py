"""From chat messages to a prompt, through the tokenizer's chat template."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from jaxpaged.engine.async_engine import INLINE_TOKENIZE_CHARS
from jaxpaged.errors import InvalidRequestError
from jaxpaged.server.protocol import ChatMessage, TemplateFields
from jaxpaged.tokenizer import render_chat

# What a message costs beside its text, as characters of it: many short ones take long to render, too.
MESSAGE_CHARS = 32


async def render_body(body: TemplateFields, tokenizer: Any, *, template: str | None, trust_request: bool) -> str:
    """The prompt text that `body`'s messages make.

    Args:
        tokenizer: a transformers tokenizer; its own template serves where `template` is None.
        trust_request: let the body bring its template.

    Raises:
        InvalidRequestError: as `jaxpaged.tokenizer.render_chat`, a template that is not trusted, or content that is not
            text.
    """
    if body.chat_template is not None:
        if not trust_request:
            raise InvalidRequestError(
                "chat_template is not taken from requests here; start the server with --trust-request-chat-template",
                param="chat_template",
            )
        template = body.chat_template
    messages = [_template_message(m) for m in body.messages]
    _name_results(messages)
    render = partial(
        render_chat,
        tokenizer,
        messages,
        chat_template=template,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=[{"type": tool.type, **tool.model_dump(exclude_unset=True)} for tool in body.tools or ()],
        documents=body.documents,
        chat_template_kwargs=_template_variables(body),
    )
    size = sum(MESSAGE_CHARS + len(m["content"]) + len(str(m.get("tool_calls", ""))) for m in messages)
    size += len(str(body.tools)) if body.tools else 0
    return render() if size <= INLINE_TOKENIZE_CHARS else await asyncio.to_thread(render)


def _template_variables(body: TemplateFields) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return variables


def _template_message(message: ChatMessage) -> dict[str, Any]:
    """A message with every field in the one form that templates are written for."""
    fields = message.model_dump(exclude_unset=True)
    fields["content"] = message_text(message)
    if message.tool_calls:
        calls = [{"type": call.type, **call.model_dump(exclude_unset=True)} for call in message.tool_calls]
        for call, given in zip(calls, message.tool_calls, strict=True):
            call["function"]["arguments"] = given.function.arguments
        fields["tool_calls"] = calls
    else:  # templates ask whether the field is there, and then take a first call for granted
        fields.pop("tool_calls", None)
    if isinstance(fields.get("reasoning"), str):
        fields.setdefault("reasoning_content", fields["reasoning"])  # the name that templates know
    return fields


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Adds to each tool's message the name of the function that it is the result of: some templates demand it."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            if isinstance(call.get("id"), str):
                names[call["id"]] = call["function"]["name"]
        call_id = message.get("tool_call_id")
        if message["role"] == "tool" and isinstance(call_id, str) and call_id in names:
            message.setdefault("name", names[call_id])


def message_text(message: ChatMessage) -> str:
    """The text of a message; "" where it has none.

    Raises:
        InvalidRequestError: content that is not text.
    """
    if isinstance(message.content, list):
        return "\n".join(_part_text(part) for part in message.content)
    return message.content or ""


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if part.type not in ("text", "input_text", "output_text", "refusal") or part.text is None:
        raise InvalidRequestError(
            f"a message has content of type {part.type!r}, but this model takes text only", param="messages"
        )
    return str(part.text)
