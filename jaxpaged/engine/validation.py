"""Checks a request against the engine before any work is queued."""

from __future__ import annotations

from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import SamplingParams


def check_prompt(token_ids: list[int], *, vocab_size: int, max_model_len: int) -> None:
    """Refuses a prompt that cannot be served.

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
    if len(token_ids) >= max_model_len:
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
    if params.logprobs is not None and params.logprobs > max_logprobs:
        raise InvalidRequestError(
            f"logprobs is {params.logprobs}, but this engine reports at most {max_logprobs} (max_logprobs)",
            param="logprobs",
        )
    bad = next((t for t in params.stop_token_ids if t >= vocab_size), None)
    if bad is not None:
        raise InvalidRequestError(
            f"stop_token_ids has {bad}, which is out of vocabulary: ids go from 0 to {vocab_size - 1}",
            param="stop_token_ids",
        )
