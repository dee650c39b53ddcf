"""Quantized weights from every kind of file: exactly the stored blocks, or ggml's rounding of what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from weights.tiny_files import (
    LLAMA_CONFIG,
    LLAMA_METADATA,
    llama_gguf_tensors,
    llama_shapes,
    random_tensors,
    write_folder,
    write_gguf,
)

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights import convert, load_model, quantization, quantize_model
from jaxpaged.weights.quantization import matrices
from jaxpaged_kernels import QuantizedWeight, dequantize_weight

TENSORS = random_tensors(llama_shapes())
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UP = "model.layers.1.mlp.up_proj.weight"
KINDS = {"q8_0": Type.Q8_0, "q4_0": Type.Q4_0}


@pytest.fixture(autouse=True)
def native_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """What "auto" does must not depend on the machine of the tests."""
    monkeypatch.setattr(quantization, "best_linear", lambda: "native")


def gguf_file(path: Path, kinds: dict[str, Type], default: Type) -> Path:
    """A Llama model with each matrix in its type, or in the default one."""
    stored: dict[str, Any] = {}
    by_gguf_name = llama_gguf_tensors(TENSORS)
    by_hf_name = dict(zip(by_gguf_name, TENSORS, strict=True))
    for gguf_name, array in by_gguf_name.items():
        kind = kinds.get(by_hf_name[gguf_name], default)
        stored[gguf_name] = array if array.ndim == 1 else (gguf.quants.quantize(array, kind), kind)
    return write_gguf(path, LLAMA_METADATA, stored)


def rounded(name: str, kind: Type) -> np.ndarray:
    return gguf.quants.dequantize(gguf.quants.quantize(TENSORS[name], kind), kind)


def formats_of(model: Any) -> dict[str, str | None]:
    return {name: matrix.format for name, matrix in matrices(model).items()}


def values_of(model: Any, name: str) -> np.ndarray:
    matrix = matrices(model)[name].matrix()
    return np.asarray(dequantize_weight(matrix, jnp.float32) if isinstance(matrix, QuantizedWeight) else matrix)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("wanted", ["auto", "q8_0"])
def test_stored_blocks_are_kept(tmp_path: Path, kind: str, wanted: Any) -> None:
    """Also those of q and k, whose rows llama.cpp reorders: rounding works row by row."""
    path = gguf_file(tmp_path / "m.gguf", {}, KINDS[kind])
    model = load_model(path, quantization=wanted)
    assert set(formats_of(model).values()) == {kind}
    for name in matrices(model):
        np.testing.assert_array_equal(values_of(model, name), rounded(name, KINDS[kind]), err_msg=name)
    norm = model.model.norm.weight[...]
    assert norm.dtype == jnp.bfloat16
    np.testing.assert_array_equal(norm, TENSORS["model.norm.weight"].astype(jnp.bfloat16))


def test_other_types_beside_q4_0_become_q8_0(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", {HEAD: Type.Q5_1, UP: Type.F16}, Type.Q4_0)
    model = load_model(path, quantization="auto")
    formats = formats_of(model)
    assert formats.pop(HEAD) == "q8_0" and formats.pop(UP) is None and set(formats.values()) == {"q4_0"}
    stored = rounded(HEAD, Type.Q5_1)
    expected = gguf.quants.dequantize(gguf.quants.quantize(stored, Type.Q8_0), Type.Q8_0)
    np.testing.assert_array_equal(values_of(model, HEAD), expected)
    np.testing.assert_array_equal(values_of(model, UP), np.float32(TENSORS[UP].astype(np.float16).astype(jnp.bfloat16)))


@pytest.mark.parametrize(("kind", "wanted"), [(Type.Q4_1, "auto"), (Type.Q8_0, "none")])
def test_all_dense(tmp_path: Path, kind: Type, wanted: Any) -> None:
    model = load_model(gguf_file(tmp_path / "m.gguf", {}, kind), dtype="float32", quantization=wanted)
    assert set(formats_of(model).values()) == {None}
    np.testing.assert_array_equal(values_of(model, UP), rounded(UP, kind))


def test_auto_leaves_a_file_dense_whose_values_are_mostly_of_other_types(tmp_path: Path) -> None:
    """To round those to 8 bits is more than it was asked for."""
    path = gguf_file(tmp_path / "m.gguf", {UP: Type.Q8_0}, Type.Q4_1)
    assert set(formats_of(load_model(path, quantization="auto")).values()) == {None}


def test_auto_without_native_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quantization, "best_linear", lambda: "xla")
    path = gguf_file(tmp_path / "m.gguf", {}, Type.Q8_0)
    assert set(formats_of(load_model(path, quantization="auto")).values()) == {None}
    assert not caplog.records
    assert set(formats_of(load_model(path, quantization="q8_0")).values()) == {"q8_0"}
    assert "made dense for each product" in caplog.text


def test_fewer_bits_than_stored(tmp_path: Path) -> None:
    model = load_model(gguf_file(tmp_path / "m.gguf", {}, Type.Q8_0), quantization="q4_0")
    formats = formats_of(model)
    assert formats.pop(EMBEDDING) == formats.pop(HEAD) == "q8_0" and set(formats.values()) == {"q4_0"}
    np.testing.assert_array_equal(values_of(model, EMBEDDING), rounded(EMBEDDING, Type.Q8_0))


@pytest.mark.parametrize("wanted", ["q8_0", "q4_0"])
def test_a_hugging_face_folder(hf_folder: Path, wanted: Any) -> None:
    model = load_model(hf_folder, dtype="bfloat16", quantization=wanted)
    np.testing.assert_array_equal(values_of(model, UP), rounded(UP, KINDS[wanted]))
    np.testing.assert_array_equal(values_of(model, EMBEDDING), rounded(EMBEDDING, Type.Q8_0))
    assert set(formats_of(load_model(hf_folder, quantization="auto")).values()) == {None}


def test_a_converted_folder(hf_folder: Path, tmp_path: Path) -> None:
    model = load_model(convert(hf_folder, tmp_path / "c", progress=False), quantization="q4_0")
    np.testing.assert_array_equal(values_of(model, UP), rounded(UP, Type.Q4_0))
    np.testing.assert_array_equal(values_of(model, HEAD), rounded(HEAD, Type.Q8_0))


def test_inputs_that_are_no_blocks_stay_dense(tmp_path: Path) -> None:
    config = LLAMA_CONFIG | {"intermediate_size": 80}
    folder = write_folder(tmp_path / "m", random_tensors(llama_shapes(config)), config)
    formats = formats_of(load_model(folder, quantization="q4_0"))
    assert {name.split(".")[-2] for name, format in formats.items() if format is None} == {"down_proj"}


def test_a_quantization_that_does_not_exist(hf_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="quantization is 'q5_0', but must be one of q8_0, q4_0"):
        load_model(hf_folder, quantization="q5_0")  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match="quantization is 'int8'"):
        quantize_model(load_model(hf_folder), "int8")  # type: ignore[arg-type]
