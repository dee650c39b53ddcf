"""One step as a pure function: weights, pools and inputs in; pools and drawn tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpaged.models.attention import Rope
from jaxpaged.models.products import Products
from jaxpaged.ops.adjust import write_tokens
from jaxpaged.runner.draw import Batch, Drawn, Logprobs, draw_tokens, prompt_logprobs
from jaxpaged.runner.optional import optional_inputs
from jaxpaged.runner.pack import Layout
from jaxpaged_kernels import paged_attention, rotate_and_write_kv

# (K, V) of each layer, both [num_blocks, block_size, num_kv_heads, head_dim]; where they are quantized, with the scales
# of K and of V behind them, both float32 [num_blocks, block_size, num_kv_heads].
LayerPools = tuple[jax.Array, ...]
Pools = list[LayerPools]


class Tokens(NamedTuple):
    """Token ids that stay on the device.

    Attributes:
        history: [num_blocks, block_size] int32, those of the pool's slots: what every row has said so far.
        newest: [rows] int32, last drawn for each row of the batch, whether the host knows it yet or not.
    """

    history: jax.Array
    newest: jax.Array


class StepOutputs(NamedTuple):
    """What comes of a step, padded to its N = S draws.

    Attributes:
        prompt: log-probabilities of prompt tokens, those that the plan asks for first; None in programs of decodes.
        hidden: [T, E], final-norm hidden states, for embeddings; None in programs of decodes.
        num_bad_ids: [] int32, block ids outside the pool that the device saw (debug mode; else 0).
    """

    drawn: Drawn
    prompt: Logprobs | None
    hidden: jax.Array | None
    num_bad_ids: jax.Array


_ATTENTION_FIELDS = ("slots", "block_tables", "kv_lens", "query_starts", "num_decodes")


@partial(jax.jit, static_argnames=("scale", "window", "decode_only", "implementation"))
def _write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rope: Rope,
    pools: LayerPools,
    batch: dict[str, jax.Array],
    *,
    scale: float,
    window: int | None,
    decode_only: bool,
    implementation: str | None,
) -> tuple[jax.Array, LayerPools]:
    """Attention's result and the pools of one layer, this step's K and V written. Jitted so that it is traced and
    lowered once for all layers of a program; XLA inlines it, and the pools stay where they are.
    """
    writer = implementation if implementation in (None, "triton", "native") else "xla"
    q, pools = rotate_and_write_kv(q, k, v, *rope, pools, batch["slots"], implementation=writer)
    k_pool, v_pool, *scales = pools
    k_scales, v_scales = scales or (None, None)
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
        k_scales=k_scales,
        v_scales=v_scales,
        implementation=implementation,
    )
    return out, pools


@dataclass(frozen=True)
class StepFunction:
    """The step of one program. Static facts are attributes, so that each instance is one compiled program.

    Attributes:
        graphdef: the model without its arrays, from `nnx.split`.
        treedef: how flat leaves make up the model's state.
        vocab_size: tokens that may be drawn; the logits may be wider.
        max_logprobs: K, or -1 for the whole vocabulary.
        attention: implementation of the attention kernels, None = by device.
        linear: implementation of the products with weights.
        check_ids: count out-of-range block ids on the device.
    """

    graphdef: Any
    treedef: Any
    layout: Layout
    vocab_size: int
    max_logprobs: int
    attention: str | None
    linear: str
    check_ids: bool

    @property
    def __name__(self) -> str:
        """How profiles and compiler logs call the program."""
        program = self.layout.program
        return f"{program.kind}_{program.num_tokens}"

    def __call__(
        self,
        leaves: Sequence[jax.Array],
        pools: Pools,
        tokens: Tokens,
        blob: jax.Array,
        optional: dict[str, jax.Array],
    ) -> tuple[Pools, Tokens, StepOutputs]:
        """Runs the model over the blob's tokens, writes their KV and ids into `pools` and `tokens` (donate them) and
        draws.

        Args:
            leaves: the model's arrays.
            pools: KV pool, one pair a layer.
            tokens: history and newest tokens.
            blob: [layout.size] int32, from `pack`.
            optional: all of the program's optional inputs, zeros where a plan has nothing for one.
        """
        model = nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))
        batch = self.layout.unpack(blob)
        pools = list(pools)

        def attend(
            layer: int, q: jax.Array, k: jax.Array, v: jax.Array, rope: Rope, *, scale: float, window: int | None
        ) -> jax.Array:
            out, pools[layer] = _write_and_attend(
                q,
                k,
                v,
                rope,
                pools[layer],
                {name: batch[name] for name in _ATTENTION_FIELDS},
                scale=scale,
                window=window,
                decode_only=self.layout.program.kind == "decode",
                implementation=self.attention,
            )
            return out

        token_ids = _resolve(batch["token_ids"], tokens.newest)
        products = Products(batch["query_starts"][-1], self.linear)
        hidden = model.hidden_states(token_ids, batch["positions"], attend, products)
        history = write_tokens(tokens.history, token_ids, batch["slots"])
        outputs = self._outputs(model, products, hidden, batch, history, optional)
        newest = tokens.newest.at[batch["draw_rows"]].set(outputs.drawn.token_ids, mode="drop")
        return pools, Tokens(history, newest), outputs

    def _outputs(
        self,
        model: Any,
        products: Products,
        hidden: jax.Array,
        batch: Batch,
        history: jax.Array,
        optional: dict[str, jax.Array],
    ) -> StepOutputs:
        """Tokens and log-probabilities from hidden states [T, E]."""
        head = partial(model.logits, how=products)
        logits = head(hidden[batch["token_index"]])
        inputs = optional_inputs(self.layout.program, logits.shape[1])
        fields = {name: layout.unpack(optional[name]) for name, layout in inputs.items()}
        num_top = logits.shape[1] if self.max_logprobs < 0 else min(self.max_logprobs, logits.shape[1])
        drawn = draw_tokens(logits, batch, fields, history, vocab_size=self.vocab_size, num_top=num_top)
        prompt = None
        if "prompt" in fields:
            prompt = prompt_logprobs(
                hidden,
                head,
                fields["prompt"],
                num_rows=len(logits),
                num_top=num_top,
                vocab_size=self.vocab_size,
            )
        num_bad_ids = jnp.int32(0)
        if self.check_ids:
            tables = batch["block_tables"]
            num_bad_ids = jnp.sum((tables < 0) | (tables >= self.layout.num_blocks), dtype=jnp.int32)
        is_mixed = self.layout.program.kind == "mixed"
        return StepOutputs(drawn, prompt, hidden if is_mixed else None, num_bad_ids)


def _resolve(token_ids: jax.Array, newest: jax.Array) -> jax.Array:
    """`token_ids` [T] int32 with -1 - row replaced by the row's newest token."""
    known = jnp.where(token_ids < 0, newest[-1 - token_ids], token_ids)
    return jnp.maximum(known, 0)  # where nothing could be drawn; what comes of it is dropped
