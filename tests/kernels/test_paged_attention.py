"""Every implementation against float64 numpy, with NaN in all slots that no row owns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import PagedCase, Rows, make_case
from pairwise import pairwise

from jaxpaged_kernels import paged_attention
from jaxpaged_kernels.api import IMPLEMENTATIONS

SCALE = 0.3
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
# Of the norm of the result: an int8 is off by at most 1/254 of its vector's largest value, an fp8 by 1/16 of itself.
QUANTIZATION_ERROR = {"int8": 0.02, "float8_e4m3fn": 0.06}

# Lengths around a block of 8 and around the groups of keys that an implementation may walk in.
DECODES: Rows = [(1, 1), (7, 1), (8, 1), (9, 1), (150, 1), (128, 1), (129, 1)]
# Whole prompts, chunks after a cached prefix, a chunk of one token, empty rows in between, more than one tile.
PREFILLS: Rows = [(1, 1), (12, 5), (8, 8), (0, 0), (150, 70), (65, 65), (33, 1), (0, 0)]
MIXED: Rows = [(140, 1), (1, 1), (9, 1), *PREFILLS]
SINKS = np.linspace(-2, 3, 16, dtype=np.float32)


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


def check(case: PagedCase, implementation: str, *, decode_only: bool = False, **options: object) -> npt.NDArray:
    """The result, which must be near the expected one."""
    dtype = case.arguments[0].dtype
    attend = jax.jit(
        functools.partial(
            paged_attention, scale=SCALE, decode_only=decode_only, implementation=implementation, **options
        )
    )
    out = attend(*case.arguments, **case.scales)
    assert out.dtype == dtype and out.shape == case.arguments[0].shape
    tolerance = TOLERANCE[str(dtype)]
    expected = case.expected(SCALE, **options)
    result = np.asarray(out, np.float64)
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)
    return result


@pytest.mark.parametrize("decode_only", [False, True])
def test_decodes(implementation: str, decode_only: bool) -> None:
    check(make_case(DECODES), implementation, decode_only=decode_only)


def test_prefills(implementation: str) -> None:
    check(make_case(PREFILLS, num_decodes=0), implementation)


def test_all_options_together(implementation: str) -> None:
    check(make_case(MIXED), implementation, window=20, soft_cap=2.0, sinks=SINKS[:4])


def batch(kind: str, block_size: int) -> Rows:
    """Rows of lengths 0, 1, those around a block, and several blocks; few query tokens, as the reference is slow."""
    long = max(2 * block_size + 3, 150)
    lengths = [1, block_size - 1, block_size, block_size + 1, long]
    decodes: Rows = [(length, 1) for length in lengths]
    # Chunks behind a cached prefix, a whole prompt, a chunk of one token.
    chunks: Rows = [(0, 0), (block_size, 5), (block_size + 1, 2), (7, 7), (long, 6), (0, 0), (1, 1)]
    return {"decode_only": decodes, "mixed": [*decodes[::-1], *chunks], "prefill": chunks}[kind]


COMBINATIONS = pairwise(
    {
        "batch": ["decode_only", "mixed", "prefill"],
        "dtype": ["float32", "bfloat16", "float16"],
        "kv_dtype": [None, "int8", "float8_e4m3fn"],
        "head_dim": [64, 80, 96, 128, 256],
        "group": [1, 2, 3, 4, 7, 8, 16],
        "block_size": [8, 16, 32, 64, 128],
        "options": ["", "window", "short window", "soft cap", "sinks"],
    }
)
OPTIONS: dict[str, dict[str, object]] = {
    "": {},
    "window": {"window": 61},
    "short window": {"window": 1},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": SINKS},
}


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_combinations(implementation: str, combination: dict[str, Any]) -> None:
    kind, group = combination["batch"], combination["group"]
    num_kv_heads = 1 if group == 16 else 2
    case = make_case(
        batch(kind, combination["block_size"]),
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        num_decodes=0 if kind == "prefill" else None,
        **{name: combination[name] for name in ("dtype", "kv_dtype", "head_dim", "block_size")},
    )
    options = dict(OPTIONS[combination["options"]])
    if "sinks" in options:
        options["sinks"] = SINKS[: group * num_kv_heads]
    check(case, implementation, decode_only=kind == "decode_only", **options)


@pytest.mark.parametrize("kv_dtype", sorted(QUANTIZATION_ERROR))
def test_quantized_is_near_exact(implementation: str, kv_dtype: str) -> None:
    """What is lost by quantizing, measured against attention over what the values were before."""
    case = make_case(MIXED, kv_dtype=kv_dtype, head_dim=64)
    out = check(case, implementation)
    exact = case.expected(SCALE, exact=True)
    assert np.linalg.norm(out - exact) < QUANTIZATION_ERROR[kv_dtype] * np.linalg.norm(exact)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", None), ("bfloat16", "float8_e4m3fn")])
def test_raw_bits(implementation: str, dtype: str, kv_dtype: str | None) -> None:
    """Pools as they are kept on a CPU. A kernel for GPUs need not take them, but must not take them for numbers."""
    case = make_case(MIXED, dtype=dtype, kv_dtype=kv_dtype, raw_bits=True, num_heads=9, num_kv_heads=3)
    if implementation == "triton":
        with pytest.raises(NotImplementedError, match="raw bits"):
            check(case, implementation)
    else:
        check(case, implementation)


def test_16_bit_row_alone(implementation: str) -> None:
    check(make_case([(40, 1)], dtype="bfloat16"), implementation, decode_only=True)


def test_small_values_of_quantized_float16(implementation: str) -> None:
    """Weight times scale is below what float16 holds, but all of them together are not."""
    case = make_case([(500, 1)], dtype="float16", kv_dtype="float8_e4m3fn")
    scales = {"k_scales": case.scales["k_scales"], "v_scales": case.scales["v_scales"] * 2.0**-16}
    attend = functools.partial(paged_attention, scale=SCALE, implementation=implementation, decode_only=True)
    out = np.asarray(jax.jit(attend)(*case.arguments, **scales), np.float64) * 2.0**16
    np.testing.assert_allclose(out, case.expected(SCALE), atol=0.01)


def test_padding(implementation: str) -> None:
    """Tokens and rows that are padding give 0, and the width of the tables does not matter."""
    rows = [*MIXED, (0, 0), (0, 0)]
    check(make_case(rows, num_tokens=200, table_width=50), implementation)


def test_only_padding(implementation: str) -> None:
    check(make_case([(0, 0), (0, 0)], num_tokens=4), implementation)


def test_padding_rows_between_decodes(implementation: str) -> None:
    """With decode_only a row without tokens still has a place in q."""
    case = make_case([(5, 1), (170, 1)], num_tokens=4)
    q, k_pool, v_pool, tables, *_ = case.arguments
    spread = jnp.asarray([0, 3, 1, 3])  # rows of the case; 3 is padding
    out = jax.jit(functools.partial(paged_attention, scale=SCALE, decode_only=True, implementation=implementation))(
        q[spread],
        k_pool,
        v_pool,
        jnp.zeros((4, tables.shape[1]), jnp.int32).at[jnp.asarray([0, 2])].set(tables),
        jnp.asarray([5, 0, 170, 0], jnp.int32),
        jnp.zeros(5, jnp.int32),
        0,
    )
    np.testing.assert_allclose(out, case.expected(SCALE)[np.asarray([0, 2, 1, 3])], atol=1e-5)


def test_more_rows_than_tokens(implementation: str) -> None:
    check(make_case([(30, 1), (4, 2), *[(0, 0)] * 20]), implementation)


def test_large_scores(implementation: str) -> None:
    """Scores in the millions neither overflow nor lose the largest."""
    case = make_case([(150, 1), (90, 30)])
    q, *rest = case.arguments
    attend = jax.jit(functools.partial(paged_attention, scale=SCALE, implementation=implementation))
    out = attend(q * 1e6, *rest)
    for token, (row, position) in enumerate([(0, 149), *[(1, 60 + i) for i in range(30)]]):
        for head in range(4):
            best = np.argmax(case.k[row][: position + 1, head // 2] @ case.q[token, head])
            np.testing.assert_allclose(np.asarray(out)[token, head], case.v[row][best, head // 2], atol=1e-3)


ROWS, TOKENS, WIDTH = 6, 48, 24


@functools.cache
def jitted(implementation: str, window: int | None) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(paged_attention, scale=SCALE, window=window, implementation=implementation))


@st.composite
def ragged_rows(draw: st.DrawFn) -> tuple[Rows, int]:
    """Rows that fit in TOKENS, and how many lead as decodes."""
    num_decodes = draw(st.integers(0, ROWS))
    rows: Rows = [(draw(st.integers(1, WIDTH * 8)), 1) for _ in range(num_decodes)]
    left = TOKENS - num_decodes
    for _ in range(draw(st.integers(0, ROWS - num_decodes))):
        queries = draw(st.integers(0, left))
        left -= queries
        kv_len = queries + draw(st.integers(0, WIDTH * 8 - queries)) if queries else 0
        rows.append((kv_len, queries))
    return rows + [(0, 0)] * (ROWS - len(rows)), num_decodes


@settings(max_examples=25, deadline=None)
@given(
    ragged=ragged_rows(),
    options=st.sampled_from([(None, None), (30, "int8")]),
    seed=st.integers(0, 99),
)
def test_any_batch(ragged: tuple[Rows, int], options: tuple[int | None, str | None], seed: int) -> None:
    (rows, num_decodes), (window, kv_dtype) = ragged, options
    case = make_case(
        rows,
        num_decodes=num_decodes,
        num_tokens=TOKENS,
        table_width=WIDTH,
        num_heads=2,
        num_kv_heads=1,
        kv_dtype=kv_dtype,
        num_blocks=ROWS * WIDTH + 3,
        seed=seed,
    )
    expected = case.expected(SCALE, window)
    for implementation in IMPLEMENTATIONS:
        out = jitted(implementation, window)(*case.arguments, **case.scales)
        np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 100])
def test_row_does_not_depend_on_its_neighbours(window: int | None) -> None:
    """Bit for bit: longer neighbours only add masked groups of keys, which change nothing."""
    case = make_case([(20, 1), (300, 1), (129, 1), (1, 1), (260, 1)])
    *arrays, kv_lens, query_starts, num_decodes = case.arguments
    attend = jax.jit(functools.partial(paged_attention, scale=SCALE, window=window, decode_only=True))
    together = attend(*arrays, kv_lens, query_starts, num_decodes)
    for row in range(len(case.rows)):
        alone = attend(*arrays, jnp.where(jnp.arange(5) == row, kv_lens, 0), query_starts, num_decodes)
        np.testing.assert_array_equal(alone[row], together[row])


def test_chunked_prefill_equals_whole() -> None:
    attend = jax.jit(functools.partial(paged_attention, scale=SCALE))
    whole = make_case([(150, 150)])
    q, k_pool, v_pool, tables, *_ = whole.arguments
    parts = []
    for start in (0, 50, 100):
        lens, starts = jnp.asarray([start + 50], jnp.int32), jnp.asarray([0, 50], jnp.int32)
        parts.append(attend(q[start : start + 50], k_pool, v_pool, tables, lens, starts, 0))
    np.testing.assert_allclose(jnp.concatenate(parts), attend(*whole.arguments), rtol=1e-6, atol=1e-6)
