"""KV pools: in what dtype to keep one, and how to read and write its slots and blocks.

A pool is [blocks, block_size, KV heads, head size]. One of a byte a value (int8 or float8_e4m3fn) goes with an array of
scales, [blocks, block_size, KV heads] float32: a vector is what is stored times its scale. Every function that returns
pools updates them in place when they are donated to the jitted program that calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxpaged_kernels import native
from jaxpaged_kernels.quantize import LARGEST, quantize
from jaxpaged_kernels.target import current_target

# Pools that keep the bits of another dtype.
_BITS = {jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint8): jnp.dtype(jnp.float8_e4m3fn)}


def pool_dtype(dtype: DTypeLike, platform: str | None = None) -> jnp.dtype:
    """The dtype in which to allocate a pool that holds values of `dtype`.

    On a CPU it is the raw bits, uint16, for bfloat16, and uint8 for float8_e4m3fn: there XLA (up to jax 0.10) updates
    an array of these through a wider copy of all of it. All functions of this package take such pools as well as plain
    ones.

    Args:
        dtype: of the keys and values.
        platform: "cpu", "gpu", "tpu"; None = that of `current_target`.
    """
    platform = platform or current_target().platform
    dtype = jnp.dtype(dtype)
    if platform == "cpu":
        return next((bits for bits, values in _BITS.items() if values == dtype), dtype)
    return dtype


def new_pool(shape: tuple[int, ...], dtype: DTypeLike, device: jax.Device) -> jax.Array:
    """Zeros on `device`. With the native kernels a pool takes memory only where it has been written."""
    if device.platform != "cpu" or native.why_unavailable() is not None:
        return jnp.zeros(shape, dtype, device=device)
    pool: jax.Array = _untouched_zeros(shape, jnp.dtype(dtype), device)()
    return pool


@functools.cache
def _untouched_zeros(shape: tuple[int, ...], dtype: jnp.dtype, device: jax.Device) -> jax.stages.Wrapped:
    zeros = jax.ffi.ffi_call("jaxpaged_zeros", jax.ShapeDtypeStruct(shape, dtype))
    return jax.jit(zeros, out_shardings=jax.sharding.SingleDeviceSharding(device))


def write_kv(
    k: jax.Array, v: jax.Array, k_pool: jax.Array, v_pool: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Stores each token's K and V in its slot.

    Args:
        k: [T, KVH, D].
        v: [T, KVH, D].
        k_pool: [blocks, block_size, KVH, D], of k's dtype or the `pool_dtype` for it.
        v_pool: [blocks, block_size, KVH, D], likewise.
        slots: [T] int32, block id * block_size + offset in the block; a token whose slot is outside the pool is
            dropped. No two tokens may share a slot.

    Returns:
        The two pools.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.
    """
    for name, new, pool in (("k", k, k_pool), ("v", v, v_pool)):
        _check_new(name, new, pool, slots)
        if not holds(pool.dtype, new.dtype):
            raise ValueError(f"{name} is {new.dtype} but its pool is {pool.dtype}: cast before writing")
    return _write(k_pool, k, slots), _write(v_pool, v, slots)


def write_quantized_kv(
    k: jax.Array,
    v: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    k_scales: jax.Array,
    v_scales: jax.Array,
    slots: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Quantizes each token's K and V and stores them, and their scales, in its slot.

    Args:
        k: [T, KVH, D] float.
        v: [T, KVH, D] float.
        k_pool: [blocks, block_size, KVH, D] of int8 or float8_e4m3fn, or the `pool_dtype` for one of these.
        v_pool: [blocks, block_size, KVH, D], likewise.
        k_scales: [blocks, block_size, KVH] float32.
        v_scales: [blocks, block_size, KVH] float32.
        slots: [T] int32, as for `write_kv`.

    Returns:
        The two pools and the two arrays of scales.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.
    """
    written = []
    for name, new, pool, scales in (("k", k, k_pool, k_scales), ("v", v, v_pool, v_scales)):
        _check_new(name, new, pool, slots)
        if not is_quantized(pool.dtype):
            raise ValueError(f"the pool of {name} is {pool.dtype}, but must be int8 or float8_e4m3fn: use write_kv")
        check_scales(f"{name}_scales", scales, pool)
        stored, new_scales = quantize(new, value_dtype(pool.dtype))
        written.append((_write(pool, stored, slots), _write(scales, new_scales, slots)))
    (k_pool, k_scales), (v_pool, v_scales) = written
    return k_pool, v_pool, k_scales, v_scales


def copy_blocks(pools: Sequence[jax.Array], src: jax.Array, dst: jax.Array) -> list[jax.Array]:
    """Copies block src[i] to block dst[i] in every pool; all are read before any is written.

    Args:
        pools: arrays [blocks, ...].
        src: [C] int32.
        dst: [C] int32, distinct; a copy whose destination is outside the pool is dropped.
    """
    return scatter_blocks(pools, gather_blocks(pools, src), dst)


def gather_blocks(pools: Sequence[jax.Array], ids: jax.Array) -> list[jax.Array]:
    """The blocks `ids` [C] int32 of every pool, each [C, block_size, KVH, D]; an id outside a pool reads any block."""
    return [pool.at[ids].get(mode="clip") for pool in pools]


def scatter_blocks(pools: Sequence[jax.Array], blocks: Sequence[jax.Array], ids: jax.Array) -> list[jax.Array]:
    """Writes blocks [C, block_size, KVH, D] to `ids` [C] int32 of each pool; ids outside the pool are dropped.

    Raises:
        ValueError: not as many arrays of blocks as pools, or blocks that are not of their pool's shape and dtype.
    """
    if len(pools) != len(blocks):
        raise ValueError(f"{len(blocks)} arrays of blocks were given for {len(pools)} pools")
    for pool, new in zip(pools, blocks, strict=True):
        if new.shape != (*ids.shape, *pool.shape[1:]) or new.dtype != pool.dtype:
            raise ValueError(
                f"blocks are {new.dtype}{list(new.shape)} for {list(ids.shape)} ids, "
                f"but the pool is {pool.dtype}{list(pool.shape)}"
            )
    return [_scatter(pool, new, ids) for pool, new in zip(pools, blocks, strict=True)]


def value_dtype(pool_dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of the values in a pool of `pool_dtype`."""
    return _BITS.get(pool_dtype, pool_dtype)


def holds(pool_dtype: jnp.dtype, dtype: jnp.dtype) -> bool:
    """Whether a pool of `pool_dtype` can hold values of `dtype`."""
    return dtype in (pool_dtype, value_dtype(pool_dtype))


def is_quantized(pool_dtype: jnp.dtype) -> bool:
    """Whether a pool of `pool_dtype` goes with scales."""
    return value_dtype(pool_dtype) in LARGEST


def check_scales(name: str, scales: jax.Array, pool: jax.Array) -> None:
    """Raises ValueError for scales, called `name`, that are not one float32 for each slot and KV head of `pool`."""
    if scales.shape != pool.shape[:3] or scales.dtype != jnp.float32:
        raise ValueError(
            f"{name} is {scales.dtype}{list(scales.shape)}, but a pool of {list(pool.shape)} "
            f"needs float32{list(pool.shape[:3])}"
        )


def to_storage(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`x` as a pool of `dtype` keeps it."""
    return lax.bitcast_convert_type(x, dtype) if dtype in _BITS else x


def from_storage(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`x`, read from a pool, as `dtype`; quantized values are not scaled."""
    return (lax.bitcast_convert_type(x, _BITS[x.dtype]) if x.dtype in _BITS else x).astype(dtype)


def _check_new(name: str, new: jax.Array, pool: jax.Array, slots: jax.Array) -> None:
    if pool.ndim != 4 or new.shape != (*slots.shape, *pool.shape[2:]) or slots.ndim != 1:
        raise ValueError(
            f"{name} is {new.shape} and slots {slots.shape}, but a pool of shape {pool.shape} "
            "takes [T, KV heads, head size] and [T]"
        )


def _write(pool: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    flat = pool.reshape(-1, *pool.shape[2:])
    return _scatter(flat, to_storage(new, pool.dtype), slots).reshape(pool.shape)


def _scatter(pool: jax.Array, rows: jax.Array, index: jax.Array) -> jax.Array:
    index = jnp.where(index < 0, pool.shape[0], index)  # a negative index would count from the end
    return pool.at[index].set(rows, mode="drop")
