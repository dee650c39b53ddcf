"""Reading a Hugging Face config.json: typed fields with named errors, RoPE in both its spellings, windows a layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from jaxpaged.config import RopeConfig
from jaxpaged.errors import ModelLoadError

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


class HFConfig:
    """A config.json, read field by field. A key whose value is null counts as missing.

    Attributes:
        source: what error messages call the file.
    """

    def __init__(self, fields: Mapping[str, Any], source: str = "config.json") -> None:
        self._fields = fields
        self.source = source

    def get(self, key: str) -> Any:
        """The raw value, or None."""
        return self._fields.get(key)

    def error(self, key: str, must: str) -> ModelLoadError:
        return ModelLoadError(f"{self.source}: {key} is {self.get(key)!r}, but must be {must}")

    # An explicit `default=None` makes the field optional; `...` (the default) makes it required.
    def integer(self, key: str, *, default: Any = ..., minimum: int = 1) -> Any:
        """An integer of at least `minimum`."""
        value = self._value(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, f"an integer of at least {minimum}")
        return value

    def number(self, key: str, *, default: Any = ...) -> Any:
        """A finite number above 0, as a float."""
        value = self._value(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(key, "a finite number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """A boolean; missing is False."""
        value = self._value(key, False)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def choice(self, key: str, choices: Mapping[str, str], *, default: str) -> str:
        """`choices[value]`: spellings mapped to what they mean."""
        value = self._value(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.error(key, f"one of {', '.join(choices)}")
        return choices[value]

    def _value(self, key: str, default: Any) -> Any:
        value = self._fields.get(key)
        if value is not None:
            return value
        if default is ...:
            raise ModelLoadError(f"{self.source} lacks {key!r}, which the model cannot be built without")
        return default

    def head_dim(self) -> int:
        """`head_dim`, or where it is missing an equal share of the hidden size."""
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        if self.get("head_dim") is None and hidden % heads:
            raise self.error("hidden_size", f"a multiple of num_attention_heads ({heads}) where head_dim is not given")
        return int(self.integer("head_dim", default=hidden // heads))

    def layer_types(self) -> list[str]:
        """`full_attention` or `sliding_attention` for each layer; [] where the file does not say."""
        types = self._value("layer_types", [])
        kinds = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or any(kind not in kinds for kind in types):
            raise self.error("layer_types", f"a list of {' and '.join(kinds)}")
        num_layers = self.integer("num_hidden_layers")
        if types and len(types) != num_layers:
            raise ModelLoadError(f"{self.source}: layer_types has {len(types)} entries for {num_layers} layers")
        return types

    def layer_windows(self) -> tuple[int | None, ...]:
        """Window of each layer by Qwen's rules; () when every layer attends to everything.

        `layer_types` decides where it is given (transformers 5), else `max_window_layers` (layers from there on have
        the window); both only where `use_sliding_window` is set.
        """
        num_layers = self.integer("num_hidden_layers")
        window = self.integer("sliding_window") if self.flag("use_sliding_window") else None
        types = self.layer_types()
        if not types and window:
            first = self.integer("max_window_layers", minimum=0)
            types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
        if "sliding_attention" not in types:
            return ()
        if window is None:
            raise ModelLoadError(f"{self.source}: layer_types has sliding_attention, but use_sliding_window is not set")
        return tuple(window if kind == "sliding_attention" else None for kind in types)

    def rope(self) -> RopeConfig:
        """RoPE from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (4)."""
        key = "rope_parameters" if self.get("rope_parameters") is not None else "rope_scaling"
        parameters = self._shared_rope_parameters(key)
        inner = HFConfig({"rope_theta": self.get("rope_theta"), **parameters}, f"{self.source}: {key}")
        if inner.number("partial_rotary_factor", default=self.number("partial_rotary_factor", default=1.0)) != 1:
            raise ModelLoadError(f"{self.source}: partial_rotary_factor is not supported; only whole heads are rotated")
        kind = inner.get("rope_type") or inner.get("type") or "default"
        theta = inner.number("rope_theta", default=10_000.0)
        if theta <= 1:
            raise inner.error("rope_theta", "above 1")
        trained = self.integer("max_position_embeddings")
        original = self.integer("original_max_position_embeddings", default=trained)
        original = inner.integer("original_max_position_embeddings", default=original)
        match kind:
            case "default":
                return RopeConfig(theta=theta)
            case "linear":
                return RopeConfig(theta=theta, kind="linear", factor=inner.number("factor"))
            case "llama3":
                low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
                if low >= high:
                    raise inner.error("low_freq_factor", f"below high_freq_factor ({high:g})")
                return RopeConfig(
                    theta=theta,
                    kind="llama3",
                    factor=inner.number("factor"),
                    low_freq_factor=low,
                    high_freq_factor=high,
                    original_max_position_embeddings=original,
                )
            case "yarn":
                return _yarn(inner, theta, original, default_factor=trained / original)
            case _:
                raise ModelLoadError(
                    f"{self.source}: rope type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}"
                )

    def _shared_rope_parameters(self, key: str) -> dict[str, Any]:
        """The RoPE dict; one that is split by layer type must say the same for each type."""
        parameters = self.get(key) or {}
        if not isinstance(parameters, Mapping):
            raise self.error(key, "an object")
        by_layer_type = [dict(p) for p in parameters.values() if isinstance(p, Mapping)]
        if not by_layer_type:
            return dict(parameters)
        if any(p != by_layer_type[0] for p in by_layer_type):
            raise ModelLoadError(f"{self.source}: {key} differs between layer types, which is not supported")
        return by_layer_type[0]


def _yarn(parameters: HFConfig, theta: float, original: int, *, default_factor: float) -> RopeConfig:
    if parameters.get("truncate") is False:
        raise ModelLoadError(f"{parameters.source}: YaRN with truncate = false is not supported")
    factor = parameters.number("factor", default=default_factor)
    attention_factor = parameters.number("attention_factor", default=None)
    scale, scale_all = parameters.number("mscale", default=None), parameters.number("mscale_all_dim", default=None)
    if attention_factor is None and scale and scale_all:
        stretch = 0.1 * math.log(max(factor, 1.0))
        attention_factor = (scale * stretch + 1) / (scale_all * stretch + 1)
    kind: Literal["yarn"] = "yarn"
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=parameters.number("beta_fast", default=32.0),
        beta_slow=parameters.number("beta_slow", default=1.0),
        attention_factor=attention_factor,
    )
