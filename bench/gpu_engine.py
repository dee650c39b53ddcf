"""Part of `gpu_check`: the whole engine on random weights, its decode step against the roofline.

    python bench/gpu_engine.py --json FILE [--small] [--batches 1 32 128 256] [--kv-cache-dtype auto|int8|fp8]

A Llama-3-8B shape in bfloat16; `batch` requests of 512 random prompt tokens at once, 128 tokens out of each, no prefix
cache. A decode step counts when every request is in it and no prompt is; its time is that of `Engine.step`, host work
included. The roofline is what it must read (all weights but the embedding table, and the KV of the true lengths) over
the speed of a plain device-to-device copy measured in the same run. After warm-up nothing may be compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.request import SamplingParams
from jaxpaged.weights.loader import abstract_model
from jaxpaged.weights.names import parameters
from timing import copy_bandwidth

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SMALL = LLAMA_3_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class Load:
    """What is asked of the engine."""

    model: dict[str, Any]
    batches: list[int]
    prompt_len: int
    output_len: int
    max_num_batched_tokens: int | None = None


@dataclass(frozen=True)
class BatchResult:
    """One batch.

    Attributes:
        seconds: from the first request until the last token.
        prefill_s: until every request has its first token.
        decode_ms: median of the steps that count, `decode_p90_ms` their 90th percentile; NaN if there was none.
        roofline_ms: of the median step.
        ratio: decode_ms over roofline_ms.
    """

    batch: int
    seconds: float
    prefill_s: float
    output_tokens_per_s: float
    decode_steps: int
    decode_ms: float
    decode_p90_ms: float
    roofline_ms: float
    ratio: float


@dataclass
class EngineReport:
    """All of a run; `failed` counts requests that did not give all their tokens."""

    device: str
    jax_version: str
    copy_gb_per_s: float
    prompt_len: int
    output_len: int
    weights_gb: float = 0.0
    start_s: float = 0.0
    kv_tokens: int = 0
    compiles_after_warmup: int = 0
    failed: int = 0
    complete: bool = False
    batches: list[BatchResult] = field(default_factory=list)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def start_engine(load: Load, kv_cache_dtype: str) -> Engine:
    """An engine with random weights, warmed up."""
    longest = load.prompt_len + load.output_len
    options: dict[str, Any] = {} if kv_cache_dtype == "auto" else {"kv_cache_dtype": kv_cache_dtype}
    config = EngineConfig(
        load_format="dummy",
        max_model_len=longest,
        max_num_seqs=max(load.batches),
        max_num_batched_tokens=load.max_num_batched_tokens,
        enable_prefix_caching=False,
        **options,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(load.model))
        return Engine.from_pretrained(str(path), config, model_name="dummy")


def bytes_read_a_step(engine: Engine) -> int:
    """Of weights, by a decode step: everything but the embedding table, of which it reads a few rows."""
    config = engine.model_config
    sizes = {
        name: int(np.prod(variable.shape)) * np.dtype(variable.dtype).itemsize
        for name, variable in parameters(abstract_model(config, config.dtype)).items()
    }
    embedding = 0 if config.tie_word_embeddings else sizes["model.embed_tokens.weight"]
    return sum(sizes.values()) - embedding


def kv_bytes_per_token(engine: Engine) -> int:
    """K and V of all layers, scales of a quantized cache included."""
    config, kind = engine.model_config, getattr(engine.config, "kv_cache_dtype", "auto")
    vector = config.head_dim * 2 if kind == "auto" else config.head_dim + 4
    return 2 * config.num_layers * config.num_kv_heads * vector


def run_batch(engine: Engine, batch: int, load: Load, copy_bytes_per_s: float) -> tuple[BatchResult, int]:
    """Serves one batch; returns its figures and how many requests failed."""
    rng = np.random.default_rng(batch)
    params = SamplingParams(temperature=0, max_tokens=load.output_len, ignore_eos=True)
    weights, kv_token = bytes_read_a_step(engine), kv_bytes_per_token(engine)
    before = engine.stats()
    start, prefill_s, complete, generated = time.perf_counter(), 0.0, 0, 0
    steps: list[tuple[float, int]] = []  # seconds, tokens in the cache
    for i in range(batch):
        prompt = rng.integers(0, engine.model_config.vocab_size, load.prompt_len).tolist()
        engine.add_request(f"{batch}-{i}", prompt, params)
    while engine.has_unfinished_requests():
        step_start = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - step_start
        complete += sum(len(o.outputs[0].token_ids) == load.output_len for o in outputs if o.finished and o.outputs)
        after = engine.stats()
        new = after.generation_tokens_total - before.generation_tokens_total - generated
        if prefill_s and new == batch:
            steps.append((seconds, batch * load.prompt_len + generated))
        generated += new
        if not prefill_s and after.prompt_tokens_total - before.prompt_tokens_total == batch * load.prompt_len:
            prefill_s = time.perf_counter() - start
    total = time.perf_counter() - start
    times = [seconds * 1e3 for seconds, _ in steps] or [float("nan")]
    roofs = [(weights + tokens * kv_token) / copy_bytes_per_s * 1e3 for _, tokens in steps] or [float("nan")]
    decode, roofline = statistics.median(times), statistics.median(roofs)
    tokens_per_s = batch * load.output_len / total
    p90 = float(np.percentile(times, 90))
    figures = (batch, total, prefill_s, tokens_per_s, len(steps), decode, p90, roofline, decode / roofline)
    return BatchResult(*figures), batch - complete


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="results, rewritten after each batch")
    parser.add_argument("--small", action="store_true", help="a tiny model, for trying it on a CPU")
    parser.add_argument("--batches", type=int, nargs="+", metavar="N", help="requests at once (default: 1 32 128 256)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as of the engine (default: auto)")
    args = parser.parse_args()
    if args.small:
        load = Load(SMALL, args.batches or [1, 4], prompt_len=32, output_len=8, max_num_batched_tokens=64)
    else:
        load = Load(LLAMA_3_8B, args.batches or [1, 32, 128, 256], prompt_len=512, output_len=128)
    copy = copy_bandwidth()
    device = jax.devices()[0].device_kind
    report = EngineReport(device, jax.__version__, copy / 1e9, load.prompt_len, load.output_len)
    start = time.perf_counter()
    engine = start_engine(load, args.kv_cache_dtype)
    report.start_s = time.perf_counter() - start
    report.weights_gb = bytes_read_a_step(engine) / 1e9
    report.kv_tokens = (engine.cache_config.num_blocks - 1) * engine.cache_config.block_size
    print(f"engine ready after {report.start_s:.1f} s, room for {report.kv_tokens:,} tokens", flush=True)
    for batch in load.batches:
        result, failed = run_batch(engine, batch, load, copy)
        report.batches.append(result)
        report.failed += failed
        report.compiles_after_warmup = engine.stats().compiles_after_warmup
        report.save(args.json)
        print(result, flush=True)
    report.complete = True
    report.save(args.json)
    return 1 if report.failed or report.compiles_after_warmup else 0


if __name__ == "__main__":
    raise SystemExit(main())
