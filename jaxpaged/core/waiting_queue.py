"""Groups that wait for admission, in the order of service."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from jaxpaged.core.group import OrderKey, SequenceGroup


class WaitingQueue:
    """A heap by order key; a group that is taken out of the middle is dropped when it reaches the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[OrderKey, SequenceGroup]] = []
        self._live: dict[str, SequenceGroup] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """The groups, in no particular order."""
        return iter(self._live.values())

    def push(self, group: SequenceGroup) -> None:
        heapq.heappush(self._heap, (group.key, group))
        self._live[group.request.request_id] = group

    def peek(self) -> SequenceGroup | None:
        while self._heap:
            group = self._heap[0][1]
            if self._live.get(group.request.request_id) is group:
                return group
            heapq.heappop(self._heap)
        return None

    def pop(self) -> SequenceGroup:
        """Take out the first group; only after `peek` has returned it."""
        _, group = heapq.heappop(self._heap)
        del self._live[group.request.request_id]
        return group

    def discard(self, group: SequenceGroup) -> None:
        """Take `group` out for good, if it is in."""
        if self._live.get(group.request.request_id) is group:
            del self._live[group.request.request_id]
            # A group may never reach the top, behind others of higher priority: do not keep more dead ones than live.
            if len(self._heap) > 2 * len(self._live) + 64:
                self._heap = [(g.key, g) for g in self._live.values()]
                heapq.heapify(self._heap)
