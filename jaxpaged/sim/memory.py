"""Owners of KV memory for simulations: the engine's own, watched, and one that keeps each sequence in one piece."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jaxpaged.config import CacheConfig
from jaxpaged.core.kv_manager import KVManager, Pair
from jaxpaged.request import Sequence
from jaxpaged.sim.buddy import BuddyAllocator, round_up


@dataclass(frozen=True)
class MemoryEvent:
    """A sequence that got its first blocks, or gave all of them up.

    Attributes:
        num_free: blocks (or slots) that are free now.
        num_tokens: of the sequence, in the pool; of one that came in: that will be after this step.
    """

    kind: str
    sequence: Sequence
    num_free: int
    num_tokens: int


class WatchedKV(KVManager):
    """The engine's manager. It also keeps a list of who came in and who went out, in order.

    Attributes:
        events: since somebody last emptied it.
    """

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self.events: list[MemoryEvent] = []
        self._entering: set[Sequence] = set()

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def attach(self, sequence: Sequence, hits: list[int]) -> None:
        super().attach(sequence, hits)
        self._entering.add(sequence)

    def grow(self, sequence: Sequence, end: int) -> Pair | None:
        copy = super().grow(sequence, end)
        if sequence in self._entering:
            self._entering.remove(sequence)
            self.events.append(MemoryEvent("admit", sequence, self.num_free, end))
        return copy

    def free(self, sequence: Sequence) -> None:
        num_tokens, held = sequence.num_computed, bool(sequence.block_table or sequence.host_blocks)
        super().free(sequence)
        self._entering.discard(sequence)
        if held:
            self.events.append(MemoryEvent("free", sequence, self.num_free, num_tokens))

    def swap_out(self, sequences: Seq[Sequence]) -> list[Pair] | None:
        pairs = super().swap_out(sequences)
        if pairs is not None:
            self.events.append(MemoryEvent("free", sequences[0], self.num_free, sequences[0].num_computed))
        return pairs

    def swap_in(self, sequences: Seq[Sequence]) -> list[Pair] | None:
        pairs = super().swap_in(sequences)
        if pairs is not None:
            self.events.append(MemoryEvent("admit", sequences[0], self.num_free, sequences[0].num_computed))
        return pairs


class ReservingKV(WatchedKV):
    """Reserves slots for all of a sequence when its request is admitted, in one piece of a buddy allocator.

    The scheduler sees large blocks, of which there must be enough for every row; what there is room for, `has_room`
    says.

    Attributes:
        reserved: slots asked for, of all sequences that hold some.
        handed_out: the same with the allocator's rounding.
        to_be_used: slots that these sequences will have filled when they end.
        copied_tokens: whose KV was copied, as nothing can be shared.
    """

    def __init__(
        self, config: CacheConfig, *, slots: int, reserve: Callable[[Sequence], int], final: Callable[[Sequence], int]
    ) -> None:
        """
        Args:
            slots: of the whole memory.
            reserve: slots that a sequence asks for.
            final: slots that it will have filled when it ends.
        """
        super().__init__(config)
        self.buddy = BuddyAllocator(slots)
        self.reserved = self.handed_out = self.to_be_used = self.copied_tokens = 0
        self._reserve, self._final = reserve, final
        self._pieces: dict[Sequence, int] = {}

    @property
    def num_free(self) -> int:
        return self.buddy.num_free

    def has_room(self, sequences: Seq[Sequence], needed: int) -> bool:
        return self.buddy.can_allocate([self._reserve(s) for s in sequences])

    def attach(self, sequence: Sequence, hits: list[int]) -> None:
        super().attach(sequence, hits)
        for sibling in sequence.request.sequences:
            if not sibling.is_finished:
                self._take_piece(sibling)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        if child not in self._pieces:
            self._take_piece(child)
        child.block_table = self._take(len(parent.block_table))
        child.num_computed = parent.num_computed
        self.copied_tokens += parent.num_computed

    def free(self, sequence: Sequence) -> None:
        start = self._pieces.pop(sequence, None)
        if start is not None:
            self.buddy.free(start)
            self._count(sequence, -1)
        super().free(sequence)

    def _take_piece(self, sequence: Sequence) -> None:
        start = self.buddy.allocate(self._reserve(sequence))
        assert start is not None, f"no room for {sequence}: has_room was not heeded"
        self._pieces[sequence] = start
        self._count(sequence, 1)

    def _count(self, sequence: Sequence, sign: int) -> None:
        reserved = self._reserve(sequence)
        self.reserved += sign * reserved
        self.handed_out += sign * round_up(reserved)
        self.to_be_used += sign * min(self._final(sequence), reserved)
