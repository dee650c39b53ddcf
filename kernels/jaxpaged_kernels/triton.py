"""Paged attention for NVIDIA GPUs: Pallas kernels through its Triton backend.

Two kernels share their inner loop. A program of either holds a tile of queries of one KV head, and walks the keys they
see through the block table, token by token, with an online softmax (FlashAttention, arXiv:2205.14135):

    decode    one token of a row times its query heads; the row's keys are split over programs (split-KV), whose parts
              a third, small kernel combines
    prefill   a run of tokens of one row times their query heads:   tile row r = token r // G, head r % G

Scores are kept in base 2, so that exp2 serves. Elsewhere than on a GPU the kernels are interpreted, for tests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxpaged_kernels import tiles
from jaxpaged_kernels.cache import value_dtype
from jaxpaged_kernels.target import Target, current_target
from jaxpaged_kernels.tiles import Splits, Tile

# The largest head size and group whose tiles are known not to spill registers.
MAX_HEAD_DIM = 256
MAX_GROUP = 64
_LOG2_E = math.log2(math.e)
_MASKED = -1e30  # finite, so that a tile row whose keys are all masked so far rescales by exp2(0), not by NaN

Ref = Any  # of a kernel's argument; its type is not public


@dataclass(frozen=True)
class _Problem:
    """What is known when the kernels are compiled."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    window: int | None
    soft_cap: float | None
    dtype: Any  # of q, and of the operands of products

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        """Head size as tiles have it: tiles are powers of two, and products take at least 16."""
        return max(pl.next_power_of_2(self.head_dim), 16)


class _Keys(NamedTuple):
    """Where keys and values are."""

    k: Ref  # [slots, KVH, D]
    v: Ref  # [slots, KVH, D]
    tables: Ref  # [S, P] int32
    k_scales: Ref | None  # [slots, KVH] float32
    v_scales: Ref | None  # [slots, KVH] float32


class _Softmax(NamedTuple):
    """Online softmax of the M rows of a tile, in base 2."""

    top: jax.Array  # [M] float32, largest score so far
    total: jax.Array  # [M] float32, sum of exp2(score - top)
    out: jax.Array  # [M, D] float32, sum of exp2(score - top) * v


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
    target = current_target()
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, block_size, num_kv_heads = k_pool.shape[:3]
    problem = _Problem(num_heads, num_kv_heads, head_dim, block_size, scale, window, soft_cap, q.dtype)
    _refuse(problem, target, k_pool.dtype)

    def by_slot(pool: jax.Array | None) -> jax.Array | None:
        return None if pool is None else pool.reshape(num_blocks * block_size, *pool.shape[2:])

    keys = _Keys(by_slot(k_pool), by_slot(v_pool), block_tables, by_slot(k_scales), by_slot(v_scales))
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)
    if decode_only:
        return _decode(problem, target, q, keys, sinks, kv_lens, None)
    out = _prefill(problem, target, q, keys, sinks, kv_lens, query_starts, num_decodes)
    rows = min(num_tokens, kv_lens.shape[0])
    lens = jnp.where(jnp.arange(rows) < num_decodes, kv_lens[:rows], 0)
    return _decode(problem, target, q, keys, sinks, lens, out)


def _refuse(problem: _Problem, target: Target, pool_dtype: jnp.dtype) -> None:
    """Raises NotImplementedError for what these kernels cannot do."""
    if target.platform not in ("gpu", "cpu"):
        raise NotImplementedError(f"Triton kernels run on NVIDIA GPUs, not on {target.platform}")
    if target.platform == "gpu" and target.compute_capability is None:
        raise NotImplementedError(f"{target.name}, whose compute capability is not known (target.py)")
    if target.compute_capability is not None and target.compute_capability < (8, 0):
        major, minor = target.compute_capability
        raise NotImplementedError(f"compute capability {major}.{minor} of {target.name}; it must be at least 8.0")
    if problem.head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(f"head size {problem.head_dim}; it must be at most {MAX_HEAD_DIM}")
    if problem.group > MAX_GROUP:
        raise NotImplementedError(f"{problem.group} query heads a KV head; it must be at most {MAX_GROUP}")
    if problem.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"queries of {problem.dtype}; they must be float32, bfloat16 or float16")
    if value_dtype(pool_dtype) != pool_dtype:
        raise NotImplementedError("pools of raw bits, which only a CPU needs")


# Decode: grid (tiles of heads, rows, splits).


def _decode(
    problem: _Problem,
    target: Target,
    q: jax.Array,
    keys: _Keys,
    sinks: jax.Array | None,
    kv_lens: jax.Array,
    out: jax.Array | None,
) -> jax.Array:
    """[T, H, D] for one query token a row: token i is row i's.

    Args:
        kv_lens: [R] int32, 0 for a row that is no decode.
        out: where to put the results of the rows that have keys; None = a new array, where the others give 0.
    """
    num_rows, padded_dim = kv_lens.shape[0], problem.padded_dim
    tile = tiles.decode_tile(target, padded_dim, problem.dtype.itemsize, keys.k.dtype.itemsize)
    head_tiles = pl.cdiv(problem.group, tile.rows)
    programs_per_row = problem.num_kv_heads * head_tiles
    max_keys = keys.tables.shape[1] * problem.block_size
    splits = tiles.decode_splits(target, num_rows * programs_per_row, max_keys)
    share = _keys_per_split(problem, kv_lens, splits, tile.keys, programs_per_row)

    parts = (problem.num_heads, num_rows, splits.most)
    partial, lse = _call(
        functools.partial(_decode_kernel, problem, tile, head_tiles),
        target,
        tile,
        name="paged_decode",
        grid=(programs_per_row, num_rows, splits.most),
        out_shape=(jax.ShapeDtypeStruct((*parts, padded_dim), jnp.float32), jax.ShapeDtypeStruct(parts, jnp.float32)),
    )(q, keys, sinks, kv_lens, share)
    return _call(
        functools.partial(_combine_kernel, problem, tile),
        target,
        tiles.combine_tile(splits.most, padded_dim),
        name="paged_combine",
        grid=(problem.num_heads, num_rows),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        input_output_aliases={} if out is None else {4: 0},
    )(partial, lse, kv_lens, share, out)


def _keys_per_split(
    problem: _Problem, kv_lens: jax.Array, splits: Splits, step: int, programs_per_row: int
) -> jax.Array:
    """[1] int32, a multiple of `step`: an even share for each block of threads, yet few enough splits a row."""
    seen = kv_lens
    if problem.window is not None:
        seen = jnp.minimum(seen, problem.window + step)  # the window may begin inside a step
    share = jnp.maximum(jnp.sum(seen) // (splits.blocks // programs_per_row + 1), splits.min_keys)
    share = jnp.maximum(share, -(-jnp.max(seen) // splits.most))
    return (-(-share // step) * step).astype(jnp.int32)[None]


def _split_begin(problem: _Problem, tile: Tile, length: jax.Array) -> jax.Array:
    """Where the first split of a decode over `length` keys begins: steps start at multiples of their keys."""
    return _first_key(problem, length - 1) // tile.keys * tile.keys


def _decode_kernel(
    problem: _Problem,
    tile: Tile,
    head_tiles: int,
    q_ref: Ref,
    keys: _Keys,
    sinks_ref: Ref | None,
    lens_ref: Ref,
    share_ref: Ref,
    partial_ref: Ref,
    lse_ref: Ref,
) -> None:
    kv_head, head_tile = pl.program_id(0) // head_tiles, pl.program_id(0) % head_tiles
    row, split = pl.program_id(1), pl.program_id(2)
    length, share = lens_ref[row], share_ref[0]
    begin = _split_begin(problem, tile, length) + split * share
    end = jnp.minimum(begin + share, length)

    @pl.when(begin < end)
    def _() -> None:
        head_in_group = head_tile * tile.rows + jnp.arange(tile.rows)
        real = head_in_group < problem.group
        head = kv_head * problem.group + head_in_group
        dim = jnp.arange(problem.padded_dim)
        q = plgpu.load(q_ref.at[row, head[:, None], dim[None, :]], mask=_mask(problem, real), other=0)
        state = _initial(problem, sinks_ref, head, real, counts=split == 0)
        positions = jnp.full((tile.rows,), length - 1)
        first = jnp.maximum(begin, _first_key(problem, length - 1))
        unmasked_end = first if problem.window is not None else end
        state = _attend(problem, tile, q, positions, keys, (row, kv_head), (first, unmasked_end, end), state)
        out, lse = state.out / state.total[:, None], state.top + jnp.log2(state.total)
        plgpu.store(partial_ref.at[head[:, None], row, split, dim[None, :]], out, mask=_all_dims(real, out))
        plgpu.store(lse_ref.at[head, row, split], lse, mask=real)


def _combine_kernel(
    problem: _Problem,
    tile: Tile,
    partial_ref: Ref,
    lse_ref: Ref,
    lens_ref: Ref,
    share_ref: Ref,
    others_ref: Ref | None,
    out_ref: Ref,
) -> None:
    """Adds up the splits of one row and head. Each is normalized; its weight is exp2 of its log-sum-exp."""
    head, row = pl.program_id(0), pl.program_id(1)
    length, share = lens_ref[row], share_ref[0]
    split, dim = jnp.arange(partial_ref.shape[2]), jnp.arange(problem.padded_dim)
    used = _split_begin(problem, tile, length) + split * share < length

    lse = plgpu.load(lse_ref.at[head, row, split], mask=used, other=_MASKED)
    weights = jnp.where(used, jnp.exp2(lse - jnp.max(lse)), 0)
    total = jnp.sum(weights)
    parts_at = partial_ref.at[head, row, split[:, None], dim[None, :]]
    parts = plgpu.load(parts_at, mask=jnp.broadcast_to(used[:, None], (split.size, dim.size)), other=0)
    out = jnp.sum(parts * weights[:, None], axis=0) / jnp.where(total == 0, 1, total)
    wanted = dim < problem.head_dim
    if others_ref is not None:
        wanted &= length > 0
    plgpu.store(out_ref.at[row, head, dim], out.astype(out_ref.dtype), mask=wanted)


# Prefill: grid (KV heads, tiles of tokens).


def _prefill(
    problem: _Problem,
    target: Target,
    q: jax.Array,
    keys: _Keys,
    sinks: jax.Array | None,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    num_decodes: jax.Array,
) -> jax.Array:
    """[T, H, D] for the tokens of the rows from `num_decodes` on, 0 for padding; the others' places are not written."""
    tile = tiles.prefill_tile(target, problem.padded_dim, problem.dtype.itemsize, keys.k.dtype.itemsize)
    tile = replace(tile, rows=max(tile.rows, pl.next_power_of_2(problem.group)))
    tile_map = _tile_map(tile.rows // problem.group, q.shape[0], kv_lens, query_starts, num_decodes)
    return _call(
        functools.partial(_prefill_kernel, problem, tile),
        target,
        tile,
        name="paged_prefill",
        grid=(problem.num_kv_heads, tile_map.shape[1]),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(q, keys, sinks, tile_map)


def _tile_map(
    tile_tokens: int, num_tokens: int, kv_lens: jax.Array, query_starts: jax.Array, num_decodes: jax.Array
) -> jax.Array:
    """[4, N] int32, of each tile: row, first token, tokens (0 where it is not needed), position of the first token.

    Behind the last row comes one more, without keys, that holds the padding tokens: a tile has to write their zeros.
    """
    num_rows = kv_lens.shape[0]
    ends = jnp.append(query_starts[1:], num_tokens)
    counts = ends - query_starts
    counts = jnp.where(jnp.arange(num_rows + 1) < num_decodes, 0, counts)
    tile_counts = (counts + tile_tokens - 1) // tile_tokens
    tile_ends = jnp.cumsum(tile_counts)
    # Every row with tokens may leave one tile all but empty.
    most = (num_tokens + (tile_tokens - 1) * min(num_rows + 1, num_tokens)) // tile_tokens
    index = jnp.arange(most)
    row = jnp.minimum(jnp.sum(tile_ends <= index[:, None], axis=1), num_rows)
    first = query_starts[row] + (index - (tile_ends - tile_counts)[row]) * tile_tokens
    tokens = jnp.clip(ends[row] - first, 0, tile_tokens)
    position = jnp.append(kv_lens, 0)[row] - (ends[row] - first)
    return jnp.stack([jnp.minimum(row, num_rows - 1), first, tokens, position]).astype(jnp.int32)


def _prefill_kernel(
    problem: _Problem,
    tile: Tile,
    q_ref: Ref,
    keys: _Keys,
    sinks_ref: Ref | None,
    map_ref: Ref,
    out_ref: Ref,
) -> None:
    kv_head = pl.program_id(0)
    index = map_ref.shape[1] - 1 - pl.program_id(1)  # backwards: the last tiles of a prompt see most keys
    row, first, tokens, position = (map_ref[i, index] for i in range(4))

    @pl.when(tokens > 0)
    def _() -> None:
        tile_row = jnp.arange(tile.rows)
        token, head = tile_row // problem.group, kv_head * problem.group + tile_row % problem.group
        real = token < tokens
        dim = jnp.arange(problem.padded_dim)
        at = (first + token[:, None], head[:, None], dim[None, :])
        q = plgpu.load(q_ref.at[at], mask=_mask(problem, real), other=0)
        state = _initial(problem, sinks_ref, head, real)
        begin, end = _first_key(problem, position), jnp.maximum(position + tokens, 0)
        unmasked_end = begin if problem.window is not None else jnp.maximum(position + 1, 0)
        state = _attend(problem, tile, q, position + token, keys, (row, kv_head), (begin, unmasked_end, end), state)
        out = state.out / jnp.where(state.total == 0, 1, state.total)[:, None]
        plgpu.store(out_ref.at[at], out.astype(out_ref.dtype), mask=_mask(problem, real))


# What both kernels share.


def _first_key(problem: _Problem, position: jax.Array) -> jax.Array:
    """The first key that a token at `position` sees."""
    return position * 0 if problem.window is None else jnp.maximum(position - (problem.window - 1), 0)


def _mask(problem: _Problem, real: jax.Array) -> jax.Array:
    """[M, D] where a tile with real rows `real` [M] lies inside the heads."""
    return real[:, None] & (jnp.arange(problem.padded_dim) < problem.head_dim)[None, :]


def _all_dims(real: jax.Array, tile: jax.Array) -> jax.Array:
    return jnp.broadcast_to(real[:, None], tile.shape)


def _initial(
    problem: _Problem, sinks_ref: Ref | None, head: jax.Array, real: jax.Array, counts: jax.Array | bool = True
) -> _Softmax:
    """The state before the first key. A sink is a key with that score and no value; only where it `counts`."""
    top, total = jnp.full(head.shape, _MASKED, jnp.float32), jnp.zeros(head.shape, jnp.float32)
    if sinks_ref is not None:
        sink = plgpu.load(sinks_ref.at[head], mask=real, other=0) * _LOG2_E
        top, total = jnp.where(counts, sink, top), jnp.where(counts, total + 1, total)
    return _Softmax(top, total, jnp.zeros((*head.shape, problem.padded_dim), jnp.float32))


def _attend(
    problem: _Problem,
    tile: Tile,
    q: jax.Array,
    positions: jax.Array,
    keys: _Keys,
    place: tuple[jax.Array, jax.Array],
    span: tuple[jax.Array, jax.Array, jax.Array],
    state: _Softmax,
) -> _Softmax:
    """`state` after the keys of `span`.

    Args:
        q: [M, D].
        positions: [M] int32.
        place: row of the block table, KV head.
        span: first key that is visible to any of the tile; where the steps begin of whose keys some are not visible to
            all of it; end.
    """
    first_key, unmasked_end, end = span

    def step(index: jax.Array, state: _Softmax, *, masked: bool) -> _Softmax:
        key = index * tile.keys + jnp.arange(tile.keys)
        inside = None
        if masked:  # what is behind the window may have been given up
            inside = key < end if problem.window is None else (key < end) & (key >= first_key)
        block_at = keys.tables.at[place[0], key // problem.block_size]
        block = plgpu.load(block_at, mask=inside, other=None if inside is None else 0)
        slot = block * problem.block_size + key % problem.block_size
        visible = None
        if masked:
            visible = key[None, :] <= positions[:, None]
            if problem.window is not None:
                visible &= key[None, :] > positions[:, None] - problem.window
        return _accumulate(problem, q, keys, slot, place[1], inside, visible, state)

    begin, middle = first_key // tile.keys, unmasked_end // tile.keys
    state = lax.fori_loop(begin, middle, functools.partial(step, masked=False), state)
    return lax.fori_loop(middle, pl.cdiv(end, tile.keys), functools.partial(step, masked=True), state)


def _accumulate(
    problem: _Problem,
    q: jax.Array,
    keys: _Keys,
    slot: jax.Array,
    kv_head: jax.Array,
    inside: jax.Array | None,
    visible: jax.Array | None,
    state: _Softmax,
) -> _Softmax:
    """`state` after the keys in slots `slot` [N]; `inside` [N]: they exist; `visible` [M, N]. None = all."""
    scores = _dot(q, _load(problem, keys.k, slot, kv_head, inside), trans_b=True)
    scale = problem.scale if problem.soft_cap else problem.scale * _LOG2_E
    if keys.k_scales is not None:
        scores *= (plgpu.load(keys.k_scales.at[slot, kv_head], mask=inside, other=_other(inside)) * scale)[None, :]
    else:
        scores *= scale
    if problem.soft_cap is not None:
        scores = jnp.tanh(scores / problem.soft_cap) * (problem.soft_cap * _LOG2_E)
    if visible is not None:
        scores = jnp.where(visible, scores, _MASKED)
    top = jnp.maximum(state.top, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - top[:, None])
    shrink = jnp.exp2(state.top - top)
    total = state.total * shrink + jnp.sum(weights, axis=1)
    values = _load(problem, keys.v, slot, kv_head, inside)
    if keys.v_scales is not None:
        v_scales = plgpu.load(keys.v_scales.at[slot, kv_head], mask=inside, other=_other(inside))
        if problem.dtype == jnp.float16:  # its range is too small for weights times scales
            values = (values.astype(jnp.float32) * v_scales[:, None]).astype(problem.dtype)
        else:
            weights *= v_scales[None, :]
    return _Softmax(top, total, state.out * shrink[:, None] + _dot(weights.astype(problem.dtype), values))


def _load(problem: _Problem, pool: Ref, slot: jax.Array, kv_head: jax.Array, inside: jax.Array | None) -> jax.Array:
    """[N, D] keys or values in q's dtype. Slots that the row does not own are not read: they may hold NaN."""
    dim = jnp.arange(problem.padded_dim)
    mask = None
    if problem.padded_dim != problem.head_dim or inside is not None:
        mask = jnp.broadcast_to((dim < problem.head_dim)[None, :], (slot.size, dim.size))
        if inside is not None:
            mask &= inside[:, None]
    values = plgpu.load(pool.at[slot[:, None], kv_head, dim[None, :]], mask=mask, other=_other(mask))
    return values.astype(problem.dtype)


def _other(mask: jax.Array | None) -> float | None:
    """What a load gives where `mask` is False."""
    return None if mask is None else 0.0


def _dot(a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
    # In float32 the default precision is TF32, with 10 bits of mantissa.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, trans_b=trans_b, precision=precision)


def _call(
    kernel: Callable[..., None],
    target: Target,
    tile: Tile,
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    input_output_aliases: dict[int, int] | None = None,
) -> Callable[..., Any]:
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=input_output_aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=target.platform != "gpu",
        name=name,
    )
