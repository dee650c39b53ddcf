"""`jaxpaged simulate`: what it prints, and one line for what it cannot do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxpaged.cli import main
from jaxpaged.models.config import model_config_from_hf
from jaxpaged.sim import MeasuredStep, ModelShape, StepLoad, find_device, write_calibration
from jaxpaged.sim.calibration import Calibration

LESSON = ["simulate", "--blocks", "12", "--block-size", "16", "--watermark", "0"]
REQUESTS = ["--requests", "A:40:40,B:30:24,C:60:30,D:20:16"]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


@pytest.mark.parametrize(("victim", "first"), [("newest", "D"), ("oldest", "A")])
def test_events_as_json(victim: str, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LESSON, "--victim", victim, *REQUESTS, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    events = printed["events"]
    assert [e["request"] for e in events if e["kind"] == "admit"][:4] == list("ABCD")
    preempted = [e for e in events if e["kind"] == "preempt"]
    assert preempted[0]["request"] == first and preempted[0]["step"] == 5
    assert sorted(e["request"] for e in events if e["kind"] == "finish") == list("ABCD")
    assert events[-1]["free_blocks"] == 12 and printed["steps"] == events[-1]["step"] + 1


def test_events_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LESSON, *REQUESTS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "event", "request", "tokens", "free"]
    assert lines[5].split() == ["5", "preempt", "D", "24", "2"]


def test_requests_need_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *REQUESTS]) == 2
    assert "--requests needs --blocks" in capsys.readouterr().err


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_traffic_on_a_device(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival": 0.1 * i, "prompt_tokens": 20, "output_tokens": 5} for i in range(30)]
    trace.write_text("\n".join(json.dumps(r) for r in rows))
    argv = ["simulate", model, "--device", "l4", "--blocks", "100"]
    assert main([*argv, "--trace", str(trace), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["requests"], result["finished"], result["output_tokens"]) == (30, 30, 150)
    assert "assumed" in result["cost_model"]
    argv = argv[:4]  # all that the device has left
    assert main([*argv, "--rate", "20", "--duration", "3", "--lengths-of", "alpaca"]) == 0
    printed = capsys.readouterr().out
    assert "TTFT" in printed and "lognormal (mean 19.31" in printed and "assumed constants" in printed


def test_measured_steps_stand_for_the_device(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Steps of 10 ms whatever they compute: requests of 20 tokens, one at a time, have 200 ms of latency."""
    device = replace(find_device("l4"), name="a machine of my own")
    steps = tuple(MeasuredStep(StepLoad(i, i, 10 * i, 10 * i), 0.01) for i in range(1, 9))
    shape = ModelShape.of(model_config_from_hf(CONFIG))
    path = tmp_path / "steps.json"
    write_calibration(path, Calibration(device, shape, steps, "by hand"))
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(f'{{"arrival": {i}, "prompt_tokens": 1, "output_tokens": 20}}' for i in range(3)))
    argv = ["simulate", model, "--trace", str(trace), "--calibration", str(path)]
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["latency"]["p50"] == pytest.approx(0.2, rel=0.01)
    assert result["ttft"]["p50"] == pytest.approx(0.01, rel=0.01), "a prompt of one token has a first token too"
    assert result["cost_model"].startswith("by hand; fit error")
    assert main([*argv, "--device", "l4"]) == 2
    assert "was measured on a machine of my own, but --device is l4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give one of --requests, --rate and --trace"),
        (["--requests", "A:40"], "--requests has 'A:40'"),
        (["--requests", "A:0:5"], "PROMPT must be at least 1"),
        (["--requests", "A:1:5,A:2:5"], "'A' twice"),
        (["--requests", "A:1:5,B:300:5"], "request B (300 prompt and 5 output tokens) never fits 12 blocks"),
        (["--rate", "3"], "--rate and --trace need MODEL"),
        (["MODEL", "--rate", "3"], "need --device (or --calibration)"),
        ([*REQUESTS, "--block-size", "0"], "block_size is 0"),
        (["MODEL", "--rate", "3", "--device", "h300"], "no device 'h300'"),
        (["MODEL", "--rate", "-3", "--device", "l4"], "the rate is -3"),
        (["MODEL", "--rate", "3", "--device", "l4", "--lengths-of", "none"], "--lengths-of is 'none'"),
        (["MODEL", "--rate", "3", "--device", "l4", "--calibration", "none.json"], "none.json is no file of measured"),
        (["MODEL", "--trace", "none.jsonl", "--device", "l4"], "cannot read the trace none.jsonl"),
        (["MODEL", "--rate", "1", "--device", "l4", "--system", "max"], "'max' reserves up to 1024 in one piece"),
    ],
)
def test_one_line_for_what_cannot_be(
    flags: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*LESSON, *(model if flag == "MODEL" else flag for flag in flags)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
