"""The Mosaic GPU prototype, compiled for an H200 on a machine that has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_program import parse_ptxas
from gpu_targets import missing

pytestmark = pytest.mark.gpu_compile

PROGRAMS = Path(__file__).with_name("mosaic_programs.py")
TOOLS = Path(__file__).parents[2] / "tools"
BLOCKS = 1 << 14
CASES: list[dict[str, Any]] = [
    {"dtype": "bfloat16", "head_dim": 64, "group": 3, "kv_heads": 3, "block_size": 16, "blocks": BLOCKS},
    {"dtype": "bfloat16", "head_dim": 128, "group": 4, "kv_heads": 8, "block_size": 8, "blocks": BLOCKS},
    {"dtype": "float16", "head_dim": 128, "group": 7, "kv_heads": 4, "block_size": 128, "blocks": BLOCKS},
    {"dtype": "bfloat16", "head_dim": 64, "group": 64, "kv_heads": 1, "block_size": 64, "blocks": BLOCKS},
]


def test_compiles_for_hopper_without_spills(tmp_path: Path) -> None:
    if reason := missing():
        if os.environ.get("GPU_COMPILE_REQUIRED"):
            pytest.fail(f"GPU_COMPILE_REQUIRED is set, but {reason}")
        pytest.skip(reason)
    # Mosaic GPU runs ptxas by itself, and reports it only through these.
    reports = {"MOSAIC_GPU_DUMP_TO": str(tmp_path), "MOSAIC_GPU_DUMP_PTXAS": "1"}
    environment = {**os.environ, **reports, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(TOOLS)}
    command = [sys.executable, str(PROGRAMS), json.dumps(CASES)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]

    for case, temporary_bytes in zip(CASES, json.loads(run.stdout), strict=True):
        pool_bytes = 2 * BLOCKS * case["block_size"] * case["kv_heads"] * case["head_dim"]
        assert temporary_bytes < pool_bytes / 4, case  # partial results, and no copy of the pool
    logs = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    assert len(logs) == len(CASES)
    for log in logs:
        assert "'sm_90a'" in log
        (kernel,) = parse_ptxas(log, {})
        assert kernel.name.startswith("paged_decode")
        assert kernel.spilled == 0 and 0 < kernel.registers <= 255
