"""config.json rebuilt from GGUF metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from weights.tiny_files import LLAMA_METADATA, write_gguf

from jaxpaged.config import ModelConfig, RopeConfig
from jaxpaged.errors import ModelLoadError
from jaxpaged.weights import GenerationConfig, load_config, load_generation_config

EMBEDDING = {"token_embd.weight": np.zeros((320, 64), np.float32)}
OUTPUT = {"output.weight": np.zeros((320, 64), np.float32)}


def load(tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, Any], arch: str = "llama") -> ModelConfig:
    return load_config(write_gguf(tmp_path / "m.gguf", metadata, tensors, arch))


def renamed(arch: str, **more: Any) -> dict[str, Any]:
    metadata = {key.replace("llama.", f"{arch}."): value for key, value in LLAMA_METADATA.items()}
    return metadata | {f"{arch}.{key.replace('__', '.')}": value for key, value in more.items()}


def test_llama(tmp_path: Path) -> None:
    assert load(tmp_path, LLAMA_METADATA, EMBEDDING) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        tie_word_embeddings=True,
        dtype="float32",
    )
    assert not load(tmp_path, LLAMA_METADATA, EMBEDDING | OUTPUT).tie_word_embeddings


def test_mistral_is_a_llama_with_a_window_or_wider_heads(tmp_path: Path) -> None:
    windowed = load(tmp_path, renamed("llama", attention__sliding_window=32), EMBEDDING)
    assert windowed.architecture == "MistralForCausalLM"
    assert windowed.windows == (32, 32)
    assert (
        load(tmp_path, renamed("llama", attention__key_length=24, rope__dimension_count=24), EMBEDDING).head_dim == 24
    )


def test_qwen(tmp_path: Path) -> None:
    qwen2 = load(tmp_path, renamed("qwen2"), EMBEDDING, "qwen2")
    assert (qwen2.architecture, qwen2.attention_bias, qwen2.qk_norm) == ("Qwen2ForCausalLM", True, False)
    qwen3 = load(tmp_path, renamed("qwen3", attention__key_length=32), EMBEDDING, "qwen3")
    assert (qwen3.architecture, qwen3.attention_bias, qwen3.qk_norm) == ("Qwen3ForCausalLM", False, True)
    assert qwen3.head_dim == 32


def llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """As llama.cpp's converter writes them, one frequency at a time."""
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / head_dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.float32(factors)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_recognised(tmp_path: Path, factor: float) -> None:
    metadata = renamed("llama", rope__dimension_count=128, rope__freq_base=500000.0)
    stored = EMBEDDING | {"rope_freqs.weight": llama3_factors(500000.0, 128, factor)}
    assert load(tmp_path, metadata, stored).rope == RopeConfig(
        theta=500000.0,
        kind="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    stored = EMBEDDING | {"rope_freqs.weight": np.float32([1, 2, 3, 4, 5, 6, 7, 8])}
    with pytest.raises(ModelLoadError, match=r"rope_freqs.weight do not follow Llama 3"):
        load(tmp_path, LLAMA_METADATA, stored)


def test_rope_scaling_from_metadata(tmp_path: Path) -> None:
    linear = renamed("llama", rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert load(tmp_path, linear, EMBEDDING).rope == RopeConfig(kind="linear", factor=4.0)
    yarn = renamed(
        "qwen2", rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=32
    )
    rope = load(tmp_path, yarn, EMBEDDING, "qwen2").rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 32)


def test_dtype_of_quantized_weights_is_bfloat16(tmp_path: Path) -> None:
    q8 = gguf.quants.quantize(np.ones((320, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    assert (
        load(tmp_path, LLAMA_METADATA, {"token_embd.weight": (q8, gguf.GGMLQuantizationType.Q8_0)}).dtype == "bfloat16"
    )
    half = {"token_embd.weight": np.zeros((320, 64), np.float16), "output_norm.weight": np.zeros(64, np.float32)}
    assert load(tmp_path, LLAMA_METADATA, half).dtype == "float16"


def test_generation_config(tmp_path: Path) -> None:
    metadata = LLAMA_METADATA | {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 1}
    path = write_gguf(tmp_path / "m.gguf", metadata, EMBEDDING)
    assert load_generation_config(path) == GenerationConfig(eos_token_ids=(1, 9), bos_token_id=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.block_count": None}, r"lacks|has no metadata key llama\.block_count"),
        ({"llama.block_count": 0}, "llama.block_count is 0, but must be at least 1"),
        ({"llama.attention.head_count": "many"}, "llama.attention.head_count"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.dimension_count": 8, "llama.attention.key_length": 16}, "rotates only a part of each head"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
    ],
)
def test_bad_metadata(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    metadata = {key: value for key, value in (LLAMA_METADATA | change).items() if value is not None}
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, metadata, EMBEDDING)


def test_unsupported_architecture_and_missing_embedding(tmp_path: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"architecture 'gpt2', which is not supported; supported are llama, qwen2"
    ):
        load(tmp_path, renamed("gpt2"), EMBEDDING, "gpt2")
    with pytest.raises(ModelLoadError, match=r"no tensor token_embd\.weight"):
        load(tmp_path, LLAMA_METADATA, OUTPUT)
