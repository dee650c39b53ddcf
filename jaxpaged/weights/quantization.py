"""Which matrices of a model are kept in 8 or 4 bits, and how they get there."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from functools import reduce
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpaged.config import Quantization
from jaxpaged.errors import ModelLoadError
from jaxpaged.models.layers import Embedding, Matrix
from jaxpaged.weights.names import parameters
from jaxpaged.weights.reader import TensorReader
from jaxpaged_kernels import best_linear, quantize_weight
from jaxpaged_kernels.quantized import BLOCK_INPUTS, WEIGHT_FORMATS, WeightFormat

logger = logging.getLogger(__name__)


def quantize_model(module: nnx.Module, quantization: WeightFormat) -> nnx.Module:
    """Rounds the matrices of `module` to blocks of 32 values with one scale each, in place, one matrix at a time.

    "q8_0" gives every matrix 8 bits; "q4_0" gives those of the layers 4, and the embedding and the head 8. Norms and
    biases stay as they are, and so do matrices whose inputs are no multiple of 32 or that are quantized already.

    Returns:
        `module`.

    Raises:
        ModelLoadError: a quantization that does not exist.
    """
    _check(quantization)
    found = matrices(module)
    for name, matrix in found.items():
        format = _format(name, matrix, quantization)
        if format is not None and matrix.format is None:
            old = matrix.weight[...]
            set_packed(matrix, quantize_weight(np.asarray(old), format), format, old.sharding)
    log_formats(found)
    return module


def formats_to_load(module: nnx.Module, reader: TensorReader, quantization: Quantization) -> dict[str, WeightFormat]:
    """How each matrix that is quantized will be, by the name of its weight; the others are dense.

    Blocks that a file stores as q8_0 or q4_0 are kept, exactly, unless fewer bits are asked for. "auto" keeps them
    where they can be multiplied as they are and hold most of the values, else nothing; in such a file the matrices of
    further quantized types (such as the q6_k of a head) become q8_0.

    Raises:
        ModelLoadError: a quantization that does not exist.
    """
    if quantization == "none" or (quantization == "auto" and best_linear() != "native"):
        return {}
    found = matrices(module)
    stored = {name: reader.quantized_as(name) for name in found}
    if quantization == "auto":
        asked: WeightFormat = "q8_0"
        kept_values = sum(math.prod(m.shape) for name, m in found.items() if stored[name] in WEIGHT_FORMATS)
        if 2 * kept_values <= sum(math.prod(m.shape) for m in found.values()):
            return {}
        found = {name: matrix for name, matrix in found.items() if stored[name] is not None}
    else:
        asked = _check(quantization)
    chosen: dict[str, WeightFormat] = {}
    for name, matrix in found.items():
        format = _format(name, matrix, asked)
        if format is not None:
            kept = next((known for known in _formats_within(format) if known == stored[name]), format)
            chosen[name] = kept
    return chosen


def matrices(module: nnx.Module) -> dict[str, Matrix]:
    """The matrices of `module` by the Hugging Face name of their weights."""
    found = {}
    for name in parameters(module):
        path, _, last = name.rpartition(".")
        owner: Any = reduce(_child, path.split("."), module)
        if last == "weight" and isinstance(owner, Matrix):
            found[name] = owner
    return found


def _child(node: Any, part: str) -> Any:
    return node[int(part)] if part.isdigit() else getattr(node, part)


def is_quantized(module: nnx.Module) -> bool:
    """Whether any matrix of `module` is."""
    return any(matrix.format is not None for matrix in matrices(module).values())


def set_packed(matrix: Matrix, packed: np.ndarray, format: WeightFormat, sharding: jax.sharding.Sharding) -> None:
    """Gives `matrix` its quantized weight."""
    matrix.weight.set_value(jax.device_put(packed, sharding))
    matrix.format = format


def log_formats(found: Mapping[str, Matrix]) -> None:
    """One line that says how many matrices have which format, and one where that is slow."""
    counts = Counter(matrix.format or str(matrix.weight.dtype) for matrix in found.values())
    logger.info("matrices of weights: %s", ", ".join(f"{count} in {kind}" for kind, count in counts.most_common()))
    if best_linear() != "native":
        logger.warning(
            "without native CPU kernels quantized weights are made dense for each product: smaller, but slower"
        )


def _formats_within(format: WeightFormat) -> tuple[WeightFormat, ...]:
    """`format` and those of fewer bits."""
    return WEIGHT_FORMATS[WEIGHT_FORMATS.index(format) :]


def _format(name: str, matrix: Matrix, quantization: WeightFormat) -> WeightFormat | None:
    if matrix.shape[1] % BLOCK_INPUTS:
        return None
    is_table = isinstance(matrix, Embedding) or name == "lm_head.weight"
    return "q8_0" if is_table else quantization


def _check(quantization: str) -> WeightFormat:
    for format in WEIGHT_FORMATS:
        if format == quantization:
            return format
    raise ModelLoadError(f"quantization is {quantization!r}, but must be one of {', '.join(WEIGHT_FORMATS)}")
