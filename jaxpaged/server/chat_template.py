"""From chat messages to a prompt, through the tokenizer's chat template."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from jaxpaged.engine.async_engine import INLINE_TOKENIZE_CHARS
from jaxpaged.errors import InvalidRequestError
from jaxpaged.server.protocol import ChatMessage, TemplateFields

# Arguments of apply_chat_template that are no variables of a template.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


async def render_chat(body: TemplateFields, tokenizer: Any, *, template: str | None, trust_request: bool) -> str:
    """The prompt text that `body`'s messages make.

    Args:
        tokenizer: a transformers tokenizer; its own template serves where `template` is None.
        trust_request: let the body bring its template.

    Raises:
        InvalidRequestError: no template, one that the messages do not fit, or content that is not text.
    """
    if tokenizer is None:
        raise InvalidRequestError("chat needs a tokenizer; use /v1/completions with token ids", param="messages")
    if body.chat_template is not None:
        if not trust_request:
            raise InvalidRequestError(
                "chat_template is not taken from requests here; start the server with --trust-request-chat-template",
                param="chat_template",
            )
        template = body.chat_template
    if template is None and not tokenizer.chat_template:
        raise InvalidRequestError(
            "this model has no chat template; start the server with --chat-template, or use /v1/completions",
            param="messages",
        )
    messages = [_template_message(m) for m in body.messages]
    render = partial(
        tokenizer.apply_chat_template,
        messages,
        chat_template=template,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tokenize=False,
        **_template_variables(body),
    )
    size = sum(len(m.get("content") or "") for m in messages)
    try:
        # A template is a program of the model's author: whatever it raises, the messages did not fit it.
        return render() if size <= INLINE_TOKENIZE_CHARS else await asyncio.to_thread(render)
    except Exception as error:
        raise InvalidRequestError(f"Chat template error: {error}", param="messages") from error


def _template_variables(body: TemplateFields) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    reserved = sorted(_RESERVED & variables.keys())
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs cannot set {reserved[0]!r}; leave it out", param="chat_template_kwargs"
        )
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
