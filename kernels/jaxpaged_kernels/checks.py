"""What arguments of the public functions must look like; all of it is known before anything is compiled or launched."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxpaged_kernels.cache import check_scales, holds, is_quantized, value_dtype
from jaxpaged_kernels.target import Target

# Kernels for GPUs count the elements of an array in signed 32 bits. Wider elements reach that limit only in arrays so
# large that the compiler turns to 64 bits by itself.
MAX_ONE_BYTE_POOL = 2**31 - 1
# The first NVIDIA GPUs (Ada) that convert to and from fp8.
FP8_CAPABILITY = (8, 9)


def check_arrays(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, k_scales: jax.Array | None, v_scales: jax.Array | None
) -> None:
    """Raises ValueError for queries, pools and scales that do not fit each other."""
    if q.ndim != 3:
        raise ValueError(f"q is {list(q.shape)}, but must be [tokens, heads, head size]")
    if k_pool.ndim != 4 or k_pool.shape != v_pool.shape:
        raise ValueError(
            f"the pools are {list(k_pool.shape)} and {list(v_pool.shape)}, "
            "but both must be the same [blocks, block_size, KV heads, head size]"
        )
    if 0 in k_pool.shape:
        raise ValueError(f"the pools are {list(k_pool.shape)}, but none of these may be 0")
    if q.shape[2] != k_pool.shape[3]:
        raise ValueError(f"q has heads of {q.shape[2]} but the pools of {k_pool.shape[3]}")
    if q.shape[1] % k_pool.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k_pool.shape[2]} KV heads")
    if is_quantized(k_pool.dtype) or is_quantized(v_pool.dtype):
        _check_quantized(q, k_pool, v_pool, k_scales, v_scales)
    elif k_scales is not None or v_scales is not None:
        raise ValueError(f"scales were given for pools of {k_pool.dtype}, but only int8 and float8_e4m3fn have them")
    elif not jnp.issubdtype(q.dtype, jnp.floating) or not all(holds(p.dtype, q.dtype) for p in (k_pool, v_pool)):
        raise ValueError(
            f"q, k_pool and v_pool are {q.dtype}, {k_pool.dtype} and {v_pool.dtype}, "
            "but must be of one float dtype (for a pool, its pool_dtype)"
        )


def _check_quantized(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, k_scales: jax.Array | None, v_scales: jax.Array | None
) -> None:
    if k_pool.dtype != v_pool.dtype or q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"q, k_pool and v_pool are {q.dtype}, {k_pool.dtype} and {v_pool.dtype}, "
            "but quantized pools must both be int8 or float8_e4m3fn, and q float32, bfloat16 or float16"
        )
    if k_scales is None or v_scales is None:
        raise ValueError(f"pools of {k_pool.dtype} need k_scales and v_scales, one for each slot and KV head")
    check_scales("k_scales", k_scales, k_pool)
    check_scales("v_scales", v_scales, v_pool)
    _check_pool_bytes(k_pool)


def _check_pool_bytes(pool: jax.Array) -> None:
    """Raises ValueError for a one-byte pool in which a GPU's 32-bit offsets would point elsewhere."""
    if pool.nbytes > MAX_ONE_BYTE_POOL:
        raise ValueError(
            f"a pool of {pool.dtype}{list(pool.shape)} has {pool.nbytes} bytes, but a one-byte pool may have at most "
            f"{MAX_ONE_BYTE_POOL}, as far as 32-bit offsets reach; use fewer blocks or a 16-bit pool"
        )


def check_rotation(q: jax.Array, k: jax.Array, v: jax.Array, pools: tuple[jax.Array, ...], slots: jax.Array) -> None:
    """Raises ValueError for heads, pools and slots that do not fit each other, but for what writing checks itself."""
    if len(pools) not in (2, 4):
        raise ValueError(f"{len(pools)} pools were given, but it takes K and V, or these and the scales of each")
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2]):
        raise ValueError(
            f"q is {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}, "
            "but must be [tokens, heads, head size] with equal tokens and head sizes, and k and v alike"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} KV heads")
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ValueError(f"slots are {slots.dtype}, but must be int32")
    if is_quantized(pools[0].dtype):
        _check_pool_bytes(pools[0])


def check_target(pool_dtype: jnp.dtype, target: Target) -> None:
    """Raises ValueError for a dtype of pools that `target` cannot compute with."""
    capability = target.compute_capability
    if value_dtype(pool_dtype) == jnp.float8_e4m3fn and capability is not None and capability < FP8_CAPABILITY:
        raise ValueError(
            f"{target.name} has compute capability {capability[0]}.{capability[1]}, but fp8 pools need "
            f"{FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or later; use int8 or 16-bit pools"
        )


def check_rows(
    q: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    num_decodes: jax.Array,
    *,
    decode_only: bool,
) -> None:
    """Raises ValueError for descriptions of rows that do not fit each other."""
    if block_tables.ndim != 2 or 0 in block_tables.shape:
        raise ValueError(f"block_tables is {list(block_tables.shape)}, but must be [rows, blocks], neither of them 0")
    num_rows = block_tables.shape[0]
    if kv_lens.shape != (num_rows,) or query_starts.shape != (num_rows + 1,) or num_decodes.shape != ():
        raise ValueError(
            f"kv_lens is {list(kv_lens.shape)}, query_starts {list(query_starts.shape)} and num_decodes "
            f"{list(num_decodes.shape)}, but {num_rows} block tables need [{num_rows}], [{num_rows + 1}] and a scalar"
        )
    for name, array in (("block_tables", block_tables), ("kv_lens", kv_lens), ("query_starts", query_starts)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} is {array.dtype}, but must be int32")
    if decode_only and q.shape[0] != num_rows:
        raise ValueError(f"decode_only needs one query token a row, but there are {q.shape[0]} for {num_rows} rows")


def check_options(q: jax.Array, *, window: int | None, soft_cap: float | None, sinks: jax.Array | None) -> None:
    """Raises ValueError for options out of range."""
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window is {window}, but must be a whole number of at least 1, or None for full attention")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}, but must be above 0, or None for no cap")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks is {list(sinks.shape)}, but must have one value for each of {q.shape[1]} heads")


def check_block_tables(block_tables: npt.ArrayLike, num_blocks: int) -> None:
    """For debugging: looks at the values of `block_tables` before they are handed to a jitted program.

    Neither XLA nor a kernel looks: an id outside the pool would read memory of another sequence, or of nobody.

    Args:
        block_tables: [S, P] integers; waited for and copied if they are on a device.
        num_blocks: of the pool.

    Raises:
        IndexError: a negative id, or one that is not below `num_blocks`.
        TypeError: called on a traced array, which has no values yet.
    """
    if isinstance(block_tables, jax.core.Tracer):
        raise TypeError("check_block_tables looks at values: call it outside of jit, before the program that is jitted")
    tables = np.asarray(block_tables)
    bad = np.argwhere((tables < 0) | (tables >= num_blocks))
    if len(bad):
        row, column = bad[0]
        raise IndexError(
            f"block_tables[{row}, {column}] is {tables[row, column]}, but the pool has blocks 0 to {num_blocks - 1}"
        )
