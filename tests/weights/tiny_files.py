"""Tiny models in the file formats that users bring, with weights drawn from a seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 320, 64, 96, 2, 4, 2, 16
LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def llama_shapes(config: Mapping[str, Any] = LLAMA_CONFIG) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of a Llama model, written out."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (q, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, q),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (ffn, hidden),
            f"{layer}.mlp.up_proj.weight": (ffn, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, ffn),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def random_tensors(shapes: Mapping[str, tuple[int, ...]], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {name: rng.standard_normal(shape, dtype=np.float32).astype(dtype) for name, shape in shapes.items()}


def write_folder(folder: Path, tensors: Mapping[str, np.ndarray] | None, config: Mapping[str, Any]) -> Path:
    """A Hugging Face folder: config.json, model.safetensors, tokenizer and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.6}))
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}</s>{% endfor %}")
    if tensors is not None:
        save_file(dict(tensors), folder / "model.safetensors")
    return folder


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with a few merges and the special tokens <s> 0, </s> 1, <pad> 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog, then the dog sleeps"] * 4, trainer)
    return tokenizer


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any], arch: str = "llama") -> Path:
    """A GGUF file. A tensor is an array, or (bytes as uint8, GGMLQuantizationType)."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, tensor in tensors.items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LLAMA_METADATA: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}
GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    whole = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in whole:
        return f"{whole[name]}.weight"
    _, _, layer, *part, kind = name.split(".")
    return f"blk.{layer}.{GGUF_PARTS['.'.join(part)]}.{kind}"


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp keeps q and k of "llama", one by one: row i of a head's first half goes to 2i, of its second
    half to 2i + 1."""
    out = np.empty_like(array)
    size = array.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = array[head * size + i]
            out[head * size + 2 * i + 1] = array[head * size + size // 2 + i]
    return out


def llama_gguf_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hugging Face tensors of a Llama model as llama.cpp stores them."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}
    out = {}
    for name, array in tensors.items():
        part = name.split(".")[-2]
        out[gguf_name(name)] = interleave(array, heads[part]) if part in heads else array
    return out
