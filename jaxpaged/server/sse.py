"""Server-sent events."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web
from pydantic import BaseModel


class EventStream:
    """A response that sends events. Writing waits while the client reads slowly.

    Args:
        named: events have a `type` that names them, and all their fields are sent. Else they are `data` lines with the
            fields that were set, and `data: [DONE]` ends them.
    """

    def __init__(self, *, named: bool = False) -> None:
        self._named = named
        # X-Accel-Buffering: a proxy such as nginx would hold events back.
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    async def open(self, request: web.Request) -> None:
        await self.response.prepare(request)

    async def send(self, events: Iterable[BaseModel]) -> None:
        """Sends events in one write."""
        data = "".join(map(self._text, events))
        if data:
            await self.response.write(data.encode())

    async def close(self) -> None:
        if not self._named:
            await self.response.write(b"data: [DONE]\n\n")
        await self.response.write_eof()

    def _text(self, event: BaseModel) -> str:
        if not self._named:
            return f"data: {event.model_dump_json(exclude_unset=True)}\n\n"
        return f"event: {getattr(event, 'type', 'error')}\ndata: {event.model_dump_json()}\n\n"
