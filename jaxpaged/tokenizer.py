"""What jaxpaged needs of a tokenizer beside encoding: its fast backend, and chats rendered to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.errors import ConfigError, InvalidRequestError

Message = Mapping[str, Any]


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
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text that a chat becomes by a chat template (Jinja), special tokens written out.

    Args:
        messages: each with "role" and "content".
        chat_template: None = the tokenizer's own.
        add_generation_prompt: end with the header of the assistant's next message.
        continue_final_message: leave the last message open, to be continued.
        template_kwargs: further variables of the template.

    Raises:
        InvalidRequestError: no template, no messages, or the template refuses them.
    """
    if tokenizer is None:
        raise InvalidRequestError("a chat needs a tokenizer, and this engine has none; give token ids")
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one", param="messages")
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message exclude each other; set one of them to false",
            param="continue_final_message",
        )
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise InvalidRequestError("this model has no chat template; pass chat_template", param="chat_template")
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(template_kwargs or {}),
        )
    except Exception as error:  # the template is the model's or the user's own code: it may raise anything
        raise InvalidRequestError(f"the chat template refuses these messages: {error}", param="messages") from error
    return text


def encode_rendered(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a rendered chat: its special tokens are in the text already, so none is added."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
