"""Rotary position embedding: its frequencies and its tables. The rotation is `jaxpaged_kernels.apply_rope`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxpaged.config import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [T, head_dim / 2] each, of `positions` [T] int32."""
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim), jnp.float32)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    magnitude = _attention_factor(rope)
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> NDArray[np.float64]:
    """Radians a token of each pair of dimensions, [head_dim / 2]."""
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match rope.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3_frequencies(rope, frequencies)
        case "yarn":
            return _yarn_frequencies(rope, frequencies, head_dim)


def _llama3_frequencies(rope: RopeConfig, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
    """Stretch long wavelengths by the factor, keep short ones, and blend linearly (in turns) in between."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return keep * frequencies + (1 - keep) * frequencies / rope.factor


def _yarn_frequencies(rope: RopeConfig, frequencies: NDArray[np.float64], head_dim: int) -> NDArray[np.float64]:
    """YaRN (Peng et al., 2023, arXiv:2309.00071), its ramp between whole dimensions."""

    def dimension_of(turns: float) -> float:
        """Pair whose angle makes `turns` rotations over the trained context."""
        wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_of(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_of(rope.beta_slow)), head_dim - 1)
    stretch = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return (1 - stretch) * frequencies + stretch * frequencies / rope.factor


def _attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: YaRN sharpens attention over its longer context."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "yarn" and rope.factor > 1:
        return 0.1 * math.log(rope.factor) + 1.0
    return 1.0
