"""Weights in blocks of 32 inputs with one scale each, packed as the native kernels multiply them.

Formats, both ggml's (GGUF files hold them), of a matrix [out, in]:

    q8_0: value = scale * q, q from -128 to 127: 34 bytes for 32 values
    q4_0: value = scale * (q - 8), q from 0 to 15: 18 bytes for 32 values

Scales are float16. Packed, 16 outputs are a group: a row of bytes with the blocks of the group, then their scales.

    q8_0: [blocks][8 steps][16 outputs][4 inputs] q + 128;  [blocks][16 outputs] scales
    q4_0: [blocks][4 steps][16 outputs][4 inputs] low half: q of step s, high half: of step s + 4;  scales likewise
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

WeightFormat = Literal["q8_0", "q4_0"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
BLOCK_INPUTS = 32
_GROUP_OUTPUTS = 16
_STEP_INPUTS = 4
# Bytes of the values of a block of one output.
_VALUE_BYTES: dict[WeightFormat, int] = {"q8_0": 32, "q4_0": 16}
_SCALE_BYTES = 2
# Values quantized at once: bounds the float32 temporaries whatever the size of the matrix.
_CHUNK_VALUES = 1 << 22


@partial(jax.tree_util.register_dataclass, data_fields=["packed"], meta_fields=["format", "shape"])
@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [out, in].

    Attributes:
        packed: [groups of 16 outputs, bytes] uint8, see above.
        shape: (out, in).
    """

    packed: jax.Array
    format: WeightFormat
    shape: tuple[int, int]


def packed_shape(format: WeightFormat, shape: tuple[int, int]) -> tuple[int, int]:
    """Shape of the packed bytes of a matrix of `shape`.

    Raises:
        ValueError: the inputs are no whole blocks.
    """
    num_outputs, size = shape
    if size % BLOCK_INPUTS:
        raise ValueError(f"a matrix {list(shape)} has {size} inputs, but {format} needs a multiple of {BLOCK_INPUTS}")
    bytes_per_output = size // BLOCK_INPUTS * (_VALUE_BYTES[format] + _SCALE_BYTES)
    return -(-num_outputs // _GROUP_OUTPUTS), _GROUP_OUTPUTS * bytes_per_output


def quantize_weight(weight: np.ndarray, format: WeightFormat) -> np.ndarray:
    """A matrix [out, in] of any float dtype, packed: each value rounded to the nearest of its block.

    The scale is that of ggml's reference: the largest magnitude / 127 for q8_0; for q4_0 the value of largest magnitude
    / -8, so that it is met exactly.

    Raises:
        ValueError: the inputs are no whole blocks.
    """
    packed = np.empty(packed_shape(format, weight.shape), np.uint8)
    groups = max(1, _CHUNK_VALUES // (_GROUP_OUTPUTS * max(weight.shape[1], 1)))
    for start in range(0, len(packed), groups):
        rows = weight[start * _GROUP_OUTPUTS : (start + groups) * _GROUP_OUTPUTS].astype(np.float32)
        blocks = rows.reshape(len(rows), -1, BLOCK_INPUTS)
        scales, values = _quantize_q8_0(blocks) if format == "q8_0" else _quantize_q4_0(blocks)
        packed[start : start + groups] = pack_blocks(scales, values, format)
    return packed


def _quantize_q8_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales = np.abs(blocks).max(axis=-1) / np.float32(127)
    scaled = blocks * _inverse(scales)
    rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
    return scales.astype(np.float16), rounded.astype(np.int8).view(np.uint8)


def _quantize_q4_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)[..., 0]
    scales = largest / np.float32(-8)
    values = np.clip(blocks * _inverse(scales) + np.float32(8.5), 0, 15).astype(np.uint8)
    half = BLOCK_INPUTS // 2
    return scales.astype(np.float16), values[..., :half] | values[..., half:] << 4


def _inverse(scales: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(scales == 0, np.float32(0), np.float32(1) / scales)
    # Of the smallest subnormals it overflows; in float16 such a scale is 0 anyway.
    return np.where(np.isfinite(inverse), inverse, np.float32(0))[..., None]


def pack_blocks(scales: np.ndarray, values: np.ndarray, format: WeightFormat) -> np.ndarray:
    """Packs blocks as ggml has them.

    Args:
        scales: [out, blocks] float16.
        values: [out, blocks, 32] uint8 for q8_0 (the bytes of int8), [out, blocks, 16] for q4_0 (of the inputs i, low,
            and i + 16, high).
    """
    num_outputs, num_blocks = scales.shape
    groups = -(-num_outputs // _GROUP_OUTPUTS)
    if padding := groups * _GROUP_OUTPUTS - num_outputs:
        scales, values = (np.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1)) for a in (scales, values))
    packed = np.empty(packed_shape(format, (num_outputs, num_blocks * BLOCK_INPUTS)), np.uint8)
    split = _GROUP_OUTPUTS * num_blocks * _VALUE_BYTES[format]
    # The four inputs of a step move together.
    steps = np.ascontiguousarray(values).view(np.uint32).reshape(groups, _GROUP_OUTPUTS, num_blocks, -1)
    packed_steps = packed[:, :split].view(np.uint32).reshape(groups, num_blocks, steps.shape[-1], _GROUP_OUTPUTS)
    packed_steps[...] = steps.transpose(0, 2, 3, 1)
    if format == "q8_0":
        packed[:, :split] ^= 128
    packed_scales = packed[:, split:].view(np.float16).reshape(groups, num_blocks, _GROUP_OUTPUTS)
    packed_scales[...] = scales.reshape(groups, _GROUP_OUTPUTS, num_blocks).transpose(0, 2, 1)
    return packed


def dequantize_weight(weight: QuantizedWeight, dtype: DTypeLike) -> jax.Array:
    """The matrix [out, in] in `dtype`, rounded once."""
    values, scales = _unpack(weight.packed, weight)
    # No einsum: devices that round what they multiply in matrix products would round the scales.
    wide = values.astype(jnp.float32) * scales.astype(jnp.float32)[:, :, None, :, None]
    return wide.transpose(0, 3, 1, 2, 4).reshape(-1, weight.shape[1])[: weight.shape[0]].astype(dtype)


def take_rows(weight: QuantizedWeight, ids: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rows `ids` [T] int32 of the matrix -> [T, in] in `dtype`; ids outside are clipped."""
    ids = jnp.clip(ids, 0, weight.shape[0] - 1)
    # First the rows' groups, a small part of the matrix, which must not be unpacked as a whole.
    values, scales = _unpack(jnp.take(weight.packed, ids // _GROUP_OUTPUTS, axis=0), weight)
    lane = ids % _GROUP_OUTPUTS
    chosen = jnp.take_along_axis(values, lane[:, None, None, None, None], axis=3)[:, :, :, 0]
    scale = jnp.take_along_axis(scales, lane[:, None, None], axis=2)
    rows = chosen.reshape(*scale.shape[:2], BLOCK_INPUTS).astype(jnp.float32) * scale.astype(jnp.float32)
    return rows.reshape(len(ids), weight.shape[1]).astype(dtype)


def _unpack(packed: jax.Array, weight: QuantizedWeight) -> tuple[jax.Array, jax.Array]:
    """Groups [G, bytes] -> values [G, blocks, 8 steps, 16, 4] int8 and scales [G, blocks, 16] float16."""
    num_blocks = weight.shape[1] // BLOCK_INPUTS
    split = _GROUP_OUTPUTS * num_blocks * _VALUE_BYTES[weight.format]
    steps = packed[:, :split].reshape(len(packed), num_blocks, -1, _GROUP_OUTPUTS, _STEP_INPUTS)
    if weight.format == "q8_0":
        values = lax.bitcast_convert_type(steps ^ 128, jnp.int8)
    else:
        values = jnp.concatenate([steps & 15, steps >> 4], axis=2).astype(jnp.int8) - jnp.int8(8)
    scales = packed[:, split:].reshape(len(packed), num_blocks, _GROUP_OUTPUTS, _SCALE_BYTES)
    return values, lax.bitcast_convert_type(scales, jnp.float16)
