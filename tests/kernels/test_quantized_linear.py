"""`linear` with quantized weights against its arithmetic written out in numpy, on every instruction set there is."""

from __future__ import annotations

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged_kernels import QuantizedWeight, dequantize_weight, linear, native, pack_blocks, quantize_weight, take_rows
from jaxpaged_kernels.quantized import WeightFormat

FORMATS: tuple[WeightFormat, ...] = ("q8_0", "q4_0")
GGML = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_0": gguf.GGMLQuantizationType.Q4_0}
BLOCK = 32


def random_weight(rng: np.random.Generator, format: WeightFormat, outputs: int, size: int) -> QuantizedWeight:
    """Every value of the format occurs, also -128, which rounding never gives."""
    scales = (rng.uniform(-1, 1, (outputs, size // BLOCK)) / size).astype(np.float16)
    values = rng.integers(0, 256, (outputs, size // BLOCK, BLOCK if format == "q8_0" else BLOCK // 2), dtype=np.uint8)
    values[0, 0, 0] = 128
    return QuantizedWeight(jnp.asarray(pack_blocks(scales, values, format)), format, (outputs, size))


def ggml_values(weight: np.ndarray, format: WeightFormat) -> np.ndarray:
    """What ggml's reference makes of a matrix, and back in float32."""
    return gguf.quants.dequantize(gguf.quants.quantize(weight, GGML[format]), GGML[format])


def rounded(x: np.ndarray) -> np.ndarray:
    """x [T, in] float32 with each block of 32 in 8 bits of its largest magnitude / 127, as float64."""
    blocks = x.reshape(len(x), -1, BLOCK)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return (np.rint(blocks * inverse) * np.float64(largest / np.float32(127))).reshape(x.shape)


def dense(weight: QuantizedWeight) -> np.ndarray:
    return np.float64(dequantize_weight(weight, jnp.float32))


@pytest.mark.parametrize("format", FORMATS)
def test_rounding_is_ggmls(format: WeightFormat) -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(37, 96)).astype(np.float32)
    weight[3] = 0
    weight[4, :BLOCK] = 1e-9  # its scale is 0 in float16
    weight[5, :4] = (7, -7, 7, -7)
    packed = jnp.asarray(quantize_weight(weight, format))
    np.testing.assert_array_equal(dense(QuantizedWeight(packed, format, weight.shape)), ggml_values(weight, format))


def test_the_layout() -> None:
    """Byte by byte as the module says; one output and one input of each group, block and step."""
    rng = np.random.default_rng(1)
    scales = rng.normal(size=(20, 3)).astype(np.float16)
    values = rng.integers(0, 256, (20, 3, 32), dtype=np.uint8)
    packed = pack_blocks(scales, values, "q8_0")
    assert packed.shape == (2, 3 * 16 * 34)
    nibbles = pack_blocks(scales, values[..., :16], "q4_0")
    assert nibbles.shape == (2, 3 * 16 * 18)
    for output, block, i in np.ndindex(20, 3, 32):
        group, lane = divmod(output, 16)
        step, j = divmod(i, 4)
        assert packed[group, ((block * 8 + step) * 16 + lane) * 4 + j] == values[output, block, i] ^ 128
        byte = nibbles[group, ((block * 4 + step % 4) * 16 + lane) * 4 + j]
        stored = values[output, block, i % 16]
        assert (byte >> 4 if step >= 4 else byte & 15) == (stored >> 4 if i >= 16 else stored & 15)
        assert packed[group, 3 * 512 :].view(np.float16)[block * 16 + lane] == scales[output, block]
        assert nibbles[group, 3 * 256 :].view(np.float16)[block * 16 + lane] == scales[output, block]


@pytest.mark.parametrize("format", FORMATS)
def test_dequantizing_is_no_matrix_product(format: WeightFormat) -> None:
    """Which some devices round to bfloat16 by default, scales with it."""
    weight = random_weight(np.random.default_rng(2), format, 45, 64)
    jaxpr = jax.make_jaxpr(lambda w: dequantize_weight(w, jnp.float32))(weight)
    assert "dot_general" not in str(jaxpr)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_those_of_the_matrix(format: WeightFormat) -> None:
    weight = random_weight(np.random.default_rng(2), format, 45, 64)
    ids = np.asarray([0, 44, 16, 15, 31, 7, 99, -3], np.int32)
    rows = jax.jit(take_rows, static_argnums=2)(weight, ids, jnp.float32)
    np.testing.assert_array_equal(rows, dense(weight)[np.clip(ids, 0, 44)])


@pytest.mark.parametrize("format", FORMATS)
def test_exact_products(isa: str, format: WeightFormat) -> None:
    """With scales that are powers of two nothing is rounded: every bit follows from the integers."""
    rng = np.random.default_rng(3)
    for T, size, outputs in (
        (1, 32, 1),
        (1, 288, 40),
        (2, 64, 16),
        (5, 96, 33),
        (12, 64, 17),
        (13, 64, 48),
        (40, 32, 70),
    ):
        blocks = rng.integers(-127, 128, (T, size // BLOCK, BLOCK))
        blocks[..., 5] = rng.choice([-127, 127], blocks.shape[:2])  # so that the scale of x is 1
        integers = rng.integers(0, 256 if format == "q8_0" else 16, (outputs, size // BLOCK, BLOCK))
        powers = rng.integers(-3, 4, (outputs, size // BLOCK))
        scales = np.float16(2.0) ** powers.astype(np.float16)
        stored = integers if format == "q8_0" else integers[..., :16] | integers[..., 16:] << 4
        weight = QuantizedWeight(
            jnp.asarray(pack_blocks(scales, stored.astype(np.uint8), format)), format, (outputs, size)
        )
        signed = integers.astype(np.uint8).view(np.int8).astype(int) if format == "q8_0" else integers - 8
        expected = np.einsum("tbi,obi,ob->to", blocks, signed, 2.0**powers)
        x = jnp.asarray(blocks.reshape(T, size), jnp.float32)
        (got,) = linear(x, [weight], implementation="native")
        np.testing.assert_array_equal(got, expected, err_msg=f"{T} {size} {outputs}")


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.float16), ids=lambda d: d.__name__)
def test_every_form(isa: str, dtype: jnp.dtype) -> None:
    """Biases, norm, SwiGLU, residual and parts of several formats, for 1 to 40 tokens (of a tile, and of several)."""
    rng = np.random.default_rng(4)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    for T, size, outputs in ((1, 64, 40), (3, 32, 5), (14, 160, 33), (40, 64, 96)):
        x = 3 * draw(T, size)
        norm, biases, residual = draw(size), [draw(outputs), None, draw(3)], draw(T, outputs)
        weights = [
            random_weight(rng, "q8_0", outputs, size),
            random_weight(rng, "q4_0", outputs, size),
            jnp.asarray(rng.normal(size=(3, size)) / size, dtype),
        ]
        denses = [dense(weights[0]), dense(weights[1]), np.float64(weights[2])]
        plain, wide = rounded(np.float32(x)), np.float64(x)
        normed = wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 1e-5) * np.float64(norm)
        rounded_norm = rounded(np.float32(normed))
        ys = [
            plain @ denses[0].T + np.float64(biases[0]),
            plain @ denses[1].T,
            wide @ denses[2].T + np.float64(biases[2]),
        ]
        gate, up = rounded_norm @ denses[0].T + np.float64(biases[0]), rounded_norm @ denses[1].T
        one, two = weights[:1], weights[:2]
        how = {"implementation": "native"}
        # The norm's last bit may move a value of x over the edge between two integers.
        cases = [
            (ys, linear(x, weights, biases, **how), 0),
            ([ys[0] + np.float64(residual)], linear(x, one, biases[:1], residual=residual, **how), 0),
            ([ys[0] - np.float64(biases[0])], linear(x, one, out_dtype=jnp.float32, **how), 0),
            (
                [gate / (1 + np.exp(-gate)) * up],
                linear(x, two, biases[:2], norm=norm, eps=1e-5, swiglu=True, **how),
                2e-3,
            ),
        ]
        for expected, got, extra in cases:
            for want, y in zip(expected, got, strict=True):
                error = np.abs(np.float64(y) - want).max() / (1 + np.abs(want).max())
                assert error < 8 * float(jnp.finfo(y.dtype).eps) + extra, (T, size, outputs)


@pytest.mark.parametrize("format", FORMATS)
def test_a_token_does_not_depend_on_its_neighbours(isa: str, format: WeightFormat) -> None:
    """To the last bit: what a token gets alone, it gets among any number of others."""
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(131, 96)), jnp.bfloat16)
    weights = [random_weight(rng, format, 50, 96) for _ in range(2)]
    how = {"norm": jnp.ones(96, jnp.bfloat16), "eps": 1e-5, "swiglu": True, "implementation": "native"}
    (together,) = linear(x, weights, **how)
    for start, stop in ((0, 1), (3, 5), (7, 20), (11, 36), (60, 131)):
        (alone,) = linear(x[start:stop], weights, **how)
        np.testing.assert_array_equal(np.asarray(alone), np.asarray(together[start:stop]))
    (part,) = linear(x, weights, num_tokens=jnp.int32(14), **how)
    np.testing.assert_array_equal(np.asarray(part[:14]), np.asarray(together[:14]))


@pytest.mark.parametrize("format", FORMATS)
def test_instruction_sets_agree(format: WeightFormat) -> None:
    """Integers are exact on all; sums of blocks differ in their last bits, where one has no fused multiply-add."""
    if (reason := native.why_unavailable()) is not None:
        pytest.skip(reason)
    rng = np.random.default_rng(6)
    x, weight = jnp.asarray(rng.normal(size=(13, 576)), jnp.float32), random_weight(rng, format, 70, 576)
    best = native.instruction_set()
    runnable = filter(native.use_instruction_set, native.INSTRUCTION_SETS)  # switches to each in turn
    results = [np.asarray(linear(x, [weight], implementation="native")[0]) for _ in runnable]
    native.use_instruction_set(best)
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=0, atol=2e-6 * np.abs(results[0]).max())


@pytest.mark.parametrize("format", FORMATS)
def test_xla_multiplies_as_if_dense(format: WeightFormat) -> None:
    rng = np.random.default_rng(7)
    x, weight = jnp.asarray(rng.normal(size=(9, 128)), jnp.float32), random_weight(rng, format, 37, 128)
    (got,) = jax.jit(lambda x, w: linear(x, [w]))(x, weight)
    np.testing.assert_allclose(got, np.float64(x) @ dense(weight).T, rtol=1e-5, atol=1e-6)
    assert got.shape == (9, 37)


@pytest.mark.parametrize("format", FORMATS)
def test_extreme_values(isa: str, format: WeightFormat) -> None:
    """Zeros and subnormals are harmless; NaN and infinity reach the result of their token, and of no other."""
    weight = random_weight(np.random.default_rng(8), format, 20, 64)
    rows = np.ones((6, 64), np.float32)
    rows[0], rows[1, :40], rows[2], rows[3, 33], rows[4, 2] = 0, 0, 1e-42, np.nan, np.inf
    (got,) = linear(jnp.asarray(rows), [weight], implementation="native")
    np.testing.assert_array_equal(got[0], 0)
    np.testing.assert_allclose(got[1], rounded(rows[1:2])[0] @ dense(weight).T, rtol=1e-5, atol=1e-6)
    assert np.abs(got[2]).max() < 1e-30
    assert np.isnan(got[3]).all() and not np.isfinite(got[4]).any()
    np.testing.assert_allclose(got[5], rounded(rows[5:])[0] @ dense(weight).T, rtol=1e-5, atol=1e-6)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="has 33 inputs, but q8_0 needs a multiple of 32"):
        quantize_weight(np.zeros((4, 33), np.float32), "q8_0")
    weight = random_weight(np.random.default_rng(9), "q4_0", 20, 64)
    with pytest.raises(ValueError, match=r"weight is q4_0\[20, 64\], but x has 32 values"):
        linear(jnp.zeros((2, 32)), [weight])
    wrong = QuantizedWeight(weight.packed[:1], "q4_0", (20, 64))
    with pytest.raises(ValueError, match=r"are uint8\[1, 576\], but must be uint8\[2, 576\]"):
        linear(jnp.zeros((2, 64)), [wrong])
