"""The pools hold what was moved into them, and notice when a step has taken them away."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.runner.kv_cache import SWAP_CHUNK, KVCache, PoolShape

LAYERS, BLOCKS = 2, 2 * SWAP_CHUNK + 10


def make_cache(num_host_blocks: int = 0) -> KVCache:
    """Each block holds its own number in every slot, negated in V, plus 1000 a layer; as does the history of tokens."""
    shape = PoolShape(LAYERS, BLOCKS, 2, 1, 4, jnp.dtype(jnp.float32))
    cache = KVCache(shape, jax.devices()[0], num_host_blocks=num_host_blocks, num_rows=4)
    numbers = jnp.broadcast_to(jnp.arange(BLOCKS, dtype=jnp.float32)[:, None, None, None], cache.shape.array)
    cache.pools = [(numbers + 1000 * layer, -numbers - 1000 * layer) for layer in range(LAYERS)]
    history = jnp.broadcast_to(jnp.arange(BLOCKS, dtype=jnp.int32)[:, None], (BLOCKS, 2))
    cache.tokens = cache.tokens._replace(history=history)
    return cache


def contents(cache: KVCache) -> list[int]:
    """The number in each block, the same in all slots, in both arrays of every layer and in the history of tokens."""
    arrays = [x for i, (k, v) in enumerate(cache.pools) for x in (np.asarray(k) - 1000 * i, -np.asarray(v) - 1000 * i)]
    numbers = arrays[0][:, 0, 0, 0]
    for array in arrays:
        assert (array == numbers[:, None, None, None]).all()
    assert (np.asarray(cache.tokens.history) == numbers[:, None]).all()
    return numbers.astype(int).tolist()


def pairs(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, np.int32).reshape(-1, 2)


def test_a_copy_reads_before_it_writes() -> None:
    cache = make_cache()
    cache.copy(pairs((5, 6), (6, 7), (5, 8)))
    cache.copy(pairs())
    expected = list(range(BLOCKS))
    expected[6], expected[7], expected[8] = 5, 6, 5
    assert contents(cache) == expected


def test_blocks_come_back_from_the_host_as_they_went() -> None:
    """More blocks than one call of the swap programs moves, and a last call that is not full."""
    count = SWAP_CHUNK + 3
    cache = make_cache(num_host_blocks=count)
    device, host = np.arange(1, 1 + count), np.random.default_rng(0).permutation(count)
    cache.swap_out(np.stack([device, host], axis=1).astype(np.int32))
    cache.copy(pairs(*((0, int(block)) for block in device[:4])))  # what the blocks hold next
    back = device + count
    cache.swap_in(np.stack([host, back], axis=1).astype(np.int32))
    found = contents(cache)
    assert found[1:5] == [0] * 4
    assert [found[block] for block in back] == device.tolist()


class Failed:
    """Stands for the result of a program that failed after its dispatch."""

    def block_until_ready(self) -> None:
        raise RuntimeError("INTERNAL: the device is on fire")


@pytest.mark.parametrize("how", ["donated", "tokens donated", "failed later", "not allocated"])
def test_a_lost_pool_is_noticed_and_replaced(how: str) -> None:
    cache = make_cache()
    assert not cache.is_lost
    if how == "donated":
        cache.pools[1][0].delete()
    elif how == "tokens donated":
        cache.tokens.newest.delete()
    elif how == "failed later":
        failed: jax.Array = Failed()  # type: ignore[assignment]
        cache.pools[1] = (cache.pools[1][0], failed)
    else:
        cache.pools = []
    assert cache.is_lost
    cache.allocate()
    assert not cache.is_lost
    assert all(not np.asarray(x).any() for x in jax.tree.leaves((cache.pools, cache.tokens)))
