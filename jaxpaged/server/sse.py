"""Server-sent events: `data: {json}` lines, then `data: [DONE]`."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web
from pydantic import BaseModel


class EventStream:
    """A response that sends events. Writing waits while the client reads slowly."""

    def __init__(self) -> None:
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
        data = "".join(f"data: {event.model_dump_json(exclude_unset=True)}\n\n" for event in events)
        if data:
            await self.response.write(data.encode())

    async def close(self) -> None:
        await self.response.write(b"data: [DONE]\n\n")
        await self.response.write_eof()
