"""The decoder that all supported families share: pre-norm, rotary grouped-query attention, SwiGLU.

Where families differ (biases, norms of q and k, windows) `ModelConfig` says so; each family's file fills it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxpaged.config import ModelConfig
from jaxpaged.models.attention import AttentionFn, DenseAttention
from jaxpaged.models.hf_config import HFConfig
from jaxpaged.models.layers import MLP, Embedding, Initializer, Linear, RMSNorm
from jaxpaged.models.products import PLAIN_PRODUCTS, Products
from jaxpaged.models.rope import rope_tables


class Attention(nnx.Module):
    """The projections around attention; what happens between them is the caller's `AttentionFn`."""

    def __init__(self, config: ModelConfig, *, init: Initializer) -> None:
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = Linear(hidden, q_size, bias=bias, init=init)
        self.k_proj = Linear(hidden, kv_size, bias=bias, init=init)
        self.v_proj = Linear(hidden, kv_size, bias=bias, init=init)
        self.o_proj = Linear(q_size, hidden, bias=config.attention_output_bias, init=init)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps, init=init) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps, init=init) if config.qk_norm else None

    def qkv(self, x: jax.Array, norm: RMSNorm, how: Products) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Residual stream [T, E] -> q [T, H, D], k and v [T, KVH, D]; for Qwen3 q and k normed, too."""
        heads = how.project(x, self.q_proj, self.k_proj, self.v_proj, norm=norm)
        q, k, v = (y.reshape(x.shape[0], -1, self.head_dim) for y in heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v


class DecoderLayer(nnx.Module):
    """One layer, in two halves around attention.

    Each half is jitted so that it is traced once and its trace shared by all layers: tracing and lowering a deep
    model then costs a fraction. XLA inlines the calls, so the compiled program is the same.
    """

    def __init__(self, config: ModelConfig, *, init: Initializer) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, init=init)
        self.self_attn = Attention(config, init=init)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, init=init)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, init=init)

    @jax.jit
    def before_attention(self, x: jax.Array, how: Products) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Residual stream [T, E] -> q [T, H, D], k and v [T, KVH, D]."""
        return self.self_attn.qkv(x, self.input_layernorm, how)

    @jax.jit
    def after_attention(self, x: jax.Array, attended: jax.Array, how: Products) -> jax.Array:
        """Residual stream [T, E] and attention's result [T, H, D] -> the next layer's residual stream [T, E]."""
        (x,) = how.project(attended.reshape(attended.shape[0], -1), self.self_attn.o_proj, residual=x)
        (h,) = how.project(x, self.mlp.gate_proj, self.mlp.up_proj, norm=self.post_attention_layernorm, swiglu=True)
        (x,) = how.project(h, self.mlp.down_proj, residual=x)
        return x


class Decoder(nnx.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, *, init: Initializer) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, init=init)
        self.layers = nnx.List([DecoderLayer(config, init=init) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, init=init)


class DecoderForCausalLM(nnx.Module):
    """A decoder with a language-model head; with `tie_word_embeddings` the head is the embedding.

    Parameter paths are Hugging Face's tensor names: `model.layers.3.self_attn.q_proj.weight` is
    `("model", "layers", 3, "self_attn", "q_proj", "weight")`, of the same shape unless it is quantized.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs | None) -> None:
        """Random parameters; where `rngs` is None there are `jax.ShapeDtypeStruct` in their places."""
        init = Initializer(rngs, dtype)
        self.config = config
        self.model = Decoder(config, init=init)
        self.lm_head = (
            None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False, init=init)
        )

    @classmethod
    def config_fields(cls, hf: HFConfig) -> dict[str, Any]:
        """The fields of `ModelConfig` in which the families differ, by the rules and defaults of this family."""
        raise NotImplementedError

    def hidden_states(
        self, token_ids: jax.Array, positions: jax.Array, attention: AttentionFn, how: Products = PLAIN_PRODUCTS
    ) -> jax.Array:
        """Final-norm hidden states [T, E] of `token_ids` [T] int32 at `positions` [T] int32.

        `attention` is called once a layer, in order; only it knows which tokens belong together. `how` says how
        to multiply by weights.
        """
        config = self.config
        x = self.model.embed_tokens(token_ids)
        rope = rope_tables(config.rope, config.head_dim, positions)
        for i, layer in enumerate(self.model.layers):
            q, k, v = layer.before_attention(x, how)
            attended = attention(i, q, k, v, rope, scale=config.head_dim**-0.5, window=config.window(i))
            x = layer.after_attention(x, attended, how)
        return self.model.norm(x)

    def logits(self, hidden: jax.Array, how: Products = PLAIN_PRODUCTS) -> jax.Array:
        """Hidden states [N, E] -> logits [N, V] float32."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return how.logits(hidden, head)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Logits [B, L, V] float32 of whole sequences [B, L] int32: dense causal attention, no cache, no padding."""
        batch, length = token_ids.shape
        positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
        hidden = self.hidden_states(token_ids.reshape(-1), positions, DenseAttention(batch, length))
        return self.logits(hidden).reshape(batch, length, -1)
