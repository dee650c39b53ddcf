"""From request bodies to sampling parameters; refuses what could not be honoured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import OutputKind, SamplingParams
from jaxpaged.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest, UnsupportedFields

if TYPE_CHECKING:
    from jaxpaged.weights import GenerationConfig

T = TypeVar("T")

DEFAULT_COMPLETION_TOKENS = 16

_REMOVED = {
    "best_of": "ask for the number of choices with n",
    "guided_json": "structured_outputs replaces it, and is not supported yet",
    "guided_regex": "structured_outputs replaces it, and is not supported yet",
    "guided_choice": "structured_outputs replaces it, and is not supported yet",
    "guided_grammar": "structured_outputs replaces it, and is not supported yet",
}
# Values that change nothing, besides None.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "logprob_token_ids": ([],),
    "echo": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "use_beam_search": (False,),
    "return_prompt_text": (False,),
    "logits_processors": ([],),
    "modalities": (["text"],),
}


def check_supported(body: GenerationRequest) -> None:
    """Refuses a body that sets a parameter which would be ignored although it changes the result.

    Raises:
        InvalidRequestError: names the parameter.
    """
    for name in UnsupportedFields.model_fields:
        value = getattr(body, name)
        if value is None or value in _NEUTRAL.get(name, ()):
            continue
        if name in _REMOVED:
            raise InvalidRequestError(f"{name} was removed from this API: {_REMOVED[name]}", param=name)
        raise InvalidRequestError(f"{name} is not supported yet; leave it out", param=name)


def completion_params(body: CompletionRequest, defaults: GenerationConfig, vocab_size: int) -> SamplingParams:
    """Sampling parameters of a text completion.

    Raises:
        InvalidRequestError: a value out of range, or a parameter that is not supported.
    """
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return _sampling_params(body, defaults, max_tokens=max_tokens, logprobs=_num_logprobs(body.logprobs, vocab_size))


def chat_params(body: ChatCompletionRequest, defaults: GenerationConfig, vocab_size: int) -> SamplingParams:
    """Sampling parameters of a chat completion.

    Raises:
        InvalidRequestError: a value out of range, or a parameter that is not supported.
    """
    return _sampling_params(
        body,
        defaults,
        max_tokens=_first(body.max_completion_tokens, body.max_tokens),
        logprobs=_num_logprobs(body.top_logprobs or 0, vocab_size) if body.logprobs else None,
    )


def truncate(token_ids: list[int], body: GenerationRequest, max_model_len: int) -> list[int]:
    """The prompt, cut to truncate_prompt_tokens; -1 leaves room for one output token."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == -1:
        keep = max_model_len - 1
    if body.truncation_side == "right":
        return token_ids[:keep]
    return token_ids[max(len(token_ids) - keep, 0) :]


def request_priority(body: GenerationRequest, header: str | None) -> int:
    """Priority of a request: the X-Vllm-Priority header's, else the body's.

    Raises:
        InvalidRequestError: the header is no integer.
    """
    if header is None:
        return body.priority
    try:
        return int(header)
    except ValueError:
        raise InvalidRequestError(
            f"the header X-Vllm-Priority is {header!r}, but must be an integer", param="X-Vllm-Priority"
        ) from None


def _sampling_params(
    body: GenerationRequest, defaults: GenerationConfig, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    check_supported(body)
    return SamplingParams(
        n=_or(body.n, 1),
        temperature=_or(_first(body.temperature, defaults.temperature), 1.0),
        top_p=_or(_first(body.top_p, defaults.top_p), 1.0),
        top_k=_or(_first(body.top_k, defaults.top_k), 0),
        min_p=_or(body.min_p, 0.0),
        seed=body.seed,
        max_tokens=max_tokens,
        stop=_stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        include_stop_str_in_output=body.include_stop_str_in_output,
        logprobs=logprobs,
        skip_special_tokens=body.skip_special_tokens,
        output_kind=OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
    )


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _num_logprobs(asked: int | None, vocab_size: int) -> int | None:
    return vocab_size if asked == -1 else asked


def _first(*values: T | None) -> T | None:
    return next((v for v in values if v is not None), None)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
