"""Conversion: what arrives is what was stored, in a folder that is either complete or not there."""

from __future__ import annotations

import gc
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors.numpy import save_file
from weights.tiny_files import (
    LLAMA_CONFIG,
    LLAMA_METADATA,
    byte_level_tokenizer,
    llama_gguf_tensors,
    llama_shapes,
    random_tensors,
    write_folder,
    write_gguf,
)

from jaxpaged.errors import ConvertError, ModelLoadError
from jaxpaged.weights import convert, load_config, load_generation_config, load_model, load_tokenizer, resolve

TENSORS = random_tensors(llama_shapes())


def values(model: Any) -> dict[str, np.ndarray]:
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.fixture(scope="module")
def converted_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    return convert(write_folder(folder / "hf", TENSORS, LLAMA_CONFIG), folder / "out", progress=False)


@pytest.fixture
def converted(converted_once: Path, tmp_path: Path) -> Path:
    """A converted folder to do anything with (one that was moved, too)."""
    return shutil.copytree(converted_once, tmp_path / "out")


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("written", ["auto", "float32", "bfloat16", "float16"])
def test_round_trip(tmp_path: Path, stored: str, written: str) -> None:
    tensors = random_tensors(llama_shapes(), np.dtype(getattr(ml_dtypes, stored, stored)))
    folder = write_folder(tmp_path / "m", tensors, LLAMA_CONFIG)
    out = convert(folder, tmp_path / "out", dtype=written, progress=False)
    name = stored if written == "auto" else written
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    assert resolve(out).kind == "converted"
    assert load_config(out).dtype == name
    assert_same(values(load_model(out)), {key: array.astype(dtype) for key, array in tensors.items()})


def test_restored_into_another_dtype(converted: Path) -> None:
    expected = {name: array.astype(ml_dtypes.bfloat16) for name, array in TENSORS.items()}
    assert_same(values(load_model(converted, dtype="bfloat16")), expected)


def test_plain_orbax_reads_it(converted: Path) -> None:
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(converted / "weights")
    for name, array in TENSORS.items():
        node = tree
        for part in name.split("."):
            node = node[part]
        np.testing.assert_array_equal(node, array)


def test_arrays_of_several_pieces(hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpaged.weights.checkpoint._CHUNK_BYTES", 1000)
    assert_same(values(load_model(convert(hf_folder, tmp_path / "out", progress=False))), TENSORS)


def test_everything_else_is_beside_it(hf_folder: Path, converted: Path) -> None:
    source, target = load_tokenizer(hf_folder), load_tokenizer(converted)
    text = "the quick brown fox</s> é"
    assert target(text).input_ids == source(text).input_ids
    assert target.chat_template == source.chat_template
    assert load_generation_config(converted) == load_generation_config(hf_folder)
    assert load_config(converted) == load_config(hf_folder)


def test_gguf_with_its_tokenizer(tmp_path: Path) -> None:
    original = byte_level_tokenizer()
    vocab = original.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    metadata = LLAMA_METADATA | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(m) for m in json.loads(original.to_str())["model"]["merges"]],
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}",
    }
    q8 = gguf.GGMLQuantizationType.Q8_0
    quantized = {
        name: array if array.ndim == 1 else (gguf.quants.quantize(array, q8), q8)
        for name, array in llama_gguf_tensors(TENSORS).items()
    }
    path = write_gguf(tmp_path / "m.gguf", metadata, quantized)
    out = convert(path, tmp_path / "out", progress=False)
    assert_same(values(load_model(out)), values(load_model(path)))
    assert load_config(out) == load_config(path)
    assert load_generation_config(out) == load_generation_config(path)
    tokenizer = load_tokenizer(out)
    for text in ("the quick brown fox", "a</s>b 12 é\n\n", "<s>hi"):
        assert tokenizer(text).input_ids == original.encode(text).ids
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x</s>"


def test_existing_destinations(hf_folder: Path, converted: Path, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"out exists; choose another destination, or overwrite it \(--overwrite\)"):
        convert(hf_folder, converted, progress=False)
    convert(hf_folder, converted, dtype="bfloat16", overwrite=True, progress=False)
    assert load_config(converted).dtype == "bfloat16"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]
    for precious in (hf_folder, tmp_path):
        with pytest.raises(ConvertError, match="is not a converted model, so it is not overwritten"):
            convert(hf_folder, precious, overwrite=True, progress=False)
    assert load_config(hf_folder).dtype == "float32"
    (tmp_path / "empty").mkdir()
    assert load_config(convert(hf_folder, tmp_path / "empty", progress=False)).dtype == "float32"
    with pytest.raises(ModelLoadError, match="is converted already"):
        convert(converted, tmp_path / "again", progress=False)


def test_a_source_that_does_not_fit_leaves_nothing(hf_folder: Path, tmp_path: Path) -> None:
    save_file({name: a for name, a in TENSORS.items() if "norm" not in name}, hf_folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match="5 missing"):
        convert(hf_folder, tmp_path / "out", progress=False)
    save_file(TENSORS, hf_folder / "model.safetensors")
    (hf_folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="tokenizer"):
        convert(hf_folder, tmp_path / "out", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_small_disk(hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 1 << 30, 1 << 20))
    with pytest.raises(ConvertError, match=r"has 1\.00 MiB free, but the model takes 64\.\d\d MiB"):
        convert(hf_folder, tmp_path / "out", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def run(code: str, *args: object) -> subprocess.Popen[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_disk_that_fills_up(hf_folder: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the full disk: the write itself fails."""
    code = """
import resource, signal, sys
from jaxpaged.errors import ConvertError
from jaxpaged.weights import convert
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    convert(sys.argv[1], sys.argv[2], progress=False)
except ConvertError as error:
    print(error)
"""
    (hf_folder / "tokenizer.json").unlink()
    (hf_folder / "tokenizer_config.json").unlink()
    (hf_folder / "chat_template.jinja").unlink()
    out, err = run(code, hf_folder, tmp_path / "out").communicate(timeout=120)
    assert "writing" in out and "failed, and nothing was kept" in out, err
    assert out.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_killed_run_leaves_nothing_that_looks_finished(
    hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """
import sys, time
from jaxpaged.weights import convert
from jaxpaged.weights.safetensors_reader import SafetensorsReader
read = SafetensorsReader.read
def slow(self, name, dtype=None):
    if name == "model.norm.weight":
        print("half way", flush=True)
        time.sleep(600)
    return read(self, name, dtype)
SafetensorsReader.read = slow
convert(sys.argv[1], sys.argv[2], progress=False)
"""
    process = run(code, hf_folder, tmp_path / "out")
    assert process.stdout is not None
    assert process.stdout.readline() == "half way\n", process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "out").exists()
    (leftover,) = tmp_path.glob("out.partial-*")
    assert any(leftover.rglob("*.json"))
    with pytest.raises(ModelLoadError, match="interrupted conversion"):
        resolve(leftover)
    assert_same(values(load_model(convert(hf_folder, tmp_path / "out", progress=False))), TENSORS)
    assert str(leftover) in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_memory_stays_near_the_largest_tensor(tmp_path: Path) -> None:
    config = LLAMA_CONFIG | {
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
    }
    folder = write_folder(tmp_path / "big", None, config)
    rng, weight_map, total = np.random.default_rng(0), {}, 0
    for i, (name, shape) in enumerate(llama_shapes(config).items()):
        file = f"model-{i}.safetensors"
        save_file({name: rng.standard_normal(shape, dtype=np.float32)}, folder / file)
        weight_map[name] = file
        total += 4 * int(np.prod(shape))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    largest = 4 * 8192 * 1024
    assert total > 7 * largest
    tiny = write_folder(tmp_path / "tiny", TENSORS, LLAMA_CONFIG)
    code = """
import re, sys
from jaxpaged.weights import convert

def peak():  # of this program: ru_maxrss would begin with what the parent process holds
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])

tiny, big, out = sys.argv[1:]
convert(tiny, out + "-tiny", progress=False)
before = peak()
convert(big, out, progress=False)
print(peak() - before)
"""
    out, err = run(code, tiny, folder, tmp_path / "out").communicate(timeout=300)
    assert out, err
    assert int(out) < 3 * largest


# Orbax drops the reads that it had not begun when the first one fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["truncate", "remove", "metadata"])
def test_damaged_checkpoint(converted: Path, damage: str) -> None:
    weights = converted / "weights"
    data = max((path for path in weights.rglob("d/*") if path.is_file()), key=lambda path: path.stat().st_size)
    if damage == "truncate":
        os.truncate(data, data.stat().st_size // 2)
    elif damage == "remove":
        data.unlink()
    else:
        (weights / "_METADATA").write_text("{")
    with pytest.raises(ModelLoadError, match=r"weights is damaged: .*; convert the model again") as caught:
        load_model(converted)
    assert "\n" not in str(caught.value)
    del caught
    gc.collect()  # now, not within another test


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "has the format version 99, but this jaxpaged reads 1"),
        ({"shapes": {}}, "its digest does not match"),
        ({"shapes": 5}, "is damaged"),
        ({"dtype": "int3"}, "is damaged"),
    ],
)
def test_bad_marker(converted: Path, change: dict[str, Any], message: str) -> None:
    marker = converted / "jaxpaged.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | change))
    with pytest.raises(ModelLoadError, match=message):
        load_model(converted)


def test_config_of_another_model_beside_the_checkpoint(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    (converted / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "vocab_size": 999}))
    with pytest.raises(ModelLoadError, match=r"9 missing .*; 2 misshapen"):
        load_model(converted)


def test_command(
    hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "convert_hf.py"))["main"]
    arguments = ["convert_hf.py", str(hf_folder), str(tmp_path / "out"), "--dtype", "bfloat16"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert main() == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'out'}\n"
    assert "21/21 tensors" in captured.err
    assert load_config(tmp_path / "out").dtype == "bfloat16"
    monkeypatch.setattr(sys, "argv", [*arguments, "--quiet"])
    assert main() == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "exists" in captured.err
    assert captured.err.count("\n") == 1
