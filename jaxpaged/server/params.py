"""From request bodies to sampling parameters; refuses what could not be honoured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from jaxpaged.core.beam import BeamSettings
from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import OutputKind, SamplingParams
from jaxpaged.server.chat_protocol import ChatCompletionRequest
from jaxpaged.server.protocol import (
    ApiModel,
    CompletionRequest,
    GenerationRequest,
    PromptFields,
    UnsupportedFields,
    UnsupportedInText,
)
from jaxpaged.server.structured import answer_form

if TYPE_CHECKING:
    from jaxpaged.weights import GenerationConfig

T = TypeVar("T")

DEFAULT_COMPLETION_TOKENS = 16

_REMOVED = {
    "best_of": "ask for the number of choices with n",
    "guided_json": "use structured_outputs with json",
    "guided_regex": "use structured_outputs with regex",
    "guided_choice": "use structured_outputs with choice",
    "guided_grammar": "use structured_outputs with grammar",
}
# Values that change nothing, besides None.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "logits_processors": ([],),
    "modalities": (["text"],),
}


def check_supported(body: GenerationRequest) -> None:
    """Refuses a body that sets a parameter which would be ignored although it changes the result.

    Raises:
        InvalidRequestError: names the parameter.
    """
    unsupported = [name for part in (UnsupportedFields, UnsupportedInText) for name in _fields(body, part)]
    for name in unsupported:
        value = getattr(body, name)
        if value is None or value in _NEUTRAL.get(name, ()):
            continue
        if name in _REMOVED:
            raise InvalidRequestError(f"{name} was removed from this API: {_REMOVED[name]}", param=name)
        raise InvalidRequestError(f"{name} is not supported yet; leave it out", param=name)


def _fields(body: GenerationRequest, part: type[ApiModel]) -> Iterable[str]:
    return part.model_fields if isinstance(body, part) else ()


def completion_params(body: CompletionRequest, defaults: GenerationConfig) -> SamplingParams:
    """Sampling parameters of a text completion.

    Raises:
        InvalidRequestError: a value out of range, or a parameter that is not supported.
    """
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo:
        max_tokens = max(max_tokens, 1)  # the engine draws a token, which the answer does not show
    params = _sampling_params(body, defaults, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.echo and params.prompt_logprobs is None and params.wants_logprobs:
        return replace(params, prompt_logprobs=params.logprobs or 0)
    return params


def chat_params(body: ChatCompletionRequest, defaults: GenerationConfig) -> SamplingParams:
    """Sampling parameters of a chat completion.

    Raises:
        InvalidRequestError: a value out of range, or a parameter that is not supported.
    """
    return _sampling_params(
        body,
        defaults,
        max_tokens=_first(body.max_completion_tokens, body.max_tokens),
        logprobs=body.top_logprobs or 0 if body.logprobs else None,
    )


def truncate(
    token_ids: list[int], body: PromptFields, limit: int, *, side: Literal["left", "right"] = "left"
) -> list[int]:
    """The prompt, cut to truncate_prompt_tokens.

    Args:
        limit: most tokens that a prompt may have; -1 stands for it.
        side: that is cut off unless the request names one.

    Raises:
        InvalidRequestError: nothing would be left.
    """
    keep = body.truncate_prompt_tokens
    if keep == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens is 0, which leaves nothing of the prompt; give a positive number, or -1",
            param="truncate_prompt_tokens",
        )
    if keep is None:
        return token_ids
    if keep == -1:
        keep = limit
    if (body.truncation_side or side) == "right":
        return token_ids[:keep]
    return token_ids[max(len(token_ids) - keep, 0) :]


def request_priority(body: PromptFields, header: str | None) -> int:
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
    beams = _beam_settings(body)
    if beams is not None:  # the model's defaults are for drawing
        defaults = replace(defaults, top_p=None, top_k=None, min_p=None, repetition_penalty=None)
    return SamplingParams(
        n=_or(body.n, 1),
        temperature=0.0 if beams is not None else _or(_first(body.temperature, defaults.temperature), 1.0),
        top_p=_or(_first(body.top_p, defaults.top_p), 1.0),
        top_k=_or(_first(body.top_k, defaults.top_k), 0),
        min_p=_or(_first(body.min_p, defaults.min_p), 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        repetition_penalty=_or(_first(body.repetition_penalty, defaults.repetition_penalty), 1.0),
        logit_bias=cast(Mapping[int, float] | None, body.logit_bias),  # SamplingParams reads the digits of its keys
        bad_words=tuple(body.bad_words or ()),
        allowed_token_ids=body.allowed_token_ids,
        min_tokens=_or(body.min_tokens, 0),
        seed=body.seed,
        max_tokens=max_tokens,
        stop=_stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        include_stop_str_in_output=body.include_stop_str_in_output,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        logprob_token_ids=tuple(body.logprob_token_ids or ()),
        skip_special_tokens=body.skip_special_tokens,
        output_kind=OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
        beam_search=beams,
        structured_outputs=answer_form(body.response_format, body.structured_outputs),
    )


def _beam_settings(body: GenerationRequest) -> BeamSettings | None:
    if not body.use_beam_search:
        return None
    if body.stream:
        raise InvalidRequestError(
            "stream is not available with use_beam_search: the outputs are known at the end; leave one of them out",
            param="stream",
        )
    return BeamSettings(_or(body.length_penalty, 1.0))


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _first(*values: T | None) -> T | None:
    return next((v for v in values if v is not None), None)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
