"""The KV pool on the device and the host pool that preempted sequences are swapped to.

One (K, V) pair of arrays a layer:

    k[block, offset, kv_head, :]     slot = block * block_size + offset
    block 0 is the null block: padding in block tables points at it, nothing is ever written to it
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpaged.capacity import kv_bytes_per_token
from jaxpaged.config import ModelConfig, format_size
from jaxpaged.core.plan import IntArray
from jaxpaged.errors import ConfigError
from jaxpaged.runner.step import Pools
from jaxpaged_kernels import copy_blocks, gather_blocks, pool_dtype, scatter_blocks

# Blocks that one call of the swap programs moves: few enough to keep the staging copy small, many enough to amortise
# the call.
SWAP_CHUNK = 32


@dataclass(frozen=True)
class PoolShape:
    """Shape and dtype of a pool: `num_layers` pairs of [num_blocks, block_size, num_kv_heads, head_dim].

    Attributes:
        dtype: that the arrays have; on a CPU bfloat16 values are kept as their bits.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype

    @classmethod
    def of(cls, model: ModelConfig, num_blocks: int, block_size: int, dtype: DTypeLike) -> PoolShape:
        return cls(model.num_layers, num_blocks, block_size, model.num_kv_heads, model.head_dim, pool_dtype(dtype))

    @property
    def array(self) -> tuple[int, int, int, int]:
        """Shape of one array of the pool."""
        return self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return self.block_size * kv_bytes_per_token(
            layers=self.num_layers,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype_bytes=self.dtype.itemsize,
        )

    @property
    def bytes_per_layer(self) -> int:
        """Bytes of one layer's K and V."""
        return self.bytes_per_block * self.num_blocks // self.num_layers

    def abstract(self) -> list[tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
        """The pool as shapes, for lowering."""
        leaf = jax.ShapeDtypeStruct(self.array, self.dtype)
        return [(leaf, leaf) for _ in range(self.num_layers)]


class KVCache:
    """The device pool and the host pool, and the block moves between steps.

    Attributes:
        pools: the device pool; each step donates it and puts back what comes out.
    """

    def __init__(self, shape: PoolShape, device: jax.Device, *, num_host_blocks: int, max_copies: int) -> None:
        """Allocates both pools.

        Args:
            device: where the weights are, too.
            num_host_blocks: blocks of the host pool, 0 = none.
            max_copies: most copies in one step.
        """
        self.shape = shape
        self.pools: Pools = []
        self._device = device
        self._max_copies = max_copies
        self._copy = jax.jit(_copy, donate_argnums=0)
        self._gather = jax.jit(_gather)
        self._scatter = jax.jit(_scatter, donate_argnums=0)
        # K and V of each layer. np.zeros takes memory only where it is touched.
        host_shape = (num_host_blocks, *shape.array[1:])
        try:
            self._host = [np.zeros(host_shape, shape.dtype) for _ in range(2 * shape.num_layers)]
        except (MemoryError, ValueError) as error:  # ValueError: more than numpy can address
            num_bytes = format_size(num_host_blocks * shape.bytes_per_block)
            raise ConfigError(f"this machine has no {num_bytes} for the host pool; lower swap_space") from error
        self.allocate()

    def allocate(self) -> None:
        """A fresh, zeroed device pool in place of the one there is."""
        self.pools = []
        zeros = partial(jnp.zeros, self.shape.array, self.shape.dtype, device=self._device)
        self.pools = [(zeros(), zeros()) for _ in range(self.shape.num_layers)]

    @property
    def is_lost(self) -> bool:
        """Whether a failed step took the pool with it. Waits for the device.

        The arrays are gone if the failure came between donation and result. As dispatch is asynchronous, they may also
        be results that hold the failure, which would come up again in every later step.
        """
        if not self.pools:  # the last allocation failed
            return True
        try:
            jax.block_until_ready(self.pools)
        except RuntimeError:
            return True
        return False

    def copy(self, pairs: IntArray) -> None:
        """Copies blocks on the device, all at once. `pairs` [C, 2] int32: (source, destination)."""
        if len(pairs):
            src, dst = _padded(pairs, self._max_copies, fill=(0, self.shape.num_blocks))
            self.pools = self._copy(self.pools, src, dst)

    def swap_out(self, pairs: IntArray) -> None:
        """Copies device blocks to the host pool. `pairs` [C, 2] int32: (device block, host block)."""
        for start in range(0, len(pairs), SWAP_CHUNK):
            chunk = pairs[start : start + SWAP_CHUNK]
            ids, _ = _padded(chunk, SWAP_CHUNK, fill=(0, 0))
            for host, blocks in zip(self._host, jax.device_get(self._gather(self.pools, ids)), strict=True):
                host[chunk[:, 1]] = blocks[: len(chunk)]

    def swap_in(self, pairs: IntArray) -> None:
        """Copies host blocks back to the device. `pairs` [C, 2] int32: (host block, device block)."""
        for start in range(0, len(pairs), SWAP_CHUNK):
            src, dst = _padded(pairs[start : start + SWAP_CHUNK], SWAP_CHUNK, fill=(0, self.shape.num_blocks))
            self.pools = self._scatter(self.pools, [host[src] for host in self._host], dst)

    def warm_up(self) -> None:
        """Compiles the block moves and runs them on nothing, so that serving never compiles them."""
        src, dst = _padded(np.empty((0, 2), np.int32), self._max_copies, fill=(0, self.shape.num_blocks))
        self.pools = self._copy(self.pools, src, dst)
        if len(self._host[0]):
            src, dst = _padded(np.empty((0, 2), np.int32), SWAP_CHUNK, fill=(0, self.shape.num_blocks))
            self.pools = self._scatter(self.pools, jax.device_get(self._gather(self.pools, src)), dst)


def _padded(pairs: IntArray, size: int, fill: tuple[int, int]) -> tuple[IntArray, IntArray]:
    """Both columns of `pairs`, padded to `size` with `fill`; an out-of-range destination is dropped."""
    padded = np.empty((size, 2), np.int32)
    padded[:] = fill
    padded[: len(pairs)] = pairs
    return padded[:, 0].copy(), padded[:, 1].copy()


def _pairs(arrays: list[jax.Array]) -> Pools:
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def _copy(pools: Pools, src: jax.Array, dst: jax.Array) -> Pools:
    return _pairs(copy_blocks(jax.tree.leaves(pools), src, dst))


def _gather(pools: Pools, ids: jax.Array) -> list[jax.Array]:
    return gather_blocks(jax.tree.leaves(pools), ids)


def _scatter(pools: Pools, blocks: list[jax.Array], ids: jax.Array) -> Pools:
    return _pairs(scatter_blocks(jax.tree.leaves(pools), blocks, ids))
