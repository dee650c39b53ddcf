"""RoPE against complex rotation in float64, and its scalings against values worked out from their definitions."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.config import RopeConfig
from jaxpaged.models.rope import inverse_frequencies, rope_tables
from jaxpaged_kernels import apply_rope


def test_rotation_is_a_complex_multiplication_of_the_two_halves() -> None:
    positions = np.array([0, 1, 7, 8191])
    x = np.random.RandomState(0).standard_normal((4, 3, 8))
    angles = positions[:, None] * 10_000.0 ** (-np.arange(4) / 4)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)[:, None, :]

    tables = rope_tables(RopeConfig(), 8, jnp.asarray(positions))
    rotated = apply_rope(jnp.asarray(x, jnp.float32), *tables)
    # The angle itself is rounded to float32: at position 8191 that is 2e-4 of a radian.
    np.testing.assert_allclose(rotated, np.concatenate([turned.real, turned.imag], axis=-1), atol=2e-3)
    np.testing.assert_allclose(rotated[:3], np.concatenate([turned.real, turned.imag], axis=-1)[:3], atol=1e-5)


def test_rotation_of_bfloat16_is_computed_in_float32() -> None:
    x = jnp.asarray(np.random.RandomState(0).standard_normal((5, 2, 16)), jnp.bfloat16)
    tables = rope_tables(RopeConfig(), 16, jnp.arange(100, 105))
    exact = apply_rope(x.astype(jnp.float32), *tables)
    assert (apply_rope(x, *tables) == exact.astype(jnp.bfloat16)).all()


def test_linear_scaling_divides_positions() -> None:
    scaled = RopeConfig(theta=500.0, kind="linear", factor=4.0)
    stretched = rope_tables(scaled, 16, jnp.array([8, 40]))
    plain = rope_tables(RopeConfig(theta=500.0), 16, jnp.array([2, 10]))
    np.testing.assert_allclose(stretched, plain, atol=1e-6)


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between() -> None:
    rope = RopeConfig(theta=500_000.0, kind="llama3", factor=8.0, original_max_position_embeddings=8192)
    plain = inverse_frequencies(RopeConfig(theta=500_000.0), 128)
    scaled = inverse_frequencies(rope, 128)
    wavelength = 2 * math.pi / plain
    np.testing.assert_allclose(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8)
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    share = (8192 / wavelength[between] - 1) / 3
    assert between.sum() > 3
    np.testing.assert_allclose(scaled[between], plain[between] * (share + (1 - share) / 8))


def test_yarn_keeps_fast_dimensions_stretches_slow_ones_and_sharpens_attention() -> None:
    rope = RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position_embeddings=32768)
    ratio = inverse_frequencies(RopeConfig(theta=1e6), 128) / inverse_frequencies(rope, 128)
    turns = 32768 * inverse_frequencies(RopeConfig(theta=1e6), 128) / (2 * math.pi)
    np.testing.assert_allclose(ratio[turns > 32 * 1.25], 1)
    np.testing.assert_allclose(ratio[turns < 1 / 1.25], 4)
    assert (np.diff(ratio) >= -1e-9).all()
    cos, sin = rope_tables(rope, 128, jnp.array([0]))
    np.testing.assert_allclose(cos, 0.1 * math.log(4) + 1, rtol=1e-6)
    np.testing.assert_allclose(sin, 0)


@pytest.mark.parametrize(("given", "expected"), [(1.25, 1.25), (None, 1.0)])
def test_attention_factor_given_or_one_without_stretching(given: float | None, expected: float) -> None:
    rope = RopeConfig(kind="yarn", factor=1.0, attention_factor=given)
    cos, _ = rope_tables(rope, 16, jnp.array([0]))
    np.testing.assert_allclose(cos, expected, rtol=1e-6)
