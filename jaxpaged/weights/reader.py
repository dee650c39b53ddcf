"""The one view of stored weights that every file format offers: named tensors, read one at a time."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Protocol

import ml_dtypes
import numpy as np

from jaxpaged.errors import ModelLoadError
from jaxpaged_kernels.quantized import WeightFormat

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


class TensorReader(Protocol):
    """Stored tensors under their Hugging Face names. Opening reads headers only; nothing stays mapped between reads."""

    def names(self) -> list[str]:
        """Names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""

    def dtype(self, name: str) -> np.dtype:
        """Dtype that `read` returns by default, without reading. Of a quantized tensor: bfloat16."""

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """A tensor in memory of its own, in `dtype` (None: as `self.dtype`).

        Raises:
            ModelLoadError: the file is damaged or can no longer be read.
        """

    def quantized_as(self, name: str) -> str | None:
        """Lower-case name of the block format that a tensor is stored in; None where it is plain."""

    def read_packed(self, name: str, format: WeightFormat) -> np.ndarray:
        """A matrix packed as `jaxpaged_kernels.quantized` says: as it is stored, or rounded to `format`.

        Raises:
            ModelLoadError: see `read`.
        """


def stored_shapes(reader: TensorReader) -> dict[str, tuple[int, ...]]:
    """Shape of each stored tensor by name."""
    return {name: reader.shape(name) for name in reader.names()}


def dtype_of(name: str) -> np.dtype:
    """The numpy dtype of "float32", "bfloat16" or "float16".

    Raises:
        ModelLoadError: any other name.
    """
    if name not in DTYPES:
        raise ModelLoadError(f"dtype {name!r} is not supported; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def stored_dtype(reader: TensorReader) -> str:
    """Name of the dtype that holds most of the parameters; what dtype "auto" means."""
    sizes: Counter[str] = Counter()
    for name in reader.names():
        sizes[reader.dtype(name).name] += prod(reader.shape(name))
    for name, _ in sizes.most_common():
        if name in DTYPES:
            return name
    return "float32"


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`array` in `dtype`, itself where it already is. Values too large for float16 become infinite, as in torch."""
    with np.errstate(over="ignore"):
        return array.astype(dtype, copy=False)
