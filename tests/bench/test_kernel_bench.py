"""The kernel bench: its arithmetic by brute force, what its contestants compute, and what it writes down."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.bench_scripts import load_script

bench = load_script("kernels")
Case, make_inputs = bench.Case, bench.make_inputs
SMALL = Case("decode", 3, 40, heads=6, kv_heads=2, head_dim=16, dtype="float32", block_size=8)
CHUNK = Case("prefill", 2, 24, heads=4, kv_heads=2, head_dim=16, dtype="float32", block_size=8, queries=10)


@pytest.mark.parametrize("lengths", ["equal", "mixed"])
@pytest.mark.parametrize(("kv_dtype", "vector"), [(None, 16 * 4), ("int8", 16 + 4), ("float8_e4m3fn", 16 + 4)])
def test_bytes_are_each_key_and_value_once_with_queries_and_result(lengths: str, kv_dtype: Any, vector: int) -> None:
    case = bench.Case("decode", 3, 40, 6, 2, 16, dtype="float32", kv_dtype=kv_dtype, block_size=8, lengths=lengths)
    total = 120 if lengths == "equal" else 40 + 22 + 5
    assert case.bytes_to_move() == total * 2 * 2 * vector + 2 * 3 * 6 * 16 * 4


def test_operations_are_those_of_the_keys_that_each_query_sees() -> None:
    seen = sum(position + 1 for position in range(24 - 10, 24))
    assert CHUNK.flops() == 2 * seen * 4 * (16 + 16) * 2  # rows, heads, both products, multiply and add


@pytest.mark.parametrize("grid", ["quick", "full"])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_no_case_comes_twice_and_every_pool_can_be_addressed(grid: str, platform: str) -> None:
    cases = bench.GRIDS[grid](platform)
    assert len(set(cases)) == len(cases)
    assert len({case.label() for case in cases}) == len(cases)
    assert all(case.kv_bytes() < 2 << 31 for case in cases if case.kv_dtype)
    assert all(case.kv_lens().min() >= case.queries for case in cases)


def expected_of_copy(case: Any, inputs: Any, copy: int) -> np.ndarray:
    """Attention over copy number `copy`, in float64, one query and head at a time."""
    tables = np.asarray(inputs.tables) + copy * inputs.blocks_per_copy
    pools = [np.asarray(p).astype(np.float64) for p in (inputs.k_pool, inputs.v_pool)]
    if inputs.scales:
        pools = [
            p * np.asarray(inputs.scales[n])[..., None] for p, n in zip(pools, ("k_scales", "v_scales"), strict=True)
        ]
    q = np.asarray(inputs.q).astype(np.float64)
    out = np.zeros_like(q)
    for row, kv_len in enumerate(case.kv_lens()):
        k, v = (p[tables[row]].reshape(-1, case.kv_heads, case.head_dim) for p in pools)
        for i in range(case.queries):
            seen, token = kv_len - case.queries + i + 1, row * case.queries + i
            for head in range(case.heads):
                kv_head = head // (case.heads // case.kv_heads)
                weights = np.exp(k[:seen, kv_head] @ q[token, head] / np.sqrt(case.head_dim))
                out[token, head] = weights @ v[:seen, kv_head] / weights.sum()
    return out


@pytest.mark.parametrize("name", ["xla", "gather"])
@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        bench.Case("decode", 3, 40, 6, 2, 16, dtype="float32", block_size=8, lengths="mixed"),
        bench.Case("decode", 3, 40, 6, 2, 16, dtype="float32", kv_dtype="int8", block_size=8),
        CHUNK,
    ],
    ids=lambda case: case.label(),
)
def test_each_call_attends_to_its_own_copy(case: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(make_inputs.__globals__, "WORKING_SET", {"cpu": 3 * case.kv_bytes()})
    inputs = make_inputs(case, "cpu")
    assert inputs.copies == 3
    assert sorted(np.asarray(inputs.tables).flat) == list(range(inputs.blocks_per_copy))
    contestant = bench.set_up(name, case, inputs)
    for call, copy in ((0, 0), (4, 1)):
        out = jax.jit(contestant.step)(contestant.carry, jnp.int32(call), contestant.operands)
        np.testing.assert_allclose(np.asarray(out), expected_of_copy(case, inputs, copy), atol=2e-5)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.EFFORTS, "cpu", bench.Effort(length=1, min_seconds=0.0, repeats=1))
    monkeypatch.setitem(bench.GRIDS, "quick", lambda platform: [SMALL, CHUNK])
    monkeypatch.setitem(make_inputs.__globals__, "WORKING_SET", {"cpu": 1})
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 2e9)
    monkeypatch.setattr(bench, "plot", lambda report, path: "no plot")


@pytest.mark.usefixtures("quick")
def test_a_run_writes_figures_that_follow_from_its_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--output-dir", str(tmp_path), "--json", str(tmp_path / "k.json")]) == 0
    report = json.loads((tmp_path / "k.json").read_text())
    assert report["copy_gb_per_s"] == 2 and report["unfinished"] == []
    timed = [row for row in report["rows"] if row["us"] is not None]
    assert {(row["label"], row["implementation"]) for row in timed} >= {
        (case.label(), name) for case in (SMALL, CHUNK) for name in ("xla", "gather")
    }
    for row in timed:
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
        assert row["of_copy"] == pytest.approx(row["gb_per_s"] / 2)
        assert row["tflops"] == pytest.approx(row["flops"] / row["us"] / 1e6)
    with (tmp_path / "kernels.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(row["rows"], row["implementation"]) for row in table] == [
        (str(row["rows"]), row["implementation"]) for row in report["rows"]
    ]
    assert SMALL.label() in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_what_fails_or_is_wrong_is_marked_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.set_up

    def set_up(name: str, case: Any, inputs: Any) -> Any:
        if name == "broken":
            raise RuntimeError("no\nway")
        contestant = real("xla", case, inputs)
        if name == "xla":
            return contestant
        return type(contestant)(lambda q, i, x: 1.1 * contestant.step(q, i, x), contestant.carry, contestant.operands)

    monkeypatch.setattr(bench, "set_up", set_up)
    monkeypatch.setattr(bench, "contestants", lambda case, platform: ["broken", "off", "xla"])
    monkeypatch.setitem(bench.GRIDS, "quick", lambda platform: [SMALL])
    assert bench.main(["--output-dir", str(tmp_path), "--json", str(tmp_path / "k.json")]) == 1
    rows = json.loads((tmp_path / "k.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["failed: RuntimeError: no way", "WRONG: differs by 1.0e-01", "ok"]


@pytest.mark.usefixtures("quick")
def test_a_time_limit_names_what_it_left_out(tmp_path: Path) -> None:
    assert bench.main(["--output-dir", str(tmp_path), "--json", str(tmp_path / "k.json"), "--time-limit", "0"]) == 0
    assert json.loads((tmp_path / "k.json").read_text())["unfinished"] == [SMALL.label(), CHUNK.label()]


def test_a_timing_is_the_median_in_microseconds_a_call() -> None:
    timing = bench.Timing.of([3e-3, 1e-3, 2e-3], calls=10)
    assert (timing.us, timing.low_us, timing.high_us, timing.calls) == pytest.approx((200, 100, 300, 10))
