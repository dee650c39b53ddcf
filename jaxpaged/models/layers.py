"""The parts that decoders are made of. Weights have Hugging Face's names and shapes; activations keep one dtype."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxpaged_kernels import rms_norm

_INIT_SCALE = 0.02


class Initializer:
    """Makes a model's first parameters, all of one dtype.

    Takes one key from `rngs` and counts on in Python: an nnx stream keeps its count in an array, and the time to update
    that under tracing (`nnx.eval_shape`) grows with the square of the number of parameters.
    """

    def __init__(self, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self._key = rngs.params()
        self._count = itertools.count()
        self._dtype = dtype

    def normal(self, *shape: int) -> nnx.Param:
        key = jax.random.fold_in(self._key, next(self._count))
        return nnx.Param(_INIT_SCALE * jax.random.normal(key, shape, self._dtype))

    def zeros(self, *shape: int) -> nnx.Param:
        return nnx.Param(jnp.zeros(shape, self._dtype))

    def ones(self, *shape: int) -> nnx.Param:
        return nnx.Param(jnp.ones(shape, self._dtype))


class Linear(nnx.Module):
    """The parameters of y = x W^T + b: `weight` [out, in], and `bias` [out] or None."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, init: Initializer) -> None:
        self.weight = init.normal(out_features, in_features)
        self.bias = init.zeros(out_features) if bias else None


class Embedding(nnx.Module):
    """`weight` [vocabulary, features].

    Ids are the caller's to check. One outside the vocabulary is clipped rather than made NaN, because a NaN that
    reaches a KV cache spoils whoever shares the step or gets the block next (0 * NaN is NaN behind any mask).
    """

    def __init__(self, num_embeddings: int, features: int, *, init: Initializer) -> None:
        self.weight = init.normal(num_embeddings, features)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return jnp.take(self.weight[...], ids, axis=0, mode="clip")


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
