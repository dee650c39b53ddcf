"""The generation defaults that a model brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.errors import ModelLoadError


@dataclass(frozen=True)
class GenerationConfig:
    """What a model's makers say about sampling from it; None where they say nothing.

    Attributes:
        eos_token_ids: ids that end an answer; may be empty.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def generation_config(generation: Mapping[str, Any], config: Mapping[str, Any], source: object) -> GenerationConfig:
    """From generation_config.json, with the ids of config.json where it has none.

    Raises:
        ModelLoadError: a value of the wrong type.
    """
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [eos]
    bos = generation.get("bos_token_id", config.get("bos_token_id"))
    return GenerationConfig(
        eos_token_ids=tuple(i for i in (_integer("eos_token_id", i, source) for i in ids) if i is not None),
        bos_token_id=_integer("bos_token_id", bos, source),
        temperature=_number("temperature", generation.get("temperature"), source),
        top_p=_number("top_p", generation.get("top_p"), source),
        top_k=_integer("top_k", generation.get("top_k"), source),
        min_p=_number("min_p", generation.get("min_p"), source),
        repetition_penalty=_number("repetition_penalty", generation.get("repetition_penalty"), source),
    )


def _integer(name: str, value: Any, source: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ModelLoadError(f"{source}: {name} is {value!r}, but must be an integer")


def _number(name: str, value: Any, source: object) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise ModelLoadError(f"{source}: {name} is {value!r}, but must be a number")
