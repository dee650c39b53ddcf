"""The KV pool on the device, the host pool that preempted sequences are swapped to, and the token ids of their slots.

Two arrays a layer, K and V, or four where they are quantized, then also the scales of both:

    k[block, offset, kv_head, :]     slot = block * block_size + offset
    k_scales[block, offset, kv_head]
    block 0 is the null block: padding in block tables points at it, nothing is ever written to it

Token ids, which penalties count, are one more array that is written, copied and swapped with the same block tables. So
they need no bookkeeping of their own: a cached prefix brings its tokens along, and a sequence that gave way or was
forked has its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpaged.capacity import kv_bytes_per_token
from jaxpaged.config import KVCacheDType, ModelConfig, format_size
from jaxpaged.core.plan import IntArray
from jaxpaged.errors import ConfigError
from jaxpaged.runner.step import Pools, Tokens
from jaxpaged_kernels import copy_blocks, gather_blocks, new_pool, pool_dtype, scatter_blocks
from jaxpaged_kernels.cache import is_quantized, value_dtype
from jaxpaged_kernels.checks import MAX_ONE_BYTE_POOL, check_target
from jaxpaged_kernels.target import current_target

_QUANTIZED: dict[KVCacheDType, DTypeLike] = {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8}

# Blocks that one call of the swap programs moves: few enough to keep the staging copy small, many enough to amortise
# the call.
SWAP_CHUNK = 32


@dataclass(frozen=True)
class PoolShape:
    """Shape and dtype of a pool: for each layer K and V, both [num_blocks, block_size, num_kv_heads, head_dim]; scales
    are float32 [num_blocks, block_size, num_kv_heads].

    Attributes:
        dtype: that the arrays of K and V have; on a CPU bfloat16 and fp8 values are kept as their bits.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: DTypeLike,
        kv_cache_dtype: KVCacheDType = "auto",
    ) -> PoolShape:
        """The pool of `model`, whose keys and values come as `dtype`.

        Raises:
            ConfigError: the device cannot compute with `kv_cache_dtype`.
        """
        stored = pool_dtype(_QUANTIZED.get(kv_cache_dtype, dtype))
        try:
            check_target(stored, current_target())
        except ValueError as error:
            raise ConfigError(f"kv_cache_dtype is {kv_cache_dtype!r}, but {error}") from error
        return cls(model.num_layers, num_blocks, block_size, model.num_kv_heads, model.head_dim, stored)

    @property
    def array(self) -> tuple[int, int, int, int]:
        """Shape of one array of K or V."""
        return self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim

    @property
    def values(self) -> jnp.dtype:
        """Dtype of the values that K and V hold."""
        return value_dtype(self.dtype)

    @property
    def layer(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arrays of one layer."""
        values = jax.ShapeDtypeStruct(self.array, self.dtype)
        scales = jax.ShapeDtypeStruct(self.array[:3], jnp.float32)
        return (values, values, scales, scales) if is_quantized(self.dtype) else (values, values)

    @property
    def max_blocks(self) -> int | None:
        """Most blocks that the kernels can address, None = no limit. Does not depend on `num_blocks`."""
        if not is_quantized(self.dtype):
            return None
        return MAX_ONE_BYTE_POOL // (self.block_size * self.num_kv_heads * self.head_dim)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers: K and V, and their scales."""
        return self.block_size * kv_bytes_per_token(
            layers=self.num_layers,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype_bytes=self.dtype.itemsize,
            scale_bytes=4 if is_quantized(self.dtype) else 0,
        )

    @property
    def bytes_per_layer(self) -> int:
        """Bytes of one layer."""
        return self.bytes_per_block * self.num_blocks // self.num_layers

    def abstract(self) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
        """The pool as shapes, for lowering."""
        return [self.layer] * self.num_layers


# Whatever is addressed by block: the pools of all layers, and the history of token ids.
Blocks = tuple[Pools, jax.Array]


class KVCache:
    """The device pool and the host pool, and the block moves between steps.

    Attributes:
        pools: the device pool; each step donates it and puts back what comes out.
        tokens: the token ids of its slots, and those last drawn; donated likewise.
    """

    def __init__(self, shape: PoolShape, device: jax.Device, *, num_host_blocks: int, num_rows: int) -> None:
        """Allocates both pools.

        Args:
            device: where the weights are, too.
            num_host_blocks: blocks of the host pool, 0 = none.
            num_rows: rows of the batch; a step copies at most one block for each.
        """
        self.shape = shape
        self.pools: Pools = []
        self._device = device
        self._num_rows = num_rows
        self._copy = jax.jit(_copy, donate_argnums=0)
        self._gather = jax.jit(_gather)
        self._scatter = jax.jit(_scatter, donate_argnums=0)
        # In the order of the leaves of `_blocks`. np.zeros takes memory only where it is touched.
        leaves = [*jax.tree.leaves(shape.abstract()), self._history]
        try:
            self._host = [np.zeros((num_host_blocks, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        except (MemoryError, ValueError) as error:  # ValueError: more than numpy can address
            num_bytes = format_size(num_host_blocks * shape.bytes_per_block)
            raise ConfigError(f"this machine has no {num_bytes} for the host pool; lower swap_space") from error
        self.allocate()

    def allocate(self) -> None:
        """A fresh, zeroed device pool in place of the one there is."""
        self.pools = []  # frees the old one before there is a new one
        zeros = partial(jnp.zeros, device=self._device)
        self.tokens = Tokens(zeros(self._history.shape, jnp.int32), zeros(self._num_rows, jnp.int32))
        self.pools = jax.tree.map(lambda leaf: new_pool(leaf.shape, leaf.dtype, self._device), self.shape.abstract())

    @property
    def is_lost(self) -> bool:
        """Whether a failed step took the pool with it. Waits for the device.

        The arrays are gone if the failure came between donation and result. As dispatch is asynchronous, they may also
        be results that hold the failure, which would come up again in every later step.
        """
        if not self.pools:  # the last allocation failed
            return True
        try:
            jax.block_until_ready((self.pools, self.tokens))
        except RuntimeError:
            return True
        return False

    def copy(self, pairs: IntArray) -> None:
        """Copies blocks on the device, all at once. `pairs` [C, 2] int32: (source, destination)."""
        if len(pairs):
            src, dst = _padded(pairs, self._num_rows, fill=(0, self.shape.num_blocks))
            self._blocks = self._copy(self._blocks, src, dst)

    def swap_out(self, pairs: IntArray) -> None:
        """Copies device blocks to the host pool. `pairs` [C, 2] int32: (device block, host block)."""
        for start in range(0, len(pairs), SWAP_CHUNK):
            chunk = pairs[start : start + SWAP_CHUNK]
            ids, _ = _padded(chunk, SWAP_CHUNK, fill=(0, 0))
            for host, blocks in zip(self._host, jax.device_get(self._gather(self._blocks, ids)), strict=True):
                host[chunk[:, 1]] = blocks[: len(chunk)]

    def swap_in(self, pairs: IntArray) -> None:
        """Copies host blocks back to the device. `pairs` [C, 2] int32: (host block, device block)."""
        for start in range(0, len(pairs), SWAP_CHUNK):
            src, dst = _padded(pairs[start : start + SWAP_CHUNK], SWAP_CHUNK, fill=(0, self.shape.num_blocks))
            self._blocks = self._scatter(self._blocks, [host[src] for host in self._host], dst)

    def warm_up(self) -> None:
        """Compiles the block moves and runs them on nothing, so that serving never compiles them."""
        src, dst = _padded(np.empty((0, 2), np.int32), self._num_rows, fill=(0, self.shape.num_blocks))
        self._blocks = self._copy(self._blocks, src, dst)
        if len(self._host[0]):
            src, dst = _padded(np.empty((0, 2), np.int32), SWAP_CHUNK, fill=(0, self.shape.num_blocks))
            self._blocks = self._scatter(self._blocks, jax.device_get(self._gather(self._blocks, src)), dst)

    @property
    def _history(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.shape.num_blocks, self.shape.block_size), np.int32)

    @property
    def _blocks(self) -> Blocks:
        return self.pools, self.tokens.history

    @_blocks.setter
    def _blocks(self, blocks: Blocks) -> None:
        self.pools, history = blocks
        self.tokens = self.tokens._replace(history=history)


def _padded(pairs: IntArray, size: int, fill: tuple[int, int]) -> tuple[IntArray, IntArray]:
    """Both columns of `pairs`, padded to `size` with `fill`; an out-of-range destination is dropped."""
    padded = np.empty((size, 2), np.int32)
    padded[:] = fill
    padded[: len(pairs)] = pairs
    return padded[:, 0].copy(), padded[:, 1].copy()


def _copy(blocks: Blocks, src: jax.Array, dst: jax.Array) -> Blocks:
    leaves, treedef = jax.tree.flatten(blocks)
    copied: Blocks = jax.tree.unflatten(treedef, copy_blocks(leaves, src, dst))
    return copied


def _gather(blocks: Blocks, ids: jax.Array) -> list[jax.Array]:
    return gather_blocks(jax.tree.leaves(blocks), ids)


def _scatter(blocks: Blocks, new: list[jax.Array], ids: jax.Array) -> Blocks:
    leaves, treedef = jax.tree.flatten(blocks)
    written: Blocks = jax.tree.unflatten(treedef, scatter_blocks(leaves, new, ids))
    return written
