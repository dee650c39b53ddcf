"""A buddy allocator, as systems that keep each request's KV in one piece use it."""

from __future__ import annotations

import heapq


def round_up(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


class BuddyAllocator:
    """Hands out chunks of 2^k slots, split in halves as needed and merged again when both halves are free.

    A total that is no power of two is cut into the powers of two that add up to it, largest first.

    Attributes:
        total: slots in all.
        num_free: slots in free chunks, of whatever sizes.
    """

    def __init__(self, total: int) -> None:
        self.total = self.num_free = total
        # Start addresses of the free chunks of each size; heaps, of which entries that are no longer free are dropped
        # when they come up.
        self._heaps: dict[int, list[int]] = {1 << k: [] for k in range(total.bit_length())}
        self._free: dict[int, int] = {}  # start -> size
        self._owned: dict[int, int] = {}
        start = 0
        for size in sorted(self._heaps, reverse=True):
            if total & size:
                self._put(start, size)
                start += size

    def allocate(self, size: int) -> int | None:
        """Start of a chunk of `round_up(size)` slots, the lowest of the smallest that will do; None if none is free."""
        wanted = round_up(size)
        chunk = wanted
        while chunk in self._heaps and self._lowest(chunk) is None:
            chunk *= 2
        if chunk not in self._heaps:
            return None
        start = heapq.heappop(self._heaps[chunk])
        del self._free[start]
        while chunk > wanted:
            chunk //= 2
            self._put(start + chunk, chunk)
        self._owned[start] = wanted
        self.num_free -= wanted
        return start

    def free(self, start: int) -> None:
        """Gives the chunk that starts at `start` back."""
        size = self._owned.pop(start)
        self.num_free += size
        while self._free.get(start ^ size) == size:
            del self._free[start ^ size]
            start &= ~size
            size *= 2
        self._put(start, size)

    def can_allocate(self, sizes: list[int]) -> bool:
        """Whether chunks of all these sizes could be had together."""
        starts = [self.allocate(size) for size in sorted(sizes, reverse=True)]
        for start in starts:
            if start is not None:
                self.free(start)
        return None not in starts

    def check(self) -> None:
        """Assert that chunks cover all slots, none overlaps another, and no two free buddies are left apart."""
        chunks = sorted([*self._free.items(), *self._owned.items()])
        position = 0
        for start, size in chunks:
            assert start == position, f"chunk {start} of {size} follows one that ends at {position}"
            assert start % size == 0, f"chunk {start} of {size} is not aligned"
            position += size
        assert position == self.total, f"chunks cover {position} of {self.total} slots"
        assert self.num_free == sum(self._free.values()), "the count of free slots is wrong"
        for start, size in self._free.items():
            assert self._free.get(start ^ size) != size, f"{start} and {start ^ size} of {size} could be merged"

    def _put(self, start: int, size: int) -> None:
        self._free[start] = size
        heapq.heappush(self._heaps[size], start)

    def _lowest(self, size: int) -> int | None:
        heap = self._heaps[size]
        while heap and self._free.get(heap[0]) != size:
            heapq.heappop(heap)
        return heap[0] if heap else None
