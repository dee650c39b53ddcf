"""Responses that are kept for later requests, in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpaged.server.responses_api.objects import ResponseObject
from jaxpaged.server.responses_api.protocol import InputItem

# What an item takes beside its text, about.
_ITEM_BYTES = 500


@dataclass(frozen=True)
class StoredResponse:
    """
    Attributes:
        items: the conversation that the response ends, its own output included.
    """

    response: ResponseObject
    items: Sequence[InputItem]


class ResponseStore:
    """Keeps the responses used last; those before give way.

    Args:
        max_bytes: of the texts that are kept, about; a response counts its whole conversation. 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()

    def put(self, stored: StoredResponse) -> None:
        size = _size(stored)
        if size > self._max_bytes:
            return
        self._kept[stored.response.id] = stored, size
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            _, (_, freed) = self._kept.popitem(last=False)
            self._num_bytes -= freed

    def get(self, response_id: str) -> StoredResponse | None:
        if response_id not in self._kept:
            return None
        self._kept.move_to_end(response_id)
        return self._kept[response_id][0]


def _size(stored: StoredResponse) -> int:
    texts = [stored.response.model_dump_json(), *(item.model_dump_json() for item in stored.items)]
    return sum(len(text) + _ITEM_BYTES for text in texts)
