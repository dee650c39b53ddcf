"""Fixtures: servers around a fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from server.fake_engine import FakeEngine, make_tokenizer
from server.live_server import Client, StartServer, running_server

from jaxpaged.server.config import ServerConfig


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
async def start_server(byte_tokenizer: Any) -> AsyncIterator[StartServer]:
    """Starts servers: options of FakeEngine in `engine`, of ServerConfig as keywords."""
    async with AsyncExitStack() as stack:

        async def start(engine: dict[str, Any] | None = None, **config: Any) -> Client:
            fake = FakeEngine(tokenizer=byte_tokenizer, **(engine or {}))
            return await stack.enter_async_context(running_server(fake, ServerConfig(**config)))

        yield start


@pytest.fixture
async def client(start_server: StartServer) -> Client:
    return await start_server()
