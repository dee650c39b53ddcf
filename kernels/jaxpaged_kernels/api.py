"""The public attention function: checks its arguments, then picks an implementation for the platform."""

from __future__ import annotations

import functools
import logging
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxpaged_kernels import reference, xla
from jaxpaged_kernels.cache import holds

logger = logging.getLogger(__name__)


class Attention(Protocol):
    """An implementation of `paged_attention`. Raises NotImplementedError, with the reason, for a case it cannot do."""

    def __call__(
        self,
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
    ) -> jax.Array: ...


IMPLEMENTATIONS: dict[str, Attention] = {"xla": xla.paged_attention, "reference": reference.paged_attention}

# Best first, by platform. A name that is not among IMPLEMENTATIONS is passed over, with a warning.
PREFERENCES: dict[str, tuple[str, ...]] = {"gpu": ("triton", "xla", "reference")}
DEFAULT_PREFERENCE = ("xla", "reference")


def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    num_decodes: jax.Array | int,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    decode_only: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention of ragged queries over keys and values kept in blocks.

    Row s owns the query tokens query_starts[s] to query_starts[s + 1]. They are the last tokens of its kv_lens[s], and
    their own K and V are already in the pools. Position p of row s is at block block_tables[s, p // block_size],
    offset p % block_size.

    Args:
        q: [T, H, D].
        k_pool: [blocks, block_size, KVH, D], of q's dtype or the `pool_dtype` for it; H is a multiple of KVH, and the
            query heads that share a KV head are consecutive.
        v_pool: [blocks, block_size, KVH, D], likewise.
        block_tables: [S, P] int32; every entry is a valid block id, also where it is padding.
        kv_lens: [S] int32, at most P * block_size; 0 for a padding row, which has no tokens.
        query_starts: [S + 1] int32, not decreasing, from 0; tokens from query_starts[S] on are padding.
        num_decodes: int32 scalar, how many leading rows have exactly one query token.
        scale: factor on the dot products.
        window: a token at position p sees the keys in (p - window, p]; None = all up to p.
        soft_cap: scores become soft_cap * tanh(score / soft_cap).
        sinks: [H], a score for each head that joins the softmax's denominator.
        decode_only: static; every row has one query token or is padding, and T == S. Then `query_starts` and
            `num_decodes` are not read.
        implementation: "xla" or "reference"; None picks by platform.

    Returns:
        [T, H, D] of q's dtype, 0 for padding tokens.

    Raises:
        ValueError: arguments that do not fit each other, or an implementation that does not exist.
        NotImplementedError: no implementation, or not the one asked for, can do this case.
    """
    num_decodes = jnp.asarray(num_decodes, jnp.int32)
    _check_arrays(q, k_pool, v_pool)
    _check_rows(q, block_tables, kv_lens, query_starts, num_decodes, decode_only=decode_only)
    _check_options(q, window=window, soft_cap=soft_cap, sinks=sinks)
    call = functools.partial(
        _call,
        arguments=(q, k_pool, v_pool, block_tables, kv_lens, query_starts, num_decodes),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        decode_only=decode_only,
    )
    if implementation is not None:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"implementation {implementation!r} does not exist: use one of {', '.join(IMPLEMENTATIONS)}"
            )
        return call(implementation)

    platform = jax.default_backend()
    refusals: list[str] = []
    for name in PREFERENCES.get(platform, DEFAULT_PREFERENCE):
        if name not in IMPLEMENTATIONS:
            refusals.append(f"{name}: not part of this version")
            continue
        try:
            out = call(name)
        except NotImplementedError as reason:
            refusals.append(f"{name}: {reason}")
            continue
        _log_pick(platform, name, "; ".join(refusals))
        return out
    raise NotImplementedError(f"no attention kernel for {platform} can do this: {'; '.join(refusals)}")


def _call(
    name: str,
    *,
    arguments: tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array],
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    decode_only: bool,
) -> jax.Array:
    attention = IMPLEMENTATIONS[name]
    return attention(*arguments, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, decode_only=decode_only)


@functools.cache
def _log_pick(platform: str, name: str, refusals: str) -> None:
    """Logs a pick, once for each different one."""
    if refusals:
        logger.warning("paged attention on %s runs the slower %r kernel (%s)", platform, name, refusals)
    else:
        logger.info("paged attention on %s runs the %r kernel", platform, name)


def _check_arrays(q: jax.Array, k_pool: jax.Array, v_pool: jax.Array) -> None:
    if q.ndim != 3:
        raise ValueError(f"q is {list(q.shape)}, but must be [tokens, heads, head size]")
    if k_pool.ndim != 4 or k_pool.shape != v_pool.shape:
        raise ValueError(
            f"the pools are {list(k_pool.shape)} and {list(v_pool.shape)}, "
            "but both must be the same [blocks, block_size, KV heads, head size]"
        )
    if q.shape[2] != k_pool.shape[3]:
        raise ValueError(f"q has heads of {q.shape[2]} but the pools of {k_pool.shape[3]}")
    if k_pool.shape[2] == 0 or q.shape[1] % k_pool.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k_pool.shape[2]} KV heads")
    if not jnp.issubdtype(q.dtype, jnp.floating) or not all(holds(p.dtype, q.dtype) for p in (k_pool, v_pool)):
        raise ValueError(
            f"q, k_pool and v_pool are {q.dtype}, {k_pool.dtype} and {v_pool.dtype}, "
            "but must be of one float dtype (for a pool, its pool_dtype)"
        )


def _check_rows(
    q: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    num_decodes: jax.Array,
    *,
    decode_only: bool,
) -> None:
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


def _check_options(q: jax.Array, *, window: int | None, soft_cap: float | None, sinks: jax.Array | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, but must be at least 1, or None for full attention")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap is {soft_cap}, but must be above 0, or None for no cap")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks is {list(sinks.shape)}, but must have one value for each of {q.shape[1]} heads")
