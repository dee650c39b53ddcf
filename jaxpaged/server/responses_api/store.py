"""Responses that are kept for later requests, in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from jaxpaged.server.responses_api.objects import ResponseObject
from jaxpaged.server.responses_api.protocol import InputItem

# What an entry takes beside its texts, about.
_ENTRY_BYTES = 500

_ITEMS: TypeAdapter[Sequence[InputItem]] = TypeAdapter(list[InputItem])


@dataclass(frozen=True)
class StoredResponse:
    """
    Attributes:
        items: the conversation that the response ends, its own output included.
    """

    response: ResponseObject
    items: Sequence[InputItem]


class ResponseStore:
    """Keeps the responses used last, as JSON, which takes a fraction of their objects' memory; those before give way.

    Args:
        max_bytes: of what is kept; a response counts its whole conversation. 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()

    def put(self, stored: StoredResponse) -> None:
        entry = stored.response.model_dump_json().encode(), _ITEMS.dump_json(stored.items, exclude_unset=True)
        if _size(entry) > self._max_bytes:
            return
        self._kept[stored.response.id] = entry
        self._num_bytes += _size(entry)
        while self._num_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._num_bytes -= _size(dropped)

    def get(self, response_id: str) -> StoredResponse | None:
        if response_id not in self._kept:
            return None
        self._kept.move_to_end(response_id)
        response, items = self._kept[response_id]
        return StoredResponse(ResponseObject.model_validate_json(response), _ITEMS.validate_json(items))


def _size(entry: tuple[bytes, bytes]) -> int:
    return _ENTRY_BYTES + sum(map(len, entry))
