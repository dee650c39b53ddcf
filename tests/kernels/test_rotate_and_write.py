"""Rotating and writing in one call against complex rotation and quantization in float64 numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from jaxpaged_kernels import pool_dtype, rotate_and_write_kv

Array = npt.NDArray[np.float64]
SLOTS = [3, -1, 17, 48, 0, 32, 9]  # of 3 blocks of 16: two are outside
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def rotated(x: Array, angles: Array) -> Array:
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype", "stored"),
    [
        (9, 3, 64, "float32", "float32"),
        (8, 8, 80, "bfloat16", "bfloat16"),
        (8, 1, 96, "float16", "float16"),
        (7, 1, 16, "float32", "int8"),
        (6, 3, 80, "bfloat16", "int8"),
        (4, 2, 128, "float32", "float8_e4m3fn"),
    ],
)
def test_equals_numpy(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: str, stored: str, implementation: str
) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((len(SLOTS), heads, head_dim)), dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    angles = rng.uniform(-3, 3, (len(SLOTS), head_dim // 2))
    kept = pool_dtype(stored) if implementation == "xla" else jnp.dtype(stored)
    pools = (jnp.zeros((3, 16, num_kv_heads, head_dim), kept),) * 2
    if stored in LARGEST:
        pools += (jnp.zeros((3, 16, num_kv_heads)),) * 2
    write = jax.jit(functools.partial(rotate_and_write_kv, implementation=implementation))
    cos, sin = jnp.cos(jnp.asarray(angles, jnp.float32)), jnp.sin(jnp.asarray(angles, jnp.float32))
    out, pools = write(q, k, v, cos, sin, pools, jnp.asarray(SLOTS, jnp.int32))

    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(np.float64(out), rotated(np.float64(q), angles), rtol=tolerance, atol=tolerance)
    written = [i for i, slot in enumerate(SLOTS) if 0 <= slot < 48]
    for new, index in ((rotated(np.float64(k), angles), 0), (np.float64(v), 1)):
        values = np.asarray(pools[index]).view(jnp.dtype(stored)).astype(np.float64)
        step = np.zeros((3, 16, num_kv_heads, 1))
        if stored in LARGEST:
            scales = np.float64(pools[2 + index])[..., None]
            values *= scales
            # int8 is off by half a step, float8_e4m3fn by half a unit in the last of 3 bits of mantissa.
            step = scales * 0.5 if stored == "int8" else np.abs(values) / 16 + scales * 2.0**-10
            largest = np.abs(new[written]).max(axis=-1, keepdims=True)
            found = scales.reshape(48, num_kv_heads, 1)[[SLOTS[i] for i in written]]
            np.testing.assert_allclose(found * LARGEST[stored], largest, rtol=tolerance)
        expected = np.zeros((48, num_kv_heads, head_dim))
        expected[[SLOTS[i] for i in written]] = new[written]
        error = np.abs(values.reshape(expected.shape) - expected)
        limit = tolerance * (1 + np.abs(expected)) + step.reshape(
            48, num_kv_heads, 1 if stored != "float8_e4m3fn" else -1
        )
        assert (error <= limit).all()
        assert (values.reshape(expected.shape)[[s for s in range(48) if s not in SLOTS]] == 0).all()


def arguments(**changes: object) -> dict[str, object]:
    pool = jnp.zeros((3, 16, 2, 8))
    heads, table = jnp.ones((5, 2, 8)), jnp.ones((5, 4))
    base = {"q": jnp.ones((5, 4, 8)), "k": heads, "v": heads, "cos": table, "sin": table, "pools": (pool, pool)}
    return {**base, "slots": jnp.zeros(5, jnp.int32), **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cos": jnp.ones((5, 8))}, r"cos is \[5, 8\].* needs \[5, 4\]"),
        ({"sin": jnp.ones((4, 4))}, r"sin \[4, 4\]"),
        ({"q": jnp.ones((5, 4, 7)), "cos": jnp.ones((5, 3)), "sin": jnp.ones((5, 3))}, r"\[5, 4, 7\]"),
        ({"k": jnp.ones((5, 3, 8))}, r"k \[5, 3, 8\] and v \[5, 2, 8\]"),
        ({"q": jnp.ones((6, 4, 8)), "cos": jnp.ones((6, 4)), "sin": jnp.ones((6, 4))}, r"q is \[6, 4, 8\]"),
        ({"q": jnp.ones((5, 3, 8))}, "3 query heads are not a multiple of 2 KV heads"),
        ({"q": jnp.ones((5, 8))}, r"q is \[5, 8\]"),
        ({"pools": (jnp.zeros((3, 16, 2, 8)),)}, "1 pools were given"),
        ({"slots": jnp.zeros(5)}, "slots are float32"),
        ({"implementation": "cuda"}, "'cuda' does not exist: use one of triton, native, xla"),
    ],
)
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_bad_arguments(changes: dict[str, object], words: str, implementation: str) -> None:
    with pytest.raises(ValueError, match=words):
        rotate_and_write_kv(**arguments(**{"implementation": implementation, **changes}))  # type: ignore[arg-type]


def test_triton_refuses_pools_of_raw_bits() -> None:
    heads = jnp.ones((5, 2, 8), jnp.bfloat16)
    changes = {"q": heads, "k": heads, "v": heads, "pools": (jnp.zeros((3, 16, 2, 8), jnp.uint16),) * 2}
    with pytest.raises(NotImplementedError, match="raw bits"):
        rotate_and_write_kv(**arguments(**changes), implementation="triton")  # type: ignore[arg-type]
