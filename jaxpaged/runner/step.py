"""One step as a pure function: weights, pool and blob in; pool and drawn tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.core.plan import NO_TOKEN
from jaxpaged.ops.sampling import gather_logprobs, sample
from jaxpaged.runner.pack import Layout
from jaxpaged_kernels import paged_attention, write_kv

# (K, V) of each layer, both [num_blocks, block_size, num_kv_heads, head_dim].
Pools = list[tuple[jax.Array, jax.Array]]


class StepOutputs(NamedTuple):
    """What a step draws, padded to its N = S draws. The log-probabilities hold zeros unless the plan asked for them.

    Attributes:
        token_ids: [N] int32, NO_TOKEN where the logits are NaN.
        logprobs: [N] float32.
        ranks: [N] int32.
        top_token_ids: [N, K] int32.
        top_logprobs: [N, K] float32.
        num_bad_ids: [] int32, block ids outside the pool that the device saw (debug mode; else 0).
    """

    token_ids: jax.Array
    logprobs: jax.Array
    ranks: jax.Array
    top_token_ids: jax.Array
    top_logprobs: jax.Array
    num_bad_ids: jax.Array


_ATTENTION_FIELDS = ("slots", "block_tables", "kv_lens", "query_starts", "num_decodes")


@partial(jax.jit, static_argnames=("scale", "window", "decode_only", "implementation"))
def _write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    batch: dict[str, jax.Array],
    *,
    scale: float,
    window: int | None,
    decode_only: bool,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention's result and the two pools of one layer, this step's K and V written. Jitted so that it is traced and
    lowered once for all layers of a program; XLA inlines it, and the pools stay where they are.
    """
    k_pool, v_pool = write_kv(k, v, k_pool, v_pool, batch["slots"])
    out = paged_attention(
        q,
        k_pool,
        v_pool,
        batch["block_tables"],
        batch["kv_lens"],
        batch["query_starts"],
        batch["num_decodes"][0],
        scale=scale,
        window=window,
        decode_only=decode_only,
        implementation=implementation,
    )
    return out, k_pool, v_pool


@dataclass(frozen=True)
class StepFunction:
    """The step of one program. Static facts are attributes, so that each instance is one compiled program.

    Attributes:
        graphdef: the model without its arrays, from `nnx.split`.
        treedef: how flat leaves make up the model's state.
        vocab_size: tokens that may be drawn; the logits may be wider.
        max_logprobs: K.
        attention: implementation of the kernels, None = by device.
        check_ids: count out-of-range block ids on the device.
    """

    graphdef: Any
    treedef: Any
    layout: Layout
    vocab_size: int
    max_logprobs: int
    attention: str | None
    check_ids: bool

    @property
    def __name__(self) -> str:
        """How profiles and compiler logs call the program."""
        program = self.layout.program
        return f"{program.kind}_{program.num_tokens}"

    def __call__(self, leaves: Sequence[jax.Array], pools: Pools, blob: jax.Array) -> tuple[Pools, StepOutputs]:
        """Runs the model over the blob's tokens, writes their KV into `pools` (donate them) and draws.

        Args:
            leaves: the model's arrays.
            pools: KV pool, one pair a layer.
            blob: [layout.size] int32, from `pack`.
        """
        model = nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))
        batch = self.layout.unpack(blob)
        pools = list(pools)

        def attend(
            layer: int, q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, window: int | None
        ) -> jax.Array:
            out, k_pool, v_pool = _write_and_attend(
                q,
                k,
                v,
                *pools[layer],
                {name: batch[name] for name in _ATTENTION_FIELDS},
                scale=scale,
                window=window,
                decode_only=self.layout.program.kind == "decode",
                implementation=self.attention,
            )
            pools[layer] = k_pool, v_pool
            return out

        hidden = model.hidden_states(batch["token_ids"], batch["positions"], attend)
        logits = model.logits(hidden[batch["token_index"]])
        return pools, self._draw(logits, batch)

    def _draw(self, logits: jax.Array, batch: dict[str, jax.Array]) -> StepOutputs:
        """Tokens and log-probabilities from `logits` [N, V] float32."""
        token_ids = sample(
            logits,
            batch["temperature"],
            batch["top_k"],
            batch["top_p"],
            batch["min_p"],
            batch["seed"],
            batch["draw_position"],
            vocab_size=self.vocab_size,
        )
        N, K = len(token_ids), min(self.max_logprobs, logits.shape[1])
        token_ids = jnp.where(jnp.isnan(jnp.max(logits, axis=1)), NO_TOKEN, token_ids)

        def without_logprobs() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            return jnp.zeros(N), jnp.zeros(N, jnp.int32), jnp.zeros((N, K), jnp.int32), jnp.zeros((N, K))

        logprobs, ranks, top_ids, top_logprobs = jax.lax.cond(
            batch["num_logprobs"][0] >= 0,
            lambda: gather_logprobs(logits, jnp.maximum(token_ids, 0), K),
            without_logprobs,
        )
        num_bad_ids = jnp.int32(0)
        if self.check_ids:
            tables = batch["block_tables"]
            num_bad_ids = jnp.sum((tables < 0) | (tables >= self.layout.num_blocks), dtype=jnp.int32)
        return StepOutputs(token_ids, logprobs, ranks, top_ids, top_logprobs, num_bad_ids)
