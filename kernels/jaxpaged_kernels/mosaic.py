"""Paged decode attention for Hopper GPUs through Pallas's Mosaic GPU backend: a prototype of what could follow Triton.

A program owns one row, one KV head and one split of the row's keys. Its first warpgroup copies keys and values, block
by block through the block table, into a ring of tiles in shared memory (TMA). Its second multiplies them (WGMMA) under
an online softmax (FlashAttention, arXiv:2205.14135), in base 2. XLA puts the splits together.

Compiled for sm_90a and checked in interpret mode; it has not run on a GPU, so it is never picked unless asked for.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged_kernels.target import Target, current_target

HEAD_DIMS = (64, 128)
BLOCK_SIZES = (8, 16, 32, 64, 128)
CAPABILITY = (9, 0)  # WGMMA is of this one alone

_KEYS = 64  # a step
_QUERIES = (
    64  # the fewest rows that WGMMA multiplies; those beyond a group's heads hold rubbish that is never copied out
)
_ALIGNMENT = 8  # rows that a copy into a swizzled tile moves together
_SWIZZLE = 128  # bytes
_STAGES = 4  # tiles of keys in the ring; at head size 128 a program takes 187 of 227 KiB of shared memory
_PROGRAMS_PER_CORE = 2  # at least, while there are keys to split, so that a last round that is not full costs little
_LOG2_E = math.log2(math.e)

Ref = Any  # of a kernel's argument, a tile or a barrier; its type is not public


@dataclass(frozen=True)
class _Problem:
    """What is known when the kernel is compiled."""

    num_rows: int
    num_kv_heads: int
    group: int  # query heads of a KV head, padded to _ALIGNMENT
    head_dim: int
    block_size: int
    num_splits: int
    scale: float
    dtype: Any

    @property
    def copy_keys(self) -> int:
        """Keys that one copy brings: a block, or a tile's part of a larger one."""
        return min(self.block_size, _KEYS)


class _Shared(NamedTuple):
    """A program's shared memory. Copies arrive at `*_ready`, the reader of a tile of the ring at `free`."""

    q: Ref  # [_QUERIES, D]
    k: Ref  # [_STAGES, _KEYS, D]
    v: Ref  # [_STAGES, _KEYS, D]
    weights: Ref  # [_QUERIES, _KEYS]
    out: Ref  # [_QUERIES, D] float32
    log2_sum: Ref  # [_QUERIES] float32
    q_ready: Ref
    k_ready: Ref
    v_ready: Ref
    free: Ref


class _Span(NamedTuple):
    """The tiles of keys that a program walks."""

    kv_len: Any
    first: Any
    steps: Any


class _Softmax(NamedTuple):
    """Of the keys so far, in registers."""

    top: Any  # [_QUERIES] largest score
    total: Any  # [_QUERIES] sum of exp2(score - top)
    out: Any  # [_QUERIES, D] sum of exp2(score - top) * v


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
    decode_only: bool,
    **unsupported: object,
) -> jax.Array:
    """See `jaxpaged_kernels.paged_attention`; interpreted where there is no GPU.

    Raises:
        NotImplementedError: a case or a device that this cannot do.
    """
    del query_starts, num_decodes
    if not decode_only:
        raise NotImplementedError("only decode_only steps")
    if options := [name for name, value in unsupported.items() if value is not None]:
        raise NotImplementedError(f"no {', '.join(options)}")
    target = current_target()
    _check_case(q, k_pool, v_pool, target)

    num_rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_pool.shape[1:3]
    heads = num_heads // num_kv_heads
    padding = -heads % _ALIGNMENT
    max_tiles = pl.cdiv(block_tables.shape[1] * block_size, _KEYS)
    splits = min(pl.cdiv(_PROGRAMS_PER_CORE * target.num_cores, num_rows * num_kv_heads), max_tiles)
    problem = _Problem(num_rows, num_kv_heads, heads + padding, head_dim, block_size, splits, scale, q.dtype)
    kernel = _kernel(problem, interpret=target.platform != "gpu")
    grouped = jnp.pad(q.reshape(num_rows, num_kv_heads, heads, head_dim), ((0, 0), (0, 0), (0, padding), (0, 0)))
    out = _combine(*kernel(grouped, k_pool, v_pool, block_tables, kv_lens))
    return out[:, :, :heads].reshape(q.shape).astype(q.dtype)


def _check_case(q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, target: Target) -> None:
    if target.platform == "gpu" and target.compute_capability != CAPABILITY:
        raise NotImplementedError(f"{target.name} is not of compute capability {CAPABILITY[0]}.{CAPABILITY[1]}")
    if target.platform != "gpu" and not hasattr(plgpu, "InterpretGPUParams"):
        raise NotImplementedError(f"jax {jax.__version__} cannot interpret it; 0.11 and later can")
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k_pool.dtype != q.dtype or v_pool.dtype != q.dtype:
        raise NotImplementedError(f"only bfloat16 or float16, not {q.dtype} with pools of {k_pool.dtype}")
    block_size, num_kv_heads, head_dim = k_pool.shape[1:]
    if head_dim not in HEAD_DIMS or block_size not in BLOCK_SIZES:
        raise NotImplementedError(
            f"only head sizes {HEAD_DIMS} and block sizes {BLOCK_SIZES}, not {head_dim} and {block_size}"
        )
    if q.shape[1] > _QUERIES * num_kv_heads:
        raise NotImplementedError(f"{q.shape[1] // num_kv_heads} query heads of a KV head are more than {_QUERIES}")


def _combine(parts: jax.Array, log2_sums: jax.Array) -> jax.Array:
    """Weighs averages of values [S, KVH, splits, G, D] by the log2 of their softmax sums [S, KVH, splits, G].

    Returns [S, KVH, G, D]: 0 for a row without keys, all of whose splits have sums of -inf.
    """
    top = jnp.max(log2_sums, axis=2, keepdims=True)
    weights = jnp.exp2(log2_sums - jnp.where(jnp.isneginf(top), 0, top))
    total = jnp.sum(weights, axis=2)
    return jnp.sum(parts * weights[..., None], axis=2) / jnp.where(total == 0, 1, total)[..., None]


def _kernel(problem: _Problem, *, interpret: bool) -> Any:
    swizzled = (
        plgpu.TilingTransform((_ALIGNMENT, _SWIZZLE // jnp.dtype(problem.dtype).itemsize)),
        plgpu.SwizzleTransform(_SWIZZLE),
    )
    ring = plgpu.SMEM((_STAGES, _KEYS, problem.head_dim), problem.dtype, transforms=swizzled)
    ready = plgpu.Barrier(num_arrivals=_KEYS // problem.copy_keys, num_barriers=_STAGES)
    shared = _Shared(
        q=plgpu.SMEM((_QUERIES, problem.head_dim), problem.dtype, transforms=swizzled),
        k=ring,
        v=ring,
        weights=plgpu.SMEM((_QUERIES, _KEYS), problem.dtype, transforms=swizzled),
        out=plgpu.SMEM((_QUERIES, problem.head_dim), jnp.float32),
        log2_sum=plgpu.SMEM((_QUERIES,), jnp.float32),
        q_ready=plgpu.Barrier(),
        k_ready=ready,
        v_ready=ready,
        free=plgpu.Barrier(num_barriers=_STAGES),
    )
    parts = (problem.num_rows, problem.num_kv_heads, problem.num_splits, problem.group)
    return plgpu.kernel(
        functools.partial(_decode, problem),
        out_type=(
            jax.ShapeDtypeStruct((*parts, problem.head_dim), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ),
        scratch_types=shared,
        grid=(problem.num_kv_heads, problem.num_splits, problem.num_rows),
        grid_names=("kv_head", "split", "row"),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )


def _decode(
    problem: _Problem, q: Ref, k_pool: Ref, v_pool: Ref, tables: Ref, kv_lens: Ref, parts: Ref, sums: Ref, *scratch: Ref
) -> None:
    shared = _Shared(*scratch)
    row, kv_head, split = (lax.axis_index(name) for name in ("row", "kv_head", "split"))
    kv_len = kv_lens[row]
    tiles = lax.div(kv_len + (_KEYS - 1), _KEYS)
    tiles_each = lax.div(tiles + (problem.num_splits - 1), problem.num_splits)
    first = lax.min(split * tiles_each, tiles)
    span = _Span(kv_len, first, lax.min(tiles_each, tiles - first))
    used = pl.ds(0, problem.group)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _() -> None:
        plgpu.copy_gmem_to_smem(q.at[row, kv_head], shared.q.at[used], shared.q_ready)
        _copy_keys(problem, span, shared, tables.at[row], k_pool, v_pool, kv_head)

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _() -> None:
        plgpu.barrier_wait(shared.q_ready)
        softmax = lax.fori_loop(0, span.steps, functools.partial(_attend, problem, span, shared), _no_keys(problem))
        total = jnp.where(softmax.total == 0, 1, softmax.total)
        shared.out[...] = softmax.out / lax.broadcast_in_dim(total, softmax.out.shape, [0])
        shared.log2_sum[...] = softmax.top + jnp.log(softmax.total) * _LOG2_E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared.out.at[used], parts.at[row, kv_head, split])
        plgpu.copy_smem_to_gmem(shared.log2_sum.at[used], sums.at[row, kv_head, split])
        plgpu.wait_smem_to_gmem(0)


def _copy_keys(
    problem: _Problem, span: _Span, shared: _Shared, table: Ref, k_pool: Ref, v_pool: Ref, kv_head: Any
) -> None:
    """Fills the ring as its tiles become free."""
    last_block = lax.div(span.kv_len - 1, problem.block_size)

    @pl.loop(0, span.steps)
    def _(step: Any) -> None:
        slot = lax.rem(step, _STAGES)

        @pl.when(step >= _STAGES)
        def _() -> None:
            plgpu.barrier_wait(shared.free.at[slot])

        for start in range(0, _KEYS, problem.copy_keys):
            position = (span.first + step) * _KEYS + start
            # Beyond the row's end its last block comes once more, to be masked: a table need not fill a tile.
            block = table[lax.min(lax.div(position, problem.block_size), last_block)]
            source = (block, pl.ds(lax.rem(position, problem.block_size), problem.copy_keys), kv_head)
            part = (slot, pl.ds(start, problem.copy_keys))
            plgpu.copy_gmem_to_smem(k_pool.at[source], shared.k.at[part], shared.k_ready.at[slot])
            plgpu.copy_gmem_to_smem(v_pool.at[source], shared.v.at[part], shared.v_ready.at[slot])


def _no_keys(problem: _Problem) -> _Softmax:
    by_row = plgpu.Layout.WGMMA.reduce(1)
    return _Softmax(
        top=plgpu.layout_cast(jnp.full((_QUERIES,), -jnp.inf, jnp.float32), by_row),
        total=plgpu.layout_cast(jnp.zeros((_QUERIES,), jnp.float32), by_row),
        out=plgpu.layout_cast(jnp.zeros((_QUERIES, problem.head_dim), jnp.float32), plgpu.Layout.WGMMA),
    )


def _attend(problem: _Problem, span: _Span, shared: _Shared, step: Any, softmax: _Softmax) -> _Softmax:
    """Takes in one tile of keys."""
    slot = lax.rem(step, _STAGES)
    k, v = shared.k.at[slot], shared.v.at[slot]
    keys_left = span.kv_len - (span.first + step) * _KEYS

    plgpu.barrier_wait(shared.k_ready.at[slot])
    key = plgpu.broadcasted_iota(jnp.int32, (_QUERIES, _KEYS), 1, layout=plgpu.Layout.WGMMA)
    scores = _product(shared.q, k.T, _KEYS) * (problem.scale * _LOG2_E)
    scores = jnp.where(key < keys_left, scores, -jnp.inf)
    top = jnp.maximum(softmax.top, scores.max(axis=1))
    weights = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [0]))
    shrink = jnp.exp2(softmax.top - top)

    plgpu.barrier_wait(shared.v_ready.at[slot])

    @pl.when(keys_left < _KEYS)
    def _() -> None:
        # A slot that the row does not own may hold anything, NaN too, which a weight of 0 would not silence.
        key = plgpu.broadcasted_iota(jnp.int32, (_KEYS, problem.head_dim), 0, layout=plgpu.Layout.WGMMA)
        values = plgpu.layout_cast(v[...], plgpu.Layout.WGMMA)
        v[...] = jnp.where(key < keys_left, values, jnp.zeros_like(values))

    # WGMMA would take them from registers, but interpret mode knows operands in shared memory alone.
    shared.weights[...] = weights.astype(problem.dtype)
    plgpu.commit_smem()
    out = softmax.out * lax.broadcast_in_dim(shrink, softmax.out.shape, [0])
    out += _product(shared.weights, v, problem.head_dim)

    @pl.when(step + _STAGES < span.steps)  # nobody waits for the tiles that are filled last
    def _() -> None:
        plgpu.barrier_arrive(shared.free.at[slot])

    return _Softmax(top, softmax.total * shrink + weights.sum(axis=1), out)


def _product(a: Ref, b: Ref, columns: int) -> Any:
    """[_QUERIES, columns] float32."""

    def multiply(accumulator: Ref) -> Any:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((_QUERIES, columns), jnp.float32))
