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
    render = partial(
        render_chat,
        tokenizer,
        messages,
        chat_template=template,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        documents=body.documents,
        chat_template_kwargs=_template_variables(body),
    )
    size = sum(MESSAGE_CHARS + len(m.get("content") or "") for m in messages)
    return render() if size <= INLINE_TOKENIZE_CHARS else await asyncio.to_thread(render)


def _template_variables(body: TemplateFields) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return variables


def _template_message(message: ChatMessage) -> dict[str, Any]:
    fields = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        fields["content"] = "\n".join(_part_text(part) for part in message.content)
    elif message.content is None:
        fields["content"] = ""
    return fields


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if part.type not in ("text", "input_text", "output_text", "refusal") or part.text is None:
        raise InvalidRequestError(
            f"a message has content of type {part.type!r}, but this model takes text only", param="messages"
        )
    return str(part.text)
