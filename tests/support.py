"""Tiny random models and a tokenizer for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxpaged.config import ModelConfig
from jaxpaged.models.registry import get_model_class

GOLDENS = Path(__file__).parent / "goldens"
# 256 byte tokens and 4 special ones; the embedding has 12 rows more, as padded embeddings do.
NUM_TOKENS = 260
EOS = 257

Alone = Callable[..., list[int]]


def tiny_config(**changes: object) -> ModelConfig:
    """A two-layer Llama shape; `changes` replace fields."""
    fields: dict[str, object] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    return ModelConfig(**{**fields, **changes})


def random_model(config: ModelConfig, seed: int = 0, dtype: object = jnp.float32) -> nnx.Module:
    """A model whose logits are far apart, so that rounding never decides between two tokens."""
    model = get_model_class(config.architecture)(config, dtype=dtype, rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)

    def draw(param: jax.Array) -> jax.Array:
        if param.ndim == 1:
            return param
        return jnp.asarray(rng.normal(size=param.shape) * 2 / np.sqrt(param.shape[-1]), dtype)

    nnx.update(model, jax.tree.map(draw, nnx.state(model)))
    return model


def dense_logprobs(model: nnx.Module) -> Callable[[list[int]], np.ndarray]:
    """Of a model of `tiny_config`: tokens -> [NUM_TOKENS] float64 log-probabilities of the next, without paging."""
    graphdef, state = nnx.split(model)
    forward = jax.jit(lambda ids: nnx.merge(graphdef, state)(ids[None])[0])

    def next_logprobs(ids: list[int]) -> np.ndarray:
        padded = np.zeros(128, np.int32)
        padded[: len(ids)] = ids
        logits = np.asarray(forward(padded)[len(ids) - 1], np.float64)
        shifted = logits - logits.max()
        return (shifted - np.log(np.exp(shifted).sum()))[:NUM_TOKENS]

    return next_logprobs


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<user>", "<bot>"]
    )
    fast.chat_template = (
        "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<bot>' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    assert len(fast) == NUM_TOKENS and fast.eos_token_id == EOS
    return fast
