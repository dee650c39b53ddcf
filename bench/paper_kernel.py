"""Time of attention by block size on this machine's CPU, for figure 18b.

    python bench/paper_kernel.py --out bench/paper

Decodes of 8 sequences of 512 tokens, 8 KV heads of 128 (bfloat16), in blocks that lie anywhere in the pool; the sizes
take turns, and the best of all turns counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged_kernels import new_pool, paged_attention, pool_dtype
from paper_engine import machine_name

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROWS, CONTEXT, HEADS, HEAD_DIM = 8, 512, 8, 128


def attention_call(size: int, *, rows: int = ROWS, context: int = CONTEXT) -> Callable[[], jax.Array]:
    """Attention of a step of decodes."""
    rng = np.random.default_rng(0)
    per_row = -(-context // size)
    shape = (1 + rows * per_row, size, HEADS, HEAD_DIM)
    pools = [new_pool(shape, pool_dtype(jnp.dtype("bfloat16")), jax.devices()[0]) for _ in range(2)]
    tables = 1 + rng.permutation(rows * per_row).astype(np.int32).reshape(rows, per_row)
    query = jnp.ones((rows, HEADS, HEAD_DIM), jnp.bfloat16)

    @jax.jit
    def attend(query: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array) -> jax.Array:
        lens, starts = jnp.full(rows, context, jnp.int32), jnp.arange(rows + 1, dtype=jnp.int32)
        return paged_attention(query, k, v, tables, lens, starts, jnp.int32(rows), scale=0.1, decode_only=True)

    return lambda: attend(query, *pools, tables)


def measure(turns: int) -> dict[int, float]:
    """Block size -> seconds."""
    calls = {size: attention_call(size) for size in SIZES}
    best = dict.fromkeys(SIZES, float("inf"))
    for turn in range(turns + 1):
        for size, call in calls.items():
            start = time.perf_counter()
            call().block_until_ready()
            if turn:  # the first compiles
                best[size] = min(best[size], time.perf_counter() - start)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write attention-cpu.json here")
    args = parser.parse_args()
    seconds = measure(args.turns)
    for size, value in seconds.items():
        print(f"blocks of {size:>3}: {value * 1e6:7.1f} µs, {value / seconds[16]:.2f} of that of 16")
    if args.out is not None:
        found = {"machine": machine_name(), "seconds": seconds}
        (args.out / "attention-cpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
