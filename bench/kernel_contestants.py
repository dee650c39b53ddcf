"""The implementations that `bench/kernels.py` times: those of jaxpaged_kernels, and others where they are installed."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged_kernels import dequantize, paged_attention
from jaxpaged_kernels.api import IMPLEMENTATIONS, PREFERENCES
from jaxpaged_kernels.cache import from_storage
from kernel_cases import WORKING_SET, Case, Inputs
from timing import Step, Timing

# Scores of the gather implementation beyond this would fill a GPU.
_MOST_SCORE_BYTES = 1 << 33


class UnavailableError(Exception):
    """Why an implementation is not timed for a case; one line."""


@dataclass(frozen=True)
class Contestant:
    """An implementation set up for a case: `step` as `timing.time_chain` takes it, from `carry` and `operands` on.

    Attributes:
        carry: the queries; scaled already where the implementation has no scale of its own.
    """

    step: Step
    carry: jax.Array
    operands: Any


def ours(platform: str) -> list[str]:
    """Names of our implementations that run at full speed on `platform`, the best first."""
    if platform != "gpu":
        return ["xla"]
    ranked = dict.fromkeys((*PREFERENCES["gpu"], *IMPLEMENTATIONS))
    return [name for name in ranked if name in IMPLEMENTATIONS and name != "reference"]


def contestants(case: Case, platform: str) -> list[str]:
    """Names of everything to time for `case`."""
    if not case.peers:
        return ours(platform)[:1]
    peers = ["jax_op"] if case.kind == "decode" and platform == "gpu" else []
    return [*ours(platform), "gather", *peers, "torch_sdpa"]


def set_up(name: str, case: Case, inputs: Inputs) -> Contestant:
    """A contestant other than "torch_sdpa".

    Raises:
        UnavailableError: it cannot do the case.
    """
    if name in IMPLEMENTATIONS:
        return _ours(name, case, inputs)
    return {"gather": _gather, "jax_op": _jax_op}[name](case, inputs)


def _rows_of_call(
    q: jax.Array, i: jax.Array, inputs: Inputs, tables: jax.Array, kv_lens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Block tables and lengths of call number i. Tied to its queries, so that XLA cannot take what follows from them
    alone, such as gathering the blocks, out of the loop.
    """
    tables = tables + (i % inputs.copies) * inputs.blocks_per_copy
    tables, kv_lens, _ = lax.optimization_barrier((tables, kv_lens, q))
    return tables, kv_lens


def _ours(name: str, case: Case, inputs: Inputs) -> Contestant:
    num_decodes = case.rows if case.kind == "decode" else 0

    def step(q: jax.Array, i: jax.Array, x: Inputs) -> jax.Array:
        tables, kv_lens = _rows_of_call(q, i, inputs, x.tables, x.kv_lens)
        return paged_attention(
            q,
            x.k_pool,
            x.v_pool,
            tables,
            kv_lens,
            x.query_starts,
            num_decodes,
            scale=case.scale,
            decode_only=case.kind == "decode",
            implementation=name,
            k_scales=x.scales.get("k_scales"),
            v_scales=x.scales.get("v_scales"),
        )

    return Contestant(step, inputs.q, inputs)


def _gather(case: Case, inputs: Inputs) -> Contestant:
    """The obvious program in plain XLA: gather the blocks of every row, then dense attention under a mask."""
    width = inputs.tables.shape[1] * case.block_size
    if case.rows * case.queries * case.heads * width * 4 > _MOST_SCORE_BYTES:
        raise UnavailableError("its scores would take over 8 GiB")

    def keys(pool: jax.Array, scales: jax.Array | None, tables: jax.Array) -> jax.Array:  # [S, L, KVH, D]
        blocks = pool[tables]
        if scales is None:
            values = from_storage(blocks, jnp.dtype(case.dtype))
        else:
            values = dequantize(from_storage(blocks, jnp.dtype(jnp.float32)), scales[tables]).astype(case.dtype)
        return values.reshape(case.rows, width, case.kv_heads, case.head_dim)

    def step(q: jax.Array, i: jax.Array, x: Inputs) -> jax.Array:
        tables, kv_lens = _rows_of_call(q, i, inputs, x.tables, x.kv_lens)
        k, v = (keys(p, x.scales.get(s), tables) for p, s in ((x.k_pool, "k_scales"), (x.v_pool, "v_scales")))
        grouped = q.reshape(case.rows, case.queries, case.kv_heads, -1, case.head_dim)
        precision = lax.Precision.HIGHEST if case.dtype == "float32" else None
        dot = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
        scores = dot("sqkgd,slkd->skgql", grouped, k) * case.scale
        position = kv_lens[:, None] - case.queries + jnp.arange(case.queries)
        visible = jnp.arange(width) <= position[..., None]  # [S, Q, L]
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
        return dot("skgql,slkd->sqkgd", weights.astype(v.dtype), v).reshape(q.shape).astype(q.dtype)

    return Contestant(step, inputs.q, inputs)


def _jax_op(case: Case, inputs: Inputs) -> Contestant:
    """JAX's own decode op, which keeps its pages head by head and takes scaled queries."""
    if case.kv_dtype == "float8_e4m3fn":
        raise UnavailableError("not for fp8 caches")
    try:
        op = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention").paged_attention
    except ImportError as error:
        raise UnavailableError("this JAX has none") from error
    by_head = (2, 0, 1, 3)
    operands = {
        "k_pages": inputs.k_pool.transpose(by_head),
        "v_pages": inputs.v_pool.transpose(by_head),
        "tables": inputs.tables,
        "kv_lens": inputs.kv_lens,
        "scales": {f"{name}_pages": scales.transpose(2, 0, 1) for name, scales in inputs.scales.items()},
    }

    def step(q: jax.Array, i: jax.Array, x: dict[str, Any]) -> jax.Array:
        tables, kv_lens = _rows_of_call(q, i, inputs, x["tables"], x["kv_lens"])
        return op(q, x["k_pages"], x["v_pages"], tables, kv_lens, **x["scales"])

    return Contestant(step, (inputs.q * case.scale).astype(inputs.q.dtype), operands)


def time_torch(case: Case, platform: str, *, min_seconds: float, repeats: int) -> Timing:
    """torch's scaled_dot_product_attention over contiguous keys and values: what attention takes without paging.

    Raises:
        UnavailableError: no torch, no GPU in torch where JAX has one, or a case that it has no fast path for.
    """
    if case.lengths == "mixed" or case.kv_dtype or case.context != case.queries != 1:
        raise UnavailableError("only for equal lengths, unquantized, whole prompts")
    try:
        import torch
    except ImportError as error:
        raise UnavailableError("torch is not installed") from error
    if platform == "gpu" and not torch.cuda.is_available():
        raise UnavailableError("torch sees no GPU")
    device = "cuda" if platform == "gpu" else "cpu"
    options: dict[str, Any] = {"dtype": getattr(torch, case.dtype), "device": device}
    q = torch.randn(case.rows, case.heads, case.queries, case.head_dim, **options)
    shape = (case.rows, case.kv_heads, case.context, case.head_dim)
    copies = max(math.ceil(WORKING_SET[platform] / case.kv_bytes()), 1)
    kv = [(torch.randn(shape, **options), torch.randn(shape, **options)) for _ in range(copies)]
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention, is_causal=case.kind == "prefill", enable_gqa=True
    )
    wait: Callable[[], None] = torch.cuda.synchronize if platform == "gpu" else lambda: None

    def run(calls: int) -> float:
        wait()
        start, state = time.perf_counter(), q
        for i in range(calls):
            state = attend(state, *kv[i % copies])
        wait()
        return time.perf_counter() - start

    run(2)
    calls = min(max(round(min_seconds / (run(4) / 4)), 2), 2000)
    return Timing.of([run(calls) for _ in range(repeats)], calls)
