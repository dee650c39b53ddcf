"""A server around a fake engine, on a real socket, and a client for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from server.fake_engine import FakeEngine

from jaxpaged.engine.async_engine import AsyncEngine
from jaxpaged.server.app import make_app
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.http_log import http_logger


@dataclass
class Client:
    """HTTP client of one running server."""

    engine: FakeEngine
    async_engine: AsyncEngine
    session: aiohttp.ClientSession
    url: str
    port: int

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, **options) as response:
            return response.status, await _content(response)

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        if body is not None:
            options["json"] = body
        async with self.session.post(self.url + path, **options) as response:
            return response.status, await _content(response)

    async def complete(self, **body: Any) -> dict[str, Any]:
        status, answer = await self.post("/v1/completions", {"prompt": "hi", **body})
        assert status == 200, answer
        return answer

    async def chat(self, **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "hi"}]
        status, answer = await self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 5, **body})
        assert status == 200, answer
        return answer

    async def events(self, path: str, **body: Any) -> list[Any]:
        """Chunks of a streamed answer, [DONE] checked and left out."""
        async with self.session.post(self.url + path, json={"stream": True, **body}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            text = await response.text()
        assert text.endswith("\n\n")
        lines = text[:-2].split("\n\n")
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]

    async def error(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        got, answer = await self.post(path, body)
        assert got == status, answer
        assert answer["error"].keys() == {"message", "type", "param", "code"}
        assert answer["error"]["code"] == status
        assert "\n" not in answer["error"]["message"]
        return answer["error"]

    async def settled(self) -> None:
        """Waits until nothing is held any more."""
        async with asyncio.timeout(10):
            while self.async_engine.num_open_requests or self.engine.has_unfinished_requests():
                await asyncio.sleep(0.01)
        assert self.engine.held == {}


async def _content(response: aiohttp.ClientResponse) -> Any:
    return await response.json() if response.content_type == "application/json" else await response.text()


@asynccontextmanager
async def running_server(engine: Any, config: ServerConfig) -> AsyncIterator[Client]:
    async with AsyncEngine(engine) as async_engine:
        app = make_app(async_engine, config)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1, logger=http_logger())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        try:
            async with aiohttp.ClientSession() as session:
                yield Client(engine, async_engine, session, f"http://127.0.0.1:{port}", port)
        finally:
            await runner.cleanup()


StartServer = Callable[..., Awaitable[Client]]
