"""What `resolve` makes of the things that users name."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from weights.tiny_files import LLAMA_CONFIG

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights import ModelFiles, resolve
from jaxpaged.weights import files as files_module


def make(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"GGUF" if name.endswith(".gguf") else b"{}")
    return folder


@pytest.mark.parametrize(
    ("names", "kind", "file"),
    [
        (("config.json", "model.safetensors"), "hf", ""),
        (("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"), "hf", ""),
        (("config.json", "pytorch_model-00001-of-00002.bin"), "hf", ""),
        (("config.json", "jaxpaged.json"), "converted", ""),
        (("a.Q8_0.gguf",), "gguf", "a.Q8_0.gguf"),
        (("config.json", "a.gguf"), "gguf", "a.gguf"),
    ],
)
def test_folders(tmp_path: Path, names: tuple[str, ...], kind: str, file: str) -> None:
    folder = make(tmp_path / "m", *names)
    expected = ModelFiles(kind, folder / file if file else folder)
    assert resolve(folder) == resolve(str(folder)) == resolve(expected) == expected
    if file:
        assert resolve(folder / file) == expected


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "is empty"),
        (("readme.txt",), "neither jaxpaged.json nor config.json nor a GGUF file"),
        (("config.json",), "has a config.json but no weights"),
        (("a.gguf", "b.gguf"), "holds 2 GGUF files; name one of them"),
    ],
)
def test_folders_that_are_no_models(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        resolve(make(tmp_path / "m", *names))


def test_what_an_interrupted_conversion_left(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="interrupted conversion"):
        resolve(make(tmp_path / "m.partial-00aabb", "config.json"))


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    make(tmp_path, "model.safetensors")
    with pytest.raises(ModelLoadError, match="is no GGUF file; for a model of another format name its folder"):
        resolve(tmp_path / "model.safetensors")
    (tmp_path / "x.gguf").write_bytes(b"oops")
    with pytest.raises(ModelLoadError, match="does not start with the bytes 'GGUF'"):
        resolve(tmp_path / "x.gguf")


def test_a_name_that_is_nothing() -> None:
    for name in ("no-such-model", "./no/such/folder", "/no/such"):
        with pytest.raises(ModelLoadError, match=f"there is no model '{name}'.*a GGUF file.*smollm2-135m-instruct"):
            resolve(name)


def test_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "snapshot", "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))

    def download(name: str, *, allow_patterns: list[str]) -> str:
        assert name == "org/model-1.5"
        assert "model*.safetensors" in allow_patterns
        assert not any(pattern.endswith((".bin", ".pt", ".pth")) for pattern in allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/model-1.5") == ModelFiles("hf", folder)


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **_: object) -> str:
        raise ConnectionError("Name or service not known\nand a long trace")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelLoadError) as caught:
        resolve("org/model")
    message = str(caught.value)
    assert "\n" not in message
    assert "'org/model'" in message
    assert "Name or service not known" in message
    assert "a GGUF file" in message


def test_catalog_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path, "m.gguf") / "m.gguf"
    monkeypatch.setattr(files_module, "pull", lambda name: path)
    assert resolve("smollm2-135m-instruct") == ModelFiles("gguf", path)
