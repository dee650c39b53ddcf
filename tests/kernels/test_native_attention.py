"""The native CPU kernels over every instruction set that this processor has, and what they alone promise: results that
do not depend, in any bit, on batch, chunks or blocks, and pools that are written where they are.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from paged_case import PagedCase, Rows, make_case
from pairwise import pairwise

from jaxpaged_kernels import native, paged_attention, pool_dtype, rotate_and_write_kv

SCALE = 0.3
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
SINKS = np.linspace(-2, 3, 32, dtype=np.float32)

# Around tiles of 64 keys and spans of 512, and around tiles of tokens; long rows of few tokens are split over spans.
LONG: Rows = [(1100, 1), (513, 1), (512, 1), (65, 1), (64, 1), (1, 1), (1030, 4), (700, 130), (0, 0), (63, 63), (1, 1)]


@functools.cache
def attention(**options: Any) -> Any:
    return jax.jit(functools.partial(paged_attention, scale=SCALE, implementation="native", **options))


def check(case: PagedCase, *, sinks: npt.NDArray | None = None, decode_only: bool = False, **options: Any) -> None:
    attend: Any = functools.partial(paged_attention, scale=SCALE, implementation="native", **options)
    out = jax.jit(functools.partial(attend, decode_only=decode_only, sinks=sinks))(*case.arguments, **case.scales)
    tolerance = TOLERANCE[str(out.dtype)]
    expected = case.expected(SCALE, sinks=sinks, **options)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=tolerance)


COMBINATIONS = pairwise(
    {
        "dtype": ["float32", "bfloat16", "float16"],
        "kv_dtype": [None, "int8", "float8_e4m3fn"],
        "head_dim": [64, 80, 96, 128, 20, 7],  # the last two fill no vector
        "group": [1, 3, 7, 16],
        "block_size": [16, 48, 1],
        "options": [{}, {"window": 70}, {"window": 1}, {"soft_cap": 1.5}, {"sinks": SINKS}],
    }
)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(str(v)[:12] for v in c.values()))
def test_combinations(isa: str, combination: dict[str, Any]) -> None:
    rows: Rows = [(130, 1), (64, 1), (1, 1), (0, 0), (90, 12), (7, 7)]
    num_heads = combination["group"] * 2
    options = dict(combination["options"])
    if "sinks" in options:
        options["sinks"] = SINKS[:num_heads]
    shape = {name: combination[name] for name in ("dtype", "kv_dtype", "head_dim", "block_size")}
    check(make_case(rows, num_heads=num_heads, num_kv_heads=2, num_tokens=25, **shape), **options)


@pytest.mark.parametrize("options", [{}, {"sinks": SINKS[:3]}, {"window": 600, "soft_cap": 5.0}], ids=str)
@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 32), ("bfloat16", 64)])
def test_many_tiles_and_spans(isa: str, dtype: str, head_dim: int, options: dict[str, Any]) -> None:
    check(make_case(LONG, num_heads=3, num_kv_heads=1, head_dim=head_dim, dtype=dtype), **options)


def test_broken_tables_and_lengths_read_no_other_memory(isa: str) -> None:
    """What is behind a row's keys in its table may be anything, and what is not in the pool is not read."""
    case = make_case([(20, 1), (40, 3)], table_width=12)
    q, k_pool, v_pool, tables, kv_lens, *rest = case.arguments
    used = np.arange(12) * 8 < np.array([[20], [40]])
    garbage = jnp.where(jnp.asarray(used), tables, jnp.asarray([[2**31 - 1], [-(2**31)]], jnp.int32))
    out = attention()(q, k_pool, v_pool, garbage, kv_lens, *rest)
    np.testing.assert_allclose(out, case.expected(SCALE), rtol=1e-5, atol=1e-5)
    beyond = attention()(q, k_pool, v_pool, garbage, kv_lens + 2**30, *rest)
    assert beyond.shape == q.shape


@pytest.mark.parametrize("place", ["k_pool", "v_pool", "q"])
def test_nan_shows(isa: str, place: str) -> None:
    """In the result of the sequence that it is in, and in no other."""
    case = make_case([(20, 1), (40, 1)], num_heads=2, num_kv_heads=1)
    q, k_pool, v_pool, tables, *rest = case.arguments
    slot = (tables[1, 1], 3)
    pools = {"k_pool": k_pool, "v_pool": v_pool}
    if place == "q":
        q = q.at[1, :, 0].set(jnp.nan)
    else:
        pools[place] = pools[place].at[slot].set(jnp.nan)
    out = np.asarray(attention()(q, pools["k_pool"], pools["v_pool"], tables, *rest))
    assert np.isnan(out[1]).all() and np.isfinite(out[0]).all()


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", None), ("bfloat16", None), ("bfloat16", "int8")])
@pytest.mark.parametrize("window", [None, 100])
def test_equal_bits_in_any_chunks_and_blocks(isa: str, dtype: str, kv_dtype: str | None, window: int | None) -> None:
    """A prompt whole, in chunks of several sizes, and token by token as decodes do, alone or beside others."""
    length = 1100
    attend = attention(window=window)

    def case_of(block_size: int) -> PagedCase:
        shape: dict[str, Any] = {
            "num_heads": 6,
            "num_kv_heads": 2,
            "head_dim": 64,
            "dtype": dtype,
            "kv_dtype": kv_dtype,
        }
        return make_case([(length, length), (300, 200)], block_size=block_size, **shape)

    whole = case_of(16)
    expected = np.asarray(attend(*whole.arguments, **whole.scales))
    other_blocks = case_of(7)
    np.testing.assert_array_equal(attend(*other_blocks.arguments, **other_blocks.scales), expected)

    q, k_pool, v_pool, tables, *_ = whole.arguments
    start = 0
    for chunk in (1, 2, 5, 33, 64, 507, 400, 87, 1):
        lens = jnp.asarray([start + chunk, 0], jnp.int32)
        starts = jnp.asarray([0, chunk, chunk], jnp.int32)
        part = attend(q[start : start + chunk], k_pool, v_pool, tables, lens, starts, 0, **whole.scales)
        np.testing.assert_array_equal(part, expected[start : start + chunk])
        start += chunk
    assert start == length

    positions = np.array([0, 62, 63, 64, 511, 512, 800, 1099])
    out = attention(window=window, decode_only=True)(
        q[positions],
        k_pool,
        v_pool,
        jnp.broadcast_to(tables[:1], (len(positions), tables.shape[1])),
        jnp.asarray(positions + 1, jnp.int32),
        jnp.zeros(len(positions) + 1, jnp.int32),
        0,
        **whole.scales,
    )
    np.testing.assert_array_equal(out, expected[positions])


def test_reads_every_fp8_value(isa: str) -> None:
    """With one key its weight is 1, and the result is the value."""
    bits = np.arange(256, dtype=np.uint8)
    pool = jnp.asarray(bits.reshape(1, 1, 1, 256))
    arrays = (jnp.zeros((1, 1, 256)), jnp.zeros_like(pool), pool, jnp.zeros((1, 1), jnp.int32))
    lens, starts, scales = jnp.ones(1, jnp.int32), jnp.asarray([0, 1], jnp.int32), jnp.ones((1, 1, 1))
    out = attention()(*arrays, lens, starts, 1, k_scales=scales, v_scales=scales)
    np.testing.assert_array_equal(np.asarray(out)[0, 0], bits.view(jnp.float8_e4m3fn).astype(np.float32))


def write(v: jax.Array, pools: tuple[jax.Array, ...], slots: list[int]) -> tuple[jax.Array, ...]:
    """The pools after the write of keys and values `v`, without any rotation."""
    table = jnp.ones((v.shape[0], v.shape[2] // 2))
    rotate = functools.partial(rotate_and_write_kv, implementation="native")
    _, pools = jax.jit(rotate)(v, v, v, table, 0 * table, pools, jnp.asarray(slots, jnp.int32))
    return pools


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
def test_quantizes_to_the_nearest(isa: str, stored: str) -> None:
    """Against the casts of numpy and ml_dtypes, for values over the whole range, halfway ones among them."""
    largest = {"int8": 127, "float8_e4m3fn": 448}[stored]
    halfway = {
        "int8": np.arange(-127, 128) / 2,
        "float8_e4m3fn": np.concatenate([np.arange(33) * 2.0**-10, np.arange(16, 33) * 14.0, [-440, -(2.0**-11)]]),
    }[stored]
    random = np.random.default_rng(0).uniform(-largest, largest, 200) * 2.0 ** np.arange(-12, 0).repeat(17)[:200]
    values = np.concatenate([[largest], halfway, random]).astype(np.float32)  # the largest makes the scale 1
    values = np.pad(values, (0, len(values) % 2))
    pool = jnp.zeros((1, 1, 1, len(values)), pool_dtype(stored, "cpu"))
    scale = jnp.zeros((1, 1, 1))
    _, written, _, scales = write(jnp.asarray(values)[None, None], (pool, pool, scale, scale), [0])
    expected = np.floor(values + 0.5) if stored == "int8" else values
    found = np.asarray(written).view(jnp.dtype(stored)).astype(np.float32).ravel()
    np.testing.assert_array_equal(found, expected.astype(jnp.dtype(stored)).astype(np.float32))
    np.testing.assert_allclose(scales, 1, rtol=1e-6)


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_the_scale(isa: str, stored: str, bad: float) -> None:
    v = jnp.ones((1, 2, 40)).at[0, 1, 33].set(bad)
    pool, scale = jnp.zeros((1, 1, 2, 40), pool_dtype(stored, "cpu")), jnp.zeros((1, 1, 2))
    *_, scales = write(v, (pool, pool, scale, scale), [0])
    assert np.isfinite(scales[0, 0, 0]) and not np.isfinite(scales[0, 0, 1])


@pytest.mark.parametrize(
    ("dtype", "stored", "head_dim"),
    [("float32", "float32", 64), ("bfloat16", "bfloat16", 80), ("float16", "float16", 6), ("bfloat16", "int8", 20)],
)
def test_rotates_and_writes(isa: str, dtype: str, stored: str, head_dim: int) -> None:
    """Against rotation as complex numbers in float64; tokens whose slot is not in the pool are dropped."""
    rng = np.random.default_rng(0)
    slots = [5, -1, 11, 12, 0, 2**31 - 1, -(2**31)]
    q, k, v = (jnp.asarray(rng.standard_normal((len(slots), heads, head_dim)), dtype) for heads in (6, 2, 2))
    angles = rng.uniform(-3, 3, (len(slots), head_dim // 2))
    pool = jnp.full((3, 4, 2, head_dim), 7, pool_dtype(stored, "cpu"))
    pools = (pool, pool) + ((jnp.full((3, 4, 2), 7.0),) * 2 if stored == "int8" else ())
    write_all = jax.jit(functools.partial(rotate_and_write_kv, implementation="native"))
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    out, written = write_all(q, k, v, cos, sin, pools, jnp.asarray(slots, jnp.int32))

    def rotated(x: jax.Array) -> npt.NDArray[np.float64]:
        a, b = np.split(np.asarray(x, np.float64), 2, axis=-1)
        turned = (a + 1j * b) * np.exp(1j * angles)[:, None]
        return np.concatenate([turned.real, turned.imag], axis=-1)

    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(np.asarray(out, np.float64), rotated(q), rtol=tolerance, atol=tolerance)
    kept = [0, 2, 4]
    for i, new in ((0, rotated(k)), (1, np.asarray(v, np.float64))):
        flat = np.asarray(written[i]).reshape(12, 2, head_dim).view(jnp.dtype(stored)).astype(np.float64)
        if stored == "int8":
            scales = np.asarray(written[2 + i]).reshape(12, 2, 1)
            flat, tolerance = flat * scales, scales.max()
        np.testing.assert_allclose(flat[[slots[t] for t in kept]], new[kept], rtol=tolerance, atol=tolerance)
        untouched = [slot for slot in range(12) if slot not in slots]
        np.testing.assert_array_equal(
            np.asarray(written[i]).reshape(12, -1)[untouched], np.asarray(pool).reshape(12, -1)[untouched]
        )


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_donated_pools_are_written_where_they_are(stored: str) -> None:
    """A step that writes and attends takes no memory in proportion to the pools."""
    if (reason := native.why_unavailable()) is not None:
        pytest.skip(reason)
    pool = jax.ShapeDtypeStruct((4096, 16, 3, 64), pool_dtype(stored, "cpu"))
    scales = jax.ShapeDtypeStruct(pool.shape[:3], jnp.float32)
    pools = (pool, pool) + ((scales, scales) if stored == "int8" else ())
    q, k = (jax.ShapeDtypeStruct((8, heads, 64), jnp.bfloat16) for heads in (9, 3))
    table = jax.ShapeDtypeStruct((8, 32), jnp.float32)
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)

    def step(pools: Any, q: Any, k: Any, v: Any, table: Any, slots: Any, tables: Any, lens: Any) -> Any:
        q, pools = rotate_and_write_kv(q, k, v, table, table, pools, slots, implementation="native")
        options = dict(zip(("k_scales", "v_scales"), pools[2:], strict=False))
        starts = jnp.arange(9, dtype=jnp.int32)
        attend: Any = functools.partial(paged_attention, scale=SCALE, implementation="native", decode_only=True)
        return attend(q, *pools[:2], tables, lens, starts, 8, **options), pools

    lowered = jax.jit(step, donate_argnums=0).lower(pools, q, k, k, table, ints((8,)), ints((8, 64)), ints((8,)))
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    size = sum(x.size * x.dtype.itemsize for x in pools)
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < 100_000
