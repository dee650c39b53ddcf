"""What `bench/kernels.py` times: batches in paged memory, and the bytes and operations that they must cost."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpaged_kernels import pool_dtype

# KV that one pass over all copies of a case reads: several times the L2 cache of any GPU (50 MB on an H100), so that
# no call finds its blocks there.
WORKING_SET = {"cpu": 1 << 26, "gpu": 1 << 28}


@dataclass(frozen=True)
class Case:
    """One batch.

    Attributes:
        context: tokens of each row in the cache, the queries included; with `lengths` "mixed" the longest, the others
            going down evenly to an eighth of it.
        queries: query tokens of each row; 1 for a decode.
        kv_dtype: "int8" or "float8_e4m3fn" for a quantized cache, None for one of `dtype`.
        peers: whether other implementations than the best one are timed, too.
    """

    kind: Literal["decode", "prefill"]
    rows: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    queries: int = 1
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    block_size: int = 16
    lengths: Literal["equal", "mixed"] = "equal"
    peers: bool = True

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def kv_lens(self) -> np.ndarray:
        """[rows] int32: true lengths."""
        if self.lengths == "equal":
            return np.full(self.rows, self.context, np.int32)
        return np.linspace(self.context, max(self.context // 8, self.queries), self.rows).astype(np.int32)

    def kv_bytes(self) -> int:
        """K and V of the true lengths, and their scales."""
        itemsize = jnp.dtype(self.kv_dtype or self.dtype).itemsize
        vector = self.head_dim * itemsize + (4 if self.kv_dtype else 0)
        return 2 * int(self.kv_lens().sum()) * self.kv_heads * vector

    def bytes_to_move(self) -> int:
        """KV once, the queries and the result."""
        tokens = self.rows * self.queries
        return self.kv_bytes() + 2 * tokens * self.heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    def flops(self) -> int:
        """Multiplications and additions of both products, over the keys that each query sees."""
        before = self.kv_lens().astype(np.int64) - self.queries
        seen = int((before * self.queries + self.queries * (self.queries + 1) // 2).sum())
        return 4 * seen * self.heads * self.head_dim

    def label(self) -> str:
        shape = f"{self.rows}x{self.context}" + (f" q{self.queries}" if self.queries > 1 else "")
        dtype = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[self.dtype]
        cache = {None: "", "int8": "/int8", "float8_e4m3fn": "/fp8"}[self.kv_dtype]
        heads = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
        mixed = " mixed" if self.lengths == "mixed" else ""
        block = f" b{self.block_size}" if self.block_size != 16 else ""
        return f"{self.kind} {shape} {heads} {dtype}{cache}{mixed}{block}"


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["q", "k_pool", "v_pool", "tables", "kv_lens", "query_starts", "scales"],
    meta_fields=["copies"],
)
@dataclass(frozen=True)
class Inputs:
    """A case's arrays. The pools hold `copies` of its KV; call number i of a chain reads copy i % copies.

    Attributes:
        q: [T, H, D].
        k_pool, v_pool: [copies * blocks, block_size, KVH, D].
        tables: [S, P] int32 of copy 0, blocks in random order.
        scales: k_scales and v_scales [copies * blocks, block_size, KVH] float32, for a quantized cache.
    """

    q: jax.Array
    k_pool: jax.Array
    v_pool: jax.Array
    tables: jax.Array
    kv_lens: jax.Array
    query_starts: jax.Array
    scales: dict[str, jax.Array]
    copies: int

    @property
    def blocks_per_copy(self) -> int:
        return self.tables.size


def make_inputs(case: Case, platform: str) -> Inputs:
    """Random values, made on the device."""
    width = -(-case.context // case.block_size)
    blocks = case.rows * width
    copies = max(math.ceil(WORKING_SET["cpu" if platform == "cpu" else "gpu"] / case.kv_bytes()), 1)
    q_key, k_key, v_key = jax.random.split(jax.random.key(0), 3)
    shape = (copies * blocks, case.block_size, case.kv_heads, case.head_dim)
    # The smallest scale that keeps values near 1: of int8 the bits are uniform, of fp8 the values normal.
    scale = 1 / 64 if case.kv_dtype == "int8" else 1.0
    scales = jnp.full(shape[:3], scale, jnp.float32)
    return Inputs(
        q=jax.random.normal(q_key, (case.rows * case.queries, case.heads, case.head_dim), case.dtype),
        k_pool=_random_pool(k_key, shape, case.kv_dtype or case.dtype),
        v_pool=_random_pool(v_key, shape, case.kv_dtype or case.dtype),
        tables=jnp.asarray(np.random.default_rng(0).permutation(blocks).reshape(case.rows, width).astype(np.int32)),
        kv_lens=jnp.asarray(case.kv_lens()),
        query_starts=jnp.arange(case.rows + 1, dtype=jnp.int32) * case.queries,
        scales={"k_scales": scales, "v_scales": scales} if case.kv_dtype else {},
        copies=copies,
    )


def _random_pool(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    @jax.jit
    def draw(key: jax.Array) -> jax.Array:
        if dtype == "int8":
            return jax.random.randint(key, shape, -127, 128, jnp.int8)
        values = jax.random.normal(key, shape, jnp.bfloat16 if dtype == "float8_e4m3fn" else dtype).astype(dtype)
        stored = pool_dtype(dtype)
        return values if values.dtype == stored else lax.bitcast_convert_type(values, stored)

    return draw(key)


def quick_grid(platform: str) -> list[Case]:
    """A few minutes' worth at most."""
    if platform == "cpu":
        small = Case("decode", 8, 512, heads=9, kv_heads=3, head_dim=64, dtype="float32")
        decode = [replace(small, rows=rows, context=context) for rows, context in ((1, 512), (8, 512), (8, 2048))]
        prefill = replace(small, kind="prefill", rows=1, queries=128)
        return [
            *decode,
            replace(small, dtype="bfloat16"),
            replace(small, kv_dtype="int8"),
            replace(small, context=2048, lengths="mixed"),
            replace(prefill, context=128),
            replace(prefill, context=512),
        ]
    large = Case("decode", 32, 8192)
    narrow = replace(large, heads=9, kv_heads=3, head_dim=64)
    chunk = Case("prefill", 1, 2048, queries=2048)
    return [
        large,
        replace(large, context=2048),
        replace(large, rows=128, context=2048),
        replace(large, rows=128, context=2048, kv_dtype="float8_e4m3fn", peers=False),
        replace(large, rows=128, context=2048, kv_dtype="int8", peers=False),
        replace(large, rows=256, context=640, peers=False),
        replace(large, lengths="mixed"),
        replace(large, rows=1, peers=False),
        replace(narrow, context=2048, peers=False),
        replace(narrow, rows=128, context=2048),
        chunk,
        replace(chunk, rows=4, context=512, queries=512, peers=False),
        replace(chunk, context=8192, queries=512),
        replace(chunk, heads=9, kv_heads=3, head_dim=64, peers=False),
    ]


HEADS = ((32, 8, 128), (9, 3, 64), (32, 32, 128), (64, 8, 128), (28, 4, 128), (32, 32, 80), (32, 32, 96), (16, 8, 256))
_MOST_KV_BYTES = {"cpu": 1 << 27, "gpu": 1 << 34}
_MOST_ONE_BYTE_POOL = 1 << 31  # offsets into one-byte pools are 32 bits


def full_grid(platform: str) -> list[Case]:
    """Every shape; the parts that a device has no memory or time for left out."""
    cases = []
    for (heads, kv_heads, head_dim), rows, context in itertools.product(
        HEADS, (1, 8, 32, 128, 256), (512, 2048, 8192, 32768)
    ):
        base = Case("decode", rows, context, heads, kv_heads, head_dim)
        cases.append(base)
        if (heads, kv_heads, head_dim) in HEADS[:2]:
            cases += [replace(base, kv_dtype=kv_dtype, peers=False) for kv_dtype in ("int8", "float8_e4m3fn")]
    llama = Case("decode", 32, 2048)
    cases += [replace(llama, dtype=dtype) for dtype in ("float16", "float32")]
    cases += [replace(llama, block_size=size) for size in (8, 32, 64, 128)]
    cases += [replace(llama, rows=rows, lengths="mixed") for rows in (8, 32, 128)]
    for heads, kv_heads, head_dim in HEADS:
        for rows, queries, context in ((1, 512, 512), (1, 2048, 2048), (4, 512, 512), (1, 512, 8192), (1, 2048, 16384)):
            cases.append(Case("prefill", rows, context, heads, kv_heads, head_dim, queries))
    most = _MOST_KV_BYTES.get(platform, _MOST_KV_BYTES["gpu"])
    return [
        case
        for case in cases
        if case.kv_bytes() <= most and not (case.kv_dtype and case.kv_bytes() // 2 >= _MOST_ONE_BYTE_POOL)
    ]


GRIDS = {"quick": quick_grid, "full": full_grid}
