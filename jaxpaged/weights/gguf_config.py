"""A GGUF file's metadata as the config.json that the Hugging Face form of the same model would have."""

from __future__ import annotations

import math
from typing import Any

import gguf
import numpy as np

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.gguf_file import GGUFFile
from jaxpaged.weights.gguf_reader import ROPE_FACTORS, read_tensor
from jaxpaged.weights.reader import DTYPES

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
# What Llama 3.1, 3.2 and 3.3 were trained with; only `factor` differs between them. GGUF stores the resulting
# factors of the frequencies instead.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """config.json of the model in `file`.

    Raises:
        ModelLoadError: an unsupported architecture, or metadata that is missing or of the wrong kind.
    """
    metadata = file.metadata
    name = metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path} holds the GGUF architecture {name!r}, which is not supported; supported are "
            f"{', '.join(_ARCHITECTURES)} (llama also covers Mistral and SmolLM2)"
        )
    if metadata.get(f"{name}.expert_count"):
        raise ModelLoadError(f"{file.path} is a mixture of experts, which is not supported; use a dense model")
    architecture, model_type = _ARCHITECTURES[name]
    fields = _Fields(file, name)
    heads = fields.integer("attention.head_count")
    hidden = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", fields.integer("rope.dimension_count", hidden // heads))
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": _short(fields.number("attention.layer_norm_rms_epsilon")),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        "dtype": _dtype(file),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelLoadError(f"{file.path} rotates only a part of each head, which is not supported")
    if name == "llama" and (window := fields.integer("attention.sliding_window", 0)):
        config["sliding_window"] = window
        architecture, model_type = "MistralForCausalLM", "mistral"
    config |= {"architectures": [architecture], "model_type": model_type}
    config |= {"rope_theta": _short(fields.number("rope.freq_base", 10_000.0))}
    config |= {"rope_scaling": _rope_scaling(file, fields, config)}
    for key, ids in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        config[key] = metadata.get(f"tokenizer.ggml.{ids}_token_id")
    return config


def eos_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Ids that end an answer: end of sequence, end of turn and end of message, where the file names them."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ids = [file.metadata[key] for key in keys if key in file.metadata]
    return tuple(value for i, value in enumerate(ids) if value not in ids[:i])


class _Fields:
    """Metadata keys of one architecture."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file = file
        self._prefix = architecture

    def text(self, key: str) -> str | None:
        return self._file.metadata.get(f"{self._prefix}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self._file.metadata.get(f"{self._prefix}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            what = "has no" if value is None else f"has the unusable value {str(value)[:60]!r} for the"
            raise ModelLoadError(f"{self._file.path} {what} metadata key {self._prefix}.{key}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not isinstance(value, int) or (value < 1 and default is None):
            raise ModelLoadError(f"{self._file.path}: metadata {self._prefix}.{key} is {value}, but must be at least 1")
        return value


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path} has no tensor token_embd.weight, so it holds no complete model")
    return embedding.shape[0]


def _dtype(file: GGUFFile) -> str:
    """Of the matrices: norms are float32 in every file, and a quantized model is served in bfloat16."""
    plain = {gguf.GGMLQuantizationType.F32: "float32", gguf.GGMLQuantizationType.F16: "float16"}
    kinds = {tensor.type for name, tensor in file.tensors.items() if len(tensor.shape) > 1}
    return plain.get(next(iter(kinds)), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _rope_scaling(file: GGUFFile, fields: _Fields, config: dict[str, Any]) -> dict[str, Any] | None:
    kind = fields.text("rope.scaling.type")
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, config["rope_theta"], config["head_dim"])
    if kind in (None, "none"):
        return None
    factor = fields.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        context = fields.integer("rope.scaling.original_context_length")
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
        for hf_key, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if fields.number(f"rope.scaling.{key}", 0.0):
                scaling[hf_key] = fields.number(f"rope.scaling.{key}")
        return scaling
    raise ModelLoadError(f"{file.path} uses the rope scaling {kind!r}; supported are none, linear, yarn and Llama 3's")


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, recognised by the factors [head_dim / 2] that it divides the frequencies by.

    Formula: Llama 3.1 model card and transformers' "llama3" rope type.
    """
    stored = read_tensor(file, ROPE_FACTORS, DTYPES["float32"]).astype(np.float64).reshape(-1)
    factor = float(stored.max(initial=1.0))
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    turns = _LLAMA3_ROPE["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise ModelLoadError(
            f"{file.path}: its {ROPE_FACTORS} do not follow Llama 3's rope scaling, and no other kind is supported; "
            "use the Hugging Face folder of this model"
        )
    return {"rope_type": "llama3", "factor": _short(factor), **_LLAMA3_ROPE}


def _short(value: float) -> float:
    """GGUF stores float32: the shortest decimal that means the same (1e-05, not 9.999999747378752e-06)."""
    return float(str(np.float32(value)))
