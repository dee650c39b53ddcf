"""Part of `gpu_check`: the kernels on the real device, against float64 numpy.

    python bench/gpu_numerics.py --json FILE [--small]

Every implementation over head sizes, GQA groups, block sizes, dtypes, options and quantized caches, with NaN in all
slots that no sequence owns; pools of more than 2^31 values, where 32-bit offsets end; writes and block moves; and the
same call twice, which must give the same bits. The exit code is 1 if anything is off.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from paged_case import make_case

from jaxpaged_kernels import (
    copy_blocks,
    dequantize,
    gather_blocks,
    paged_attention,
    scatter_blocks,
    write_kv,
    write_quantized_kv,
)
from kernel_contestants import ours

# Largest error relative to the result's norm. float32 products that fall to TF32 give 3e-4; 16-bit weights of the
# softmax and results are rounded to 2^-9 (bfloat16) and 2^-12 (float16); quantized values are scaled in q's dtype.
LIMITS = {"float32": 2e-5, "bfloat16": 6e-3, "float16": 1e-3}
QUANTIZED_LIMIT = 1.5e-2

attend: Callable[..., jax.Array] = paged_attention  # its options come from tables here

DECODE = [(1, 1), (15, 1), (16, 1), (17, 1), (300, 1), (1025, 1), (0, 0)]
MIXED = [(33, 1), (500, 1), (40, 40), (300, 70), (16, 16), (0, 0), (129, 129)]
HEADS = [(32, 8, 128, 16), (9, 3, 64, 16), (8, 8, 80, 8), (14, 2, 96, 32), (16, 1, 256, 64), (8, 2, 128, 128)]
SMALL_HEADS = [(9, 3, 64, 16), (4, 2, 80, 8)]


@dataclass(frozen=True)
class Check:
    """One comparison: `error` must not be above `limit`; it is None where the implementation declined."""

    name: str
    implementation: str
    error: float | None
    limit: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.note.startswith("not run") or (self.error is not None and self.error <= self.limit)


@dataclass(frozen=True)
class AttentionCase:
    """Arguments of `make_case`, and options of `paged_attention`."""

    rows: list[tuple[int, int]]
    heads: tuple[int, int, int, int]
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        return self.dtype == "bfloat16" and not self.kv_dtype and not self.options

    @property
    def name(self) -> str:
        kind = "decode" if self.rows is DECODE else "mixed"
        heads, kv_heads, head_dim, block = self.heads
        parts = [f"{kind} {heads}/{kv_heads}x{head_dim} block {block} {self.dtype}", self.kv_dtype or "", *self.options]
        return " ".join(part for part in parts if part)


def attention_cases(small: bool) -> Iterator[AttentionCase]:
    """Every head shape in bfloat16, then the other dtypes, the options and quantized caches on two shapes."""
    shapes = SMALL_HEADS if small else HEADS
    for rows in (DECODE, MIXED):
        for heads in shapes:
            yield AttentionCase(rows, heads)
        for heads in shapes[:2]:
            for dtype in ("float32", "float16"):
                yield AttentionCase(rows, heads, dtype)
            for kv_dtype in ("int8", "float8_e4m3fn"):
                yield AttentionCase(rows, heads, kv_dtype=kv_dtype)
        for options in ({"window": 37}, {"soft_cap": 5.0}, {"sinks": True}):
            yield AttentionCase(rows, shapes[0], options=options)


def check_attention(case: AttentionCase, implementation: str) -> Check:
    """Against float64 numpy; a second call must give the same bits."""
    heads, kv_heads, head_dim, block_size = case.heads
    made = make_case(
        case.rows,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=case.dtype,
        kv_dtype=case.kv_dtype,
        num_tokens=len(case.rows) if case.rows is DECODE else None,
    )
    options = dict(case.options)
    arrays: dict[str, Any] = dict(made.scales)
    if options.pop("sinks", False):
        arrays["sinks"] = jnp.linspace(-1, 1, heads)
    scale = head_dim**-0.5
    decode_only = case.rows is DECODE

    @jax.jit
    def run(*arguments: jax.Array, **arrays: jax.Array) -> jax.Array:
        return attend(
            *arguments, scale=scale, decode_only=decode_only, implementation=implementation, **options, **arrays
        )

    limit = QUANTIZED_LIMIT if case.kv_dtype else LIMITS[case.dtype]
    try:
        out, again = (np.asarray(run(*made.arguments, **arrays)) for _ in range(2))
    except NotImplementedError as reason:
        return Check(case.name, implementation, None, limit, f"not run: {reason}")
    if out.tobytes() != again.tobytes():
        return Check(case.name, implementation, None, limit, "two calls on the same arguments differ")
    expected = made.expected(scale, **options, sinks=arrays.get("sinks"))
    return Check(case.name, implementation, _error(out, expected), limit)


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    found = found.astype(np.float64)
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def check_far_blocks(num_blocks: int, implementation: str) -> Check:
    """Rows whose blocks are the first and the last of a large pool, after writes to its last slots."""
    block_size, kv_heads, head_dim, heads, context = 16, 8, 128, 32, 100
    name = f"pool of {num_blocks * block_size * kv_heads * head_dim:.1e} values"
    pool = _large_pool(num_blocks, (block_size, kv_heads, head_dim))
    rng = np.random.default_rng(0)
    new = jnp.asarray(rng.standard_normal((3, kv_heads, head_dim)), jnp.bfloat16)
    slots = jnp.asarray([0, num_blocks * block_size - 1, num_blocks * block_size], jnp.int32)  # the last is dropped
    pool = jax.jit(lambda new, pool, slots: write_kv(new, new, pool, pool, slots)[0], donate_argnums=1)(
        new, pool, slots
    )
    width = -(-context // block_size)
    tables = np.stack([np.arange(width), num_blocks - 1 - np.arange(width)]).astype(np.int32)
    q = jnp.asarray(rng.standard_normal((2, heads, head_dim)), jnp.bfloat16)
    arguments = (jnp.asarray(tables), jnp.full(2, context, jnp.int32), jnp.arange(3, dtype=jnp.int32))
    gathered = jax.jit(lambda pool, tables: pool[tables])(pool, arguments[0])
    kv = np.asarray(gathered).astype(np.float64).reshape(2, -1, kv_heads, head_dim)
    fresh = np.asarray(new).astype(np.float64)
    wrote = np.array_equal(kv[0, 0], fresh[0]) and np.array_equal(kv[1, block_size - 1], fresh[1])
    kv = kv[:, :context].repeat(heads // kv_heads, axis=2)
    scores = np.einsum("shd,slhd->shl", np.asarray(q).astype(np.float64), kv) * head_dim**-0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = np.einsum("shl,slhd->shd", weights / weights.sum(axis=-1, keepdims=True), kv)

    @jax.jit
    def run(q: jax.Array, pool: jax.Array, *rows: jax.Array) -> jax.Array:
        return attend(q, pool, pool, *rows, 2, scale=head_dim**-0.5, decode_only=True, implementation=implementation)

    try:
        error = _error(np.asarray(run(q, pool, *arguments)), expected)
    except NotImplementedError as reason:
        return Check(name, implementation, None, 0, f"not run: {reason}")
    note = "" if wrote else "a write to the first or the last slot is lost"
    return Check(name, implementation, float("inf") if note else error, LIMITS["bfloat16"], note)


def _large_pool(num_blocks: int, block: tuple[int, int, int]) -> jax.Array:
    """bfloat16; the same random blocks over and over, so that drawing it takes no memory of its own."""
    pattern = jax.random.normal(jax.random.key(0), (64, *block), jnp.bfloat16)
    return jax.jit(lambda x: jnp.broadcast_to(x, (num_blocks // 64, *x.shape)).reshape(num_blocks, *block))(pattern)


def check_cache() -> Iterator[Check]:
    """Writes, copies, gathers and scatters, exact against numpy; quantized writes within half a step."""
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((8, 16, 4, 64)).astype(np.float32)
    new = rng.standard_normal((5, 4, 64)).astype(np.float32)
    slots = np.array([3, 127, -1, 128, 40], np.int32)
    expected = pool.copy()
    expected.reshape(128, 4, 64)[[3, 127, 40]] = new[[0, 1, 4]]
    k_pool, v_pool = jax.jit(write_kv, donate_argnums=(2, 3))(new, new, jnp.asarray(pool), jnp.asarray(pool), slots)
    yield Check("write_kv", "cache", max(_largest(k_pool, expected), _largest(v_pool, expected)), 0)
    src, dst = np.array([1, 2, 5], np.int32), np.array([2, 1, 8], np.int32)
    [copied] = jax.jit(copy_blocks, donate_argnums=0)([jnp.asarray(pool)], src, dst)
    expected = pool.copy()
    expected[[2, 1]] = pool[[1, 2]]
    yield Check("copy_blocks", "cache", _largest(copied, expected), 0)
    blocks = jax.jit(gather_blocks)([jnp.asarray(pool)], src)
    yield Check("gather_blocks", "cache", _largest(blocks[0], pool[src]), 0)
    [restored] = jax.jit(scatter_blocks, donate_argnums=0)([jnp.zeros(pool.shape)], blocks, src)
    expected = np.zeros_like(pool)
    expected[src] = pool[src]
    yield Check("scatter_blocks", "cache", _largest(restored, expected), 0)
    for dtype, step in (("int8", 0.5 / 127), ("float8_e4m3fn", 16 / 448)):
        zeros = jnp.zeros(pool.shape, dtype)
        scales = jnp.zeros(pool.shape[:3])
        written = jax.jit(write_quantized_kv)(new, new, zeros, zeros, scales, scales, slots)
        values = np.asarray(dequantize(written[0], written[2])).reshape(128, 4, 64)[[3, 127, 40]]
        largest = np.abs(new[[0, 1, 4]]).max(axis=-1, keepdims=True)
        error = np.abs(values - new[[0, 1, 4]]).max(axis=-1, keepdims=True) / largest
        yield Check(f"write_quantized_kv {dtype}", "cache", float(error.max()), step * 1.001)


def _largest(found: jax.Array, expected: np.ndarray) -> float:
    return float(np.abs(np.asarray(found) - expected).max())


# What a check is called, of which implementation, and what runs it.
Task = tuple[str, str, Callable[[], Iterable[Check]]]


def all_tasks(small: bool) -> Iterator[Task]:
    """The best implementation over everything, the others over a few plain cases."""
    yield "writes and block moves", "cache", check_cache
    names, shapes = ours(jax.default_backend()), SMALL_HEADS if small else HEADS
    pools = (1 << 10,) if small else (3 << 16, 5 << 16)  # 3.2e9 and 5.4e9 values of bfloat16: 6 and 10 GiB
    for name in names:
        for case in attention_cases(small):
            if name == names[0] or (case.is_plain and case.heads in shapes[:2]):
                yield case.name, name, partial(_one, check_attention, case, name)
        for num_blocks in pools:
            yield f"pool of {num_blocks} blocks", name, partial(_one, check_far_blocks, num_blocks, name)


def _one(check: Callable[..., Check], *arguments: Any) -> list[Check]:
    return [check(*arguments)]


def run_task(task: Task) -> list[Check]:
    """A task's checks; what raises is a failed one."""
    name, implementation, run = task
    try:
        return list(run())
    except Exception as error:  # one that does not compile must not hide the others
        return [Check(name, implementation, None, 0, " ".join(f"{type(error).__name__}: {error}".split())[:300])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="results, rewritten after each check")
    parser.add_argument("--small", action="store_true", help="few and small shapes, for trying it on a CPU")
    args = parser.parse_args()
    checks: list[Check] = []
    start = time.perf_counter()
    for task in all_tasks(args.small):
        for check in run_task(task):
            checks.append(check)
            error = "" if check.error is None else f"{check.error:.1e}"
            verdict = "ok" if check.ok else "WRONG"
            print(f"{verdict:<6}{check.implementation:<10}{check.name:<52}{error:>8} {check.note}", flush=True)
        _save(args.json, checks, time.perf_counter() - start, complete=False)
    _save(args.json, checks, time.perf_counter() - start, complete=True)
    return 0 if all(check.ok for check in checks) else 1


def _save(path: Path, checks: list[Check], seconds: float, *, complete: bool) -> None:
    device = jax.devices()[0].device_kind
    content = {"device": device, "jax_version": jax.__version__, "complete": complete, "seconds": seconds}
    path.write_text(json.dumps({**content, "checks": [{**asdict(c), "ok": c.ok} for c in checks]}, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
