"""Qwen2 and Qwen2.5: biases on queries, keys and values; some layers may attend through a window."""

from __future__ import annotations

from typing import Any

from jaxpaged.models.decoder import DecoderForCausalLM
from jaxpaged.models.hf_config import HFConfig


class Qwen2ForCausalLM(DecoderForCausalLM):
    """q, k and v always have biases, the output projection never."""

    @classmethod
    def config_fields(cls, hf: HFConfig) -> dict[str, Any]:
        return {
            "num_kv_heads": hf.integer("num_key_value_heads"),
            "head_dim": hf.head_dim(),
            "attention_bias": True,
            "windows": hf.layer_windows(),
        }
