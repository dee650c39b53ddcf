"""Server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from contextlib import suppress

from aiohttp import web
from pydantic import BaseModel

from jaxpaged.server.state import random_id

# An event: its body, or that body's JSON.
Event = BaseModel | str

# What a slow reader has let pile up is not written out all at once.
_MAX_HELD_EVENTS = 64
_JSON = json.JSONEncoder(ensure_ascii=False)


class EventStream:
    """A response that sends events. Writing waits while the client reads slowly.

    Args:
        named: events have a `type` that names them, and all their fields are sent. Else they are `data` lines with the
            fields that were set, and `data: [DONE]` ends them.
    """

    def __init__(self, *, named: bool = False) -> None:
        self._named = named
        self._held: list[str] = []
        self._transport: asyncio.Transport | None = None
        # X-Accel-Buffering: a proxy such as nginx would hold events back.
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    async def open(self, request: web.Request) -> None:
        self._transport = request.transport
        await self.response.prepare(request)

    @property
    def is_clear(self) -> bool:
        """Whether all that was sent so far has gone out to the client."""
        return self._transport is not None and self._transport.get_write_buffer_size() == 0

    @property
    def is_full(self) -> bool:
        """Whether it holds enough to be flushed before it takes more."""
        return len(self._held) >= _MAX_HELD_EVENTS

    def add(self, events: Iterable[Event]) -> None:
        """Takes events, to be sent in one write with those that follow before `flush`."""
        self._held.extend(map(self._text, events))

    async def flush(self) -> None:
        """Sends what was taken."""
        if self._held:
            await self.response.write(self._take_held())

    def flush_at_once(self) -> None:
        """As `flush`, for a stream that is clear: there is nothing to wait for."""
        if self._held:
            with suppress(StopIteration):
                self.response.write(self._take_held()).send(None)

    async def close(self) -> None:
        """Sends the rest and ends the stream."""
        if not self._named:
            self._held.append("data: [DONE]\n\n")
        await self.response.write_eof(self._take_held())

    def _take_held(self) -> bytes:
        data = "".join(self._held).encode()
        self._held.clear()
        return data

    def _text(self, event: Event) -> str:
        if isinstance(event, str):
            return f"data: {event}\n\n"
        if not self._named:
            return f"data: {event.model_dump_json(exclude_unset=True)}\n\n"
        return f"event: {getattr(event, 'type', 'error')}\ndata: {event.model_dump_json()}\n\n"


class TextFrame:
    """JSON of events that differ in one text only; all the rest of it is made once.

    Args:
        make: the event with that text.
    """

    def __init__(self, make: Callable[[str], BaseModel]) -> None:
        mark = random_id()
        self._before, self._after = make(mark).model_dump_json(exclude_unset=True).split(f'"{mark}"')

    def fill(self, text: str) -> str:
        return f"{self._before}{_JSON.encode(text)}{self._after}"
