"""The parts that decoders are made of. Weights have Hugging Face's names and shapes; activations keep one dtype."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxpaged_kernels import QuantizedWeight, rms_norm, take_rows
from jaxpaged_kernels.linear import Weight
from jaxpaged_kernels.quantized import WeightFormat

_INIT_SCALE = 0.02


class Initializer:
    """Makes a model's first parameters, all of one dtype; without `rngs` only their shapes (`jax.ShapeDtypeStruct`).

    Takes one key from `rngs` and counts on in Python: an nnx stream keeps its count in an array, and the time to update
    that under tracing (`nnx.eval_shape`) grows with the square of the number of parameters.
    """

    def __init__(self, rngs: nnx.Rngs | None, dtype: DTypeLike) -> None:
        self._key = None if rngs is None else rngs.params()
        self._count = itertools.count()
        self.dtype = jnp.dtype(dtype)

    def normal(self, *shape: int) -> nnx.Param:
        if self._key is None:
            return self._abstract(shape)
        key = jax.random.fold_in(self._key, next(self._count))
        return nnx.Param(_INIT_SCALE * jax.random.normal(key, shape, self.dtype))

    def zeros(self, *shape: int) -> nnx.Param:
        return self._abstract(shape) if self._key is None else nnx.Param(jnp.zeros(shape, self.dtype))

    def ones(self, *shape: int) -> nnx.Param:
        return self._abstract(shape) if self._key is None else nnx.Param(jnp.ones(shape, self.dtype))

    def _abstract(self, shape: tuple[int, ...]) -> nnx.Param:
        return nnx.Param(jax.ShapeDtypeStruct(shape, self.dtype))


class Matrix(nnx.Module):
    """`weight` [rows, columns]; of a quantized one the packed bytes (see `jaxpaged_kernels.quantized`).

    Attributes:
        shape: (rows, columns), whatever the weight is stored as.
        format: None, or how it is quantized.
    """

    def __init__(self, rows: int, columns: int, *, init: Initializer) -> None:
        self.shape = (rows, columns)
        self.format: WeightFormat | None = None
        self.weight = init.normal(rows, columns)

    def matrix(self) -> Weight:
        """The weight as `jaxpaged_kernels.linear` takes it."""
        weight = self.weight[...]
        return weight if self.format is None else QuantizedWeight(weight, self.format, self.shape)


class Linear(Matrix):
    """The parameters of y = x W^T + b: `weight` [out, in], and `bias` [out] or None."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, init: Initializer) -> None:
        super().__init__(out_features, in_features, init=init)
        self.bias = init.zeros(out_features) if bias else None


class Embedding(Matrix):
    """`weight` [vocabulary, features].

    Ids are the caller's to check. One outside the vocabulary is clipped rather than made NaN, because a NaN that
    reaches a KV cache spoils whoever shares the step or gets the block next (0 * NaN is NaN behind any mask).
    """

    def __init__(self, num_embeddings: int, features: int, *, init: Initializer) -> None:
        super().__init__(num_embeddings, features, init=init)
        self._dtype = init.dtype

    def __call__(self, ids: jax.Array) -> jax.Array:
        matrix = self.matrix()
        if isinstance(matrix, QuantizedWeight):
            return take_rows(matrix, ids, self._dtype)
        return jnp.take(matrix, ids, axis=0, mode="clip")


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, features: int, *, eps: float, init: Initializer) -> None:
        self.eps = eps
        self.weight = init.ones(features)

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)


class MLP(nnx.Module):
    """The parameters of SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool, init: Initializer) -> None:
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias, init=init)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias, init=init)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, init=init)
