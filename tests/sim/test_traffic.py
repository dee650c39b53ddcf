"""Arrivals and lengths: their means, their order, and what a bad file is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.sim import DATASETS, Dataset, Fixed, Histogram, LogNormal, bursts, poisson, read_trace
from jaxpaged.sim.lengths import read_dataset


@pytest.mark.parametrize(("name", "means"), [("sharegpt", (161.31, 337.99)), ("alpaca", (19.31, 58.45))])
def test_lengths_have_the_paper_s_means(name: str, means: tuple[float, float]) -> None:
    prompts, outputs = DATASETS[name].draw(20_000, np.random.default_rng(0), 2048)
    assert (prompts.mean(), outputs.mean()) == (pytest.approx(means[0], rel=0.02), pytest.approx(means[1], rel=0.02))
    assert (prompts + outputs).max() <= 2048 and min(prompts.min(), outputs.min()) >= 1


def test_a_lognormal_has_its_sigma() -> None:
    lengths = LogNormal(300, 0.5).draw(50_000, np.random.default_rng(1), 100_000)
    assert np.log(lengths).std() == pytest.approx(0.5, rel=0.03)


def test_a_histogram_draws_its_bins() -> None:
    lengths = Histogram((1, 3, 10), (1, 3)).draw(40_000, np.random.default_rng(2), 100)
    assert set(lengths.tolist()) == set(range(1, 10))
    assert (lengths < 3).mean() == pytest.approx(0.25, abs=0.01)


def test_poisson_arrivals() -> None:
    traffic = poisson(DATASETS["alpaca"], 50, 400, seed=0, max_model_len=2048)
    gaps = np.diff(traffic.arrivals)
    assert len(traffic) == pytest.approx(50 * 400, rel=0.03) and traffic.arrivals.max() < 400
    assert (gaps >= 0).all() and gaps.std() == pytest.approx(gaps.mean(), rel=0.05), "exponential gaps"
    again = poisson(DATASETS["alpaca"], 50, 400, seed=0, max_model_len=2048)
    other = poisson(DATASETS["alpaca"], 50, 400, seed=1, max_model_len=2048)
    assert (again.arrivals == traffic.arrivals).all() and (again.outputs == traffic.outputs).all()
    assert other.arrivals[0] != traffic.arrivals[0]


def test_bursts() -> None:
    traffic = bursts(Dataset(Fixed(5), Fixed(7)), 20, 500, size=8, seed=0, max_model_len=64)
    assert len(traffic) % 8 == 0 and len(traffic) == pytest.approx(20 * 500, rel=0.1)
    assert (traffic.arrivals.reshape(-1, 8) == traffic.arrivals[::8, None]).all()
    assert set(traffic.prompts.tolist()) == {5} and set(traffic.outputs.tolist()) == {7}


ROW = {"arrival": 1.5, "prompt_tokens": 10, "output_tokens": 20}


def test_a_trace_is_sorted(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [ROW, ROW | {"arrival": 0, "prompt_tokens": 3, "note": "ignored"}]
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    traffic = read_trace(path)
    assert traffic.arrivals.tolist() == [0, 1.5] and traffic.prompts.tolist() == [3, 10]
    assert traffic.outputs.tolist() == [20, 20]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (json.dumps(ROW | {"prompt_tokens": -1}), "line 2: prompt_tokens is -1"),
        (json.dumps(ROW | {"output_tokens": 0}), "line 2: output_tokens is 0"),
        (json.dumps(ROW | {"output_tokens": 2.5}), "line 2: output_tokens is 2.5"),
        (json.dumps(ROW | {"arrival": -0.1}), "line 2: arrival is -0.1"),
        (json.dumps(ROW | {"arrival": "soon"}), "line 2: arrival is 'soon'"),
        ('{"arrival": NaN, "prompt_tokens": 1, "output_tokens": 1}', "line 2: arrival is nan"),
        (json.dumps({"arrival": 1, "prompt_tokens": 1}), "line 2: the field output_tokens is missing"),
        ("[1, 2, 3]", "line 2: .* is no object"),
        ("1.5 10 20", "line 2: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_a_trace_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(tmp_path / "empty.jsonl")


def test_a_file_of_histograms(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    part = {"edges": [1, 11], "counts": [1]}
    path.write_text(json.dumps({"prompt": part, "output": part}))
    prompts, outputs = read_dataset(path).draw(2000, np.random.default_rng(0), 100)
    assert prompts.mean() == pytest.approx(5.5, abs=0.3) and outputs.max() == 10
    path.write_text(json.dumps({"prompt": part, "output": {"edges": [1, 5]}}))
    with pytest.raises(ConfigError, match=r"lengths\.json: output must be"):
        read_dataset(path)
    path.write_text(json.dumps({"prompt": {"edges": [5, 1], "counts": [1]}, "output": part}))
    with pytest.raises(ConfigError, match="prompt: the edges of a histogram must ascend"):
        read_dataset(path)


@pytest.mark.parametrize(("rate", "duration", "message"), [(0, 10, "rate is 0"), (5, -1, "duration is -1")])
def test_bad_rates(rate: float, duration: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        poisson(DATASETS["alpaca"], rate, duration, seed=0, max_model_len=2048)


def test_the_simulator_imports_no_jax() -> None:
    code = "import sys, jaxpaged.sim, jaxpaged.sim.planner; print([m for m in sys.modules if m == 'jax'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
