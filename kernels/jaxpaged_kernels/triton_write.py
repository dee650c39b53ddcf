"""Rotating queries and keys and writing keys and values on NVIDIA GPUs: one launch for all of a layer's arrays.

XLA makes at least three of it, for the queries and for the scatter of K and of V, and seven for a quantized pool.
Elsewhere than on a GPU the kernel is interpreted, for tests.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxpaged_kernels.quantize import LARGEST
from jaxpaged_kernels.target import current_target

Ref = Any  # of a kernel's argument; its type is not public
Halves = tuple[jax.Array, jax.Array]  # the first and the second half of each head


def rotate_and_write_kv(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pools: tuple[jax.Array, ...],
    slots: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """See `jaxpaged_kernels.rotate_and_write_kv`."""
    flat = [pool.reshape(-1, *pool.shape[2:]) for pool in pools]
    num_tokens, num_kv_heads, _ = k.shape
    # XLA makes one product of the three projections. Given its parts one by one, it would copy each.
    heads = jnp.concatenate([x.reshape(num_tokens, -1) for x in (q, k, v)], axis=1).reshape(num_tokens, -1, q.shape[2])
    rotated, *written = pl.pallas_call(
        functools.partial(_kernel, num_pools=len(pools)),
        grid=(num_kv_heads, num_tokens),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *flat)],
        input_output_aliases={4 + i: 1 + i for i in range(len(flat))},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=current_target().platform != "gpu",
        name="rotate_and_write_kv",
    )(heads, cos, sin, slots, *flat)
    return rotated, tuple(new.reshape(pool.shape) for new, pool in zip(written, pools, strict=True))


def _kernel(heads_ref: Ref, cos_ref: Ref, sin_ref: Ref, slots_ref: Ref, *refs: Ref, num_pools: int) -> None:
    """One token, one KV head and its query heads.

    Args:
        heads_ref: [T, H + 2 KVH, D], heads of q, of k and of v.
        refs: pools as inputs, rotated q, the same pools as outputs.
    """
    kv_head, token = pl.program_id(0), pl.program_id(1)
    rotated_ref, *pools = refs[num_pools:]
    num_heads, half = rotated_ref.shape[1], rotated_ref.shape[2] // 2
    num_kv_heads = (heads_ref.shape[1] - num_heads) // 2
    group = num_heads // num_kv_heads
    pair = jnp.arange(pl.next_power_of_2(half))
    real = pair < half
    cos, sin = (plgpu.load(ref.at[token, pair], mask=real, other=0.0) for ref in (cos_ref, sin_ref))

    def load(head: jax.Array, mask: jax.Array, at: jax.Array) -> Halves:
        """Both halves of heads, one by one: a tile cannot be cut."""
        first = plgpu.load(heads_ref.at[token, head, at], mask=mask, other=0.0)
        return first, plgpu.load(heads_ref.at[token, head, at + half], mask=mask, other=0.0)

    member = jnp.arange(pl.next_power_of_2(group))
    head, mask, at = kv_head * group + member[:, None], (member < group)[:, None] & real[None, :], pair[None, :]
    first, second = _rotate(load(head, mask, at), cos[None, :], sin[None, :])
    plgpu.store(rotated_ref.at[token, head, at], first.astype(rotated_ref.dtype), mask=mask)
    plgpu.store(rotated_ref.at[token, head, at + half], second.astype(rotated_ref.dtype), mask=mask)

    slot = slots_ref[token]

    @pl.when((slot >= 0) & (slot < pools[0].shape[0]))
    def _() -> None:
        first, second = _rotate(load(num_heads + kv_head, real, pair), cos, sin)
        # Rounded to the model's dtype first, as it is where the rotation is an operation of its own.
        key = first.astype(heads_ref.dtype), second.astype(heads_ref.dtype)
        value = load(num_heads + num_kv_heads + kv_head, real, pair)
        for new, pool, scales in zip((key, value), pools[:2], pools[2:] or (None, None), strict=True):
            first, second = new
            if scales is not None:
                (first, second), scales[slot, kv_head] = _quantize(new, jnp.dtype(pool.dtype))
            plgpu.store(pool.at[slot, kv_head, pair], first.astype(pool.dtype), mask=real)
            plgpu.store(pool.at[slot, kv_head, pair + half], second.astype(pool.dtype), mask=real)


def _rotate(halves: Halves, cos: jax.Array, sin: jax.Array) -> Halves:
    """Heads, rotated, in float32; as `jaxpaged_kernels.apply_rope`."""
    first, second = (x.astype(jnp.float32) for x in halves)
    return first * cos - second * sin, second * cos + first * sin


def _quantize(halves: Halves, dtype: jnp.dtype) -> tuple[Halves, jax.Array]:
    """A head as it is stored, and its scale []; as `jaxpaged_kernels.quantize`."""
    first, second = (x.astype(jnp.float32) for x in halves)
    largest = LARGEST[dtype]
    scale = jnp.maximum(jnp.max(jnp.abs(first)), jnp.max(jnp.abs(second))) * (1 / largest)
    divisor = jnp.where(scale == 0, 1, scale)

    def stored(x: jax.Array) -> jax.Array:
        x = jnp.clip(x / divisor, -largest, largest)
        return jnp.floor(x + 0.5) if dtype == jnp.int8 else x

    return (stored(first), stored(second)), scale
