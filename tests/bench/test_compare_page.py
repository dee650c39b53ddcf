"""bench/compare_page.py: records of two invocations become one page, by hand."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from bench.bench_scripts import load_script

page = load_script("compare_page")
records = importlib.import_module("peers.records")
tables = importlib.import_module("peers.tables")

SETTINGS = {
    "peers": ["jaxpaged", "vllm"], "workloads": ["W1"], "dtype": ["bf16"], "repeats": 2, "threads": 2,
    "max_num_seqs": 16, "max_model_len": 2048, "rates": [0.5, 0.70711], "rate_seconds": 30.0, "latency_limit": 0.2,
    "small": False, "time_limit": 120.0, "seed": 0,
}  # fmt: skip
FACTS = {
    "date": "2026-01-02 10:00:00 +0000", "cpu": "Abacus 9000", "cpu_flags": ["avx2", "amx_bf16"], "processors": 2,
    "memory_gib": 23.4, "python": "3.11.7", "model": "smollm2", "settings": SETTINGS,
    "versions": {"jaxpaged": {"jaxpaged": "0.1.0", "jax": "0.10.2"}, "vllm": {"vllm": "0.32.0"}},
}  # fmt: skip


def run(name: str, dtype: str, repeat: int, throughput: float, **more: Any) -> Any:
    result = {"completed": 8, "failed": 0, "output_throughput": throughput, "other_cpus": 0.01} | more
    return tables.Run(name, dtype, repeat, first_token_s=None, peak_rss=10**9, results={"W1": result})


def write(folder: Path, name: str, runs: list[Any], **facts: Any) -> None:
    records.write_runs(folder / name, FACTS | facts, runs)


def test_what_is_written_is_read_again_but_for_digits_and_logs(tmp_path: Path) -> None:
    one = run("vllm", "bf16", 0, 100 / 3, errors=["HTTP 503"])
    one.error = "ended with status 1; its log ends:\n    /home/someone/secret"
    write(tmp_path, "one.json", [one, run("vllm", "bf16", 1, 1234567.0)])
    read = records.read_runs(tmp_path / "one.json")
    assert read.facts == FACTS
    assert read.runs[0].results["W1"] == one.results["W1"] | {"output_throughput": 33.333}
    assert read.runs[0].error == "ended with status 1; its log ends:"
    assert (read.runs[1].repeat, read.runs[1].results["W1"]["output_throughput"]) == (1, 1234600.0)
    assert len((tmp_path / "one.json").read_text().splitlines()) < 60


def test_the_machine_is_described_without_its_name() -> None:
    told = records.machine()
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert told["memory_gib"] == pytest.approx(int(meminfo["MemTotal"].split()[0]) / (1 << 20), abs=0.06)
    assert told["cpu"] and told["processors"] >= 1 and set(told) == {"cpu", "cpu_flags", "processors", "memory_gib"}


def test_a_page_of_two_files(tmp_path: Path) -> None:
    write(tmp_path, "bf16.json", [run("jaxpaged", "bf16", 0, 90.0), run("vllm", "bf16", 0, 45.0),
                                  run("jaxpaged", "bf16", 1, 80.0), run("vllm", "bf16", 1, 50.0)])  # fmt: skip
    write(tmp_path, "f32.json", [run("jaxpaged", "f32", 0, 60.0), run("vllm", "f32", 0, 30.0, other_cpus=0.4)],
          date="2026-01-02 11:00:00 +0000", settings=SETTINGS | {"dtype": ["f32"], "repeats": 1})  # fmt: skip
    assert page.main([str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text()
    assert "- processor: Abacus 9000\n- its instructions: avx2, amx_bf16\n" in text
    assert "- measured from: 2026-01-02 10:00:00 +0000, 2026-01-02 11:00:00 +0000\n" in text
    assert "- jaxpaged: jaxpaged 0.1.0, jax 0.10.2\n" in text
    assert "| vllm | bf16 | 1.80x (1.60 to 2.00) |" in text and "| vllm | f32 | 2.00x |" in text
    assert "| jaxpaged | bf16 | 85.0 (80.0 to 90.0) |" in text
    assert "took processors from vllm f32 W1 (0.40)" in text
    assert (
        "python bench/compare.py --model MODEL --peers jaxpaged vllm --workloads W1 --dtype f32 --repeats 1 "
        "--threads 2 --max-num-seqs 16 --max-model-len 2048 --time-limit 120 --seed 0\n"
    ) in text
    assert str(tmp_path) not in text and "W4" not in text


def test_a_workload_of_two_files_has_the_repeats_of_both(tmp_path: Path) -> None:
    for name, own in (("a.json", 90.0), ("b.json", 60.0)):
        write(tmp_path, name, [run("jaxpaged", "bf16", 0, own), run("vllm", "bf16", 0, 30.0)])
    both = page.together([records.read_runs(tmp_path / name) for name in ("a.json", "b.json")])
    assert both.ratio("vllm", "bf16", "W1") == tables.Spread(2.5, 2.0, 3.0)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"cpu": "Abacus 9001"}, "the files differ in cpu: Abacus 9000, Abacus 9001"),
        ({"versions": {"vllm": {"vllm": "0.33.0"}}}, "vllm is {'vllm': '0.32.0'} in one file"),
    ],
)
def test_files_that_do_not_belong_together(
    facts: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "a.json", [])
    write(tmp_path, "b.json", [], **facts)
    with pytest.raises(SystemExit):
        page.main([str(tmp_path)])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "README.md").exists()


def test_rates_need_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [{"rate": 1.0, "mean_norm_ms": 50.0}, {"rate": 2.0, "mean_norm_ms": 250.0}]
    figures = {"W4": {"points": points, "completed": 9, "failed": 0, "rate_at_200ms": 1.75}}
    write(tmp_path, "w4.json", [tables.Run("vllm", "bf16", 0, results=figures)],
          settings=SETTINGS | {"workloads": ["W4"], "repeats": 1})  # fmt: skip
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(SystemExit):
            page.main([str(tmp_path)])
        assert "matplotlib is not installed; install" in capsys.readouterr().err
        return
    assert page.main([str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text()
    assert "](rates.png)" in text and (tmp_path / "rates.png").stat().st_size > 10_000
    assert "| vllm | bf16 | 1.75 |" in text
    assert "--rates 0.5 0.707 --rate-seconds 30 --latency-limit 0.2\n" in text
    assert json.loads((tmp_path / "w4.json").read_text())["runs"][0]["results"]["W4"]["points"] == points
