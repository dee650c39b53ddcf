"""Tensors of pytorch_model*.bin files, which are pickles: read only by torch's restricted loader."""

from __future__ import annotations

import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.reader import DTYPES, cast
from jaxpaged_kernels import quantize_weight
from jaxpaged_kernels.quantized import WeightFormat


class PytorchReader:
    """pytorch_model*.bin files as a `TensorReader`, mapped by torch."""

    def __init__(self, folder: Path) -> None:
        try:
            torch = import_module("torch")
        except ImportError:
            raise ModelLoadError(
                f"{folder} has its weights only as pytorch_model*.bin, which are pickles and are read only through "
                "torch's safe loader; install torch, or use a copy of the model in safetensors"
            ) from None
        self._torch = torch
        self._tensors: dict[str, Any] = {}
        for path in sorted(folder.glob("pytorch_model*.bin")):
            try:
                # Files of torch before 1.6 are no zip archives and cannot be mapped.
                mapped = zipfile.is_zipfile(path)
                loaded = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
            except Exception as error:  # torch raises RuntimeError, UnpicklingError, OSError and more
                raise ModelLoadError(
                    f"torch's safe loader refuses {path} ({type(error).__name__}): it is damaged or holds more than "
                    "tensors; use a copy of the model in safetensors"
                ) from error
            if not isinstance(loaded, dict) or not all(isinstance(t, torch.Tensor) for t in loaded.values()):
                raise ModelLoadError(f"{path} holds something else than named tensors; use a copy in safetensors")
            self._tensors |= loaded

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> np.dtype:
        torch_name = str(self._tensors[name].dtype).removeprefix("torch.")
        return DTYPES.get(torch_name, DTYPES["float32"])

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        stored = self.dtype(name)
        tensor = self._tensors[name].detach()
        if stored == DTYPES["bfloat16"]:  # which numpy does not know, so torch hands out its bits
            array = tensor.view(self._torch.int16).numpy().view(stored)
        else:
            array = tensor.numpy()
        return np.array(cast(array, dtype or stored))

    def quantized_as(self, name: str) -> str | None:
        return None

    def read_packed(self, name: str, format: WeightFormat) -> np.ndarray:
        return quantize_weight(self.read(name), format)
