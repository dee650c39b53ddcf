"""`jaxpaged plan` for a device: arithmetic by hand, the engine's own allocation, and what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support import random_model, tiny_config

from jaxpaged.cli import build_parser, main
from jaxpaged.commands.options import engine_options
from jaxpaged.config import GIB, MIB, EngineConfig, ModelConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.errors import ConfigError
from jaxpaged.models.config import model_config_from_hf
from jaxpaged.sim import (
    CostModel,
    Dataset,
    Fixed,
    MeasuredStep,
    ModelShape,
    Setup,
    StepLoad,
    find_device,
    write_calibration,
)
from jaxpaged.sim.calibration import Calibration
from jaxpaged.sim.planner import DeploymentPlan, Load, plan_deployment, temporaries_bytes
from jaxpaged.sim.saturation import saturate

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def plan(config: ModelConfig, load: Load, **options: Any) -> DeploymentPlan:
    return plan_deployment(config, ModelShape.of(config), load, **options)


@pytest.mark.parametrize(
    ("dtype", "options", "has_temporaries"),
    [
        ("float32", {}, True),
        ("float32", {"kv_cache_memory": 3 * MIB + 12_345}, False),
        ("float32", {"kv_cache_dtype": "int8"}, False),
        ("bfloat16", {"max_num_batched_tokens": 64, "max_num_seqs": 16}, True),
        ("bfloat16", {"kv_cache_dtype": "int8", "block_size": 32}, False),
    ],
)
def test_the_arithmetic_is_that_of_the_engine(dtype: str, options: dict[str, Any], has_temporaries: bool) -> None:
    """Weights and pool to the byte; with what XLA takes for the largest step within 2 % of the sum."""
    options = {"kv_cache_memory": 16 * MIB, **options}
    model = random_model(tiny_config(dtype=dtype), dtype=jnp.dtype(dtype))
    engine = Engine(model, None, EngineConfig(warmup=False, **options))
    scale = {"kv_dtype_bytes": 1, "kv_scale_bytes": 4} if "kv_cache_dtype" in options else {}
    limits = engine.scheduler_config
    made = plan_deployment(
        model.config,
        ModelShape.of(model.config, dtype=dtype, **scale),
        Load(50, 50),
        device_memory=GIB,
        pool_bytes=options["kv_cache_memory"],
        block_size=engine.cache_config.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )
    runner = engine._runner
    pool = made.shared.blocks * made.shared.bytes_per_block
    assert pool == sum(leaf.nbytes for leaf in jax.tree.leaves(runner.cache.pools))
    assert made.shared.blocks == engine.cache_config.num_blocks
    assert made.memory.weights == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert made.memory.weights == runner.weights_bytes
    if has_temporaries:
        largest = runner.buckets.mixed[-1]
        runner._call(largest, runner._packers[largest].layout.empty(), None)
        total = made.memory.weights + pool + engine.temporaries()[str(largest)]
        assert made.memory.weights + pool + made.memory.temporaries == pytest.approx(total, rel=0.02)
    engine.shutdown()


def test_temporaries_of_a_real_model() -> None:
    """SmolLM2-135M in bfloat16: what XLA took for the largest step on a CPU (jax 0.10.2), rows by rows."""
    config = tiny_config(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, dtype="bfloat16",
    )  # fmt: skip
    for rows, tokens, measured in ((32, 256, 32_355_216), (32, 1024, 32_355_216), (128, 256, 129_359_056)):
        assert temporaries_bytes(config, num_tokens=tokens, num_seqs=rows, dtype="bfloat16") == pytest.approx(
            measured, rel=0.01
        )


def test_a_prefix_by_hand() -> None:
    """Blocks of 16: 10 tokens of prompt and 22 of output are 2 blocks; with 48 in front, 5, of which 3 are shared."""
    config = tiny_config()
    block = 16 * ModelShape.of(config).kv_token_bytes
    options = {"device_memory": GIB, "pool_bytes": 104 * block, "max_num_batched_tokens": 64}
    assert plan(config, Load(10, 22), **options).unshared.requests == 103 // 2
    made = plan(config, Load(58, 22, shared_prefix=48), **options)
    assert made.unshared.requests == 103 // 5 and made.shared.requests == (103 - 3) // 2
    assert made.average_requests == (103 - 3) // 2, "58 + 11 tokens are 5 blocks too"


def test_the_pool_is_what_is_left() -> None:
    made = plan(tiny_config(), Load(8, 8), device_memory=GIB, jax_memory_fraction=0.5, gpu_memory_utilization=0.8)
    memory = made.memory
    assert memory.usable == int(GIB // 2 * 0.8)
    assert memory.pool == memory.usable - memory.weights - memory.temporaries
    assert made.shared.blocks == memory.pool // made.shared.bytes_per_block


@pytest.mark.parametrize(
    ("load", "options", "message"),
    [
        (Load(100, 29), {}, "129 tokens, but the model was made for 128"),
        (Load(0, 5), {}, "prompt is 0"),
        (Load(10, 5, 11), {}, "shared_prefix is 11"),
        (Load(10, 5), {"device_memory": 200_000}, r"does not fit: .* short"),
        (Load(10, 5), {"jax_memory_fraction": 1.5}, "share of JAX is 1.5"),
    ],
)
def test_what_cannot_be(load: Load, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(tiny_config(), load, **{"device_memory": GIB, **options})


def test_saturation_by_hand() -> None:
    """Eight at once, a step each second: 8 tokens a second, of which each request has 10, but for the last."""
    config = tiny_config()
    device = replace(find_device("l4"), bandwidth=1e15, flops=1e20)
    cost = CostModel(ModelShape.of(config), device)
    seconds = cost.constants.overhead + 8 * cost.constants.per_sequence
    setup = Setup(slots=16 * 64, max_model_len=64, max_num_seqs=8)
    full = saturate(setup, Dataset(Fixed(6), Fixed(10)), cost)
    assert full.batch == 8
    assert full.output_tokens_per_s == pytest.approx(8 / seconds, rel=0.02)
    assert full.requests_per_s == pytest.approx(0.8 / seconds, rel=0.02)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    return str(path)


def test_llama_3_8b_on_an_h200(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """8,030,261,248 parameters; 2 x 32 layers x 8 heads x 128 x 2 bytes a token; 1500 + 500 tokens are 125 blocks."""
    argv = ["plan", model, "--device", "h200", "--prompt", "1500", "--output", "500", "--shared-prefix", "1024"]
    assert main([*argv, "--json", "--rate", "4", "--duration", "5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["weights"] == 2 * 8_030_261_248
    assert found["shared"]["bytes_per_token"] == 131_072 and found["unshared"]["blocks_per_request"] == 125
    blocks = found["memory"]["pool"] // (16 * 131_072) - 1
    assert found["unshared"]["requests"] == blocks // 125
    assert found["shared"]["requests"] == (blocks - 64) // (125 - 64)
    simulated = found["simulated"]
    assert simulated["finished"] == simulated["requests"] > 0
    assert simulated["prefix_hit_tokens"] == 1024 * (simulated["requests"] - 1), "all but the first find the prefix"
    assert simulated["saturation"]["requests_per_s"] > simulated["requests_per_s"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "8,030,261,248 parameters" in printed and f"jaxpaged serve {model} --max-model-len 2048 " in printed
    assert "--quantization" not in printed and "--kv-cache-dtype" not in printed


def test_the_command_has_what_the_plan_assumed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In bfloat16 the weights alone do not fit this device."""
    flags = ["--quantization", "q4_0", "--kv-cache-dtype", "int8", "--dtype", "bfloat16", "--block-size", "32"]
    assert main(["plan", model, "--device", "t4", *flags]) == 0
    command = capsys.readouterr().out.splitlines()[-1].split()
    start = command.index("serve")
    options = EngineConfig.from_options(engine_options(build_parser().parse_args(command[start:])))
    assert (options.quantization, options.kv_cache_dtype, options.dtype) == ("q4_0", "int8", "bfloat16")
    assert (options.block_size, options.max_num_batched_tokens) == (32, 2048)


def test_measured_steps_name_the_device(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    device = replace(find_device("h200"), name="a machine of my own", memory=100 * GIB)
    steps = tuple(MeasuredStep(StepLoad(i, i, 10 * i, 10 * i), 0.01) for i in range(1, 9))
    shape = ModelShape.of(model_config_from_hf(LLAMA_3_8B))
    path = tmp_path / "steps.json"
    write_calibration(path, Calibration(device, shape, steps, "by hand"))
    assert main(["plan", model, "--calibration", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["device"] == 100 * GIB and "simulated" not in found


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["MODEL", "--device", "t4"], "does not fit: of 16.00 GiB"),
        (["MODEL", "--device", "h300"], "no device 'h300'"),
        (["MODEL", "--memory", "80GiB", "--rate", "3"], "--rate and --trace need --device"),
        (["MODEL", "--rate", "3"], "--rate and --trace need --device"),
        (["MODEL", "--device", "h200", "--block-size", "0"], "block_size is 0"),
        (["--device", "h200"], "--device, --calibration, --memory, --rate and --trace need MODEL"),
    ],
)
def test_one_line_for_what_cannot_be(
    flags: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *(model if flag == "MODEL" else flag for flag in flags)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
