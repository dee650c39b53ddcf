"""Rotary position embedding applied to heads (Hugging Face's half-split layout), alone or with the write of K and V."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpaged_kernels import native, native_attention
from jaxpaged_kernels.cache import value_dtype, write_kv, write_quantized_kv
from jaxpaged_kernels.checks import check_rotation, check_target
from jaxpaged_kernels.target import current_target


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate `x` [T, heads, D] by the tables [T, D / 2]; computed in float32, returned in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def rotate_and_write_kv(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pools: tuple[jax.Array, ...],
    slots: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Rotates queries and keys, and stores each token's K and V in its slot: `apply_rope` and `write_kv` or
    `write_quantized_kv`, on an NVIDIA GPU in one launch.

    Args:
        q: [T, H, D], not rotated.
        k: [T, KVH, D], not rotated.
        v: [T, KVH, D].
        cos: [T, D / 2] float32.
        sin: [T, D / 2] float32.
        pools: (K, V), or (K, V, K scales, V scales), as for the functions named above; donate them.
        slots: [T] int32, block id * block_size + offset in the block; a token whose slot is outside the pool is not
            stored.
        implementation: "triton", "native" or "xla"; None = by device.

    Returns:
        The rotated q, and the pools.

    Raises:
        ValueError: shapes or dtypes that do not fit each other, an implementation that does not exist, or fp8 pools on
            an NVIDIA GPU below compute capability 8.9.
        NotImplementedError: "triton" was asked for with pools of raw bits, which only a CPU needs, or "native" where
            it cannot run.
    """
    if implementation is None:
        implementation = _best(q, k, v)
    if implementation not in ("triton", "native", "xla"):
        raise ValueError(f"implementation {implementation!r} does not exist: use one of triton, native, xla")
    check_rotation(q, k, v, pools, slots)
    half = (q.shape[0], q.shape[2] // 2)
    if q.shape[2] % 2 or cos.shape != half or sin.shape != half:
        raise ValueError(
            f"cos is {list(cos.shape)} and sin {list(sin.shape)}, but q of {list(q.shape)} needs {list(half)}"
        )
    check_target(pools[0].dtype, current_target())
    if implementation == "xla" or q.size == 0:
        return apply_rope(q, cos, sin), _write(apply_rope(k, cos, sin), v, pools, slots)
    jax.eval_shape(_write, k, v, pools, slots)  # its checks
    if implementation == "triton":
        if value_dtype(pools[0].dtype) != pools[0].dtype:
            raise NotImplementedError(f"triton cannot write pools of raw bits ({pools[0].dtype}): use xla")
        from jaxpaged_kernels import triton_write  # see api.py

        return triton_write.rotate_and_write_kv(q, k, v, cos, sin, pools, slots)
    return native_attention.rotate_and_write_kv(q, k, v, cos, sin, pools, slots)


def _best(q: jax.Array, k: jax.Array, v: jax.Array) -> str:
    platform = current_target().platform
    if platform == "cpu" and native.why_unavailable() is None and q.dtype == k.dtype == v.dtype:
        return "native"
    return "triton" if platform == "gpu" else "xla"


def _write(k: jax.Array, v: jax.Array, pools: tuple[jax.Array, ...], slots: jax.Array) -> tuple[jax.Array, ...]:
    if len(pools) == 2:
        return write_kv(k, v, pools[0], pools[1], slots)
    k_pool, v_pool, k_scales, v_scales = pools
    return write_quantized_kv(k, v, k_pool, v_pool, k_scales, v_scales, slots)
