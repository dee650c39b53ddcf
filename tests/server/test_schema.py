"""The server against its own /openapi.json, with requests that schemathesis makes from it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from server.fake_engine import FakeEngine, make_tokenizer
from server.live_server import running_server

from jaxpaged.server.config import ServerConfig

schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")

from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.generation import GenerationMode  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("GET", "/version"),
    ("GET", "/load"),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server in a thread of its own."""
    loop = asyncio.new_event_loop()
    started: asyncio.Future[str] = loop.create_future()
    stop = asyncio.Event()

    async def serve() -> None:
        async with running_server(FakeEngine(tokenizer=make_tokenizer()), ServerConfig()) as client:
            started.set_result(client.url)
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(asyncio.wait_for(started, 30), loop).result()
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def schema(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


def test_every_operation_is_tried(schema: Any) -> None:
    described = {(o.ok().method.upper(), o.ok().path) for o in schema.get_all_operations()}
    assert described == set(OPERATIONS)  # it leaves out the document itself


def has_body(method: str, path: str) -> bool:
    return method == "POST" and path != "/ping" and not path.endswith("/cancel")


CASES = [
    *[(method, path, "positive") for method, path in OPERATIONS],
    *[(method, path, "negative") for method, path in OPERATIONS if has_body(method, path)],
]


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_answers_fit_the_schema(schema: Any, method: str, path: str, mode: str) -> None:
    operation = schema[path][method]
    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

    @settings(
        max_examples=20 if has_body(method, path) else 5,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data: Any) -> None:
        case = data.draw(operation.as_strategy(generation_mode=GenerationMode(mode)))
        case.call_and_validate(checks=checks)

    check()
