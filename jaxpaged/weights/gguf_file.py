"""The header of a GGUF file, parsed with every length checked against the file's size before it is believed.

The `gguf` package's own reader trusts the header (a forged count makes it loop or allocate without end) and makes
several numpy views a vocabulary entry; its tables of types and its dequantization are used as they are.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf

from jaxpaged.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies.

    Attributes:
        shape: as numpy counts (slowest dimension first), of elements.
        offset: in bytes from the start of the file.
        num_bytes: as stored, quantized.
    """

    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """Metadata and tensor table of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Parse the header.

        Raises:
            ModelLoadError: not GGUF, of an unknown version, damaged, truncated, or one part of several.
        """
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).parse()
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelLoadError(f"cannot read the GGUF file {path}: {error}") from error


class _Parser:
    """A cursor over the header's bytes."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def parse(self) -> GGUFFile:
        if self._take(4) != _MAGIC:
            raise ModelLoadError(f"{self._path} is not a GGUF file: it does not start with the bytes 'GGUF'")
        (version,) = self._scalars("I", 1)
        if version not in _VERSIONS:
            raise ModelLoadError(
                f"{self._path} is GGUF version {version} (or of the other byte order); versions "
                f"{' and '.join(map(str, _VERSIONS))} in little-endian order are supported"
            )
        num_tensors, num_keys = self._scalars("Q", 2)
        metadata: dict[str, Any] = {}
        for _ in range(self._count(num_keys, 12)):
            key = self._string()
            (kind,) = self._scalars("I", 1)
            metadata[key] = self._value(kind)
        if metadata.get("split.count", 1) not in (0, 1):
            raise ModelLoadError(
                f"{self._path} is one of {metadata['split.count']} parts of a split GGUF; join them first "
                "(llama-gguf-split --merge FIRST_PART OUT)"
            )
        infos = [self._tensor_info() for _ in range(self._count(num_tensors, 24))]
        return GGUFFile(self._path, metadata, self._place(infos, metadata.get("general.alignment", 32)))

    def _place(self, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, GGUFTensor]:
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._damaged(f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in infos:
            try:
                quantization = gguf.GGMLQuantizationType(kind)
                block_size, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
            except (ValueError, KeyError):
                raise ModelLoadError(f"{self._path}: tensor {name!r} is of the unknown GGUF type {kind}") from None
            if not shape or shape[-1] % block_size:
                raise self._damaged(f"tensor {name!r} of shape {shape} is not made of {quantization.name} blocks")
            num_bytes = prod(shape) // block_size * block_bytes
            if start + offset + num_bytes > self._size:
                raise ModelLoadError(
                    f"{self._path} is truncated or damaged: tensor {name!r} should end at byte "
                    f"{start + offset + num_bytes}, but the file has {self._size}; download it again"
                )
            if name in tensors:
                raise self._damaged(f"tensor {name!r} is there twice")
            tensors[name] = GGUFTensor(shape, quantization, start + offset, num_bytes)
        return tensors

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type number and offset from the start of the data."""
        name = self._string()
        (num_dims,) = self._scalars("I", 1)
        if num_dims > _MAX_DIMS:
            raise self._damaged(f"tensor {name!r} has {num_dims} dimensions")
        dims = self._scalars("Q", num_dims)
        (kind,) = self._scalars("I", 1)
        (offset,) = self._scalars("Q", 1)
        return name, tuple(reversed(dims)), kind, offset

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalars(self._format(kind), 1)[0]
        (item_kind,) = self._scalars("I", 1)
        (length,) = self._scalars("Q", 1)
        if item_kind == _STRING:
            return [self._string() for _ in range(self._count(length, 8))]
        return list(self._scalars(self._format(item_kind), length))

    def _format(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._damaged(f"a metadata value is of the unknown type {kind}")
        return _SCALARS[kind]

    def _string(self) -> str:
        (length,) = self._scalars("Q", 1)
        return self._take(length).decode("utf-8", errors="replace")

    def _scalars(self, code: str, count: int) -> tuple[Any, ...]:
        item = struct.calcsize(f"<{code}")
        return struct.unpack(f"<{self._count(count, item)}{code}", self._take(count * item))

    def _count(self, count: int, min_bytes: int) -> int:
        """`count`, once that many items of at least `min_bytes` each can still follow."""
        if count * min_bytes > self._size - self._at:
            raise self._damaged(f"it announces {count} more items than fit")
        return count

    def _take(self, length: int) -> bytes:
        if length > self._size - self._at:
            raise self._damaged("it ends within its header")
        self._at += length
        return self._data[self._at - length : self._at]

    def _damaged(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path} is truncated or damaged at byte {self._at}: {what}; download it again")
