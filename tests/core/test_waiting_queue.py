"""The queue of waiting groups: order, removal, and no memory for those that are gone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.group import SequenceGroup
from jaxpaged.core.waiting_queue import WaitingQueue
from jaxpaged.request import Request, SamplingParams


def make_group(number: int, priority: int) -> SequenceGroup:
    request = Request(str(number), [1], SamplingParams(), max_tokens=1, seed=0)
    return SequenceGroup(request, (priority, 0.0, number))


@given(priorities=st.lists(st.integers(-2, 2), max_size=30), gone=st.sets(st.integers(0, 29)))
def test_what_is_left_comes_out_in_order(priorities: list[int], gone: set[int]) -> None:
    queue = WaitingQueue()
    groups = [make_group(i, priority) for i, priority in enumerate(priorities)]
    for group in groups:
        queue.push(group)
    left = [group for i, group in enumerate(groups) if i not in gone]
    for i in gone & set(range(len(groups))):
        queue.discard(groups[i])
    assert len(queue) == len(left) and set(queue) == set(left)
    served = []
    while queue.peek() is not None:
        served.append(queue.pop())
    assert served == sorted(left, key=lambda group: group.key)


def test_groups_that_are_gone_take_no_memory_behind_one_that_stays() -> None:
    queue = WaitingQueue()
    head = make_group(0, priority=-1)
    queue.push(head)
    for i in range(1, 10_000):
        group = make_group(i, priority=0)
        queue.push(group)
        queue.discard(group)
    assert queue.peek() is head
    assert len(queue._heap) < 100
