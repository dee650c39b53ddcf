"""Attention on a CPU in C++, through XLA's foreign function interface: see csrc/attention_impl.h.

A query's result does not depend, in any bit, on its batch, the chunks that its prompt comes in, the block size or the
number of threads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged_kernels import native
from jaxpaged_kernels.cache import is_quantized
from jaxpaged_kernels.target import current_target

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    num_decodes: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    decode_only: bool,
    k_scales: jax.Array | None,
    v_scales: jax.Array | None,
) -> jax.Array:
    """See `jaxpaged_kernels.paged_attention`."""
    del num_decodes  # a decode is a chunk of one token: nothing here treats it apart
    _check(q)
    nothing = jnp.zeros(0, jnp.float32)
    attend = jax.ffi.ffi_call("jaxpaged_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
    return attend(
        q,
        k_pool,
        v_pool,
        block_tables,
        kv_lens,
        query_starts,
        nothing if sinks is None else sinks.astype(jnp.float32),
        nothing if k_scales is None else k_scales,
        nothing if v_scales is None else v_scales,
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0),
        window=np.int64(window or 0),
        decode_only=decode_only,
    )


def rotate_and_write_kv(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pools: tuple[jax.Array, ...],
    slots: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """See `jaxpaged_kernels.rotate_and_write_kv`. Pools that are donated are written where they are."""
    _check(q)
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise NotImplementedError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: native needs one dtype")
    if is_quantized(pools[0].dtype) != (len(pools) == 4):
        raise ValueError(f"{len(pools)} pools of {pools[0].dtype} were given: only quantized ones go with scales")
    first_pool = 6  # of the arguments
    write = jax.ffi.ffi_call(
        "jaxpaged_rotate_and_write",
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *pools)],
        input_output_aliases={first_pool + i: 1 + i for i in range(len(pools))},
    )
    rotated, *written = write(
        q, k, v, cos.astype(jnp.float32), sin.astype(jnp.float32), slots.astype(jnp.int32), *pools
    )
    return rotated, tuple(written)


def _check(q: jax.Array) -> None:
    """Raises NotImplementedError where the library cannot be called, or has no kernel for q."""
    if (platform := current_target().platform) != "cpu":
        raise NotImplementedError(f"native kernels are for CPUs, not for {platform}")
    if (reason := native.why_unavailable()) is not None:
        raise NotImplementedError(reason)
    if q.dtype not in _DTYPES:
        raise NotImplementedError(f"q is {q.dtype}: native has float32, bfloat16 and float16")
