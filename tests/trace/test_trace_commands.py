"""`jaxpaged trace` and --trace: what they run, where the trace goes, and what they say when it cannot."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trace_support import record_all, request

import jaxpaged.llm
from jaxpaged.cli import main
from jaxpaged.request import SamplingParams
from jaxpaged.trace import Record, TraceFile, open_trace, recording

HEADER, RECORDS = record_all([request("A", 6, 3)])


class FakeLLM:
    """Records a trace made beforehand, whatever it is asked."""

    error: str | None = None

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.params: SamplingParams | None = None
        self.options: dict[str, Any] = {}

    def __call__(self, model: str, **options: Any) -> FakeLLM:
        self.options = options
        return self

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @contextmanager
    def recording(self, file: TraceFile) -> Iterator[None]:
        file.begin(HEADER)
        yield
        for record in RECORDS:
            file.write(record)

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.5)

    def generate(self, prompts: list[str], params: SamplingParams) -> list[Any]:
        self.calls.append(prompts)
        self.params = params
        return [SimpleNamespace(error=self.error) for _ in prompts]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()
    monkeypatch.setattr(jaxpaged.llm, "LLM", fake)
    return fake


def read(path: Path) -> list[Record]:
    with open_trace(path) as (_, records):
        return list(records)


def test_trace_has_questions_of_its_own(llm: FakeLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "steps.jsonl"
    assert main(["trace", "m", "-o", str(out), "--n", "2", "--max-tokens", "7", "--block-size", "8"]) == 0
    assert f"jaxpaged view {out}" in capsys.readouterr().out
    assert read(out) == RECORDS
    first, others = llm.calls
    assert len(first) == 1 and len(others) == 7 and len(set(first + others)) == 8
    assert all(prompt.startswith(first[0][:150]) for prompt in others)
    assert llm.params == SamplingParams(temperature=0.5, n=2, max_tokens=7)
    assert llm.options == {"block_size": 8, "warmup": False}


def test_trace_takes_prompts_from_a_file(llm: FakeLLM, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("only one\n\n", encoding="utf-8")
    assert main(["trace", "m", "-o", str(tmp_path / "t"), "--prompts", str(prompts)]) == 0
    assert llm.calls == [["only one"]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompts", "/none"], "cannot read the prompts /none"),
        (["--prompts", "/dev/null"], "/dev/null has no prompts; write one a line"),
        (["-o", "/none/steps"], "cannot write the trace /none/steps: No such file or directory"),
    ],
)
def test_what_cannot_be_is_said_before_a_model_is_loaded(
    llm: FakeLLM, capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], message: str
) -> None:
    assert main(["trace", "m", "-o", str(tmp_path / "t"), *flags]) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert llm.calls == []


def test_a_failed_request_is_reported(llm: FakeLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm.error = "the device is gone"
    assert main(["trace", "m", "-o", str(tmp_path / "t")]) == 1
    assert "the device is gone" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "m", "hello"], ["serve", "m", "--port", "0"]])
def test_other_commands_open_the_trace_before_they_load(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    assert main([*command, "--trace", "/none/steps"]) == 1
    assert "cannot write the trace /none/steps" in capsys.readouterr().err


def test_without_a_file_nothing_is_recorded() -> None:
    engine = SimpleNamespace(observers=[])
    with recording(engine, None):  # type: ignore[arg-type]
        assert engine.observers == []


def test_looking_at_a_trace_imports_no_jax() -> None:
    code = "import sys, jaxpaged.trace, jaxpaged.trace.html, jaxpaged.commands.view; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
