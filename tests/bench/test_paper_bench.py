"""The bench of the paper's figures: what follows from lengths and allocation, near the paper's numbers."""

from __future__ import annotations

import json

import pytest
from bench.bench_scripts import load_script

bench = load_script("paper")
PAPER = {"max": 7.0, "pow2": 9.81, "oracle": 13.62, "paged": 30.42}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, object]]]:
    """Figures 2 and 13 of a short run, from the file that is written."""
    file = tmp_path_factory.mktemp("paper") / "paper.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["paper.py", "--figures", "2,13", "--scale", "0.5", "--json", str(file)])
        assert bench.main() == 0
    found: dict[str, dict[str, dict[str, object]]] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("system", PAPER)
def test_requests_in_the_batch(figures: dict[str, dict[str, dict[str, float]]], system: str) -> None:
    assert figures["13"]["sharegpt"][system] == pytest.approx(PAPER[system], rel=0.15)


@pytest.mark.parametrize(("system", "token_states"), [("max", 20.4), ("pow2", 26.8), ("oracle", 38.2), ("paged", 96.3)])
def test_where_the_memory_goes(
    figures: dict[str, dict[str, dict[str, dict[str, float]]]], system: str, token_states: float
) -> None:
    parts = figures["2"]["sharegpt"][system]
    assert parts["token_states"] == pytest.approx(token_states, rel=0.15)
    assert sum(parts.values()) == pytest.approx(100)


def test_an_unknown_figure_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["paper.py", "--figures", "2,99"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "there is no figure '99' here" in capsys.readouterr().err
