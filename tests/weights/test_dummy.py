"""Random weights: what they hold, that they are the same again, and what an engine needs beside a config.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from weights.tiny_files import LLAMA_CONFIG, llama_shapes, random_tensors, write_folder

from jaxpaged.cli import main
from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError, InvalidRequestError, ModelLoadError
from jaxpaged.llm import LLM
from jaxpaged.request import SamplingParams
from jaxpaged.weights import ModelFiles, dummy_model, load_config, resolve
from jaxpaged.weights.dummy import _uniform
from jaxpaged.weights.names import parameters

OPTIONS = {"load_format": "dummy", "max_model_len": 64, "num_blocks": 16, "warmup": False, "compilation_cache": ""}


@pytest.fixture
def config_json(tmp_path: Path) -> Path:
    path = tmp_path / "bare" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA_CONFIG | {"torch_dtype": "bfloat16"}))
    return path


def values(path: Path, **options: object) -> dict[str, np.ndarray]:
    model = dummy_model(load_config(resolve(path, weights=False)), **options)
    return {name: np.asarray(variable[...]) for name, variable in parameters(model).items()}


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_every_parameter_has_its_shape_dtype_and_spread(config_json: Path, dtype: str) -> None:
    found = values(config_json, dtype=dtype)
    assert {name: array.shape for name, array in found.items()} == llama_shapes()
    for array in found.values():
        assert array.dtype.name == ("bfloat16" if dtype == "auto" else dtype)
        wide = array.astype(np.float64)
        if array.ndim == 1:
            assert (wide == 1).all()
        else:  # thousands of values: their deviation is known to a few percent
            assert wide.std() * np.sqrt(array.shape[1]) == pytest.approx(1, rel=0.05)
            assert abs(wide.mean()) < 0.05 * wide.std()


def test_no_two_matrices_and_no_two_rows_are_alike(config_json: Path) -> None:
    rows = [row.tobytes() for array in values(config_json).values() if array.ndim == 2 for row in array]
    assert len(set(rows)) == len(rows)


def test_biases_are_zero(config_json: Path) -> None:
    config_json.write_text(json.dumps(LLAMA_CONFIG | {"attention_bias": True}))
    biases = [array for name, array in values(config_json).items() if name.endswith("bias")]
    assert len(biases) == 4 * LLAMA_CONFIG["num_hidden_layers"]
    assert not any(array.any() for array in biases)


def test_the_seed_decides(config_json: Path) -> None:
    first, again, other = (values(config_json, seed=seed) for seed in (3, 3, 2**63))
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name])
        assert array.ndim == 1 or (array != other[name]).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_large_matrix_is_drawn_in_place_with_bounded_temporaries(dtype: str) -> None:
    shape = (128_256, 1024)  # 125 MiB of bfloat16 or more
    key = jax.eval_shape(lambda: jax.random.key(0))
    compiled = jax.jit(_uniform, static_argnames=("shape", "dtype")).lower(key, shape=shape, dtype=dtype).compile()
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes >= np.prod(shape) * np.dtype(dtype if dtype != "bfloat16" else "u2").itemsize
    assert memory.temp_size_in_bytes < 100 << 20


def test_the_last_rows_of_a_matrix_are_drawn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpaged.weights.dummy._VALUES_AT_ONCE", 4 * 64)
    matrix = np.asarray(_uniform(jax.random.key(0), (10, 64), "float32"))  # 4 + 4 + 2 rows
    assert (np.abs(matrix) > 0).all() and len(np.unique(matrix, axis=0)) == 10


def test_activations_and_logits_are_finite_in_half_precision(config_json: Path) -> None:
    config_json.write_text(json.dumps(LLAMA_CONFIG | {"num_hidden_layers": 24}))
    model = dummy_model(load_config(resolve(config_json, weights=False)), dtype="float16")
    logits = np.asarray(model(np.arange(64)[None]))
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 2  # random, and neither vanishing nor exploding


def test_sharding_decides_where_parameters_go(config_json: Path) -> None:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    model = dummy_model(load_config(resolve(config_json, weights=False)), sharding=place)
    assert {leaf.sharding for leaf in jax.tree.leaves(nnx.state(model))} == {place}


def test_a_config_is_enough_only_without_weights(config_json: Path, hf_folder: Path) -> None:
    expected = ModelFiles("config", config_json)
    assert resolve(config_json, weights=False) == resolve(config_json.parent, weights=False) == expected
    assert resolve(hf_folder, weights=False) == ModelFiles("config", hf_folder / "config.json")
    assert resolve(hf_folder).kind == "hf"
    with pytest.raises(ModelLoadError, match=r"no weights: .*load_format dummy"):
        resolve(config_json.parent)
    with pytest.raises(ModelLoadError, match=r"config\.json is no GGUF file"):
        resolve(config_json)


def test_token_ids_are_answered_without_a_tokenizer(config_json: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    model = dummy_model(load_config(resolve(config_json, weights=False)), dtype="float32", seed=4)
    padded, length = np.zeros((1, 8), np.int32), 3
    padded[0, :length] = [5, 6, 7]
    for i in range(length, length + 3):  # causal: what is behind a token does not change its logits
        padded[0, i] = np.asarray(model(padded))[0, i - 1].argmax()
    with LLM(config_json.parent, dtype="float32", seed=4, **OPTIONS) as llm:
        assert llm.get_tokenizer() is None
        [output] = llm.generate([5, 6, 7], params)
        with pytest.raises(InvalidRequestError, match="text prompt needs a tokenizer; give token ids"):
            llm.generate("Hello", params)
        with pytest.raises(InvalidRequestError, match="chat needs a tokenizer"):
            llm.chat([{"role": "user", "content": "Hello"}], params)
    assert output.outputs[0].token_ids == padded[0, length : length + 3].tolist()


def test_a_tokenizer_that_is_there_is_used_and_no_weights_are_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", random_tensors(llama_shapes()), LLAMA_CONFIG)
    (folder / "model.safetensors").write_bytes(b"not weights")
    with LLM(folder, **OPTIONS) as llm:
        [output] = llm.generate("the quick", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        assert llm.get_default_sampling_params().temperature == 0.6  # of its generation_config.json
    assert output.outputs[0].text != ""


def test_a_damaged_tokenizer_is_no_missing_one(config_json: Path) -> None:
    (config_json.parent / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot load the tokenizer"):
        LLM(config_json, **OPTIONS)


def test_the_command_line_says_that_text_needs_a_tokenizer(
    config_json: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--load-format", "dummy", "--max-model-len", "64", "--num-gpu-blocks-override", "16"]
    assert (
        main(["generate", str(config_json), "Hello", *flags, "--max-tokens", "8", "--compilation-cache-dir", ""]) != 0
    )
    assert "a text prompt needs a tokenizer" in capsys.readouterr().err


def test_an_unknown_load_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="load_format is 'random', but must be one of auto, dummy"):
        EngineConfig(load_format="random")  # type: ignore[arg-type]


def test_only_gguf_files_need_the_gguf_package(config_json: Path) -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('gguf', 'aiohttp', 'pydantic', 'transformers')))\n"
        "from jaxpaged.weights import dummy_model, load_config, resolve\n"
        "import jaxpaged.llm\n"
        f"print(dummy_model(load_config(resolve({str(config_json)!r}, weights=False))).config.vocab_size)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == [str(LLAMA_CONFIG["vocab_size"])], done.stderr
