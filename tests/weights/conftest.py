"""Model folders for the tests of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from weights.tiny_files import LLAMA_CONFIG, llama_shapes, random_tensors, write_folder


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "hf", random_tensors(llama_shapes()), LLAMA_CONFIG)
