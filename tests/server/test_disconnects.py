"""Clients that leave, dawdle or send too much."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import socket
import string
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from server.live_server import Client, StartServer

from jaxpaged.server.sse import EventStream

PATH = "/v1/completions"


def raw_request(body: dict[str, Any], *, path: str = PATH, extra_length: int = 0) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(data) + extra_length}\r\n\r\n".encode() + data


@contextlib.asynccontextmanager
async def connection(client: Client) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(start_server: StartServer, stream: bool) -> None:
    client = await start_server({"step_s": 0.01})
    async with connection(client) as (_, writer):
        writer.write(raw_request({"prompt": "hi", "max_tokens": 250, "stream": stream}))
        async with asyncio.timeout(5):
            while client.engine.stats().generation_tokens_total < 3:
                await asyncio.sleep(0.005)
    await client.settled()
    assert client.engine.stats().generation_tokens_total < 100
    assert client.engine.stats().finished == {"abort": 1}
    assert (await client.get("/load"))[1] == {"server_load": 0}


async def test_a_client_that_leaves_ends_all_prompts_and_choices(start_server: StartServer) -> None:
    client = await start_server({"step_s": 0.01})
    async with connection(client) as (_, writer):
        writer.write(raw_request({"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 250}))
        while len(client.engine.held) < 3:
            await asyncio.sleep(0.005)
    await client.settled()
    assert client.engine.stats().finished == {"abort": 3}


async def test_200_clients_that_leave_at_random(start_server: StartServer) -> None:
    client = await start_server({"step_s": 0.002, "max_num_seqs": 16})
    rng = random.Random(3)

    async def visit() -> None:
        patience = rng.choice([0, 0.001, rng.uniform(0, 0.2), rng.uniform(0, 1.0)])
        body: dict[str, Any] = {"prompt": "hi", "max_tokens": rng.randint(1, 60), "stream": rng.random() < 0.5}
        if rng.random() < 0.3:
            body |= {"n": 3, "prompt": ["hi", "ho"]}
        await asyncio.sleep(rng.uniform(0, 0.5))
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(patience), client.session.post(client.url + PATH, json=body) as response:
                await response.read()

    neighbour = asyncio.create_task(client.complete(prompt="hi", max_tokens=26, temperature=0))
    await asyncio.gather(*(visit() for _ in range(200)))
    assert (await neighbour)["choices"][0]["text"] == "abcdefghijklmnopqrstuvwxyz"
    await client.settled()
    assert client.engine.stats().finished.get("abort", 0) > 0
    assert client.engine.stats().scheduler.num_free_blocks == client.engine.stats().scheduler.num_total_blocks
    assert (await client.get("/load"))[1] == {"server_load": 0}
    assert (await client.complete(max_tokens=3))["choices"][0]["text"] == "abc"


async def test_half_a_request_and_a_dropped_connection(client: Client) -> None:
    whole = raw_request({"prompt": "hi"})
    for part in (whole[:20], whole[:-3], raw_request({"prompt": "hi"}, extra_length=5)):
        async with connection(client) as (_, writer):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
    assert client.engine.all_requests == []
    assert (await client.complete(max_tokens=3))["choices"][0]["text"] == "abc"


async def test_a_body_that_says_it_is_100_mb_is_refused_at_once(client: Client) -> None:
    async with connection(client) as (reader, writer):
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000000\r\n\r\n"
        writer.write(head.encode())  # not one byte of the body
        async with asyncio.timeout(5):
            status = await reader.readline()
        assert b"413" in status


async def test_a_body_of_100_mb_is_not_buffered(client: Client) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chunk = b" " * 65536

    async def body() -> Any:  # chunked: its length is not known beforehand
        for _ in range(100_000_000 // len(chunk)):
            yield chunk

    try:
        async with client.session.post(
            client.url + PATH, data=body(), headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 413
            error = (await response.json())["error"]
            assert error["type"] == "RequestTooLargeError" and "4,194,304" in error["message"]
    except aiohttp.ClientConnectionError:
        pass  # the server hung up before the client was done sending
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 50_000
    await client.complete(max_tokens=1)


async def test_the_size_limit(start_server: StartServer) -> None:
    client = await start_server(max_request_bytes=2000)
    error = await client.error(PATH, {"prompt": "hi", "user": "x" * 2000}, 413)
    assert "2,000 bytes" in error["message"]
    await client.complete(user="x" * 1900)


async def test_a_slow_reader_gets_everything_and_delays_nobody(start_server: StartServer) -> None:
    client = await start_server()
    async with connection(client) as (reader, writer):
        body = {"prompt": [[71]] * 16, "max_tokens": 250, "stream": True, "logprobs": 5}
        writer.write(raw_request(body))
        await reader.readline()  # then it does not read for a while: over a MB fills the buffers
        answer = await client.complete(max_tokens=26, temperature=0)
        assert answer["choices"][0]["text"] == "abcdefghijklmnopqrstuvwxyz"
        await client.settled()  # the engine is done with it long before the client is
        received = bytearray()
        async with asyncio.timeout(20):
            while b"[DONE]" not in received[-200:]:
                received += await reader.read(1 << 20)
    assert received.count(b'"finish_reason":"length"') == 16
    texts = dict.fromkeys(range(16), "")
    for line in received.splitlines():
        if line.startswith(b'data: {"'):
            [choice] = json.loads(line[6:])["choices"]
            texts[choice["index"]] += choice["text"]
    assert set(texts.values()) == {(string.ascii_lowercase * 10)[:250]}


async def test_the_answer_of_a_reader_that_stops_is_not_all_written_out(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not read waits as outputs, which are bounded by the request, and only a little of it as bytes."""
    transports = []
    open_stream = EventStream.open

    async def open_with_small_buffer(stream: EventStream, request: web.Request) -> None:
        assert request.transport is not None
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        transports.append(request.transport)
        await open_stream(stream, request)

    monkeypatch.setattr(EventStream, "open", open_with_small_buffer)
    client = await start_server()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    sock.connect(("127.0.0.1", client.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    with contextlib.closing(writer):
        writer.write(raw_request({"prompt": [[71]] * 16, "max_tokens": 250, "stream": True, "logprobs": 5}))
        await reader.readline()
        await client.settled()
        [transport] = transports
        assert 0 < transport.get_write_buffer_size() < 200_000
        received = bytearray()
        async with asyncio.timeout(20):
            while b"[DONE]" not in received[-200:]:
                received += await reader.read(1 << 20)
        assert len(received) > 1_000_000
