"""What a user may name as a model, and the files that it stands for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.catalog import list_catalog, pull

MARKER = "jaxpaged.json"
WEIGHTS = "weights"
PARTIAL = ".partial-"
_FORMS = "a converted folder, a Hugging Face folder, a GGUF file, a hub name (org/name) or one of the catalog: {}"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
]


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk.

    Attributes:
        kind: "converted" (written by `convert`), "hf" (config.json with safetensors or pytorch_model*.bin), "gguf", or
            "config" (config.json; weights, if there are any, are left aside).
        path: the folder; of "gguf" and "config" the file.
    """

    kind: Literal["converted", "hf", "gguf", "config"]
    path: Path

    @property
    def folder(self) -> Path:
        """Where the files beside the weights are, such as the tokenizer's."""
        return self.path.parent if self.kind in ("gguf", "config") else self.path


def resolve(model: str | Path | ModelFiles, *, weights: bool = True) -> ModelFiles:
    """Find the files of `model`; a catalog or hub name is downloaded unless it is already there.

    Args:
        weights: False where the config is enough: then a config.json, or a folder with one, will do.

    Raises:
        ModelLoadError: nothing of that name, or what is there is no model.
    """
    if isinstance(model, ModelFiles):
        return model
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path, weights=weights)
    if path.is_file():
        return ModelFiles("config", path) if not weights and path.suffix == ".json" else _file(path)
    name = str(model)
    if name in list_catalog():
        return _file(pull(name))
    forms = _FORMS.format(", ".join(list_catalog()))
    if isinstance(model, str) and _HUB_NAME.fullmatch(name):
        return _from_hub(name, forms, weights=weights)
    raise ModelLoadError(f"there is no model {name!r}: no such path, and no name that is known; give {forms}")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ModelLoadError: unreadable, not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot read {path} as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds no JSON object but a {type(content).__name__}")
    return content


def _folder(path: Path, *, weights: bool) -> ModelFiles:
    if (path / MARKER).is_file():
        return ModelFiles("converted", path)
    if not weights and (path / "config.json").is_file():
        return ModelFiles("config", path / "config.json")
    if PARTIAL in path.name:
        raise ModelLoadError(f"{path} is what an interrupted conversion left; remove it and convert again")
    ggufs = sorted(path.glob("*.gguf"))
    if (path / "config.json").is_file():
        if any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin")):
            return ModelFiles("hf", path)
        if not ggufs:
            raise ModelLoadError(
                f"{path} has a config.json but no weights: expected model.safetensors, "
                "model.safetensors.index.json with its parts, or pytorch_model*.bin "
                "(load_format dummy makes random ones)"
            )
    if len(ggufs) == 1:
        return ModelFiles("gguf", ggufs[0])
    if ggufs:
        raise ModelLoadError(f"{path} holds {len(ggufs)} GGUF files; name one of them, e.g. {ggufs[0]}")
    if not any(path.iterdir()):
        raise ModelLoadError(f"the folder {path} is empty")
    raise ModelLoadError(f"{path} is no model folder: it has neither {MARKER} nor config.json nor a GGUF file")


def _file(path: Path) -> ModelFiles:
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if is_gguf:
        return ModelFiles("gguf", path)
    if path.suffix == ".gguf":
        raise ModelLoadError(f"{path} is not a GGUF file: it does not start with the bytes 'GGUF'; download it again")
    raise ModelLoadError(f"{path} is no GGUF file; for a model of another format name its folder")


def _from_hub(name: str, forms: str, *, weights: bool) -> ModelFiles:
    from huggingface_hub import snapshot_download

    wanted = _HUB_FILES if weights else [pattern for pattern in _HUB_FILES if not pattern.startswith("model")]
    try:
        return _folder(Path(snapshot_download(name, allow_patterns=wanted)), weights=weights)
    except ModelLoadError:
        raise
    except Exception as error:  # the hub client raises its HTTP library's errors beside its own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(
            f"there is no path {name!r}, and the Hugging Face hub gave no such model ({reason}); give {forms}"
        ) from error
