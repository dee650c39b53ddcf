"""Qwen3 (dense): each head's queries and keys are RMS-normalized before RoPE; heads are 128 wide whatever E is."""

from __future__ import annotations

from typing import Any

from jaxpaged.models.decoder import DecoderForCausalLM
from jaxpaged.models.hf_config import HFConfig


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Norms on q and k take the place of Qwen2's biases."""

    @classmethod
    def config_fields(cls, hf: HFConfig) -> dict[str, Any]:
        attention_bias = hf.flag("attention_bias")
        return {
            "num_kv_heads": hf.integer("num_key_value_heads"),
            "head_dim": hf.integer("head_dim", default=128),
            "attention_bias": attention_bias,
            "attention_output_bias": attention_bias,
            "qk_norm": True,
            "windows": hf.layer_windows(),
        }
