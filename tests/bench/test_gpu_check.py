"""The device check: what its parts make of results, and how it ends when a part fails, hangs or says too much."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from bench.bench_scripts import load_script

from jaxpaged.models.config import model_config_from_hf
from jaxpaged_kernels import paged_attention

check = load_script("gpu_check")
engine = load_script("gpu_engine")
numerics = load_script("gpu_numerics")


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes "numerics" a script of the test's own, and runs it."""

    def run(script: str, limit_s: float = 60) -> Any:
        (tmp_path / "part.py").write_text(
            f"import json, pathlib, sys, time\npath = pathlib.Path(sys.argv[2])\n{script}"
        )
        monkeypatch.setattr(check, "BENCH", tmp_path)
        monkeypatch.setitem(check.PARTS, "numerics", check.Part("part.py", limit_s))
        return check.run_part("numerics", tmp_path, small=False)

    return run


def test_a_part_that_ends_well(part: Any) -> None:
    outcome = part("path.write_text('{\"complete\": true}')")
    assert outcome.ok and outcome.content == {"complete": True}
    assert check.exit_code([outcome]) == 0


def test_a_part_that_fails_keeps_what_it_wrote(part: Any, tmp_path: Path) -> None:
    outcome = part("path.write_text('{\"checks\": []}'); print('why'); sys.exit(3)")
    assert outcome.status == "failed (exit code 3)" and outcome.content == {"checks": []}
    assert any("why" in line for line in check.table([outcome], 1.0, tmp_path))
    assert check.exit_code([outcome]) == 1


def test_a_part_that_hangs_is_stopped_and_keeps_what_it_wrote(part: Any) -> None:
    outcome = part("path.write_text('{\"complete\": false}'); time.sleep(600)", limit_s=3)
    assert outcome.status == "stopped after 3 s" and outcome.content == {"complete": False}


def test_results_of_an_earlier_run_do_not_pass_for_new_ones(part: Any) -> None:
    part("path.write_text('{\"complete\": true}')")
    assert part("sys.exit(1)").content == {}


def outcome(name: str, status: str = "ok", **content: Any) -> Any:
    return check.Outcome(name, status, 1.0, content, [])


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([outcome("numerics", complete=True), outcome("engine")], 0),
        ([outcome("numerics", complete=False), outcome("engine")], 1),
        ([outcome("numerics", "failed (exit code 1)", complete=True), outcome("engine", "stopped after 9 s")], 1),
        ([outcome("numerics", complete=True), outcome("engine", "stopped after 9 s")], 2),
        ([outcome("engine")], 0),
    ],
)
def test_exit_codes(outcomes: list[Any], code: int) -> None:
    assert check.exit_code(outcomes) == code


def kernel_row(i: int, **changes: Any) -> dict[str, Any]:
    figures = {"us": 10.0, "gb_per_s": 100.0, "of_copy": 0.5, "tflops": 1.0}
    return {"label": f"case {i}", "implementation": "triton", "status": "ok", **figures, **changes}


def test_the_table_stays_within_sixty_lines_and_keeps_every_part(tmp_path: Path) -> None:
    checks = [
        {"name": f"c{i}", "implementation": f"i{i % 9}", "error": 1.0, "limit": 0.1, "ok": False, "note": ""}
        for i in range(200)
    ]
    rows = [kernel_row(i) for i in range(150)]
    report = engine.EngineReport("GPU", "0", 4000.0, 512, 128, batches=[])
    outcomes = [
        outcome("numerics", checks=checks, device="GPU", jax_version="0"),
        outcome("kernels", rows=rows, copy_gb_per_s=1.0, loop_us=1.0, unfinished=[]),
        outcome("engine", **vars(report)),
    ]
    lines = check.table(outcomes, 1.0, tmp_path)
    assert len(lines) <= 60
    for start in ("jaxpaged on GPU, jax 0", "numerics: ok", "kernels: ok", "engine: ok", "all of it"):
        assert any(line.startswith(start) for line in lines)


def test_a_kernel_line_has_its_figures_and_those_of_others() -> None:
    rows = [
        kernel_row(0, us=12.34, gb_per_s=3456.0, of_copy=0.789),
        kernel_row(0, implementation="xla", us=99.0),
        kernel_row(0, implementation="torch_sdpa", status="not run: no torch", us=None),
        kernel_row(0, implementation="jax_op", status="failed: E", us=None),
    ]
    lines = check.kernels_lines({"rows": rows, "copy_gb_per_s": 4300.0, "loop_us": 5.0, "unfinished": []})
    assert " ".join(lines[1].split()) == "case 0 triton 12.3 3456 GB/s 78.9% 1.0 TF/s | xla 99.0, jax_op failed"
    assert "jax_op: failed: E" in lines[2]


def test_a_decode_step_reads_all_weights_of_llama_3_8b_but_its_embedding() -> None:
    config = model_config_from_hf(engine.LLAMA_3_8B)
    fake = SimpleNamespace(model_config=config, config=SimpleNamespace(kv_cache_dtype="auto"))
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14_336 * 4096 + 2 * 4096
    assert engine.bytes_read_a_step(fake) == 2 * (32 * layer + 4096 + 128_256 * 4096)
    assert engine.kv_bytes_per_token(fake) == 128 << 10
    fake.config.kv_cache_dtype = "int8"
    assert engine.kv_bytes_per_token(fake) == 2 * 32 * 8 * (128 + 4)


@pytest.mark.parametrize("factor", [1.0, 1.02, float("nan")])
def test_attention_that_is_off_by_two_percent_is_found(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*arguments: jax.Array, **options: Any) -> jax.Array:
        return factor * paged_attention(*arguments, **options)

    monkeypatch.setattr(numerics, "attend", attend)
    case = numerics.AttentionCase(numerics.DECODE, (4, 2, 16, 8))
    assert numerics.check_attention(case, "xla").ok == (factor == 1)


def test_block_moves_and_far_blocks_are_right_here() -> None:
    checks = [*numerics.check_cache(), numerics.check_far_blocks(128, "xla")]
    assert [c.name for c in checks if not c.ok] == []
    assert max(c.error for c in checks if c.limit == 0) == 0


def test_a_check_that_raises_is_a_failed_one() -> None:
    def broken() -> Any:
        raise RuntimeError("no\nway")

    [found] = numerics.run_task(("a case", "triton", broken))
    assert (found.name, found.implementation, found.ok, found.note) == (
        "a case",
        "triton",
        False,
        "RuntimeError: no way",
    )


def test_a_case_that_is_declined_is_no_failure() -> None:
    def declines(*_: Any, **__: Any) -> jax.Array:
        raise NotImplementedError("too large")

    case = numerics.AttentionCase(numerics.MIXED, (4, 2, 16, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics, "attend", declines)
        found = numerics.check_attention(case, "triton")
    assert found.ok and found.error is None and found.note == "not run: too large"
    assert not np.isfinite(numerics._error(np.array([np.nan]), np.array([1.0])))
