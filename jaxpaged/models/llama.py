"""Llama 2 and 3.x, and models of the same architecture such as SmolLM2."""

from __future__ import annotations

from typing import Any

from jaxpaged.models.decoder import DecoderForCausalLM
from jaxpaged.models.hf_config import HFConfig


class LlamaForCausalLM(DecoderForCausalLM):
    """The plain decoder; biases only where the config asks for them."""

    @classmethod
    def config_fields(cls, hf: HFConfig) -> dict[str, Any]:
        attention_bias = hf.flag("attention_bias")
        return {
            "num_kv_heads": hf.integer("num_key_value_heads", default=hf.integer("num_attention_heads")),
            "head_dim": hf.head_dim(),
            "attention_bias": attention_bias,
            "attention_output_bias": attention_bias,
            "mlp_bias": hf.flag("mlp_bias"),
        }
