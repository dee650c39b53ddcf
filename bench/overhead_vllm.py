"""vLLM's side of `overhead.py`: its own scheduler with a model that costs nothing, run by the Python of an environment
that has vLLM (0.32). Prints one JSON list of {"rows", "steps", "schedule", "update"}, microseconds of processor
time of each step.

    VLLM_PYTHON -P bench/overhead_vllm.py '{"rows": [16], "steps": 300, "prompt_len": 64, ...}'
"""

# It needs nothing of jaxpaged, which that environment does not have.
from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "torch_dtype": "bfloat16",
}


def make_scheduler(folder: Path, rows: int, setup: dict[str, Any], num_blocks: int) -> Any:
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    max_model_len, block_size = setup["max_model_len"], setup["block_size"]
    config = {**CONFIG, "vocab_size": setup["vocab"], "max_position_embeddings": max_model_len}
    (folder / "config.json").write_text(json.dumps(config))
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    vllm_config = VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, max_model_len=max_model_len),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=max(rows, 2048),
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        device_config=DeviceConfig("cpu"),
    )
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    return Scheduler(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=block_size,
        log_stats=False,
    )


def add_requests(scheduler: Any, rows: int, setup: dict[str, Any], rng: np.random.Generator) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(setup["block_size"], sha256)
    for i in range(rows):
        length = setup["prompt_len"] + int(rng.integers(0, setup["prompt_len"]))
        prompt = rng.integers(0, setup["vocab"], length).tolist()
        params = SamplingParams(max_tokens=setup["steps"], ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=2)
        scheduler.add_request(Request(f"r{i}", prompt, params, None, block_hasher=hasher))


def measure(rows: int, setup: dict[str, Any]) -> dict[str, Any]:
    from vllm.v1.outputs import ModelRunnerOutput

    rng = np.random.default_rng(0)
    num_blocks = 1 + rows * -(-(2 * setup["prompt_len"] + setup["steps"]) // setup["block_size"])
    times: dict[str, list[float]] = {"schedule": [], "update": []}
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(Path(folder), rows, setup, num_blocks)
    add_requests(scheduler, rows, setup, rng)
    while scheduler.has_unfinished_requests():
        start = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time()
        counts = plan.num_scheduled_tokens
        ids = list(counts)
        done = {r.request_id for r in scheduler.running if r.num_computed_tokens >= r.num_prompt_tokens}
        drawn = rng.integers(0, setup["vocab"], len(ids)).tolist()
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[[token] if i in done else [] for i, token in zip(ids, drawn, strict=True)],
        )
        before = time.thread_time()
        scheduler.update_from_output(plan, result)
        updated = time.thread_time()
        if len(ids) == rows and all(count == 1 for count in counts.values()):
            times["schedule"].append((planned - start) * 1e6)
            times["update"].append((updated - before) * 1e6)
    return {"rows": rows, "steps": len(times["update"]), **times}


def main() -> None:
    os.environ |= {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    setup = json.loads(sys.argv[1])
    print(json.dumps([measure(rows, setup) for rows in setup["rows"]]))


if __name__ == "__main__":
    main()
