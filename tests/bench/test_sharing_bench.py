"""The bench of sharing: its block counts by arithmetic, its lengths, and what it writes down."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bench.bench_scripts import load_script

bench = load_script("sharing")


@pytest.mark.parametrize("width", [2, 4, 6])
@pytest.mark.parametrize(("prompt_len", "output_len"), [(32, 40), (37, 25), (5, 9), (16, 1)])
def test_parallel_sampling_shares_the_whole_blocks_of_the_prompt(width: int, prompt_len: int, output_len: int) -> None:
    counted = bench.count_blocks(
        "alpaca", "parallel", width, [(prompt_len, output_len)], block_size=16, rng=np.random.default_rng(0)
    )
    used = unshared = 0
    for length in range(prompt_len, prompt_len + output_len):  # tokens of each sequence in the pool, step by step
        blocks, shared = -(-length // 16), prompt_len // 16
        unshared += width * blocks
        used += blocks if length == prompt_len else shared + width * (blocks - shared)
    assert (counted.used, counted.unshared) == (used, unshared)
    is_copied = prompt_len % 16 and output_len > 1
    assert counted.copies == (width - 1 if is_copied else 0)


def test_beams_share_what_they_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """All continuations are equally probable, so that the first beam always wins: the newest tokens alone differ."""
    monkeypatch.setattr(bench, "candidate_rows", lambda num_top: np.float32([[-1.0] * num_top]))
    counted = bench.count_blocks("alpaca", "beam", 2, [(16, 33)], block_size=16, rng=np.random.default_rng(0))
    # 16 tokens in one block; then 32 steps with one token more each.
    assert counted.unshared == 2 * (1 + 16 * 2 + 16 * 3)
    assert counted.used == 1 + 16 * (1 + 2) + 16 * (2 + 2)
    assert counted.copies == 15 * 2  # one a step, unless the newest token is the first of its block


@pytest.mark.parametrize("mean", [19.31, 58.45, 161.31, 337.99])
def test_lengths_have_the_mean(mean: float) -> None:
    lengths = bench.draw_lengths(mean, 20_000, 0.8, np.random.default_rng(1))
    assert np.mean(lengths) == pytest.approx(mean, rel=0.02)
    assert min(lengths) >= 1 and max(lengths) <= bench.MAX_MODEL_LEN // 2


def test_candidates_are_log_probabilities_best_first() -> None:
    rows = bench.candidate_rows(9)
    assert rows.shape == (12 * 64, 9) and (np.diff(rows, axis=1) <= 0).all()
    assert (np.exp(rows[:, :5]).sum(1) < 1 + 1e-5).all()


def test_table_and_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "sharing.json"
    monkeypatch.setattr(bench, "DATASETS", {"alpaca": (20, 10)})
    monkeypatch.setattr("sys.argv", ["sharing.py", "--requests", "3", "--json", str(file)])
    bench.main()
    rows = json.loads(file.read_text())
    assert [(r["method"], r["width"]) for r in rows] == [(m, w) for m in ("parallel", "beam") for w in (2, 4, 6)]
    printed = capsys.readouterr().out
    for row in rows:
        assert f"{row['saved_percent']:.2f}" in printed and row["paper"] in printed
        assert row["saved_percent"] == pytest.approx(100 * (1 - row["used"] / row["unshared"]))
