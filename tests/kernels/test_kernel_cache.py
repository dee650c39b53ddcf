"""Writing and copying KV, and that programs which do so neither copy a pool nor work in pool-sized temporaries."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged_kernels import (
    copy_blocks,
    gather_blocks,
    paged_attention,
    pool_dtype,
    quantize,
    scatter_blocks,
    write_kv,
    write_quantized_kv,
)
from jaxpaged_kernels.cache import from_storage, to_storage

DTYPES = ["float32", "bfloat16", "float16"]
QUANTIZED = ["int8", "float8_e4m3fn"]
BLOCK, HEADS, DIM = 4, 2, 8


def random_pool(seed: int, dtype: str, blocks: int = 6) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal((blocks, BLOCK, HEADS, DIM))
    return to_storage(jnp.asarray(values, dtype), pool_dtype(dtype))


def ids(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv(dtype: str) -> None:
    pools = random_pool(0, dtype), random_pool(1, dtype)
    k, v = (jnp.asarray(np.random.default_rng(i).standard_normal((6, HEADS, DIM)), dtype) for i in (2, 3))
    slots = [5, 24, 0, 23, -1, 2**31 - 1]  # 24 slots: three of these are outside
    out = write_kv(k, v, *pools, ids(*slots))
    for new, pool, result in zip((k, v), pools, out, strict=True):
        expected = np.asarray(from_storage(pool, jnp.dtype(dtype))).copy()
        for token, slot in enumerate(slots):
            if 0 <= slot < 24:
                expected[slot // BLOCK, slot % BLOCK] = new[token]
        assert result.dtype == pool.dtype
        np.testing.assert_array_equal(from_storage(result, jnp.dtype(dtype)), expected)


def test_write_kv_into_a_plain_bfloat16_pool() -> None:
    pool = jnp.zeros((2, BLOCK, HEADS, DIM), jnp.bfloat16)
    k = jnp.full((1, HEADS, DIM), 1.5, jnp.bfloat16)
    k_pool, v_pool = write_kv(k, 2 * k, pool, pool, ids(6))
    np.testing.assert_array_equal(k_pool, pool.at[1, 2].set(1.5))
    np.testing.assert_array_equal(v_pool, pool.at[1, 2].set(3))


@pytest.mark.parametrize("raw_bits", [True, False], ids=["pool_dtype", "plain"])
@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("new_dtype", DTYPES)
def test_write_quantized_kv(new_dtype: str, dtype: str, raw_bits: bool) -> None:
    stored_as = pool_dtype(dtype) if raw_bits else jnp.dtype(dtype)
    pools = [jnp.zeros((6, BLOCK, HEADS, DIM), stored_as) for _ in "kv"]
    scales = [jnp.full((6, BLOCK, HEADS), jnp.nan, jnp.float32) for _ in "kv"]
    new = [jnp.asarray(np.random.default_rng(i).standard_normal((6, HEADS, DIM)), new_dtype) for i in (2, 3)]
    slots = [5, 24, 0, 23, -1, 2**31 - 1]  # 24 slots: three of these are outside
    out = jax.jit(write_quantized_kv)(*new, *pools, *scales, ids(*slots))
    for x, pool, new_scales in zip(new, out[:2], out[2:], strict=True):
        stored, expected_scales = (np.asarray(part) for part in jax.jit(quantize, static_argnums=1)(x, dtype))
        values = np.asarray(from_storage(pool, jnp.float32)).reshape(24, HEADS, DIM)
        flat_scales = np.asarray(new_scales).reshape(24, HEADS)
        assert pool.dtype == stored_as and new_scales.dtype == jnp.float32
        for token, slot in enumerate(slots):
            if 0 <= slot < 24:
                np.testing.assert_array_equal(values[slot], stored[token].astype(np.float32))
                np.testing.assert_array_equal(flat_scales[slot], expected_scales[token])
        others = np.setdiff1d(np.arange(24), slots)
        assert not values[others].any() and np.isnan(flat_scales[others]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks(dtype: str) -> None:
    pools = [random_pool(0, dtype), random_pool(1, dtype, blocks=9)]
    taken = gather_blocks(pools, ids(5, 0, 5))
    for pool, blocks in zip(pools, taken, strict=True):
        np.testing.assert_array_equal(blocks, np.asarray(pool)[[5, 0, 5]])
    for pool, result in zip(pools, scatter_blocks(pools, taken, ids(2, 99, -1)), strict=True):
        expected = np.asarray(pool).copy()
        expected[2] = expected[5]
        np.testing.assert_array_equal(result, expected)


def test_copies_read_before_they_write() -> None:
    pool = random_pool(0, "float32")
    (out,) = copy_blocks([pool], ids(1, 2, 3, 0), ids(2, 1, 4, 6))
    expected = np.asarray(pool)[[0, 2, 1, 3, 3, 5]]
    np.testing.assert_array_equal(out, expected)


def test_pool_dtype() -> None:
    assert pool_dtype("bfloat16", "cpu") == jnp.uint16
    assert pool_dtype("bfloat16", "gpu") == pool_dtype(jnp.bfloat16, "tpu") == jnp.bfloat16
    assert pool_dtype("float8_e4m3fn", "cpu") == jnp.uint8
    assert pool_dtype("float8_e4m3fn", "gpu") == jnp.float8_e4m3fn
    assert pool_dtype(jnp.float16, "cpu") == jnp.float16
    assert pool_dtype("int8", "cpu") == pool_dtype("int8", "gpu") == jnp.int8
    assert pool_dtype(np.float32, "cpu") == jnp.float32


def test_arguments_that_do_not_fit() -> None:
    pool, k = random_pool(0, "float32"), jnp.zeros((3, HEADS, DIM))
    with pytest.raises(ValueError, match="v is bfloat16 but its pool is float32"):
        write_kv(k, k.astype(jnp.bfloat16), pool, pool, ids(0, 1, 2))
    with pytest.raises(ValueError, match=r"k is \(3, 2, 8\) and slots \(2,\)"):
        write_kv(k, k, pool, pool, ids(0, 1))
    with pytest.raises(ValueError, match="1 arrays of blocks were given for 2 pools"):
        scatter_blocks([pool, pool], [pool[:1]], ids(0))
    with pytest.raises(ValueError, match="blocks are"):
        scatter_blocks([pool], [pool[:2]], ids(0))


def test_quantized_arguments_that_do_not_fit() -> None:
    k, pool, scales = (
        jnp.zeros((3, HEADS, DIM)),
        jnp.zeros((6, BLOCK, HEADS, DIM), jnp.int8),
        jnp.zeros((6, BLOCK, HEADS)),
    )
    with pytest.raises(ValueError, match=r"v_scales is float32\[6, 4\], but a pool of \[6, 4, 2, 8\] needs"):
        write_quantized_kv(k, k, pool, pool, scales, scales[..., 0], ids(0, 1, 2))
    with pytest.raises(ValueError, match="k_scales is float16"):
        write_quantized_kv(k, k, pool, pool, scales.astype(jnp.float16), scales, ids(0, 1, 2))
    with pytest.raises(ValueError, match="the pool of k is float32, but must be int8 or float8_e4m3fn: use write_kv"):
        write_quantized_kv(k, k, pool.astype(jnp.float32), pool, scales, scales, ids(0, 1, 2))
    with pytest.raises(ValueError, match=r"k is \(3, 2, 8\) and slots \(2,\)"):
        write_quantized_kv(k, k, pool, pool, scales, scales, ids(0, 1))
    with pytest.raises(ValueError, match="k is float32 but its pool is int8: cast before writing"):
        write_kv(k, k, pool, pool, ids(0, 1, 2))


# Large enough that a copy of one pool (3.1 or 1.6 MB) stands out.
LAYERS, BLOCKS, BLOCK_SIZE, NUM_HEADS, KV_HEADS, HEAD_DIM, ROWS = 3, 256, 16, 9, 3, 64, 4
Step = Callable[..., tuple[list[jax.Array], jax.Array | None]]


def empty_pools(dtype: str, kv_dtype: str | None = None) -> list[jax.Array]:
    """K and V of each layer, and their scales where `kv_dtype` is quantized."""
    shape = (BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    scales = [jnp.zeros(shape[:3])] * 2 if kv_dtype else []
    return [x + 0 for _ in range(LAYERS) for x in [*[jnp.zeros(shape, pool_dtype(kv_dtype or dtype))] * 2, *scales]]


def write(x: jax.Array, layer: list[jax.Array], slots: jax.Array) -> tuple[jax.Array, ...]:
    return (write_kv if len(layer) == 2 else write_quantized_kv)(x, x, *layer, slots)


def layers(pools: list[jax.Array]) -> list[list[jax.Array]]:
    count = len(pools) // LAYERS
    return [pools[i : i + count] for i in range(0, len(pools), count)]


def compile_memory(step: Callable, pools: list[jax.Array], *arguments: jax.Array) -> tuple[int, int]:
    """(bytes of temporaries, bytes of outputs that share memory with inputs) of `step`, its pools donated."""
    memory = jax.jit(step, donate_argnums=0).lower(pools, *arguments).compile().memory_analysis()
    return memory.temp_size_in_bytes, memory.alias_size_in_bytes


KINDS = [(dtype, None) for dtype in DTYPES] + [("bfloat16", kv_dtype) for kv_dtype in QUANTIZED]


@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS)
def test_writes_are_in_place(dtype: str, kv_dtype: str | None) -> None:
    def write_all(pools: list[jax.Array], k: jax.Array, slots: jax.Array) -> list[jax.Array]:
        return [pool for layer in layers(pools) for pool in write(k, layer, slots)]

    pools = empty_pools(dtype, kv_dtype)
    temporaries, aliased = compile_memory(write_all, pools, jnp.zeros((32, KV_HEADS, HEAD_DIM), dtype), ids(*range(32)))
    assert aliased == sum(pool.nbytes for pool in pools)
    assert temporaries < pools[0].nbytes / 16


@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS)
def test_copies_are_in_place(dtype: str, kv_dtype: str | None) -> None:
    pools = empty_pools(dtype, kv_dtype)
    temporaries, aliased = compile_memory(copy_blocks, pools, ids(1, 2), ids(3, 4))
    assert aliased == sum(pool.nbytes for pool in pools)
    assert temporaries < pools[0].nbytes / 16


@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS)
def test_swaps_are_in_place(dtype: str, kv_dtype: str | None) -> None:
    pools = empty_pools(dtype, kv_dtype)
    blocks = [jnp.zeros((2, *pool.shape[1:]), pool.dtype) for pool in pools]
    temporaries, aliased = compile_memory(scatter_blocks, pools, blocks, ids(3, 4))
    assert aliased == sum(pool.nbytes for pool in pools)
    assert temporaries < pools[0].nbytes / 16
    temporaries = jax.jit(gather_blocks).lower(pools, ids(3, 4)).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < pools[0].nbytes / 16


@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS)
@pytest.mark.parametrize("num_tokens", [ROWS, 48], ids=["decode", "mixed"])
def test_a_step_of_layers_is_in_place(dtype: str, kv_dtype: str | None, num_tokens: int) -> None:
    """Writing and attending in every layer leaves one buffer for each pool, and reads it without a converted copy."""
    decode_only = num_tokens == ROWS

    def step(
        pools: list[jax.Array], x: jax.Array, slots: jax.Array, tables: jax.Array, lens: jax.Array, starts: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        out = []
        for layer in layers(pools):
            k_pool, v_pool, *scales = write(x[:, :KV_HEADS], layer, slots)
            out += [k_pool, v_pool, *scales]
            attend = functools.partial(paged_attention, scale=1.0, decode_only=decode_only, implementation="xla")
            names = ("k_scales", "v_scales") if scales else ()
            x = x + attend(x, k_pool, v_pool, tables, lens, starts, 1, **dict(zip(names, scales, strict=True)))
        return out, x

    pools = empty_pools(dtype, kv_dtype)
    temporaries, aliased = compile_memory(
        step,
        pools,
        jnp.zeros((num_tokens, NUM_HEADS, HEAD_DIM), dtype),
        jnp.zeros(num_tokens, jnp.int32),
        jnp.zeros((ROWS, 4096), jnp.int32),  # as wide as 65,536 tokens: what is not used must cost nothing
        jnp.zeros(ROWS, jnp.int32),
        jnp.zeros(ROWS + 1, jnp.int32),
    )
    assert aliased == sum(pool.nbytes for pool in pools)
    assert temporaries < sum(pool.nbytes for pool in pools) / 4
