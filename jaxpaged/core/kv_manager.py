"""Block tables of sequences: prefix hits, growth, fork with copy-on-write, swapping and freeing.

The manager decides which block holds which tokens; it never touches KV itself. What the device has to copy comes
back as pairs of block ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from jaxpaged.config import CacheConfig
from jaxpaged.core.block_keys import extend_keys
from jaxpaged.core.block_pool import BlockPool
from jaxpaged.request import Sequence

Pair = tuple[int, int]


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def group_blocks(prompt_len: int, lengths: Seq[int], block_size: int) -> int:
    """Blocks of a group whose sequences have `lengths` tokens in the pool and share the prompt's full blocks.

    A partial last block of the prompt is shared too for as long as nobody has written behind the prompt; then each
    sequence has its own (the last one the original).
    """
    if max(lengths) <= prompt_len:
        return num_blocks_for(prompt_len, block_size)
    shared = prompt_len // block_size
    return shared + sum(num_blocks_for(length, block_size) - shared for length in lengths)


class KVManager:
    """Owner of the device pool and of the host pool that swapped sequences go to.

    A sequence's table always holds exactly the blocks of its `num_computed` tokens and of those that the current step
    writes.

    Attributes:
        pool: blocks on the device; block 0 is the null block.
        host_pool: blocks on the host.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        self.pool = BlockPool(config.num_blocks, num_eager=config.num_eager_blocks)
        self.host_pool = BlockPool(config.num_host_blocks, num_reserved=0)
        self._epoch = 0
        self._checked_tables: dict[Sequence, list[int]] = {}

    def match_prefix(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Blocks that already hold the KV of the first of `num_tokens` tokens; at least one token is left to compute.

        Takes no reference: pass the blocks to `attach` before anything else is allocated.
        """
        if not self.enable_prefix_caching:
            return []
        limit = (num_tokens - 1) // self.block_size
        extend_keys(sequence, limit, self.block_size, self._epoch)
        hits: list[int] = []
        for key in sequence.block_keys[:limit]:
            block = self.pool.find(key)
            if block is None:
                break
            hits.append(block)
        return hits

    def has_room(self, sequences: Seq[Sequence], needed: int) -> bool:
        """Whether `needed` more blocks can be had, for a group of these sequences that is to be admitted."""
        return needed <= self.pool.num_free

    def attach(self, sequence: Sequence, hits: list[int]) -> None:
        """Start the (empty) table of `sequence` with the blocks of a prefix hit."""
        for block in hits:
            self.pool.touch(block)
        sequence.block_table = list(hits)
        sequence.num_computed = len(hits) * self.block_size

    def blocks_to_write(self, writes: Iterable[tuple[Sequence, int]]) -> int:
        """New blocks that writing each sequence's tokens [num_computed, end) takes, copies included.

        Args:
            writes: (sequence, end) for each.
        """
        needed = 0
        copied: Counter[int] = Counter()
        for sequence, end in writes:
            table = sequence.block_table
            needed += max(num_blocks_for(end, self.block_size) - len(table), 0)
            index = sequence.num_computed // self.block_size
            if index < len(table) and self.pool.ref_counts[table[index]] - copied[table[index]] > 1:
                copied[table[index]] += 1
                needed += 1
        return needed

    def grow(self, sequence: Sequence, end: int) -> Pair | None:
        """Make tokens [num_computed, end) writable; `blocks_to_write` must have found enough free blocks.

        Returns:
            (source, destination) of a block that must be copied before the write, or None.
        """
        table = sequence.block_table
        copy = None
        index = sequence.num_computed // self.block_size
        if index < len(table) and self.pool.ref_counts[table[index]] > 1:
            source, (destination,) = table[index], self._take(1)
            self.pool.free([source])
            table[index] = destination
            copy = (source, destination)
        missing = num_blocks_for(end, self.block_size) - len(table)
        if missing > 0:
            table += self._take(missing)
        return copy

    def append(self, sequences: Seq[Sequence], counts: Seq[int]) -> list[int] | None:
        """Append so many blocks to each table; for sequences that write into no block which they share.

        Returns:
            The blocks, one sequence's behind the other's, or None if too few are free; nothing has changed then.
        """
        blocks = self.pool.allocate(sum(counts))
        if blocks is None:
            return None
        first = 0
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.block_table += blocks[first : first + count]
            first += count
        return blocks

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give `child` (which has no blocks) every block of `parent`, a partial last one too."""
        for block in parent.block_table:
            self.pool.touch(block)
        child.block_table = list(parent.block_table)
        child.num_computed = parent.num_computed
        # Keys beyond the shared blocks would stand for the parent's own tokens.
        child.block_keys = parent.block_keys[: parent.num_computed // self.block_size]

    def shares_next_write(self, sequence: Sequence) -> bool:
        """Whether the next token goes into a block that another table refers to as well."""
        index = sequence.num_computed // self.block_size
        return index < len(sequence.block_table) and self.pool.ref_counts[sequence.block_table[index]] > 1

    def cache_blocks(self, sequence: Sequence, start: int) -> None:
        """Make the full, computed blocks from index `start` on findable."""
        if not self.enable_prefix_caching:
            return
        stop = sequence.num_computed // self.block_size
        extend_keys(sequence, stop, self.block_size, self._epoch)
        table, keys = sequence.block_table, sequence.block_keys
        for index in range(start, stop):
            self.pool.register(table[index], keys[index])

    def free(self, sequence: Sequence) -> None:
        """Give back all blocks, on the device and on the host. Tail first: a prefix is of use to more requests."""
        self.pool.free(reversed(sequence.block_table))
        self.host_pool.free(reversed(sequence.host_blocks))
        sequence.block_table = []
        sequence.host_blocks = []
        sequence.num_computed = 0
        self._checked_tables.pop(sequence, None)

    def swap_out(self, sequences: Seq[Sequence]) -> list[Pair] | None:
        """Move the sequences' blocks to the host, shared ones once.

        Returns:
            (device block, host block) pairs, or None if the host pool has no room; nothing has changed then.
        """
        pairs = self._move(sequences, self.host_pool, "block_table", "host_blocks")
        if pairs is not None:
            for sequence in sequences:
                table, sequence.block_table = sequence.block_table, []
                self.pool.free(reversed(table))
                self._checked_tables.pop(sequence, None)
        return pairs

    def swap_in(self, sequences: Seq[Sequence]) -> list[Pair] | None:
        """Move the sequences' blocks back to the device, shared ones once.

        Returns:
            (host block, device block) pairs, or None if too few blocks are free; nothing has changed then.
        """
        pairs = self._move(sequences, self.pool, "host_blocks", "block_table")
        if pairs is not None:
            for sequence in sequences:
                host_blocks, sequence.host_blocks = sequence.host_blocks, []
                self.host_pool.free(reversed(host_blocks))
        return pairs

    def reset_prefix_cache(self) -> None:
        """Make nothing that has been computed so far findable by sequences whose keys are not yet known."""
        self.pool.reset_cache()
        self._epoch += 1

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Assert the invariants of the pools, given every sequence that may hold blocks."""
        sequences = list(sequences)
        for name, pool in (("block_table", self.pool), ("host_blocks", self.host_pool)):
            pool.check()
            references = Counter(block for sequence in sequences for block in getattr(sequence, name))
            counted = {block: count for block, count in enumerate(pool.ref_counts) if count}
            assert references == counted, f"{name}: tables refer {dict(references)}, the pool counts {counted}"
        for sequence in sequences:
            table, before = sequence.block_table, self._checked_tables.get(sequence, [])
            assert table[: max(len(before) - 1, 0)] == before[:-1] and len(table) >= len(before), (
                f"{sequence}: table went from {before} to {table}"
            )
            assert len(table) >= num_blocks_for(sequence.num_computed, self.block_size) or sequence.host_blocks, (
                f"{sequence}: {sequence.num_computed} computed tokens in {len(table)} blocks"
            )
        self._checked_tables = {s: list(s.block_table) for s in sequences if s.block_table}

    def check_write(self, sequence: Sequence, end: int) -> None:
        """Assert that writing tokens [num_computed, end) hits only blocks that no other table refers to."""
        for index in range(sequence.num_computed // self.block_size, num_blocks_for(end, self.block_size)):
            count = self.pool.ref_counts[sequence.block_table[index]]
            assert count == 1, f"{sequence} writes into block {sequence.block_table[index]} with {count} references"

    def _take(self, count: int) -> list[int]:
        blocks = self.pool.allocate(count)
        assert blocks is not None, f"{count} blocks wanted, {self.pool.num_free} free: blocks_to_write was not heeded"
        return blocks

    @staticmethod
    def _move(sequences: Seq[Sequence], to: BlockPool, source: str, destination: str) -> list[Pair] | None:
        """Allocate in `to` a block for each distinct one in the `source` lists, and fill the `destination` lists."""
        distinct = dict.fromkeys(block for sequence in sequences for block in getattr(sequence, source))
        blocks = to.allocate(len(distinct))
        if blocks is None:
            return None
        moved = dict(zip(distinct, blocks, strict=True))
        unowned = set(blocks)
        for sequence in sequences:
            table = [moved[block] for block in getattr(sequence, source)]
            for block in table:
                if block in unowned:
                    unowned.remove(block)  # allocate() has counted its first owner
                else:
                    to.touch(block)
            setattr(sequence, destination, table)
        return list(moved.items())
