"""The buddy allocator: worked by hand, and against a plain set of slots over random sequences."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.sim.buddy import BuddyAllocator, round_up


@pytest.mark.parametrize(("size", "rounded"), [(1, 1), (2, 2), (3, 4), (25, 32), (32, 32), (33, 64), (2048, 2048)])
def test_sizes_are_rounded_up_to_a_power_of_two(size: int, rounded: int) -> None:
    assert round_up(size) == rounded


def test_a_small_memory_by_hand() -> None:
    """Sixteen slots: 3 (4) | 2 | 2 free | 8, then the halves come together again."""
    buddy = BuddyAllocator(16)
    assert [buddy.allocate(3), buddy.allocate(2), buddy.allocate(5)] == [0, 4, 8]
    assert buddy.num_free == 2 and buddy.allocate(3) is None
    assert buddy.allocate(1) == 6
    buddy.free(4)
    assert buddy.allocate(4) is None, "slots 4 and 5 are free, but 6 is not"
    buddy.free(6)
    assert buddy.allocate(4) == 4
    for start in (0, 4, 8):
        buddy.free(start)
    assert buddy.allocate(16) == 0


def test_a_total_that_is_no_power_of_two() -> None:
    """The paper's OPT-13B: 15,728 slots hold seven sequences of 2048, and the rest of each smaller power once."""
    buddy = BuddyAllocator(15_728)
    assert sum(buddy.allocate(2048) is not None for _ in range(9)) == 7
    assert buddy.num_free == 15_728 - 7 * 2048 == 1024 + 256 + 64 + 32 + 16
    assert buddy.can_allocate([1024, 200, 60]) and not buddy.can_allocate([1024, 512])
    buddy.check()


@settings(max_examples=60, deadline=None)
@given(total=st.integers(1, 300), steps=st.lists(st.tuples(st.booleans(), st.integers(1, 90)), max_size=60))
def test_chunks_never_overlap_and_all_come_back(total: int, steps: list[tuple[bool, int]]) -> None:
    buddy = BuddyAllocator(total)
    owned: dict[int, range] = {}
    taken: set[int] = set()
    for takes, number in steps:
        if takes:
            could = buddy.can_allocate([number])
            start = buddy.allocate(number)
            assert could == (start is not None)
            if start is not None:
                slots = range(start, start + round_up(number))
                assert slots.stop <= total and taken.isdisjoint(slots)
                taken.update(slots)
                owned[start] = slots
        elif owned:
            start = sorted(owned)[number % len(owned)]
            taken.difference_update(owned.pop(start))
            buddy.free(start)
        assert buddy.num_free == total - len(taken)
        buddy.check()
    for start in owned:
        buddy.free(start)
    buddy.check()
    assert buddy.num_free == total
    largest = 1 << (total.bit_length() - 1)
    assert buddy.allocate(largest) == 0, "what is free was not merged"
