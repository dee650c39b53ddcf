"""A pool of KV blocks: who owns which, which are free, and which free ones can still be found by what they hold.

A block is free, owned (reference count >= 1), or cached and free: nobody refers to it, but its key still leads to it
until it is handed out again. Free blocks form a doubly linked list that lives in two arrays, so taking one out of the
middle (a hit on a cached block) costs as little as taking the first. Its order is that of reuse:

1. blocks without a key, the one that was freed last first, then those of the eager part that were never in use;
2. cached ones, the least recently used first;
3. the reserve: blocks beyond the eager part that were never in use. Where memory is taken when it is first written, as
   on a CPU, leaving them alone for as long as cached blocks can be evicted keeps it small.
"""

from __future__ import annotations

from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    """Block ids, their reference counts and their keys. It knows nothing of what is stored in a block.

    Attributes:
        num_blocks: all ids, reserved ones included.
        num_reserved: leading ids that are never handed out (1: the null block).
        num_free: blocks that `allocate` could hand out now, cached ones included.
        ref_counts: references to each block. Only the pool changes it.
    """

    def __init__(self, num_blocks: int, *, num_reserved: int = 1, num_eager: int | None = None) -> None:
        """`num_eager`: blocks that may be in use before one is evicted; None = all."""
        self.num_blocks = num_blocks
        self.num_reserved = num_reserved
        self.num_free = num_blocks - num_reserved
        self.ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        # The list is a ring through two more nodes: behind `_head` is the block to be reused first, behind `_fence` the
        # reserve. Cached blocks go before the fence.
        self._head, self._fence = num_blocks, num_blocks + 1
        fence = num_blocks if num_eager is None else min(num_reserved + num_eager, num_blocks)
        ring = [self._head, *range(num_reserved, fence), self._fence, *range(fence, num_blocks)]
        self._next = [-1] * (num_blocks + 2)
        self._prev = [-1] * (num_blocks + 2)
        for left, right in zip(ring, ring[1:] + ring[:1], strict=True):
            self._next[left] = right
            self._prev[right] = left

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be handed out."""
        return self.num_blocks - self.num_reserved

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by key, owned or free."""
        return len(self._by_key)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, each with one reference, or None if fewer are free. Drops the keys of cached ones."""
        if count > self.num_free:
            return None
        blocks: list[int] = []
        block = self._next[self._head]
        while len(blocks) < count and block != self._fence:
            self._drop_key(block)
            self.ref_counts[block] = 1
            blocks.append(block)
            block = self._next[block]
        self._next[self._head] = block
        self._prev[block] = self._head
        self.num_free -= len(blocks)
        if len(blocks) < count:
            blocks += self._take_reserve(count - len(blocks))
        return blocks

    def touch(self, block: int) -> None:
        """One more reference; a cached and free block is owned from now on."""
        if self.ref_counts[block] == 0:
            self._unlink(block)
        self.ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One reference less to each block, in the order given: of those with a key, the first is evicted first."""
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                # A block that cannot be found again is worth nothing: reuse it before any cached one.
                self._link_after(block, self._head if self._keys[block] is None else self._prev[self._fence])

    def find(self, key: bytes) -> int | None:
        """The block that holds what `key` stands for."""
        return self._by_key.get(key)

    def is_cached(self, block: int) -> bool:
        """Whether the block can be found by key."""
        return self._keys[block] is not None

    def cached_blocks(self) -> Iterable[int]:
        """The blocks that can be found by key, in no particular order."""
        return self._by_key.values()

    def register(self, block: int, key: bytes) -> None:
        """Make an owned block findable, unless it already is or another block has the key."""
        if self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def reset_cache(self) -> None:
        """Forget every key. Owned blocks stay owned."""
        for block in list(self._by_key.values()):
            self._drop_key(block)

    def check(self) -> None:
        """Assert that each block is in exactly one state and that list, counts and keys agree."""
        free: list[int] = []
        block, before = self._next[self._head], self._head
        while block != self._head:
            assert self._prev[block] == before, f"free list: block {block} follows {before} but points elsewhere"
            if block == self._fence:
                block, before = self._next[block], block
                continue
            assert self.ref_counts[block] == 0, f"block {block} is free with {self.ref_counts[block]} references"
            free.append(block)
            assert len(free) <= self.num_blocks, "the free list runs in a circle"
            block, before = self._next[block], block
        owned = [b for b, count in enumerate(self.ref_counts) if count > 0]
        assert len(free) == self.num_free, f"{len(free)} blocks in the free list, {self.num_free} counted"
        assert len(free) + len(owned) == self.num_usable, (
            f"{len(free)} free + {len(owned)} owned blocks of {self.num_usable}"
        )
        reserved = range(self.num_reserved)
        assert not any(b in reserved for b in (*free, *owned)), "a reserved block is free or owned"
        keyed = {b: key for b, key in enumerate(self._keys) if key is not None}
        assert keyed == {b: key for key, b in self._by_key.items()}, "keys and blocks disagree"

    def _take_reserve(self, count: int) -> list[int]:
        """`count` blocks from behind the fence, which has nothing before it."""
        blocks = []
        for _ in range(count):
            block = self._next[self._fence]
            self._unlink(block)
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def _drop_key(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None

    def _unlink(self, block: int) -> None:
        left, right = self._prev[block], self._next[block]
        self._next[left] = right
        self._prev[right] = left
        self.num_free -= 1

    def _link_after(self, block: int, left: int) -> None:
        right = self._next[left]
        self._next[left] = self._prev[right] = block
        self._prev[block] = left
        self._next[block] = right
        self.num_free += 1
