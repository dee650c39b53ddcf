"""Where the time of a step goes on this machine: the engine's step beside its parts, each compiled and timed alone.

    python bench/step.py smollm2-135m-instruct [--rows 1 8 16] [--context 256] [--prefill 512]

- engine: `Engine.step` while `rows` requests decode, host work included (with one step ahead it overlaps the device).
- model: embedding, norms, products with weights and head; attention is left out.
- attention: RoPE, the write of K and V, and attention, of all layers.
- draw: greedy tokens from the logits.

Bytes are those that a step must read: all weights once, and the KV of the true lengths; FLOPs are those of the
products.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpaged import LLM, SamplingParams, load_model
from jaxpaged.config import Quantization
from jaxpaged.models.products import Products
from jaxpaged.ops.sampling import sample
from jaxpaged.runner.lowering import main_dtype
from jaxpaged.weights.quantization import matrices
from jaxpaged_kernels import best_linear, new_pool, paged_attention, pool_dtype, rotate_and_write_kv

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Times:
    """Medians in milliseconds; `engine` is NaN where it was not asked for.

    Attributes:
        rows: sequences.
        tokens: of all sequences in the step.
        context: tokens of each sequence in the pool, this step's included.
        gigabytes: read at least by model and attention.
        gigaflops: of the products.
    """

    rows: int
    tokens: int
    context: int
    engine: float
    model: float
    attention: float
    draw: float
    gigabytes: float
    gigaflops: float

    def line(self) -> str:
        parts = self.model + self.attention + self.draw
        bandwidth, speed = self.gigabytes / (self.model + self.attention) * 1e3, self.gigaflops / self.model * 1e3
        engine = f"{self.engine:7.2f}" if self.engine == self.engine else "      -"
        return (
            f"{self.rows:4d} {self.tokens:6d} {self.context:7d} {engine} {parts:7.2f} "
            f"{self.model:7.2f} {self.attention:9.2f} {self.draw:6.2f}   {bandwidth:5.1f} GB/s {speed:5.0f} GFLOP/s"
        )


HEADER = "rows tokens context  engine   parts   model attention   draw   (ms; speeds of model and attention, of model)"


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    """Of `call`, which returns when it is done; after one that does not count."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


class Parts:
    """The parts of a step of one model, compiled for any number of rows and tokens."""

    def __init__(self, model: Any, linear: str, attention: str | None, repeats: int) -> None:
        self.config = model.config
        graphdef, state = nnx.split(model)
        self._leaves, treedef = jax.tree.flatten(state)
        self.dtype = main_dtype(self._leaves)
        self._embedding_bytes = model.model.embed_tokens.weight[...].nbytes
        layers = (m for name, m in matrices(model).items() if name.startswith("model.layers."))
        self._layer_params = sum(math.prod(matrix.shape) for matrix in layers)
        self._implementation = attention
        self._repeats = repeats

        def run(leaves: list[jax.Array], ids: jax.Array, rows: jax.Array) -> jax.Array:
            model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            products = Products(jnp.int32(len(ids)), linear)
            hidden = model.hidden_states(ids, jnp.zeros_like(ids), lambda i, q, *_, **__: q, products)
            logits: jax.Array = model.logits(hidden[rows], products)
            return logits

        self._run = jax.jit(run)
        self._attend = jax.jit(self._attention_layers, donate_argnums=0)

    @property
    def weight_bytes(self) -> int:
        """Of all arrays; an embedding that is also the head is read once, as the head."""
        embedding = 0 if self.config.tie_word_embeddings else self._embedding_bytes
        return sum(leaf.nbytes for leaf in self._leaves) - embedding

    def measure(self, rows: int, chunk: int, context: int, engine: float) -> Times:
        """Of a step of `rows` sequences with `chunk` new tokens each, the last of `context`."""
        config, T = self.config, rows * chunk
        ids, last = jnp.ones(T, jnp.int32), jnp.arange(rows) * chunk + chunk - 1
        logits = self._run(self._leaves, ids, last)
        model = median_ms(lambda: self._run(self._leaves, ids, last).block_until_ready(), self._repeats)
        zeros = jnp.zeros(rows)

        @jax.jit
        def draw(logits: jax.Array) -> jax.Array:
            seeds = jnp.zeros((rows, 2), jnp.uint32)
            return sample(
                logits, zeros, jnp.zeros(rows, jnp.int32), zeros + 1, zeros, seeds, jnp.zeros(rows, jnp.int32)
            )

        drawing = median_ms(lambda: draw(logits).block_until_ready(), self._repeats)
        kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize
        gigabytes = (self.weight_bytes + kv_bytes * rows * context) / 1e9
        flops = 2 * (T * self._layer_params + rows * config.vocab_size * config.hidden_size) / 1e9
        attention = self._time_attention(rows, chunk, context)
        return Times(rows, T, context, engine, model, attention, drawing, gigabytes, flops)

    def _time_attention(self, rows: int, chunk: int, context: int) -> float:
        config, T = self.config, rows * chunk
        per_row = -(-context // BLOCK_SIZE)
        shape = (1 + rows * per_row, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        device = jax.devices()[0]
        pools = [
            tuple(new_pool(shape, pool_dtype(self.dtype), device) for _ in range(2)) for _ in range(config.num_layers)
        ]
        tables = 1 + np.arange(rows * per_row, dtype=np.int32).reshape(rows, per_row)
        position = np.tile(np.arange(context - chunk, context), rows)
        slots = tables[np.repeat(np.arange(rows), chunk), position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        q = jnp.ones((T, config.num_heads, config.head_dim), self.dtype)
        batch = (tables, np.full(rows, context, np.int32), np.arange(rows + 1, dtype=np.int32) * chunk, np.int32(slots))

        def call() -> None:
            nonlocal pools
            pools, out = self._attend(pools, q, *batch)
            out.block_until_ready()

        return median_ms(call, self._repeats)

    def _attention_layers(
        self, pools: list[tuple[jax.Array, ...]], q: jax.Array, tables: jax.Array, lens: jax.Array, starts: jax.Array,
        slots: jax.Array,
    ) -> tuple[list[tuple[jax.Array, ...]], jax.Array]:  # fmt: skip
        writer = "xla" if self._implementation == "reference" else self._implementation
        angles = jnp.ones((len(q), q.shape[2] // 2), jnp.float32)
        k = q[:, : self.config.num_kv_heads]
        written = []
        for pool in pools:
            rotated, new = rotate_and_write_kv(q, k, k, angles, angles, pool, slots, implementation=writer)
            decodes = len(q) == len(tables)
            count = jnp.int32(len(tables) if decodes else 0)
            q = paged_attention(
                rotated, new[0], new[1], tables, lens, starts, count,
                scale=0.1, decode_only=decodes, implementation=self._implementation,
            )  # fmt: skip
            written.append(new)
        return written, q


def engine_ms(llm: LLM, rows: int, context: int, steps: int) -> float:
    """Median time of `Engine.step` while `rows` sequences of about `context` tokens decode."""
    engine, rng = llm._engine, np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=steps + 8, ignore_eos=True)
    for row in range(rows):
        prompt = rng.integers(0, engine.model_config.vocab_size, context - steps // 2).tolist()
        engine.add_request(f"{context}-{row}", prompt, params)
    seconds: list[tuple[float, int]] = []
    while engine.has_unfinished_requests():
        start, before = time.perf_counter(), engine.stats().generation_tokens_total
        engine.step()
        seconds.append((time.perf_counter() - start, engine.stats().generation_tokens_total - before))
    whole = [s for s, tokens in seconds if tokens == rows]
    return statistics.median(whole[4:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as for `jaxpaged serve`")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16], help="sequences that decode")
    parser.add_argument("--context", type=int, default=256, help="tokens of each in the pool")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512], help="lengths of single prompts")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", "-q", default="auto", choices=get_args(Quantization), help="as of serve")
    parser.add_argument("--linear", help="implementation of the products (default: by device)")
    parser.add_argument("--attention", help="implementation of attention (default: by device)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    model = load_model(args.model, dtype=args.dtype, quantization=args.quantization)
    llm = LLM.from_module(
        model, None, max_num_seqs=max(args.rows), max_model_len=max(2048, args.context + args.repeats + 8),
        linear=args.linear, attention=args.attention,
    )  # fmt: skip
    parts = Parts(model, args.linear or best_linear(), args.attention, args.repeats)
    print(HEADER)
    results = []
    for rows in args.rows:
        engine = engine_ms(llm, rows, args.context, steps=max(args.repeats, 12))
        results.append(parts.measure(rows, 1, args.context, engine))
        print(results[-1].line(), flush=True)
    for length in args.prefill:
        results.append(parts.measure(1, length, length, float("nan")))
        print(results[-1].line(), flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
