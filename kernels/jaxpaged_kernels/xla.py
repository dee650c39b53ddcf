"""The portable fast path: plain XLA operations, with loops that stop at the true lengths.

Work is cut into tiles. A decode tile is a few rows with one query token each, sorted by length so that a tile's rows
end close together; a prefill tile is a run of tokens of one row. Either walks its keys in groups of blocks with an
online softmax. Groups always start at position 0 and a masked group changes nothing, so a row's result does not
depend on which rows share its tile.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged_kernels.cache import from_storage

KEYS_PER_GROUP = 128
ROWS_PER_TILE = 4
TOKENS_PER_TILE = 64
_MASKED = -1e30  # finite, so that a row whose keys are all masked so far rescales by exp(0), not by NaN


class _Cache(NamedTuple):
    """What the queries attend to, and how."""

    k_pool: jax.Array  # [blocks, block, KVH, D]
    v_pool: jax.Array  # [blocks, block, KVH, D]
    tables: jax.Array  # [S, P] int32, P a multiple of `blocks_per_group`
    blocks_per_group: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: jax.Array | None  # [KVH, G] float32
    k_scales: jax.Array | None  # [blocks, block, KVH] float32
    v_scales: jax.Array | None  # [blocks, block, KVH] float32

    @property
    def keys_per_group(self) -> int:
        return self.blocks_per_group * self.k_pool.shape[1]


class _Scales(NamedTuple):
    """Of a group of L quantized keys and values. The products take them as stored; scores and weights are scaled."""

    k: jax.Array  # [B, KVH, 1, 1, L] float32
    v: jax.Array  # [B, KVH, 1, 1, L] float32


class _Softmax(NamedTuple):
    """Online softmax of M query tokens times heads, for each of B rows."""

    top: jax.Array  # [B, KVH, M, G] float32, largest score so far
    total: jax.Array  # [B, KVH, M, G] float32, sum of exp(score - top)
    out: jax.Array  # [B, KVH, M, G, D] float32, sum of exp(score - top) * v


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
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_pool.shape[1:3]
    grouped = (num_kv_heads, num_heads // num_kv_heads)
    blocks_per_group = min(max(KEYS_PER_GROUP // block_size, 1), block_tables.shape[1])
    cache = _Cache(
        k_pool,
        v_pool,
        jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % blocks_per_group))),
        blocks_per_group,
        scale,
        window,
        soft_cap,
        None if sinks is None else sinks.astype(jnp.float32).reshape(grouped),
        k_scales,
        v_scales,
    )
    heads = q.reshape(num_tokens, *grouped, head_dim)
    if decode_only:
        out = _decode(heads, cache, kv_lens)
    else:
        rows = min(num_tokens, kv_lens.shape[0])
        lens = jnp.where(jnp.arange(rows) < num_decodes, kv_lens[:rows], 0)
        out = jnp.zeros(heads.shape, jnp.float32).at[:rows].set(_decode(heads[:rows], cache, lens))
        out = _prefill(out, heads, cache, kv_lens, query_starts, num_decodes)
    return out.reshape(q.shape).astype(q.dtype)


def _decode(q: jax.Array, cache: _Cache, kv_lens: jax.Array) -> jax.Array:
    """[R, KVH, G, D] float32 for one query token a row; rows of length 0 cost nothing and give 0."""
    num_rows = q.shape[0]
    tile_rows = min(ROWS_PER_TILE, num_rows)
    order = jnp.argsort(-kv_lens)
    order = jnp.pad(order, (0, -num_rows % tile_rows), constant_values=num_rows)
    num_tiles = (jnp.sum(kv_lens > 0) + tile_rows - 1) // tile_rows

    def tile(i: jax.Array, out: jax.Array) -> jax.Array:
        rows = lax.dynamic_slice_in_dim(order, i * tile_rows, tile_rows)
        lens = kv_lens.at[rows].get(mode="fill", fill_value=0)
        result = _attend(q[rows][:, None], (lens - 1)[:, None], cache, cache.tables[rows])
        return out.at[rows].set(result[:, 0], mode="drop")

    return lax.fori_loop(0, num_tiles, tile, jnp.zeros(q.shape, jnp.float32))


def _prefill(
    out: jax.Array, q: jax.Array, cache: _Cache, kv_lens: jax.Array, query_starts: jax.Array, num_decodes: jax.Array
) -> jax.Array:
    """`out` [T, KVH, G, D] with the tokens of all rows from `num_decodes` on filled in."""
    num_rows = kv_lens.shape[0]
    tile_tokens = min(TOKENS_PER_TILE, q.shape[0])
    lengths = jnp.where(jnp.arange(num_rows) < num_decodes, 0, jnp.diff(query_starts))
    tiles = (lengths + tile_tokens - 1) // tile_tokens
    tile_ends = jnp.cumsum(tiles)

    def tile(i: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.sum(tile_ends <= i)
        first = query_starts[row] + (i - (tile_ends[row] - tiles[row])) * tile_tokens
        end = query_starts[row + 1]
        start = jnp.minimum(first, q.shape[0] - tile_tokens)
        token = start + jnp.arange(tile_tokens)
        mine = (token >= first) & (token < end)
        position = jnp.where(mine, kv_lens[row] - (end - token), -1)
        result = _attend(
            lax.dynamic_slice_in_dim(q, start, tile_tokens)[None],
            position[None],
            cache,
            lax.dynamic_slice_in_dim(cache.tables, row, 1),
        )[0]
        others = lax.dynamic_slice_in_dim(out, start, tile_tokens)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(mine[:, None, None, None], result, others), start, 0)

    return lax.fori_loop(0, tile_ends[-1], tile, out)


def _attend(q: jax.Array, positions: jax.Array, cache: _Cache, tables: jax.Array) -> jax.Array:
    """Attention of one tile.

    Args:
        q: [B, M, KVH, G, D], M query tokens of each of B rows.
        positions: [B, M] int32, position of each query token; -1 is padding, which sees no key.
        tables: [B, P] int32, the rows' block tables.

    Returns:
        [B, M, KVH, G, D] float32.
    """
    num_rows, num_tokens, num_kv_heads, group, head_dim = q.shape
    shape = (num_rows, num_kv_heads, num_tokens, group)
    if cache.sinks is None:
        top, total = jnp.full(shape, _MASKED), jnp.zeros(shape)
    else:  # a sink is a key with this score and no value
        top, total = jnp.broadcast_to(cache.sinks[None, :, None], shape), jnp.ones(shape)
    state = _Softmax(top, total, jnp.zeros((*shape, head_dim)))
    q = q.transpose(0, 2, 1, 3, 4)

    last = jnp.max(positions, axis=1)  # [B]
    first_key = jnp.zeros_like(last)
    if cache.window is not None:
        first = jnp.min(jnp.where(positions < 0, last[:, None], positions), axis=1)
        first_key = jnp.maximum(first - (cache.window - 1), 0)
        first_key = jnp.where(last < 0, jnp.max(first_key), first_key)  # padding rows do not hold the others back
    first_group = jnp.min(first_key) // cache.keys_per_group
    end_group = jnp.max(last) // cache.keys_per_group + 1

    # A weight times the scale of a value can be too small for float16.
    values_dtype = jnp.float32 if cache.v_scales is not None and q.dtype == jnp.float16 else q.dtype

    def body(index: jax.Array, state: _Softmax) -> _Softmax:
        ids = lax.dynamic_slice_in_dim(tables, index * cache.blocks_per_group, cache.blocks_per_group, axis=1)
        # XLA for CPU reads a bfloat16 pool through a float32 copy of it, which it would make once for the whole pool,
        # before the loop. Tied to the block ids, the pool cannot leave the loop, and only the blocks are converted.
        k_pool, v_pool, ids = lax.optimization_barrier((cache.k_pool, cache.v_pool, ids))
        key = index * cache.keys_per_group + jnp.arange(cache.keys_per_group)
        owned = (key >= first_key[:, None]) & (key <= last[:, None])  # [B, L]
        visible = key <= positions[..., None]  # [B, M, L]
        if cache.window is not None:
            visible &= key > positions[..., None] - cache.window
        k = _read(k_pool, ids, q.dtype)
        v = _read(v_pool, ids, values_dtype)
        v = jnp.where(owned[..., None, None], v, 0)  # what others left there may be NaN, and 0 * NaN is NaN
        scales = None
        if cache.k_scales is not None and cache.v_scales is not None:
            k_scales, v_scales = (_read(pool, ids, jnp.float32) for pool in (cache.k_scales, cache.v_scales))
            scales = _Scales(_by_head(k_scales), _by_head(jnp.where(owned[..., None], v_scales, 0)))
        return _accumulate(state, q, k, v, visible[:, None, :, None], cache, scales)

    state = lax.fori_loop(first_group, end_group, body, state)
    out = state.out / jnp.where(state.total == 0, 1, state.total)[..., None]
    return out.transpose(0, 2, 1, 3, 4)


def _read(pool: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What blocks `ids` [B, N] of `pool` [blocks, block, ...] hold, as [B, N * block, ...]."""
    return from_storage(pool[ids], dtype).reshape(ids.shape[0], -1, *pool.shape[2:])


def _by_head(scales: jax.Array) -> jax.Array:
    """[B, KVH, 1, 1, L], as scores and weights are, from [B, L, KVH]."""
    return scales.transpose(0, 2, 1)[:, :, None, None]


def _accumulate(
    state: _Softmax,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    cache: _Cache,
    scales: _Scales | None,
) -> _Softmax:
    """`state` after a group of L keys: q [B, KVH, M, G, D], k and v [B, L, KVH, D], visible [B, 1, M, 1, L]."""
    joined = q.shape[2] == 1
    scores = (_joined_scores(q, k) if joined else _dot("bkmgd,blkd->bkmgl", q, k)) * cache.scale
    if scales is not None:
        scores *= scales.k
    if cache.soft_cap is not None:
        scores = cache.soft_cap * jnp.tanh(scores / cache.soft_cap)
    scores = jnp.where(visible, scores, _MASKED)
    top = jnp.maximum(state.top, jnp.max(scores, axis=-1))
    weights = jnp.where(visible, jnp.exp(scores - top[..., None]), 0)
    total = jnp.sum(weights, axis=-1)
    weights = (weights if scales is None else weights * scales.v).astype(v.dtype)
    out = _joined_values(weights, v) if joined else _dot("bkmgl,blkd->bkmgd", weights, v)
    shrink = jnp.exp(state.top - top)
    return _Softmax(top, state.total * shrink + total, state.out * shrink[..., None] + out)


# With one query token a row, the product of each KV head is tiny and its keys lie apart. On a CPU it is 1.3 to 3.5
# times as fast to take all heads in one product, as one head of size KVH * D, though most of its terms are 0.


def _joined_scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """[B, KVH, 1, G, L] float32 from q [B, KVH, 1, G, D], each query set to 0 in the places of other KV heads."""
    num_rows, num_kv_heads, _, group, _ = q.shape
    spread = q[..., None, :] * jnp.eye(num_kv_heads, dtype=q.dtype)[:, None, None, :, None]
    scores = _dot("bhe,ble->bhl", spread.reshape(num_rows, num_kv_heads * group, -1), k.reshape(*k.shape[:2], -1))
    return scores.reshape(*q.shape[:4], -1)


def _joined_values(weights: jax.Array, v: jax.Array) -> jax.Array:
    """[B, KVH, 1, G, D] float32 from weights [B, KVH, 1, G, L]: of what all KV heads give, each query's own."""
    num_rows, num_kv_heads, _, group, num_keys = weights.shape
    out = _dot("bhl,ble->bhe", weights.reshape(num_rows, -1, num_keys), v.reshape(*v.shape[:2], -1))
    out = out.reshape(num_rows, num_kv_heads, group, num_kv_heads, -1)
    return jnp.stack([out[:, head, None, :, head] for head in range(num_kv_heads)], axis=1)


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)
