"""KV pools: in what dtype to keep one, and how to read and write its slots and blocks.

A pool is [blocks, block_size, KV heads, head size]. Every function that returns pools updates them in place when they
are donated to the jitted program that calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def pool_dtype(dtype: DTypeLike, platform: str | None = None) -> jnp.dtype:
    """The dtype in which to allocate a pool that holds values of `dtype`.

    It is uint16, the raw bits, for bfloat16 on a CPU: there XLA (up to jax 0.10) updates a bfloat16 array through a
    float32 copy of all of it. All functions of this package take such pools as well as plain ones.

    Args:
        dtype: of the keys and values.
        platform: "cpu", "gpu", "tpu"; None = JAX's default.
    """
    platform = platform or jax.default_backend()
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.uint16) if platform == "cpu" and dtype == jnp.bfloat16 else dtype


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
        if pool.ndim != 4 or new.shape != (*slots.shape, *pool.shape[2:]) or slots.ndim != 1:
            raise ValueError(
                f"{name} is {new.shape} and slots {slots.shape}, but a pool of shape {pool.shape} "
                "takes [T, KV heads, head size] and [T]"
            )
        if not holds(pool.dtype, new.dtype):
            raise ValueError(f"{name} is {new.dtype} but its pool is {pool.dtype}: cast before writing")
    return _write(k_pool, k, slots), _write(v_pool, v, slots)


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


def holds(pool_dtype: jnp.dtype, dtype: jnp.dtype) -> bool:
    """Whether a pool of `pool_dtype` can hold values of `dtype`."""
    return pool_dtype == dtype or (pool_dtype == jnp.uint16 and dtype == jnp.bfloat16)


def to_storage(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`x` as a pool of `dtype` keeps it."""
    return lax.bitcast_convert_type(x, dtype) if dtype == jnp.uint16 else x


def from_storage(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`x`, read from a pool, as `dtype`."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def _write(pool: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    flat = pool.reshape(-1, *pool.shape[2:])
    return _scatter(flat, to_storage(new, pool.dtype), slots).reshape(pool.shape)


def _scatter(pool: jax.Array, rows: jax.Array, index: jax.Array) -> jax.Array:
    index = jnp.where(index < 0, pool.shape[0], index)  # a negative index would count from the end
    return pool.at[index].set(rows, mode="drop")
