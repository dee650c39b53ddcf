"""What callers of `LLM` give, one or many, brought to one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from jaxpaged.blocking_engine import Prompt
from jaxpaged.errors import InvalidRequestError
from jaxpaged.pooling import PoolingParams
from jaxpaged.request import SamplingParams

P = TypeVar("P", SamplingParams, PoolingParams)

# As vLLM's methods take it: {"prompt": text} or {"prompt_token_ids": ids}.
PromptMapping = Mapping[str, Any]
_KEYS = ("prompt_token_ids", "prompt")  # of both, the ids are taken


def as_prompts(prompts: object) -> list[Prompt]:
    """A list of prompts, from one or many.

    Raises:
        InvalidRequestError: something else is among them.
    """
    if isinstance(prompts, (str, Mapping)):
        return [_as_prompt(prompts)]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts is of type {type(prompts).__name__}; give text, a list of token ids, or a list of either",
            param="prompts",
        )
    if len(prompts) > 0 and all(isinstance(item, int) for item in prompts):
        return [list(prompts)]
    return [_as_prompt(item) for item in prompts]


def _as_prompt(item: object) -> Prompt:
    if isinstance(item, Mapping):
        if unknown := [key for key in item if key not in _KEYS]:
            raise InvalidRequestError(
                f"a prompt has the key {unknown[0]!r}, but may have {' or '.join(map(repr, _KEYS))} only",
                param="prompts",
            )
        item = next((item[key] for key in _KEYS if key in item), None)
    is_ids = isinstance(item, list) and all(isinstance(token, int) for token in item)
    if not isinstance(item, str) and not is_ids:
        raise InvalidRequestError(f"{item!r:.80} is no prompt; give text or a list of token ids", param="prompts")
    return cast(Prompt, item)


def params_of_each(params: object, kind: type[P], count: int, name: str) -> list[P]:
    """Parameters of each of `count` prompts, from one for all or a list of them.

    Args:
        name: of the argument, for errors.

    Raises:
        InvalidRequestError: another type, or not as many as prompts.
    """
    each = [as_params(p, kind, name) for p in (params if isinstance(params, (list, tuple)) else [params] * count)]
    if len(each) != count:
        what = name.replace("params", "parameters").replace("_", " ")
        raise InvalidRequestError(f"{len(each)} {what} for {count} prompts; give one, or one for each", param=name)
    return each


def as_params(params: object, kind: type[P], name: str) -> P:
    """`params`, if they are of that kind.

    Raises:
        InvalidRequestError: another type.
    """
    if not isinstance(params, kind):
        raise InvalidRequestError(f"{params!r:.80} is no {kind.__name__}; give one, e.g. {kind.__name__}()", param=name)
    return params
