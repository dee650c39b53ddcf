"""Quantization against its definition in numpy, and its error bounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged_kernels import dequantize, quantize

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


@pytest.fixture(params=sorted(LARGEST))
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


def quantized(x: object, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    stored, scales = jax.jit(quantize, static_argnums=1)(jnp.asarray(x), dtype)
    assert stored.dtype == jnp.dtype(dtype) and scales.dtype == jnp.float32
    assert stored.shape == np.shape(x) and scales.shape == np.shape(x)[:-1]
    return np.asarray(stored), np.asarray(scales)


@pytest.mark.parametrize("input_dtype", ["float32", "bfloat16", "float16"])
def test_values(dtype: str, input_dtype: str) -> None:
    """The values of the dtype that are nearest to x / scale."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 3, 64)) * 10.0 ** rng.integers(-3, 4, (40, 3, 1))
    x = x.astype(jnp.dtype(input_dtype)).astype(np.float32)
    stored, scales = quantized(jnp.asarray(x, input_dtype), dtype)
    np.testing.assert_allclose(scales, np.abs(x).max(-1) / LARGEST[dtype], rtol=3e-7)
    ratio = x / scales[..., None]
    nearest = np.rint(ratio) if dtype == "int8" else ratio.astype(jnp.dtype(dtype)).astype(np.float32)
    error, smallest = (np.abs(y - ratio) for y in (stored.astype(np.float32), nearest))
    assert (error <= smallest + 1e-6 * np.abs(ratio)).all()  # between two values, a last bit of the ratio decides
    assert (np.abs(stored.astype(np.float32)).max(-1) == LARGEST[dtype]).all()


def test_error_is_bounded(dtype: str) -> None:
    x = np.random.default_rng(1).standard_normal((500, 64)).astype(np.float32)
    stored, scales = quantized(x, dtype)
    error = np.abs(np.asarray(dequantize(jnp.asarray(stored), jnp.asarray(scales))) - x)
    step = scales[:, None]  # of int8, and of the smallest values of fp8
    bound = step / 2 if dtype == "int8" else np.maximum(np.abs(x) / 16, step * 2.0**-10)
    assert (error <= bound * (1 + 1e-5)).all()


def test_zeros_are_stored_as_zeros(dtype: str) -> None:
    stored, scales = quantized(np.zeros((2, 3, 8), np.float32), dtype)
    assert not stored.any() and not scales.any()


def test_a_single_value_and_both_signs(dtype: str) -> None:
    stored, scales = quantized(np.float32([[[-3.0]], [[3.0]]]), dtype)
    np.testing.assert_array_equal(stored.astype(np.float32).ravel(), [-LARGEST[dtype], LARGEST[dtype]])
    np.testing.assert_allclose(scales.ravel(), 3 / LARGEST[dtype], rtol=1e-6)


@pytest.mark.parametrize("magnitude", [1e-45, 1.9e-43, 1e-38, 3e38])
def test_extreme_magnitudes_stay_in_range(dtype: str, magnitude: float) -> None:
    stored, scales = quantized(np.float32([[magnitude, -magnitude, 0]]), dtype)
    assert (np.abs(stored.astype(np.float32)) <= LARGEST[dtype]).all() and stored[0, 2] == 0
    # What is too small for a scale may become 0.
    np.testing.assert_allclose(
        stored[0].astype(np.float64) * scales[0], [magnitude, -magnitude, 0], rtol=1e-3, atol=1e-38
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(dtype: str, bad: float) -> None:
    """int8 cannot hold it: then the scale does."""
    stored, scales = quantized(np.float32([[1, bad, 2], [1, 2, 3]]), dtype)
    values = np.asarray(dequantize(jnp.asarray(stored), jnp.asarray(scales)))
    assert not np.isfinite(values[0]).any() and np.isfinite(values[1]).all()


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot quantize to float16: use one of int8, float8_e4m3fn"):
        quantize(jnp.ones((2, 4)), jnp.float16)
