"""Every implementation against float64 numpy, with NaN in all slots that no row owns."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import PagedCase, Rows, make_case

from jaxpaged_kernels import paged_attention
from jaxpaged_kernels.api import IMPLEMENTATIONS

SCALE = 0.3
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}

# Lengths around a block of 8 and around the groups of keys that an implementation may walk in.
DECODES: Rows = [(1, 1), (7, 1), (8, 1), (9, 1), (150, 1), (128, 1), (129, 1)]
# Whole prompts, chunks after a cached prefix, a chunk of one token, empty rows in between, more than one tile.
PREFILLS: Rows = [(1, 1), (12, 5), (8, 8), (0, 0), (150, 70), (65, 65), (33, 1), (0, 0)]
MIXED: Rows = [(140, 1), (1, 1), (9, 1), *PREFILLS]


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


def check(case: PagedCase, implementation: str, *, decode_only: bool = False, **options: object) -> None:
    dtype = case.arguments[0].dtype
    attend = jax.jit(
        functools.partial(
            paged_attention, scale=SCALE, decode_only=decode_only, implementation=implementation, **options
        )
    )
    out = attend(*case.arguments)
    assert out.dtype == dtype and out.shape == case.arguments[0].shape
    tolerance = TOLERANCE[str(dtype)]
    expected = case.expected(SCALE, **options)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("block_size", "decode_only"), [(8, False), (8, True), (16, True), (32, True)])
def test_decodes(implementation: str, block_size: int, decode_only: bool) -> None:
    check(make_case(DECODES, block_size=block_size), implementation, decode_only=decode_only)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_prefills(implementation: str, block_size: int) -> None:
    check(make_case(PREFILLS, block_size=block_size, num_decodes=0), implementation)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(2, 2, 64), (6, 3, 80), (9, 3, 64), (4, 1, 128), (14, 2, 16), (16, 8, 16)],
)
def test_heads(implementation: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    check(make_case(MIXED, **shape), implementation)


SINKS = np.linspace(-2, 3, 4, dtype=np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 61},
        {"window": 1000},
        {"soft_cap": 1.5},
        {"sinks": SINKS},
        {"window": 20, "soft_cap": 2.0, "sinks": SINKS},
    ],
    ids=str,
)
def test_options(implementation: str, options: dict[str, object]) -> None:
    check(make_case(MIXED), implementation, **options)


@pytest.mark.parametrize("options", [{"window": 8}, {"window": 20, "soft_cap": 2.0, "sinks": SINKS}], ids=str)
def test_options_of_decodes(implementation: str, options: dict[str, object]) -> None:
    check(make_case(DECODES), implementation, decode_only=True, **options)


@pytest.mark.parametrize(("dtype", "raw_bits"), [("bfloat16", True), ("bfloat16", False), ("float16", False)], ids=str)
def test_16_bit(implementation: str, dtype: str, raw_bits: bool) -> None:
    check(make_case(MIXED, dtype=dtype, raw_bits=raw_bits, num_heads=9, num_kv_heads=3), implementation)


def test_16_bit_row_alone(implementation: str) -> None:
    check(make_case([(40, 1)], dtype="bfloat16"), implementation, decode_only=True)


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
    """Scores in the thousands neither overflow nor lose the largest."""
    case = make_case([(150, 1), (90, 30)])
    q, *rest = case.arguments
    attend = jax.jit(functools.partial(paged_attention, scale=SCALE, implementation=implementation))
    out = attend(q * 1e4, *rest)
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
@given(batch=ragged_rows(), window=st.sampled_from([None, 30]), seed=st.integers(0, 99))
def test_any_batch(batch: tuple[Rows, int], window: int | None, seed: int) -> None:
    rows, num_decodes = batch
    case = make_case(
        rows, num_decodes=num_decodes, num_tokens=TOKENS, table_width=WIDTH, num_heads=2, num_kv_heads=1, seed=seed
    )
    q, k_pool, v_pool, *rest = case.arguments
    spare = ROWS * WIDTH + 3 - k_pool.shape[0]
    k_pool, v_pool = (
        jnp.pad(x, ((0, spare), (0, 0), (0, 0), (0, 0)), constant_values=jnp.nan) for x in (k_pool, v_pool)
    )
    expected = case.expected(SCALE, window)
    for implementation in IMPLEMENTATIONS:
        out = jitted(implementation, window)(q, k_pool, v_pool, *rest)
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
