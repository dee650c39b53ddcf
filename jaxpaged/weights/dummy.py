"""Random weights in the shape of a model: for measuring speed and memory where the real ones are not at hand."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpaged.config import ModelConfig
from jaxpaged.weights.loader import Shardings, abstract_model, placement
from jaxpaged.weights.names import parameters
from jaxpaged.weights.reader import dtype_of

# Values drawn at once: the generator takes many times the bytes of what it gives, here at most some 100 MB.
_VALUES_AT_ONCE = 1 << 22


def dummy_model(config: ModelConfig, *, dtype: str = "auto", seed: int = 0, sharding: Shardings = None) -> nnx.Module:
    """A module of `config` with random weights, the same for the same seed.

    Each parameter is drawn where it stays and in its dtype, one after another, so that memory holds the model once and
    never in a wider dtype. A matrix [out, in] is uniform with variance 1 / in, which keeps activations near 1; norms
    are 1 and biases 0.

    Args:
        dtype: "float32", "bfloat16" or "float16"; "auto" is the config's.
        sharding: as for `load_model`.

    Raises:
        ModelLoadError: an architecture or a dtype that is not supported.
    """
    name = config.dtype if dtype == "auto" else dtype_of(dtype).name
    module = abstract_model(config, name)
    place = placement(sharding)
    for key, variable in parameters(module).items():
        shape = variable.shape
        if len(shape) == 1:
            value = 1.0 if key.endswith("norm.weight") else 0.0
            variable.set_value(jnp.full(shape, value, name, device=place(key)))
        else:
            stream = jax.random.fold_in(jax.random.key(seed % 2**32), zlib.crc32(key.encode()))
            variable.set_value(_program(shape, name, place(key))(stream))
    return module


@lru_cache(maxsize=64)
def _program(shape: tuple[int, int], dtype: str, sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    """What draws a matrix; layers have the same shapes, so a model takes a handful of programs."""
    return jax.jit(partial(_uniform, shape=shape, dtype=dtype), out_shardings=sharding)


def _uniform(key: jax.Array, shape: tuple[int, int], dtype: str) -> jax.Array:
    """[out, in] with mean 0 and variance 1 / in, drawn a few rows at a time."""
    num_rows, size = shape
    limit = math.sqrt(3 / size)
    rows = min(max(_VALUES_AT_ONCE // size, 1), num_rows)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        part = jax.random.uniform(jax.random.fold_in(key, i), (rows, size), dtype, -limit, limit)
        start = jnp.minimum(i * rows, num_rows - rows)  # the last part may draw some rows again
        return lax.dynamic_update_slice_in_dim(out, part, start, axis=0)

    return lax.fori_loop(0, -(-num_rows // rows), body, jnp.zeros(shape, dtype))
