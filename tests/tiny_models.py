"""Tiny models of every family: Hugging Face configs, weights from seeds, token ids.

Both sides of the comparison, transformers (tools/make_goldens.py) and ours (test_families.py), take them from here,
so that no weights need to be committed.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

BATCH, LENGTH, VOCAB = 2, 32, 64


def _config(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    } | fields


def _llama(**fields: Any) -> dict[str, Any]:
    return _config("llama", "LlamaForCausalLM", **fields)


def _mistral(**fields: Any) -> dict[str, Any]:
    return _config("mistral", "MistralForCausalLM", **fields)


def _qwen2(**fields: Any) -> dict[str, Any]:
    return _config("qwen2", "Qwen2ForCausalLM", **fields)


def _qwen3(**fields: Any) -> dict[str, Any]:
    return _config("qwen3", "Qwen3ForCausalLM", **fields)


# Trained contexts below LENGTH and heads of 16 spread the frequencies over every zone of llama3 and yarn scaling.
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 24}
_YARN_TUNED = _YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 1.25}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _llama(rope_theta=10000.0, torch_dtype="float32"),
    "llama_multi_head_biases": _llama(num_key_value_heads=4, head_dim=6, attention_bias=True, mlp_bias=True),
    "llama3_tied": _llama(
        num_attention_heads=2, num_key_value_heads=1, rope_theta=500.0, rope_scaling=_LLAMA3, tie_word_embeddings=True
    ),
    "llama_linear": _llama(rope_theta=1000.0, rope_scaling={"type": "linear", "factor": 4.0}),
    "llama_yarn": _llama(num_attention_heads=2, max_position_embeddings=96, rope_parameters=_YARN, dtype="float32"),
    "llama_yarn_tuned": _llama(num_attention_heads=2, max_position_embeddings=96, rope_parameters=_YARN_TUNED),
    "mistral_window": _mistral(sliding_window=7),
    "mistral_full": _mistral(sliding_window=None, head_dim=12, rope_theta=1e6),
    "qwen2": _qwen2(use_sliding_window=False, sliding_window=5, max_window_layers=1, rope_theta=1e6),
    "qwen2_window": _qwen2(num_hidden_layers=3, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": _qwen3(head_dim=16, tie_word_embeddings=True, rope_theta=1e6),
    "qwen3_layer_types": _qwen3(
        head_dim=10,
        num_hidden_layers=3,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    ),
}


def weight(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The weight called `name`, from its name alone; RandomState because its stream never changes."""
    normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("norm.weight"):
        return (1 + 0.2 * normal).astype(np.float32)
    if name.endswith("bias"):
        return (0.3 * normal).astype(np.float32)
    scale = 1.0 if "embed" in name else 1.5 * shape[-1] ** -0.5
    return (scale * normal).astype(np.float32)


def token_ids() -> NDArray[np.int32]:
    """[BATCH, LENGTH]."""
    return np.random.RandomState(0).randint(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)
