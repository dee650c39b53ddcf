"""The token ids that the KV pool's slots belong to: the history of every row, on the device, which penalties count.

It is written, copied and swapped like KV, with the same block tables, so it needs no bookkeeping of its own: a cached
prefix brings its tokens along, and a sequence that was preempted or forked has its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.core.plan import IntArray
from jaxpaged.runner.kv_cache import SWAP_CHUNK
from jaxpaged_kernels import copy_blocks, gather_blocks, scatter_blocks


class TokenPool:
    """Token ids by slot, on the device and, of blocks that are swapped out, on the host.

    Attributes:
        tokens: [num_blocks, block_size] int32; each step donates it and puts back what comes out.
    """

    def __init__(
        self, num_blocks: int, block_size: int, device: jax.Device, *, num_host_blocks: int, max_copies: int
    ) -> None:
        self._shape = (num_blocks, block_size)
        self._device = device
        self._max_copies = max_copies
        self._host = np.zeros((num_host_blocks, block_size), np.int32)
        self._copy = jax.jit(_copy, donate_argnums=0)
        self._gather = jax.jit(_gather)
        self._scatter = jax.jit(_scatter, donate_argnums=0)
        self.allocate()

    def allocate(self) -> None:
        """A fresh, zeroed device pool in place of the one there is."""
        self.tokens = jnp.zeros(self._shape, jnp.int32, device=self._device)

    @property
    def is_lost(self) -> bool:
        """Whether a failed step took the pool with it, as `KVCache.is_lost`. Waits for the device."""
        try:
            jax.block_until_ready(self.tokens)
        except RuntimeError:
            return True
        return False

    def copy(self, pairs: IntArray) -> None:
        """Copies blocks on the device, all at once. `pairs` [C, 2] int32: (source, destination)."""
        if len(pairs):
            self.tokens = self._copy(self.tokens, *self._padded(pairs, self._max_copies))

    def swap_out(self, pairs: IntArray) -> None:
        """Copies device blocks to the host. `pairs` [C, 2] int32: (device block, host block)."""
        for start in range(0, len(pairs), SWAP_CHUNK):
            chunk = pairs[start : start + SWAP_CHUNK]
            blocks = jax.device_get(self._gather(self.tokens, self._padded(chunk, SWAP_CHUNK)[0]))
            self._host[chunk[:, 1]] = blocks[: len(chunk)]

    def swap_in(self, pairs: IntArray) -> None:
        """Copies host blocks back to the device. `pairs` [C, 2] int32: (host block, device block)."""
        for start in range(0, len(pairs), SWAP_CHUNK):
            source, destination = self._padded(pairs[start : start + SWAP_CHUNK], SWAP_CHUNK)
            self.tokens = self._scatter(self.tokens, self._host[source], destination)

    def warm_up(self) -> None:
        """Compiles the block moves and runs them on nothing, so that serving never compiles them."""
        nothing = np.empty((0, 2), np.int32)
        self.tokens = self._copy(self.tokens, *self._padded(nothing, self._max_copies))
        if len(self._host):
            source, destination = self._padded(nothing, SWAP_CHUNK)
            blocks = jax.device_get(self._gather(self.tokens, source))
            self.tokens = self._scatter(self.tokens, blocks, destination)

    def _padded(self, pairs: IntArray, size: int) -> tuple[IntArray, IntArray]:
        """Both columns of `pairs`, padded to `size`; a padding's destination is outside the pool and dropped."""
        source, destination = np.zeros(size, np.int32), np.full(size, self._shape[0], np.int32)
        source[: len(pairs)], destination[: len(pairs)] = pairs[:, 0], pairs[:, 1]
        return source, destination


def _copy(tokens: jax.Array, source: jax.Array, destination: jax.Array) -> jax.Array:
    return copy_blocks([tokens], source, destination)[0]


def _gather(tokens: jax.Array, ids: jax.Array) -> jax.Array:
    return gather_blocks([tokens], ids)[0]


def _scatter(tokens: jax.Array, blocks: jax.Array, ids: jax.Array) -> jax.Array:
    return scatter_blocks([tokens], [blocks], ids)[0]
