"""Symmetric quantization of keys and values to one byte: one scale for each token and KV head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# The largest value of each dtype: int8 leaves -128 out, so that both signs reach equally far.
LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}


def quantize(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Stored values and their scales: x is about stored * scale.

    The largest magnitude of each vector maps to the largest value of `dtype`. What is not finite makes the scale not
    finite, so that it shows in whatever is computed with it.

    Args:
        x: [..., D] float, at least one value a vector.
        dtype: int8 or float8_e4m3fn.

    Returns:
        [..., D] of `dtype`, and [...] float32, 0 for a vector of zeros.

    Raises:
        ValueError: another dtype.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in LARGEST:
        raise ValueError(f"cannot quantize to {dtype}: use one of {', '.join(map(str, LARGEST))}")
    largest = LARGEST[dtype]
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1) * jnp.float32(1 / largest)
    stored = x / jnp.where(scales == 0, 1, scales)[..., None]
    stored = jnp.clip(stored, -largest, largest)  # a scale that is subnormal is too coarse to keep to it
    if dtype == jnp.int8:
        stored = jnp.floor(stored + 0.5)  # Pallas's Triton backend has no round, and both have to agree
    return stored.astype(dtype), scales


def dequantize(stored: jax.Array, scales: jax.Array) -> jax.Array:
    """[..., D] float32 from stored values [..., D] and their scales [...]."""
    return stored.astype(jnp.float32) * scales[..., None]
