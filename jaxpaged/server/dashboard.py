"""/dashboard: the picture of the KV memory, live, with the server's figures."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from typing import TYPE_CHECKING

from aiohttp import web

from jaxpaged.server.config import ServerConfig
from jaxpaged.server.dashboard_feed import FigureSource, StepFeed
from jaxpaged.server.errors import ApiError, to_http
from jaxpaged.server.middleware import is_key
from jaxpaged.trace.html import live_page, page_policy

if TYPE_CHECKING:
    from jaxpaged.engine.async_engine import AsyncEngine
    from jaxpaged.server.metrics import ServerMetrics

FRAME_S = 0.25
FIGURES_S = 1.0
# A browser that has not taken a frame for so long is let go.
WRITE_S = 20.0
MAX_VIEWERS = 16


class Dashboard:
    """The page and its events. Each viewer has at most one frame on its way; what it misses meanwhile it never gets.

    Args:
        frame_s: between two frames.
        write_s: how long a browser may take for one.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        config: ServerConfig,
        metrics: ServerMetrics,
        *,
        frame_s: float = FRAME_S,
        write_s: float = WRITE_S,
    ) -> None:
        self._engine = engine
        self._config = config
        self._title = config.model_names(engine.engine.model_name)[0]
        self._feed = StepFeed(engine.engine)
        self._source = FigureSource(engine.stats)
        metrics.on_observe = self._source.observe
        self._frame_s = frame_s
        self._write_s = write_s
        self._num_viewers = 0

    def add_to(self, app: web.Application) -> None:
        app.add_routes([web.get("/dashboard", self.page), web.get("/dashboard/events", self.events)])

    async def page(self, request: web.Request) -> web.Response:
        """The page; it holds nothing of the server but the model's name."""
        if (refusal := self._refusal(request)) is not None:
            return refusal
        return web.Response(
            text=live_page(self._title, "dashboard/events"),
            content_type="text/html",
            headers={
                "Content-Security-Policy": f"{page_policy(live=True)}; frame-ancestors 'none'",
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
            },
        )

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: `header` once, `records` and `figures` for as long as somebody reads them."""
        if (refusal := self._refusal(request)) is not None:
            return refusal
        if self._num_viewers >= MAX_VIEWERS:
            raise ApiError(f"{MAX_VIEWERS} browsers show the dashboard, the limit; close one", status=503)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )
        is_first = self._num_viewers == 0
        if is_first:
            self._feed.open()
        self._num_viewers += 1  # before anything is awaited, or more than the limit come in
        try:
            if is_first:  # an engine without work takes no step that could tell its state
                await self._engine.tell_observers()
            await response.prepare(request)
            await self._send_frames(response)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # it has gone
        finally:
            self._num_viewers -= 1
            if self._num_viewers == 0:
                self._feed.close()
        return response

    async def _send_frames(self, response: web.StreamResponse) -> None:
        frame = f"event: header\ndata: {self._feed.header.to_json()}\n\n"
        cursor: int | None = None
        skipped, next_figures = 0, 0.0
        loop = asyncio.get_running_loop()
        while self._engine.is_running:
            records, cursor, missed = self._feed.since(cursor)
            skipped += missed
            if records:
                frame += f"event: records\ndata: [{','.join(records)}]\n\n"
            if loop.time() >= next_figures:
                frame += f"event: figures\ndata: {json.dumps(self._source.figures(skipped).to_dict())}\n\n"
                next_figures = loop.time() + FIGURES_S
            if frame:
                async with asyncio.timeout(self._write_s):
                    await response.write(frame.encode())
            frame = ""
            await asyncio.sleep(self._frame_s)

    def _refusal(self, request: web.Request) -> web.Response | None:
        """The answer to who has no key. A browser asks its user for a password, which is the key, and sends it so."""
        config = self._config
        if not config.api_keys or config.dashboard_public or is_key(_sent_key(request), config):
            return None
        answer = to_http(ApiError("missing or wrong API key; give it as the password, with any user name", status=401))
        answer.headers["WWW-Authenticate"] = 'Basic realm="jaxpaged dashboard", charset="UTF-8"'
        return answer


def _sent_key(request: web.Request) -> str:
    scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return sent.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(sent.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
