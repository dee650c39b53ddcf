"""Checks a request against the engine before any work is queued."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from jaxpaged.core.beam import num_candidates
from jaxpaged.core.constraints import MAX_EDITS
from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import Request, SamplingParams
from jaxpaged.tokenizer import encode


def check_prompt(token_ids: list[int], *, vocab_size: int, max_model_len: int, draws: bool = True) -> None:
    """Refuses a prompt that cannot be served.

    Args:
        draws: output is to follow.

    Raises:
        InvalidRequestError: empty, no integers, a token id outside the vocabulary, or no room for one output token.
    """
    if not token_ids:
        raise InvalidRequestError("the prompt is empty; give at least one token", param="prompt")
    odd = next((kind for kind in set(map(type, token_ids)) if not issubclass(kind, int)), None)
    if odd is not None:
        raise InvalidRequestError(f"token ids must be int, but the prompt has a {odd.__name__}", param="prompt")
    bad = next((t for t in token_ids if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise InvalidRequestError(
            f"Token id {bad} is out of vocabulary: ids go from 0 to {vocab_size - 1}", param="prompt"
        )
    if len(token_ids) + draws > max_model_len:
        reason = "exceeds this limit even without" if len(token_ids) > max_model_len else "leaves no room for"
        raise InvalidRequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{len(token_ids)} input tokens, which {reason} any output tokens. Please reduce the length of the input "
            f"prompt. (parameter=input_tokens, value={len(token_ids)})",
            param="input_tokens",
        )


def check_params(
    params: SamplingParams, *, vocab_size: int, max_model_len: int, max_num_seqs: int, max_logprobs: int
) -> None:
    """Refuses sampling parameters that this engine cannot honour.

    Raises:
        InvalidRequestError: names the parameter, its value and the limit.
    """
    if params.n > max_num_seqs:
        raise InvalidRequestError(
            f"n is {params.n}, but this engine runs at most {max_num_seqs} sequences at once (max_num_seqs)", param="n"
        )
    if params.max_tokens is not None and params.max_tokens > max_model_len:
        raise InvalidRequestError(
            f"max_tokens is {params.max_tokens}, but this model's maximum context length is {max_model_len} tokens",
            param="max_tokens",
        )
    check_beams(params)
    for name in ("logprobs", "prompt_logprobs"):
        _check_logprobs(name, getattr(params, name), vocab_size, max_logprobs)
    ids: dict[str, Iterable[int]] = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "logprob_token_ids": params.logprob_token_ids,
    }
    for name, token_ids in ids.items():
        bad = next((t for t in token_ids if t >= vocab_size), None)
        if bad is not None:
            raise InvalidRequestError(
                f"{name} has {bad}, which is out of vocabulary: ids go from 0 to {vocab_size - 1}", param=name
            )


def check_constraints(request: Request) -> None:
    """Refuses a request whose parameters leave no token to draw, or change more logits than a step has room for.

    Raises:
        InvalidRequestError: names the parameter.
    """
    constraints, params = request.constraints, request.params
    if constraints is None:
        return
    if len(constraints.early) > MAX_EDITS:
        raise InvalidRequestError(
            f"logit_bias, bad_words and min_tokens change {len(constraints.early)} logits, but at most {MAX_EDITS} are "
            "allowed",
            param="logit_bias",
        )
    if params.allowed_token_ids is None:
        return
    left = {t for t in params.allowed_token_ids if t < request.vocab_size}
    if not left:
        raise InvalidRequestError("allowed_token_ids has no id of the tokenizer's", param="allowed_token_ids")
    left -= {word[0] for word in request.bad_words if len(word) == 1}
    if not left:
        raise InvalidRequestError("bad_words forbids every id of allowed_token_ids", param="bad_words")
    if params.min_tokens and left <= set(params.stop_token_ids) | request.eos_token_ids:
        raise InvalidRequestError(
            "min_tokens forbids every id of allowed_token_ids: all of them end the output", param="min_tokens"
        )


# What a beam search heeds, or what makes no difference to it: it draws nothing.
_BEAM_PARAMS = {
    "beam_search",
    "n",
    "max_tokens",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "temperature",
    "seed",
}


def check_beams(params: SamplingParams) -> None:
    """Refuses parameters that a beam search would have to ignore.

    Raises:
        InvalidRequestError: names the parameter.
    """
    if params.beam_search is None:
        return
    params = replace(params, top_k=max(params.top_k, 0))  # -1 is off, too
    for field in fields(params):
        if field.name not in _BEAM_PARAMS and getattr(params, field.name) != field.default:
            raise InvalidRequestError(f"{field.name} is not available with beam search; leave it out", param=field.name)


def check_beam_width(request: Request, max_logprobs: int) -> None:
    """Refuses more beams than the engine can rank.

    Raises:
        InvalidRequestError: names the width and the limit.
    """
    if request.beams is None:
        return
    width, needed = request.params.n, num_candidates(request.params.n, request.stop_ids)
    if needed > request.vocab_size:
        raise InvalidRequestError(
            f"the beam width is {width}, but the vocabulary of {request.vocab_size} tokens has no room for "
            f"{needed} continuations of a beam; lower it",
            param="n",
        )
    if max_logprobs != -1 and needed > max_logprobs:
        raise InvalidRequestError(
            f"a beam width of {width} needs {needed} log-probabilities for each beam (with {needed - width} stop "
            f"tokens), but this engine has {max_logprobs}; lower it or raise max_logprobs",
            param="n",
        )


def with_all_logprobs(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """`params` with -1, which asks for all log-probabilities, written as how many these are."""
    names = [name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) == -1]
    return replace(params, **dict.fromkeys(names, vocab_size)) if names else params  # type: ignore[arg-type]


def bad_word_ids(words: Iterable[str], tokenizer: Any | None) -> tuple[tuple[int, ...], ...]:
    """Token ids of bad words, as each is spelled at the front of a text and behind a space.

    The second spelling counts only if it has as many tokens and begins with another: else its first token is a space of
    its own, which the first spelling does not need.

    Raises:
        InvalidRequestError: no tokenizer.
    """
    if words and tokenizer is None:
        raise InvalidRequestError("bad_words needs a tokenizer, and this engine has none", param="bad_words")
    spellings = []
    for word in words:
        text = word.lstrip()
        plain, spaced = (tuple(encode(tokenizer, t, add_special_tokens=False)) for t in (text, f" {text}"))
        spellings.append(plain)
        if len(plain) == len(spaced) and plain[0] != spaced[0]:
            spellings.append(spaced)
    return tuple(spellings)


def _check_logprobs(name: str, asked: int | None, vocab_size: int, max_logprobs: int) -> None:
    if asked is None or max_logprobs == -1:
        return
    count = vocab_size if asked == -1 else asked
    if count > max_logprobs:
        what = f"{name} is {asked}" + (f" (all {vocab_size})" if asked == -1 else "")
        raise InvalidRequestError(f"{what}, but this engine reports at most {max_logprobs} (max_logprobs)", param=name)
