"""The public attention function: checks its arguments, then picks an implementation for the platform."""

from __future__ import annotations

import functools
import logging
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxpaged_kernels import native_attention, reference, xla
from jaxpaged_kernels.checks import check_arrays, check_options, check_rows, check_target
from jaxpaged_kernels.target import current_target

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
        k_scales: jax.Array | None,
        v_scales: jax.Array | None,
    ) -> jax.Array: ...


# Backends of Pallas are imported when they are used: they are not for everyone, and may leave JAX one day.
def _triton(*args: Any, **kwargs: Any) -> jax.Array:
    from jaxpaged_kernels import triton

    return triton.paged_attention(*args, **kwargs)


def _mosaic(*args: Any, **kwargs: Any) -> jax.Array:
    from jaxpaged_kernels import mosaic

    return mosaic.paged_attention(*args, **kwargs)


IMPLEMENTATIONS: dict[str, Attention] = {
    "triton": _triton,
    "native": native_attention.paged_attention,
    "xla": xla.paged_attention,
    "reference": reference.paged_attention,
}

# Best first, by platform. A name that is not among IMPLEMENTATIONS is passed over, with a warning.
PREFERENCES: dict[str, tuple[str, ...]] = {
    "gpu": ("triton", "xla", "reference"),
    "cpu": ("native", "xla", "reference"),
}
DEFAULT_PREFERENCE = ("xla", "reference")


# Run only when asked for by name.
PROTOTYPES: dict[str, Attention] = {"mosaic": _mosaic}


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
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention of ragged queries over keys and values kept in blocks.

    Row s owns the query tokens query_starts[s] to query_starts[s + 1]. They are the last tokens of its kv_lens[s], and
    their own K and V are already in the pools. Position p of row s is at block block_tables[s, p // block_size],
    offset p % block_size.

    Args:
        q: [T, H, D].
        k_pool: [blocks, block_size, KVH, D], of q's dtype, int8 or float8_e4m3fn, or the `pool_dtype` for one of
            these; H is a multiple of KVH, and the query heads that share a KV head are consecutive.
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
        k_scales: [blocks, block_size, KVH] float32; a key is its stored vector times this. For int8 and fp8 pools.
        v_scales: [blocks, block_size, KVH] float32, likewise for values.
        implementation: one of `IMPLEMENTATIONS` or `PROTOTYPES`; None picks by platform.

    Returns:
        [T, H, D] of q's dtype, 0 for padding tokens.

    Raises:
        ValueError: arguments that do not fit each other, fp8 on a GPU that has none, or an implementation that does
            not exist.
        NotImplementedError: no implementation, or not the one asked for, can do this case.
    """
    num_decodes = jnp.asarray(num_decodes, jnp.int32)
    target = current_target()
    check_arrays(q, k_pool, v_pool, k_scales, v_scales)
    check_target(k_pool.dtype, target)
    check_rows(q, block_tables, kv_lens, query_starts, num_decodes, decode_only=decode_only)
    check_options(q, window=window, soft_cap=soft_cap, sinks=sinks)
    if q.size == 0:
        return q

    def call(name: str) -> jax.Array:
        return (IMPLEMENTATIONS | PROTOTYPES)[name](
            q,
            k_pool,
            v_pool,
            block_tables,
            kv_lens,
            query_starts,
            num_decodes,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            decode_only=decode_only,
            k_scales=k_scales,
            v_scales=v_scales,
        )

    if implementation is not None:
        if implementation not in (names := (*IMPLEMENTATIONS, *PROTOTYPES)):
            raise ValueError(f"implementation {implementation!r} does not exist: use one of {', '.join(names)}")
        return call(implementation)

    refusals: list[str] = []
    for name in PREFERENCES.get(target.platform, DEFAULT_PREFERENCE):
        if name not in IMPLEMENTATIONS:
            refusals.append(f"{name}: not part of this version")
            continue
        try:
            out = call(name)
        except NotImplementedError as reason:
            refusals.append(f"{name}: {reason}")
            continue
        _log_pick(target.platform, name, "; ".join(refusals))
        return out
    raise NotImplementedError(f"no attention kernel for {target.platform} can do this: {'; '.join(refusals)}")


@functools.cache
def _log_pick(platform: str, name: str, refusals: str) -> None:
    """Logs a pick, once for each different one."""
    if refusals:
        logger.warning("paged attention on %s runs the slower %r kernel (%s)", platform, name, refusals)
    else:
        logger.info("paged attention on %s runs the %r kernel", platform, name)
