"""A ragged batch in scattered blocks, and its attention computed row by row from the rows themselves, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxpaged_kernels import pool_dtype

Rows = list[tuple[int, int]]  # (kv_len, query tokens) of each row
Array = npt.NDArray[np.float64]


@dataclass
class PagedCase:
    """Inputs of `paged_attention`, and the rows they were made of.

    Attributes:
        arguments: positional arguments of `paged_attention`.
        q: [T, H, D] float64, of the values in `arguments`.
        k, v: each row's [kv_len, KVH, D] float64, likewise.
    """

    arguments: tuple[jax.Array, ...]
    rows: Rows
    q: Array
    k: list[Array]
    v: list[Array]

    def expected(
        self,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: npt.ArrayLike | None = None,
    ) -> Array:
        """[T, H, D]; 0 for padding tokens."""
        out = np.zeros_like(self.q)
        start = 0
        for (kv_len, queries), k, v in zip(self.rows, self.k, self.v, strict=True):
            for i in range(queries):
                position = kv_len - queries + i
                first = 0 if window is None else max(position - window + 1, 0)
                keys = slice(first, position + 1)
                for head in range(self.q.shape[1]):
                    kv_head = head // (self.q.shape[1] // k.shape[1])
                    scores = k[keys, kv_head] @ self.q[start + i, head] * scale
                    if soft_cap is not None:
                        scores = soft_cap * np.tanh(scores / soft_cap)
                    weights = np.exp(scores)
                    total = weights.sum() + (0 if sinks is None else np.exp(np.asarray(sinks, np.float64)[head]))
                    out[start + i, head] = weights @ v[keys, kv_head] / total
            start += queries
        return out


def make_case(
    rows: Rows,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 8,
    dtype: str = "float32",
    raw_bits: bool = True,
    num_decodes: int | None = None,
    num_tokens: int | None = None,
    table_width: int | None = None,
    seed: int = 0,
) -> PagedCase:
    """Random values in random blocks, and NaN in every slot that no row owns.

    Args:
        rows: (kv_len, query tokens) of each row; leading rows of one query count as decodes.
        raw_bits: keep bfloat16 pools as `pool_dtype` says, not as bfloat16.
        num_decodes: over the number of leading rows of one query.
        num_tokens: T, padding included; None = no padding.
        table_width: blocks of a table, padding included; None = those of the longest row.
    """
    rng = np.random.default_rng(seed)
    total = sum(queries for _, queries in rows)
    if num_decodes is None:
        num_decodes = next((i for i, (_, queries) in enumerate(rows) if queries != 1), len(rows))
    needs = [-(-kv_len // block_size) for kv_len, _ in rows]
    num_blocks = sum(needs) + 3
    free = list(rng.permutation(np.arange(1, num_blocks)))

    def values(*shape: int) -> npt.NDArray:
        return rng.standard_normal(shape).astype(jnp.dtype(dtype))

    tables = np.zeros((len(rows), table_width or max(*needs, 1)), np.int32)
    k_pool = np.full((num_blocks, block_size, num_kv_heads, head_dim), np.nan, jnp.dtype(dtype))
    v_pool = k_pool.copy()
    k_rows, v_rows = [], []
    for row, (kv_len, _) in enumerate(rows):
        k, v = values(kv_len, num_kv_heads, head_dim), values(kv_len, num_kv_heads, head_dim)
        for block in range(needs[row]):
            tables[row, block] = free.pop()
            part = slice(block * block_size, min((block + 1) * block_size, kv_len))
            k_pool[tables[row, block], : part.stop - part.start] = k[part]
            v_pool[tables[row, block], : part.stop - part.start] = v[part]
        k_rows.append(k.astype(np.float64))
        v_rows.append(v.astype(np.float64))
    q = values(num_tokens or total, num_heads, head_dim)
    stored = pool_dtype(dtype, "cpu") if raw_bits else jnp.dtype(dtype)
    arguments = (
        jnp.asarray(q),
        jnp.asarray(k_pool.view(stored)),
        jnp.asarray(v_pool.view(stored)),
        jnp.asarray(tables),
        jnp.asarray(np.array([kv_len for kv_len, _ in rows], np.int32)),
        jnp.asarray(np.cumsum([0] + [queries for _, queries in rows]).astype(np.int32)),
        jnp.asarray(np.int32(num_decodes)),
    )
    return PagedCase(arguments, rows, q.astype(np.float64), k_rows, v_rows)
