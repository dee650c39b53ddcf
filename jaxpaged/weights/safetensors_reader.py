"""Tensors of the safetensors file or files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.reader import cast
from jaxpaged_kernels import quantize_weight
from jaxpaged_kernels.quantized import WeightFormat

_INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class SafetensorsReader:
    """One or sharded safetensors files as a `TensorReader`."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, np.dtype] = {}
        for path in safetensors_files(folder):
            self._open(path)

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype:
        return self._dtypes[name]

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        path = self._files[name]
        try:
            # Opened anew for each tensor: pages of a mapped file count as this process's memory until it is unmapped.
            with safe_open(path, framework="np") as file:
                array: np.ndarray = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"cannot read {name!r} from {path}: {error}") from error
        return cast(array, dtype or self._dtypes[name])

    def quantized_as(self, name: str) -> str | None:
        return None

    def read_packed(self, name: str, format: WeightFormat) -> np.ndarray:
        return quantize_weight(self.read(name), format)

    def _open(self, path: Path) -> None:
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if name in self._files:
                        raise ModelLoadError(f"tensor {name!r} is both in {self._files[name]} and in {path.name}")
                    view = file.get_slice(name)
                    if view.get_dtype() not in _DTYPES:
                        raise ModelLoadError(
                            f"{path}: tensor {name!r} is stored as {view.get_dtype()}, which is not supported; "
                            "use a checkpoint in float32, bfloat16 or float16"
                        )
                    self._files[name] = path
                    self._shapes[name] = tuple(view.get_shape())
                    self._dtypes[name] = np.dtype(_DTYPES[view.get_dtype()])
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{path} is not a whole safetensors file ({error}); download it again") from error


def safetensors_files(folder: Path) -> list[Path]:
    """The files that hold the weights: all that the index names, or model.safetensors, or the only one there.

    Raises:
        ModelLoadError: a damaged index, a shard that is missing, or no way to tell which files to take.
    """
    index = folder / _INDEX
    if index.is_file():
        return _shards(index)
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    raise ModelLoadError(
        f"{folder} has {len(others)} safetensors files but neither model.safetensors nor {_INDEX}, "
        "so it is unclear which to load; add the index file"
    )


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} is not a safetensors index ({error!r}); download it again") from error
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise ModelLoadError(f"{index} points out of its folder, to {outside[0]!r}")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"{index.parent} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}; download the rest"
        )
    return [index.parent / name for name in names]
