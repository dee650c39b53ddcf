"""The Triton kernels, interpreted, where they alone have edges: splits, tiles of each GPU, tiles that are not full."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_case import PagedCase, Rows, make_case

from jaxpaged_kernels import paged_attention, triton
from jaxpaged_kernels.target import Target

SCALE = 0.3
SINKS = np.array([-1.0, 2.0], np.float32)
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def pretend(monkeypatch: pytest.MonkeyPatch, cores: int, capability: tuple[int, int] | None = None) -> None:
    """Makes the kernels choose as for such a GPU; they are interpreted all the same."""
    monkeypatch.setattr(triton, "current_target", lambda: Target("cpu", "pretended", capability, cores))


def check(case: PagedCase, *, decode_only: bool = False, **options: Any) -> None:
    attend = functools.partial(
        paged_attention, scale=SCALE, decode_only=decode_only, implementation="triton", **options
    )
    out = jax.jit(attend)(*case.arguments, **case.scales)
    tolerance = TOLERANCE[str(out.dtype)]
    expected = case.expected(SCALE, **options)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"sinks": SINKS}, {"window": 400, "sinks": SINKS}], ids="-".join)
def test_many_splits(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Enough cores for up to 8 splits a row; rows of 0, 1, a share of keys and one more, and all of them."""
    pretend(monkeypatch, cores=132)
    rows: Rows = [(701, 1), (1, 1), (128, 1), (129, 1), (500, 1)]
    check(make_case(rows, num_heads=2, num_kv_heads=1, table_width=100), decode_only=True, **options)


@pytest.mark.parametrize(
    ("length", "window"),
    [
        pytest.param(641, None, id="a key more than 4 splits of a multiple of a step"),
        pytest.param(700, 640, id="window that begins inside of a step"),
    ],
)
def test_the_last_split_reaches_the_last_key(monkeypatch: pytest.MonkeyPatch, length: int, window: int | None) -> None:
    pretend(monkeypatch, cores=1)
    case = make_case([(length, 1)], num_heads=2, num_kv_heads=1)
    check(case, decode_only=True, window=window)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
def test_tiles_of_other_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    pretend(monkeypatch, 8, capability)
    rows: Rows = [(140, 1), (9, 1), (90, 30), (0, 0), (33, 33)]
    check(make_case(rows, num_heads=3, num_kv_heads=1, head_dim=128, dtype="bfloat16", num_tokens=70), window=50)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(48, 2, 8, 48), (64, 1, 16, 16), (2, 1, 72, 1), (5, 1, 160, 8)],
)
def test_shapes_that_fill_no_tile(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Groups of more heads than a tile has rows, odd head sizes, blocks of one slot or not of a power of two."""
    rows: Rows = [(53, 1), (1, 1), (40, 7), (0, 0), (3, 1)]
    check(make_case(rows, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size))


def test_every_token_is_in_one_tile_of_a_prefill() -> None:
    """Those of decodes in none; padding in tiles without keys, which write its zeros."""
    rng = np.random.default_rng(0)
    num_rows, num_tokens = 5, 24
    tile_map = jax.jit(triton._tile_map, static_argnums=(0, 1))
    for trial in range(60):
        tile_tokens = (1, 3, 8, 64)[trial % 4]
        num_decodes = int(rng.integers(0, num_rows + 1))
        queries = np.ones(num_rows, np.int32)
        left = num_tokens - num_decodes
        for row in range(num_decodes, num_rows):
            queries[row] = rng.integers(0, left + 1) if trial % 3 else min(left, 1)
            left -= queries[row]
        before = rng.integers(0, 50, num_rows)
        starts = np.cumsum([0, *queries]).astype(np.int32)
        kv_lens = np.where(queries > 0, before + queries, 0).astype(np.int32)
        tiles = np.asarray(tile_map(tile_tokens, num_tokens, kv_lens, starts, num_decodes))
        owner = [row for row, count in enumerate(queries) for _ in range(count)]
        seen = np.zeros(num_tokens, int)
        for row, first, tokens, position in tiles.T:
            assert 0 <= tokens <= tile_tokens
            for i in range(tokens):
                seen[first + i] += 1
                if first + i < starts[-1]:
                    assert owner[first + i] == row
                    assert position + i == kv_lens[row] - (starts[row + 1] - (first + i))
                else:
                    assert position + i < 0  # sees no key
        assert (seen[:num_decodes] == 0).all() and (seen[num_decodes:] == 1).all()


@pytest.mark.parametrize("implementation", ["xla", "triton", "reference"])
@pytest.mark.parametrize("decode_only", [True, False])
def test_slots_behind_the_window_may_hold_anything(implementation: str, decode_only: bool) -> None:
    rows: Rows = [(150, 1), (70, 1)] if decode_only else [(150, 1), (90, 30)]
    case = make_case(rows)
    window, block_size = 20, 8
    q, k_pool, v_pool, tables, *rest = case.arguments
    poison = [
        int(tables[row, block])
        for row, (kv_len, queries) in enumerate(rows)
        for block in range((kv_len - queries - window + 1) // block_size)
    ]
    assert len(poison) > 10
    k_pool, v_pool = (pool.at[jnp.asarray(poison)].set(jnp.nan) for pool in (k_pool, v_pool))
    attend = functools.partial(
        paged_attention, scale=0.3, window=window, decode_only=decode_only, implementation=implementation
    )
    out = jax.jit(attend)(q, k_pool, v_pool, tables, *rest)
    np.testing.assert_allclose(np.asarray(out, np.float64), case.expected(0.3, window), rtol=1e-5, atol=1e-5)
