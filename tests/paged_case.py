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
LARGEST = {"int8": 127, "float8_e4m3fn": 448}


@dataclass
class PagedCase:
    """Inputs of `paged_attention`, and the rows they were made of.

    Attributes:
        arguments: positional arguments of `paged_attention`.
        scales: its arguments k_scales and v_scales, for a quantized pool.
        q: [T, H, D] float64, of the values in `arguments`.
        k, v: each row's [kv_len, KVH, D] float64, likewise; of a quantized pool, its stored values times their scales.
        exact_k, exact_v: the same before they were quantized.
    """

    arguments: tuple[jax.Array, ...]
    scales: dict[str, jax.Array]
    rows: Rows
    q: Array
    k: list[Array]
    v: list[Array]
    exact_k: list[Array]
    exact_v: list[Array]

    def expected(
        self,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: npt.ArrayLike | None = None,
        *,
        exact: bool = False,
    ) -> Array:
        """[T, H, D]; 0 for padding tokens. `exact`: as if nothing had been quantized."""
        all_k, all_v = (self.exact_k, self.exact_v) if exact else (self.k, self.v)
        out = np.zeros_like(self.q)
        start = 0
        for (kv_len, queries), k, v in zip(self.rows, all_k, all_v, strict=True):
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
    kv_dtype: str | None = None,
    raw_bits: bool = False,
    num_decodes: int | None = None,
    num_tokens: int | None = None,
    table_width: int | None = None,
    num_blocks: int | None = None,
    seed: int = 0,
) -> PagedCase:
    """Random values in random blocks, and NaN in every slot that no row owns (in its scale, where int8 has no NaN).

    Args:
        rows: (kv_len, query tokens) of each row; leading rows of one query count as decodes.
        dtype: of queries, and of keys and values before they are quantized.
        kv_dtype: "int8" or "float8_e4m3fn" for a quantized pool.
        raw_bits: keep bfloat16 and fp8 pools as `pool_dtype` says for a CPU.
        num_decodes: over the number of leading rows of one query.
        num_tokens: T, padding included; None = no padding.
        table_width: blocks of a table, padding included; None = those of the longest row.
        num_blocks: of the pool; None = two more than the rows take, and block 0.
    """
    rng = np.random.default_rng(seed)
    total = sum(queries for _, queries in rows)
    if num_decodes is None:
        num_decodes = next((i for i, (_, queries) in enumerate(rows) if queries != 1), len(rows))

    def values(*shape: int) -> npt.NDArray:
        return rng.standard_normal(shape).astype(jnp.dtype(dtype))

    q = values(num_tokens or total, num_heads, head_dim)
    exact = [[values(kv_len, num_kv_heads, head_dim) for kv_len, _ in rows] for _ in range(2)]
    tables = _tables(rows, block_size, table_width, rng)
    num_blocks = num_blocks or int(tables.max()) + 3

    def pool_of(vectors: list[npt.NDArray]) -> jax.Array:
        return jnp.asarray(_scatter(vectors, tables, num_blocks, block_size))

    pools, stored_scales, used = [], [], []
    for vectors in exact:
        if kv_dtype is None:
            stored, scales = vectors, [np.ones(x.shape[:-1]) for x in vectors]
        else:
            stored, scales = zip(*(_quantized(x, kv_dtype) for x in vectors), strict=True)
        pool = pool_of(stored)
        pools.append(pool.view(pool_dtype(pool.dtype, "cpu")) if raw_bits else pool)
        stored_scales.append(pool_of(scales))
        used.append([x.astype(np.float64) * scale[..., None] for x, scale in zip(stored, scales, strict=True)])

    arguments = (
        jnp.asarray(q),
        *pools,
        jnp.asarray(tables),
        jnp.asarray(np.array([kv_len for kv_len, _ in rows], np.int32)),
        jnp.asarray(np.cumsum([0] + [queries for _, queries in rows]).astype(np.int32)),
        jnp.asarray(np.int32(num_decodes)),
    )
    k, v = used
    exact_k, exact_v = ([x.astype(np.float64) for x in vectors] for vectors in exact)
    scales_of = {} if kv_dtype is None else dict(zip(("k_scales", "v_scales"), stored_scales, strict=True))
    return PagedCase(arguments, scales_of, rows, q.astype(np.float64), k, v, exact_k, exact_v)


def _quantized(x: npt.NDArray, dtype: str) -> tuple[npt.NDArray, npt.NDArray[np.float32]]:
    """Stored values [..., D] and scales [...]."""
    x = x.astype(np.float32)
    scales = np.abs(x).max(axis=-1) / np.float32(LARGEST[dtype])
    stored = x / scales[..., None]
    return (np.rint(stored) if dtype == "int8" else stored).astype(jnp.dtype(dtype)), scales


def _tables(rows: Rows, block_size: int, table_width: int | None, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    """[S, P]: random blocks, each of one row, and 0 for padding."""
    needs = [-(-kv_len // block_size) for kv_len, _ in rows]
    free = list(rng.permutation(np.arange(1, sum(needs) + 1)))
    tables = np.zeros((len(rows), table_width or max(*needs, 1)), np.int32)
    for row, need in enumerate(needs):
        tables[row, :need] = [free.pop() for _ in range(need)]
    return tables


def _scatter(
    vectors: list[npt.NDArray], tables: npt.NDArray[np.int32], num_blocks: int, block_size: int
) -> npt.NDArray:
    """[num_blocks, block_size, ...]: the rows of `vectors`, each [kv_len, ...], in their blocks; the rest is NaN."""
    dtype = vectors[0].dtype
    nothing = 99 if dtype == np.int8 else np.nan
    pool = np.full((num_blocks, block_size, *vectors[0].shape[1:]), nothing, dtype)
    for table, row in zip(tables, vectors, strict=True):
        for position, vector in enumerate(row):
            pool[table[position // block_size], position % block_size] = vector
    return pool
