"""From a Hugging Face config.json to `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpaged.config import ModelConfig
from jaxpaged.errors import ModelLoadError
from jaxpaged.models.hf_config import HFConfig
from jaxpaged.models.registry import SUPPORTED, get_model_class

_DTYPES = {prefix + name: name for name in ("float32", "bfloat16", "float16") for prefix in ("", "torch.")}


def model_config_from_hf(config: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """The shape of a decoder, from config.json as transformers 4 or 5 writes it.

    Args:
        config: the parsed file.
        source: what error messages call it, e.g. its path.

    Raises:
        ModelLoadError: an unsupported architecture, activation or RoPE type, or a missing or inconsistent field.
    """
    hf = HFConfig(config, source)
    architecture = _architecture(hf)
    if hf.get("quantization_config") is not None:
        raise ModelLoadError(
            f"{source}: quantization_config is not supported; use the unquantized weights of the model, or a GGUF file"
        )
    hf.choice("hidden_act", {"silu": "silu", "swish": "silu"}, default="silu")
    result = ModelConfig(
        architecture=architecture,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hf.integer("hidden_size"),
        intermediate_size=hf.integer("intermediate_size"),
        num_layers=hf.integer("num_hidden_layers"),
        num_heads=hf.integer("num_attention_heads"),
        max_position_embeddings=hf.integer("max_position_embeddings"),
        rms_norm_eps=hf.number("rms_norm_eps", default=1e-6),
        rope=hf.rope(),
        tie_word_embeddings=hf.flag("tie_word_embeddings"),
        dtype=hf.choice("dtype" if hf.get("dtype") is not None else "torch_dtype", _DTYPES, default="float32"),
        **get_model_class(architecture).config_fields(hf),
    )
    _check_heads(hf, result)
    return result


def _architecture(hf: HFConfig) -> str:
    names = hf.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise hf.error("architectures", f"a list with one of {', '.join(SUPPORTED)}")
    return names[0]


def _check_heads(hf: HFConfig, config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise hf.error("num_attention_heads", f"a multiple of num_key_value_heads ({config.num_kv_heads})")
    if config.head_dim % 2:
        raise ModelLoadError(f"{hf.source}: head_dim is {config.head_dim}, but must be even: RoPE rotates pairs")
