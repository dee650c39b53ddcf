"""What jaxpaged needs of a tokenizer beside encoding: its fast backend, and chats rendered to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.errors import ConfigError, InvalidRequestError

Message = Mapping[str, Any]

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


def backend_tokenizer(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` inside a fast tokenizer of transformers, or itself.

    Raises:
        ConfigError: a tokenizer written in Python ("slow").
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "token_to_id"):
        raise ConfigError(f"{type(tokenizer).__name__} is not a fast tokenizer: load one with AutoTokenizer")
    return backend


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text that a chat becomes by a chat template (Jinja), special tokens written out.

    Args:
        messages: each with "role" and "content".
        chat_template: None = the tokenizer's own.
        add_generation_prompt: end with the header of the assistant's next message.
        continue_final_message: leave the last message open, to be continued.
        tools: functions that the model may call, in OpenAI's form, for templates that show them.
        documents: for templates that show documents to the model.
        chat_template_kwargs: further variables of the template.

    Raises:
        InvalidRequestError: no template, no messages, a variable of a reserved name, or the template refuses them.
    """
    if tokenizer is None:
        raise InvalidRequestError(
            "a chat needs a tokenizer, and this engine has none; give token ids", param="messages"
        )
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one", param="messages")
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message exclude each other; set one of them to false",
            param="continue_final_message",
        )
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise InvalidRequestError(
            "this model has no chat template; give one (chat_template), or a plain prompt", param="chat_template"
        )
    variables = chat_template_kwargs or {}
    if reserved := sorted(_RESERVED & variables.keys()):
        raise InvalidRequestError(
            f"chat_template_kwargs cannot set {reserved[0]!r}; leave it out", param="chat_template_kwargs"
        )
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=list(tools) if tools else None,
            documents=documents,
            **variables,
        )
    except Exception as error:  # the template is the model's or the user's own code: it may raise anything
        reason = " ".join(str(error).split())
        raise InvalidRequestError(f"Chat template error: {reason}", param="messages") from error
    return text


def check_template(template: str) -> None:
    """Refuses a chat template that is not valid Jinja.

    Raises:
        ConfigError: with the line and the reason.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([], chat_template=template)  # compiles it, with transformers' tags, and renders nothing
    except TemplateSyntaxError as error:
        reason = " ".join((error.message or "syntax error").split()).rstrip(".")
        raise ConfigError(f"the chat template is not valid Jinja: line {error.lineno}: {reason}; correct it") from error


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text.

    Raises:
        InvalidRequestError: a lone surrogate in the text, which stands for no character.
    """
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except TypeError:  # what the library says of a lone surrogate, among other things
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the text is not valid Unicode: {error}", param="prompt") from error
        raise
    return ids


def encode_rendered(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a rendered chat: its special tokens are in the text already, so none is added."""
    return encode(tokenizer, text, add_special_tokens=False)
