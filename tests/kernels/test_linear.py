"""`linear` against float64 numpy, over every implementation and every instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged_kernels import best_linear, linear, native

FORMS = ("plain", "three", "norm", "swiglu", "residual", "wide")
# Largest error, in units of the dtype's epsilon times the size of the products: roundings of the result, of the
# normalized x and, for SwiGLU, of both factors.
TOLERANCE = 8
IMPLEMENTATIONS = ("xla", *native.INSTRUCTION_SETS)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "xla":
        yield "xla"
        return
    if (reason := native.why_unavailable()) is not None:
        pytest.skip(reason)
    best = native.instruction_set()
    if not native.use_instruction_set(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield "native"
    native.use_instruction_set(best)


def _case(form: str, T: int, size: int, outputs: int, dtype: jnp.dtype) -> tuple[jax.Array, dict]:
    rng = np.random.default_rng((FORMS.index(form), T, size, outputs))

    def draw(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(scale * rng.normal(size=shape), dtype)

    def weights(count: int, *widths: int) -> list[jax.Array]:
        return [draw(n, size, scale=size**-0.5) for n in (widths or (outputs,) * count)]

    x = draw(T, size, scale=3.0)
    kwargs: dict = {
        "plain": lambda: {"weights": weights(1)},
        "three": lambda: {
            "weights": weights(3, outputs, 3 * outputs + 1, 1),
            "biases": [draw(outputs), None, draw(1)],
        },
        "norm": lambda: {"weights": weights(2), "norm": draw(size), "eps": 1e-5},
        "swiglu": lambda: {
            "weights": weights(2),
            "biases": [draw(outputs), draw(outputs)],
            "norm": draw(size),
            "eps": 1e-5,
            "swiglu": True,
        },
        "residual": lambda: {"weights": weights(1), "biases": [draw(outputs)], "residual": draw(T, outputs)},
        "wide": lambda: {"weights": weights(1), "out_dtype": jnp.float32},
    }[form]()
    return x, kwargs


def _expected(x: jax.Array, kwargs: dict) -> list[np.ndarray]:
    h = np.float64(x)
    if "norm" in kwargs:
        h = h / np.sqrt(np.mean(h**2, axis=1, keepdims=True) + kwargs["eps"]) * np.float64(kwargs["norm"])
    biases = kwargs.get("biases", [None] * len(kwargs["weights"]))
    ys = [
        h @ np.float64(w).T + (0 if b is None else np.float64(b))
        for w, b in zip(kwargs["weights"], biases, strict=True)
    ]
    if kwargs.get("swiglu"):
        ys = [ys[0] / (1 + np.exp(-ys[0])) * ys[1]]
    return [y + np.float64(kwargs["residual"]) for y in ys] if "residual" in kwargs else ys


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.float16), ids=lambda d: d.__name__)
@pytest.mark.parametrize("form", FORMS)
def test_equals_float64(implementation: str, form: str, dtype: jnp.dtype) -> None:
    """Token counts on both sides of a tile's, a group's and a task's; rows that are no multiple of a vector."""
    for T, size, outputs in ((1, 64, 40), (2, 7, 5), (7, 100, 33), (26, 1024, 8), (130, 48, 70)):
        x, kwargs = _case(form, T, size, outputs, dtype)
        got = linear(x, kwargs.pop("weights"), implementation=implementation, **kwargs)
        expected = _expected(x, _case(form, T, size, outputs, dtype)[1])
        assert len(got) == len(expected)
        for y, want in zip(got, expected, strict=True):
            assert y.dtype == (jnp.float32 if form == "wide" else dtype)
            error = np.abs(np.float64(y) - want).max() / (1 + np.abs(want).max())
            assert error < TOLERANCE * float(jnp.finfo(dtype).eps), (T, size, outputs)


def test_a_token_does_not_depend_on_its_neighbours(implementation: str) -> None:
    """To the last bit: what a token gets alone, it gets among any number of others."""
    if implementation == "xla":
        pytest.skip("XLA picks other ways for other sizes")
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        x, kwargs = _case("swiglu", 40, 100, 33, dtype)
        (together,) = linear(x, implementation=implementation, **kwargs)
        for start, stop in ((0, 1), (3, 5), (7, 13), (11, 40)):
            (alone,) = linear(x[start:stop], implementation=implementation, **kwargs)
            np.testing.assert_array_equal(np.asarray(alone), np.asarray(together[start:stop]))


def test_extreme_values(implementation: str) -> None:
    """SiLU of large numbers neither overflows nor loses its sign, and NaN and infinity are not lost."""
    gate = jnp.asarray([[-1e4], [-90.0], [-1.0], [0.0], [90.0], [1e4], [jnp.nan]], jnp.float32)
    one = jnp.ones((1, 1), jnp.float32)
    (got,) = linear(gate, [one, jnp.zeros((1, 1))], [None, jnp.ones(1)], swiglu=True, implementation=implementation)
    with np.errstate(over="ignore"):
        expected = np.float64(gate) / (1 + np.exp(-np.float64(gate)))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-30)
    (infinite,) = linear(
        jnp.asarray([[jnp.inf]], jnp.bfloat16), [jnp.ones((3, 1), jnp.bfloat16)], implementation=implementation
    )
    assert np.isposinf(np.float32(infinite)).all()


def test_padding_is_left_out(implementation: str) -> None:
    """Results of rows that count do not change, whatever the others hold."""
    x, kwargs = _case("swiglu", 40, 64, 33, jnp.float32)
    (whole,) = linear(x, implementation=implementation, **kwargs)
    for count in (0, 1, 7, 40):
        padded = jnp.where(jnp.arange(40)[:, None] < count, x, jnp.nan)
        (part,) = linear(padded, num_tokens=jnp.int32(count), implementation=implementation, **kwargs)
        np.testing.assert_allclose(part[:count], whole[:count], rtol=1e-5, atol=1e-5)


def test_inside_jit_and_without_tokens(implementation: str) -> None:
    x, kwargs = _case("norm", 9, 64, 40, jnp.float32)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        return sum(linear(2 * x, implementation=implementation, **kwargs))

    np.testing.assert_allclose(run(x), sum(_expected(2 * x, kwargs)), rtol=1e-4, atol=1e-4)
    assert [y.shape for y in linear(x[:0], implementation=implementation, **kwargs)] == [(0, 40), (0, 40)]
    (empty,) = linear(jnp.zeros((2, 0)), [jnp.zeros((4, 0))], implementation=implementation)
    np.testing.assert_array_equal(empty, np.zeros((2, 4)))


def test_best_is_native_where_it_is_built() -> None:
    assert best_linear() == ("xla" if native.why_unavailable() else "native")


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"implementation": "triton"}, "use one of native, xla"),
        ({"weights": []}, "give 1 to 3"),
        ({"weights": [jnp.zeros((3, 5))]}, r"weight is float32\[3, 5\].*needs float32\[3, 4\]"),
        ({"weights": [jnp.zeros((3, 4), jnp.bfloat16)]}, "weight is bfloat16"),
        ({"biases": [jnp.zeros(2)]}, r"bias is float32\[2\].*needs float32\[3\]"),
        ({"norm": jnp.zeros(3)}, "norm is"),
        ({"residual": jnp.zeros((2, 4))}, "residual is"),
        ({"swiglu": True}, "two weights of one shape"),
        ({"weights": [jnp.zeros((3, 4))] * 2, "residual": jnp.zeros((2, 3))}, "exactly one weight"),
        ({"out_dtype": jnp.bfloat16}, "out_dtype is bfloat16"),
        ({"x": jnp.zeros((2, 4), jnp.int32)}, r"x is int32\[2, 4\]"),
    ),
)
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    arguments = {"x": jnp.zeros((2, 4)), "weights": [jnp.zeros((3, 4))]} | change
    with pytest.raises(ValueError, match=message):
        linear(arguments.pop("x"), arguments.pop("weights"), arguments.pop("biases", None), **arguments)
