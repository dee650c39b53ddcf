"""Mistral: every layer attends through one sliding window, where the config sets one."""

from __future__ import annotations

from typing import Any

from jaxpaged.errors import ModelLoadError
from jaxpaged.models.decoder import DecoderForCausalLM
from jaxpaged.models.hf_config import HFConfig


class MistralForCausalLM(DecoderForCausalLM):
    """No biases; `sliding_window` (v0.1: 4096 tokens, later versions: none) holds for all layers."""

    @classmethod
    def config_fields(cls, hf: HFConfig) -> dict[str, Any]:
        window = hf.integer("sliding_window", default=None)
        if window is not None and "full_attention" in hf.layer_types():
            raise ModelLoadError(
                f"{hf.source}: layer_types alternates windows, which is the Ministral architecture, not Mistral's; "
                "MistralForCausalLM has one window for all layers"
            )
        return {
            "num_kv_heads": hf.integer("num_key_value_heads"),
            "head_dim": hf.head_dim(),
            "windows": (window,) * hf.integer("num_hidden_layers") if window else (),
        }
