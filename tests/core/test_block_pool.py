"""The block pool against lists that are searched from end to end."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jaxpaged.core.block_pool import NULL_BLOCK, BlockPool

NUM_BLOCKS, NUM_EAGER = 9, 5
KEYS = [bytes([i]) for i in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """`spare` holds free blocks without a key, next one last; `cached` those with one, least recently freed first;
    `reserve` those beyond the eager ones that were never in use, next one first."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, num_eager=NUM_EAGER)
        self.spare = list(range(1, 1 + NUM_EAGER))[::-1]
        self.reserve = list(range(1 + NUM_EAGER, NUM_BLOCKS))
        self.cached: list[int] = []
        self.owned: dict[int, int] = {}
        self.keys: dict[bytes, int] = {}

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        if count > len(self.spare) + len(self.cached) + len(self.reserve):
            assert blocks is None
            return
        expected = []
        for _ in range(count):
            block = self.spare.pop() if self.spare else (self.cached or self.reserve).pop(0)
            self.keys = {key: b for key, b in self.keys.items() if b != block}
            self.owned[block] = 1
            expected.append(block)
        assert blocks == expected

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        references = [b for b, count in self.owned.items() for _ in range(count)]
        blocks = data.draw(st.lists(st.sampled_from(range(len(references))), unique=True)) if references else []
        self.pool.free(references[i] for i in blocks)
        for block in (references[i] for i in blocks):
            self.owned[block] -= 1
            if self.owned[block] == 0:
                del self.owned[block]
                (self.cached if block in self.keys.values() else self.spare).append(block)

    @rule(key=st.sampled_from(KEYS), data=st.data())
    def register(self, key: bytes, data: st.DataObject) -> None:
        if self.owned:
            block = data.draw(st.sampled_from(sorted(self.owned)))
            self.pool.register(block, key)
            if key not in self.keys and block not in self.keys.values():
                self.keys[key] = block

    @rule(key=st.sampled_from(KEYS))
    def find_and_touch(self, key: bytes) -> None:
        block = self.pool.find(key)
        assert block == self.keys.get(key)
        if block is not None:
            self.pool.touch(block)
            self.owned[block] = self.owned.get(block, 0) + 1
            if block in self.cached:
                self.cached.remove(block)

    @rule()
    def reset(self) -> None:
        self.pool.reset_cache()
        self.keys = {}
        # Without keys they are only free; they keep their turn behind the spare ones.
        self.spare = self.cached[::-1] + self.spare
        self.cached = []

    @invariant()
    def states_agree(self) -> None:
        self.pool.check()
        assert self.pool.num_free == len(self.spare) + len(self.cached) + len(self.reserve)
        assert {b: n for b, n in enumerate(self.pool.ref_counts) if n} == self.owned
        assert self.pool.num_cached == len(self.keys)
        assert NULL_BLOCK not in self.owned


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_the_whole_pool_can_be_handed_out_and_no_more() -> None:
    pool = BlockPool(5)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    assert pool.num_free == 0


def test_cached_blocks_are_evicted_least_recently_freed_first() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert blocks == [1, 2, 3]
    for block in blocks:
        pool.register(block, bytes([block]))
    pool.free([2, 3, 1])
    pool.touch(3)  # used again
    pool.free([3])
    assert pool.allocate(2) == [2, 1]
    assert pool.find(bytes([1])) is None
    assert pool.find(bytes([3])) == 3


def test_blocks_beyond_the_eager_ones_are_used_only_when_nothing_can_be_evicted() -> None:
    pool = BlockPool(7, num_eager=3)
    assert pool.allocate(3) == [1, 2, 3]
    for block in (1, 2):
        pool.register(block, bytes([block]))
    pool.free([2, 1])
    assert pool.allocate(1) == [2]  # 4, 5 and 6 were never in use, and stay so
    assert pool.allocate(3) == [1, 4, 5]
    pool.register(4, b"4")
    pool.free([4, 5])
    assert pool.allocate(2) == [5, 4]  # in use once, they are like any other
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [6]


def test_a_host_pool_has_no_null_block() -> None:
    pool = BlockPool(2, num_reserved=0)
    assert pool.num_usable == 2
    assert pool.allocate(2) == [0, 1]
