"""The kernels and whole steps, compiled for GPUs by `tools/gpu_compile.py` on a machine that needs none.

With GPU_COMPILE_REQUIRED set in the environment a missing compiler is a failure, else these tests skip.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_targets import missing

pytestmark = pytest.mark.gpu_compile

TOOL = Path(__file__).parents[2] / "tools" / "gpu_compile.py"
TARGETS = ("h200", "a100")
HEAD_DIMS = (64, 80, 96, 128, 256)
KINDS = ("decode", "mixed")
PLAIN = [f"{kind}-bfloat16-d{d}-g4-b16" for kind in KINDS for d in HEAD_DIMS]
OPTIONS = [f"decode-bfloat16-d64-g4-b16-{option}" for option in ("window", "cap", "sinks")]
OPTIONS += [f"mixed-bfloat16-d64-g4-b16-{option}" for option in ("window", "sinks")]
OTHERS = [f"{kind}-{rest}" for kind in KINDS for rest in ("float32-d128-g4-b16", "bfloat16-d64-g3-b16")]
INT8 = [f"{kind}-bfloat16-d128-g4-b16-int8" for kind in KINDS]
FP8 = [f"{kind}-bfloat16-d128-g4-b16-fp8" for kind in KINDS]
# Arrays of the pool that each gives back; int8 ones come with scales.
WRITES = {
    "write_kv-bfloat16": 2,
    "write_kv-int8": 2,
    "rotate_and_write_kv-bfloat16-d128": 2,
    "rotate_and_write_kv-int8-d128": 2,
    "copy_blocks": 4,
    "scatter_blocks": 4,
}
KERNELS = [*PLAIN, *OPTIONS, *OTHERS, *INT8, *WRITES]
SMOLLM2_DECODE, SMOLLM2_MIXED = "step-smollm2-135m-decode32", "step-smollm2-135m-mixed2048"
LLAMA_DECODE = "step-llama-3-8b-decode32"
STEPS = [(step, target) for step in (SMOLLM2_DECODE, SMOLLM2_MIXED) for target in TARGETS] + [(LLAMA_DECODE, "h200")]

Row = dict[str, Any]


@pytest.fixture(scope="module")
def ahead_of_time() -> None:
    """Skips, or fails, where the compiler is missing."""
    if reason := missing():
        if os.environ.get("GPU_COMPILE_REQUIRED"):
            pytest.fail(f"GPU_COMPILE_REQUIRED is set, but {reason}")
        pytest.skip(reason)


def compile_all(names: list[str], targets: tuple[str, ...] = TARGETS) -> dict[tuple[str, str], Row]:
    """Results by variant and target. In a process of its own: JAX's CUDA plugin starts only where no backend has."""
    patterns = [word for name in names for word in ("--only", name)]
    command = [sys.executable, str(TOOL), "--json", "--targets", ",".join(targets), *patterns]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode in (0, 1), run.stderr
    rows: list[Row] = json.loads(run.stdout)
    # An exit status of 1 says that a variant failed, and nothing else does.
    assert run.returncode == int(any(row["status"] == "failed" for row in rows))
    return {(row["variant"], row["target"]): row for row in rows}


@pytest.fixture(scope="module")
def kernels(ahead_of_time: None) -> dict[tuple[str, str], Row]:
    return compile_all([*KERNELS, *FP8])


@pytest.fixture(scope="module")
def steps(ahead_of_time: None) -> dict[tuple[str, str], Row]:
    return compile_all([SMOLLM2_DECODE, SMOLLM2_MIXED]) | compile_all([LLAMA_DECODE], ("h200",))


def check_compiled(row: Row) -> None:
    assert row["status"] == "ok", row["reason"]
    assert row["spilled"] == 0
    assert all(0 < kernel["registers"] <= 255 for kernel in row["kernels"])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", KERNELS)
def test_a_kernel_compiles_without_spills(kernels: dict[tuple[str, str], Row], variant: str, target: str) -> None:
    check_compiled(kernels[variant, target])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", WRITES)
def test_pools_are_written_in_place(kernels: dict[tuple[str, str], Row], variant: str, target: str) -> None:
    row = kernels[variant, target]
    scales = 2 * 4 * row["array_bytes"] // 128 if "int8" in variant else 0  # a float32 for 128 values of a byte
    assert row["donated_bytes"] == WRITES[variant] * row["array_bytes"] + scales
    assert row["aliased_bytes"] == row["donated_bytes"]
    assert row["temporary_bytes"] < row["array_bytes"] / 20


@pytest.mark.parametrize("variant", FP8)
def test_fp8_compiles_where_the_gpu_has_it_and_is_refused_elsewhere(
    kernels: dict[tuple[str, str], Row], variant: str
) -> None:
    check_compiled(kernels[variant, "h200"])
    refused = kernels[variant, "a100"]
    assert refused["status"] == "refused"
    assert "A100" in refused["reason"] and "8.9" in refused["reason"]


@pytest.mark.parametrize(("variant", "target"), STEPS)
def test_a_step_keeps_its_pool_in_place(steps: dict[tuple[str, str], Row], variant: str, target: str) -> None:
    row = steps[variant, target]
    check_compiled(row)
    layers = 32 if variant == LLAMA_DECODE else 30
    assert row["aliased_bytes"] == row["donated_bytes"] >= 2 * layers * row["array_bytes"]
    assert row["temporary_bytes"] < 2 * row["array_bytes"] / 5  # a fifth of one layer's pool


@pytest.mark.parametrize("target", TARGETS)
def test_a_decode_layer_is_at_most_16_launches(steps: dict[tuple[str, str], Row], target: str) -> None:
    row = steps[SMOLLM2_DECODE, target]
    assert 0 < len(row["layer"]) <= 16, row["layer"]
    # The rest is the embedding, RoPE's tables and drawing the tokens.
    assert row["launches"] - 30 * len(row["layer"]) < 60


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (SMOLLM2_DECODE, {"rotate_and_write_kv", "paged_decode", "paged_combine"}),
        (SMOLLM2_MIXED, {"rotate_and_write_kv", "paged_prefill", "paged_decode", "paged_combine"}),
    ],
)
def test_steps_run_the_triton_kernels(
    steps: dict[tuple[str, str], Row], variant: str, expected: set[str], target: str
) -> None:
    row = steps[variant, target]
    assert {kernel["name"] for kernel in row["kernels"]} == expected
    assert expected <= set(row["layer"])


def test_faults_are_found(ahead_of_time: None) -> None:
    """Programs that spill, copy their pool, do not hand it back, or should have been refused."""
    command = [sys.executable, str(Path(__file__).with_name("bad_programs.py"))]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(TOOL.parent)}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["fine"] == {"status": "ok", "reason": ""}
    assert found["spill"]["status"] == "failed" and "hungry spills" in found["spill"]["reason"]
    assert found["copied"]["status"] == "failed" and "copy of an array" in found["copied"]["reason"]
    assert found["not aliased"]["status"] == "failed" and "updated in place" in found["not aliased"]["reason"]
    assert found["not refused"]["status"] == "failed" and "nothing refused" in found["not refused"]["reason"]
