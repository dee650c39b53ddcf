"""Medians, spreads and ratios of bench/compare.py by hand, and what its tables show."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from bench.bench_scripts import load_script

load_script("compare")
tables = importlib.import_module("peers.tables")
plot = importlib.import_module("peers.plot")
Spread = tables.Spread


def run(name: str, repeat: int, *, dtype: str = "bf16", first: float = 1.0, rss: int = 0, **figures: float) -> Any:
    """`figures`: of output tokens a second, by workload."""
    results = {key: {"output_throughput": value, "completed": 8, "failed": 0} for key, value in figures.items()}
    return tables.Run(name, dtype, repeat, first_token_s=first, peak_rss=rss, results=results)


def test_spread() -> None:
    assert Spread.of([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([4.0, 1.0]) == Spread(2.5, 1.0, 4.0)
    assert Spread.of([None]) is None
    assert Spread(2.0, 1.0, 3.25).show(1) == "2.0 (1.0 to 3.2)"
    assert Spread(2.0, 1.99, 2.01).show(1, "x") == "2.0x"


def test_ratios_are_taken_repeat_by_repeat() -> None:
    assert tables.paired_ratio([100, 50, 90], [50, 25, 60]) == Spread(2.0, 1.5, 2.0)
    # The medians by themselves, 100 and 12, would give 8.3.
    assert tables.paired_ratio([100, 200, 60], [10, 100, 12]).median == 5.0
    assert tables.paired_ratio([2.0, 4.0], [3.0, 4.0], less_is_better=True) == Spread(1.25, 1.0, 1.5)
    assert tables.paired_ratio([100, None, 90], [50, 25, 0]) == Spread(2.0, 2.0, 2.0)
    assert tables.paired_ratio([None], [1.0]) is None


def comparison() -> Any:
    runs = [
        run("jaxpaged", 0, first=4.0, rss=1_200_000_000, W1=100, W2=300),
        run("vllm", 0, first=60.0, rss=4_800_000_000, W1=50, W2=250),
        run("jaxpaged-inprocess", 0, W1=120, W2=400),
        run("openvino", 0, W1=60, W2=200),
        run("jaxpaged", 1, first=5.0, rss=1_000_000_000, W1=80, W2=310),
        run("vllm", 1, first=70.0, rss=4_600_000_000, W1=50),
        run("jaxpaged", 0, dtype="f32", W1=70),
        run("vllm", 0, dtype="f32", W1=140),
    ]
    return tables.Comparison(runs, repeats=2)


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_peers_are_compared_with_their_own_kind_and_precision() -> None:
    assert rows(tables.ratio_table(comparison(), ["W1", "W2"])) == [
        ["peer", "dtype", "W1", "W2"],
        ["---", "---:", "---:", "---:"],
        ["vllm", "bf16", "1.80x (1.60 to 2.00)", "1.20x"],
        ["openvino", "bf16", "2.00x", "2.00x"],
        ["vllm", "f32", "0.50x", ""],
    ]


def test_start_and_memory() -> None:
    [_, _, own, peer, *_] = rows(tables.cost_table(comparison()))
    assert own == ["jaxpaged", "bf16", "server", "4.5 (4.0 to 5.0)", "1.20"]
    assert peer == ["vllm", "bf16", "server", "65.0 (60.0 to 70.0)", "4.80"]


def test_a_workloads_table_shows_what_was_measured() -> None:
    runs = [run("jaxpaged", 0, W1=100), run("vllm", 0, W1=50), run("llama.cpp", 0)]
    runs[1].results["W1"] |= {"median_ttft_ms": 97.6, "p99_ttft_ms": 120.2, "other_cpus": 0.5}
    text = tables.workload_table(tables.Comparison(runs, 1), "W1")
    assert text.startswith("## W1: one request at a time, prompt 128, output 64\n")
    head, _, own, peer = rows(text)
    assert own[:4] == ["jaxpaged", "bf16", "100.0", ""]
    assert peer[:5] == ["vllm", "bf16", "50.0", "2.00x", "98 / 120"]
    assert dict(zip(head, peer, strict=True))["other load, CPUs, most"] == "0.50"
    assert dict(zip(head, peer, strict=True))["requests done / failed"] == "8 / 0"


def test_a_repeat_in_which_requests_failed_has_no_figures() -> None:
    runs = [run("jaxpaged", repeat, W1=100) for repeat in range(2)] + [
        run("vllm", repeat, W1=50) for repeat in range(2)
    ]
    runs[3].results["W1"] |= {"failed": 2, "completed": 6, "output_throughput": 20.0, "errors": ["HTTP 503: busy"]}
    both = tables.Comparison(runs, 2)
    assert both.spread("vllm", "bf16", "W1", "output_throughput") == Spread(50.0, 50.0, 50.0)
    assert both.ratio("vllm", "bf16", "W1") == Spread(2.0, 2.0, 2.0)
    assert both.errors() == ["vllm bf16, repeat 2: 2 of 8 requests of W1 failed: HTTP 503: busy"]
    head, _, _, peer = rows(tables.workload_table(both, "W1"))
    assert dict(zip(head, peer, strict=True))["requests done / failed"] == "14 / 2"
    del runs[2]
    alone = rows(tables.workload_table(tables.Comparison(runs, 2), "W1"))[3]
    assert alone[:4] == ["vllm", "bf16", "failed", ""]


def test_what_failed_is_named() -> None:
    broken = tables.Run("vllm", "bf16", 1, error="ended with status 1")
    assert tables.Comparison([broken], 2).errors() == ["vllm bf16, repeat 2: ended with status 1"]


def test_what_was_measured_beside_other_programs_is_named() -> None:
    runs = [run("vllm", 0, W1=1, W2=1), run("openvino", 0, W1=1)]
    runs[0].results["W1"]["other_cpus"] = 0.25
    runs[0].results["W2"]["other_cpus"] = 0.05
    runs[1].results["W1"]["other_cpus"] = 1.5
    assert tables.Comparison(runs, 1).disturbances() == ["openvino bf16 W1 (1.50)", "vllm bf16 W1 (0.25)"]


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    points = [{"rate": 1.0, "mean_norm_ms": 100.0}, {"rate": 2.0, "mean_norm_ms": 700.0}]
    drawn = tables.Run("vllm", "bf16", 0, results={"W4": {"points": points}})
    pixels = []
    for runs, name in (([], "empty.png"), ([drawn], "one.png")):
        plot.plot_rates(runs, tmp_path / name)
        with Image.open(tmp_path / name) as image:
            assert image.size == (1200, 750)
            pixels.append(image.convert("RGB").getcolors(1 << 20))
    # The first colour of matplotlib's cycle is on the picture with a line and not on the other.
    blue = (31, 119, 180)
    assert [any(colour == blue for _, colour in colours) for colours in pixels] == [False, True]
