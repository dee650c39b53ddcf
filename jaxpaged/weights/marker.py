"""jaxpaged.json: what says that a converted folder is complete, and what its checkpoint holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.files import MARKER, read_json
from jaxpaged.weights.reader import DTYPES

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Marker:
    """Contents of jaxpaged.json.

    Attributes:
        dtype: of every parameter.
        parameters: shape of each parameter, by Hugging Face name.
    """

    dtype: str
    parameters: Mapping[str, tuple[int, ...]]

    def to_json(self) -> str:
        return json.dumps(
            {
                "format_version": FORMAT_VERSION,
                "dtype": self.dtype,
                "num_parameters": sum(map(prod, self.parameters.values())),
                "shapes_sha256": shapes_digest(self.parameters),
                "shapes": self.parameters,
            },
            indent=1,
        )

    @classmethod
    def read(cls, folder: Path) -> Marker:
        """The marker of a converted folder.

        Raises:
            ModelLoadError: damaged, or written by a version of jaxpaged with another format.
        """
        path = folder / MARKER
        content = read_json(path)
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise ModelLoadError(
                f"{folder} has the format version {version!r}, but this jaxpaged reads {FORMAT_VERSION}; "
                "convert the model again"
            )
        try:
            parameters = {name: tuple(shape) for name, shape in content["shapes"].items()}
            whole = content["shapes_sha256"] == shapes_digest(parameters) and content["dtype"] in DTYPES
        except (KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"{path} is damaged ({error!r}); convert the model again") from error
        if not whole:
            raise ModelLoadError(f"{path} is damaged: its digest does not match; convert the model again")
        return cls(content["dtype"], parameters)


def shapes_digest(parameters: Mapping[str, tuple[int, ...]]) -> str:
    """SHA-256 over all names and shapes."""
    text = "\n".join(f"{name} {list(shape)}" for name, shape in sorted(parameters.items()))
    return hashlib.sha256(text.encode()).hexdigest()
