"""The bench of host time: what it counts, and how it gets vLLM's numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bench.bench_scripts import load_script

bench = load_script("overhead")


def script(folder: Path, body: str) -> Path:
    """Stands for the Python of another environment."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_every_step_of_nothing_but_decodes_is_measured() -> None:
    found = bench.measure(3, 10, 8)
    assert (found.engine, found.rows, found.steps) == ("jaxpaged", 3, 9)  # the first tokens come with the prompts
    assert set(found.median_us) == set(found.p99_us) == {"schedule", "pack", "update", "output"}
    assert found.compared == found.median_us["schedule"] + found.median_us["pack"] + found.median_us["update"]


def test_the_other_scheduler_is_asked_in_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = [{"rows": 2, "steps": 3, "schedule": [100, 300, 200], "update": [10, 20, 90]}]
    python = script(tmp_path, f"""echo "$3" > {tmp_path}/asked; echo a warning; echo '{json.dumps(times)}'""")
    out = tmp_path / "out.json"
    arguments = ["--rows", "2", "--steps", "5", "--against", "vllm", "--vllm-python", str(python), "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["overhead.py", *arguments])
    bench.main()
    asked = json.loads((tmp_path / "asked").read_text())
    assert (asked["rows"], asked["steps"], asked["block_size"]) == ([2], 5, 16)
    ours, theirs = json.loads(out.read_text())
    assert (ours["engine"], ours["steps"]) == ("jaxpaged", 4)
    assert (theirs["engine"], theirs["rows"], theirs["median_us"]) == ("vllm", 2, {"schedule": 200, "update": 20})
    ratio = 220 / sum(ours["median_us"][stage] for stage in ("schedule", "pack", "update"))
    assert f"2 rows: {ratio:.1f}x less than vllm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "nowhere/python.*--vllm-python"),
        (
            "echo Traceback >&2; echo \"ModuleNotFoundError: No module named 'vllm'\" >&2; exit 1",
            "No module named 'vllm'",
        ),
    ],
    ids=["no such file", "no vllm in it"],
)
def test_without_it_one_line_says_what_is_missing(tmp_path: Path, body: str | None, message: str) -> None:
    python = Path("nowhere/python") if body is None else script(tmp_path, body)
    with pytest.raises(SystemExit, match=message) as caught:
        bench.measure_vllm(python, [1], 5, 8)
    assert "\n" not in str(caught.value)
