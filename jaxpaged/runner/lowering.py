"""An engine's steps as XLA programs, lowered from shapes alone: no weights, no pool, not even the device is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged.config import EngineConfig, ModelConfig, SchedulerConfig
from jaxpaged.runner.buckets import Buckets, Program
from jaxpaged.runner.kv_cache import PoolShape
from jaxpaged.runner.optional import optional_inputs
from jaxpaged.runner.pack import Layout
from jaxpaged.runner.step import StepFunction, Tokens
from jaxpaged_kernels import best_linear

# Of quantized weights, which are multiplied by activations of the others' dtype.
_PACKED = jnp.uint8

# A parameter, or its shape and dtype.
Leaf = jax.Array | jax.ShapeDtypeStruct


@dataclass(frozen=True)
class StepLowering:
    """All that decides what the programs of an engine are.

    For a device that is not here, make and use it inside `jax.sharding.use_abstract_mesh` of that device: the kernels
    and the pool's dtype follow it.

    Attributes:
        model: shape of the model.
        graphdef: the model without its arrays, from `nnx.split`.
        treedef: how flat leaves make up the model's state.
        dtype: of activations, and of the keys and values as the model makes them.
        linear: implementation of the products with weights.
        vocab_size: tokens that may be drawn; the model's own vocabulary may be padded.
    """

    model: ModelConfig
    graphdef: Any
    treedef: Any
    dtype: jnp.dtype
    config: EngineConfig
    scheduler: SchedulerConfig
    linear: str
    vocab_size: int

    @classmethod
    def of(
        cls, model: nnx.Module, config: EngineConfig, scheduler: SchedulerConfig, *, vocab_size: int
    ) -> tuple[StepLowering, list[Any]]:
        """Also the model's leaves: arrays, or shapes for a model of `nnx.eval_shape`."""
        graphdef, state = nnx.split(model)
        leaves, treedef = jax.tree.flatten(state)
        dtypes = {leaf.dtype for leaf in leaves if leaf.dtype != _PACKED}
        linear = config.linear or (best_linear() if len(dtypes) == 1 else "xla")
        return cls(model.config, graphdef, treedef, main_dtype(leaves), config, scheduler, linear, vocab_size), leaves

    @cached_property
    def buckets(self) -> Buckets:
        return Buckets(
            self.scheduler.max_num_seqs,
            self.scheduler.max_num_batched_tokens,
            skips_padding=self.linear == "native",
        )

    @property
    def max_blocks(self) -> int:
        """Width of a block table."""
        return -(-self.scheduler.max_model_len // self.config.block_size)

    def layout(self, program: Program, num_blocks: int) -> Layout:
        """The blob of `program` over a pool of `num_blocks`."""
        return Layout(program, self.max_blocks, self.config.block_size, num_blocks)

    def pool_shape(self, num_blocks: int) -> PoolShape:
        return PoolShape.of(self.model, num_blocks, self.config.block_size, self.dtype, self.config.kv_cache_dtype)

    def lower(
        self, layout: Layout, leaves: Sequence[Leaf], sharding: jax.sharding.Sharding | None = None
    ) -> jax.stages.Lowered:
        """The step of `layout.program`; it takes (leaves, pools, tokens, blob, optional inputs) and donates pools and
        tokens.

        Args:
            leaves: the model's, as from `of`.
            sharding: where all arguments will be, if that is not where `leaves` are; then `leaves` are shapes.
        """
        arguments = self.arguments(layout, leaves)
        if sharding is not None:
            arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
        return jax.jit(self._step(layout), donate_argnums=(1, 2)).lower(*arguments)

    def arguments(self, layout: Layout, leaves: Sequence[Leaf]) -> tuple[Any, ...]:
        """What the step takes, as shapes but for `leaves`."""
        blob = jax.ShapeDtypeStruct((layout.size,), np.int32)
        history, newest = (layout.num_blocks, layout.block_size), (self.scheduler.max_num_seqs,)
        shapes: Any = [jax.ShapeDtypeStruct(shape, np.int32) for shape in (history, newest)]
        tokens = Tokens(*shapes)
        inputs = optional_inputs(layout.program, self.model.vocab_size)
        optional = {name: jax.ShapeDtypeStruct((blob.size,), np.int32) for name, blob in inputs.items()}
        return list(leaves), self.pool_shape(layout.num_blocks).abstract(), tokens, blob, optional

    def description(self, layout: Layout, leaves: Sequence[Leaf]) -> str:
        """All that decides the step's program beside versions, machine and source."""
        arguments, structure = jax.tree.flatten(self.arguments(layout, leaves))
        shapes = [(x.shape, str(x.dtype), bool(getattr(x, "weak_type", False))) for x in arguments]
        others = (layout, self.vocab_size, self.config.max_logprobs, self.config.attention, self.linear)
        return repr((others, self.config.debug_checks, self._model_description, str(structure), shapes))

    @cached_property
    def _model_description(self) -> str:
        return repr(self.graphdef) + str(self.treedef)

    def _step(self, layout: Layout) -> StepFunction:
        return StepFunction(
            self.graphdef,
            self.treedef,
            layout,
            self.vocab_size,
            self.config.max_logprobs,
            self.config.attention,
            self.linear,
            self.config.debug_checks,
        )


def main_dtype(leaves: Sequence[Leaf]) -> jnp.dtype:
    """The dtype that most of the bytes of `leaves` have, quantized weights left aside."""
    sizes: dict[jnp.dtype, int] = {}
    for leaf in (leaf for leaf in leaves if leaf.dtype != _PACKED):
        sizes[leaf.dtype] = sizes.get(leaf.dtype, 0) + leaf.size * leaf.dtype.itemsize
    return jnp.dtype(max(sizes, key=lambda dtype: sizes[dtype]))


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes that a program takes beside its arguments and results."""
    analysis: Any = compiled.memory_analysis()
    return int(analysis.temp_size_in_bytes)
