"""What is done about a library of native kernels that is not there or does not fit."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxpaged_kernels import native


@pytest.fixture(autouse=True)
def ask_again() -> None:
    native.why_unavailable.cache_clear()


def library(interface: int, major: int, minor: int) -> SimpleNamespace:
    return SimpleNamespace(
        jaxpaged_interface=lambda: interface,
        jaxpaged_xla_api_major=lambda: major,
        jaxpaged_xla_api_minor=lambda: minor,
    )


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "_native.so")
    reason = native.why_unavailable()
    assert reason is not None and "install a C++20 compiler" in reason


def test_a_file_that_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "_native.so"
    path.write_bytes(b"no library")
    monkeypatch.setattr(native, "LIBRARY", path)
    reason = native.why_unavailable()
    assert reason is not None and "cannot be used" in reason


@pytest.mark.parametrize(
    ("built", "words"),
    [
        (library(0, 0, 1), "another version"),
        (library(native._INTERFACE, 0, 99), "built for another jaxlib"),
        (library(native._INTERFACE, 7, 0), "built for another jaxlib"),
        (library(native._INTERFACE, 0, 0), None),  # older headers do
    ],
)
def test_a_library_that_does_not_fit(built: SimpleNamespace, words: str | None) -> None:
    reason = native._does_not_fit(built)  # type: ignore[arg-type]
    assert reason is None if words is None else reason is not None and words in reason


def test_the_library_says_what_it_is() -> None:
    if native.why_unavailable() is not None:
        pytest.skip("the library is not there")
    assert native._does_not_fit(ctypes.CDLL(str(native.LIBRARY))) is None
    assert native.instruction_set() in native.INSTRUCTION_SETS
