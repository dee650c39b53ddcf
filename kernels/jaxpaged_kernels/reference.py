"""The oracle: attention written the obvious way, in float32, with no regard for speed or memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpaged_kernels.cache import from_storage
from jaxpaged_kernels.quantize import dequantize


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
    """See `jaxpaged_kernels.paged_attention`. Gathers every table whole, once for each query token."""
    del num_decodes  # a decode is a chunk of one token: nothing here treats it apart
    num_tokens, num_heads, head_dim = q.shape
    num_rows, num_kv_heads = block_tables.shape[0], k_pool.shape[2]
    token = jnp.arange(num_tokens)
    if decode_only:
        row, position = token, kv_lens - 1
    else:
        row = jnp.searchsorted(query_starts[1:], token, side="right")
        row = jnp.minimum(row, num_rows - 1)
        position = kv_lens[row] - (query_starts[row + 1] - token)
        position = jnp.where(token < query_starts[-1], position, -1)  # padding sees no key

    def keys_of(pool: jax.Array, scales: jax.Array | None) -> jax.Array:  # [T, L, H, D]
        blocks = from_storage(pool[block_tables[row]], jnp.float32)
        if scales is not None:
            blocks = dequantize(blocks, scales[block_tables[row]])
        keys = blocks.reshape(num_tokens, -1, num_kv_heads, head_dim)
        return jnp.repeat(keys, num_heads // num_kv_heads, axis=2)

    k, v = keys_of(k_pool, k_scales), keys_of(v_pool, v_scales)
    key_position = jnp.arange(k.shape[1])
    visible = key_position <= position[:, None]
    if window is not None:
        visible &= key_position > position[:, None] - window

    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("thd,tlhd->thl", q.astype(jnp.float32), k, precision=highest) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (num_tokens, num_heads, 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]]
    weights = jnp.where(visible[:, None], weights, 0)  # a row that sees no key has NaN weights
    v = jnp.where(visible[:, :, None, None], v, 0)  # slots of others may hold anything, and 0 * NaN is NaN
    return jnp.einsum("thl,tlhd->thd", weights, v, precision=highest).astype(q.dtype)
