"""From chat messages to a prompt, through the tokenizer's chat template."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from jaxpaged.engine.async_engine import INLINE_TOKENIZE_CHARS
from jaxpaged.errors import InvalidRequestError
from jaxpaged.messages import content_text, template_messages
from jaxpaged.server.chat_protocol import ChatMessage, TemplateFields
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
    messages = template_messages([_fields(m) for m in body.messages])
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
    # See `StoredTokenizer`: the event loop cannot wait while it is loaded.
    is_short = size <= INLINE_TOKENIZE_CHARS and getattr(tokenizer, "is_loaded", True)
    return render() if is_short else await asyncio.to_thread(render)


def _template_variables(body: TemplateFields) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return variables


def _fields(message: ChatMessage) -> dict[str, Any]:
    fields = message.model_dump(exclude_unset=True)
    if message.tool_calls:  # with the arguments as they were parsed, also where none were given
        for call, given in zip(fields["tool_calls"], message.tool_calls, strict=True):
            call["function"]["arguments"] = given.function.arguments
    return fields


def message_text(message: ChatMessage) -> str:
    """The text of a message; "" where it has none.

    Raises:
        InvalidRequestError: content that is not text.
    """
    return content_text(message.model_dump(include={"content"}, exclude_unset=True).get("content"))
