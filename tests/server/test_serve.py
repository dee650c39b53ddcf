"""Listening, logging and stopping."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from server.fake_engine import FakeEngine

from jaxpaged.errors import ConfigError
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.listen import bind
from jaxpaged.server.serve import Stopper, describe_activity, serve

LOCAL = ServerConfig(host="127.0.0.1", port=0, shutdown_timeout_s=5)


@dataclass
class Running:
    """A server in the background of a test."""

    def __init__(
        self, task: asyncio.Task[None], stopper: Stopper, address: str, session: aiohttp.ClientSession
    ) -> None:
        self.task, self.stopper, self.address, self.session = task, stopper, address, session

    async def complete(self, **body: Any) -> Any:
        async with self.session.post(self.address + "/v1/completions", json={"prompt": "hi", **body}) as response:
            return await (response.text() if body.get("stream") else response.json())


@asynccontextmanager
async def serving(engine: FakeEngine, config: ServerConfig) -> AsyncIterator[Running]:
    stopper, ready = Stopper(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(engine, config, stopper=stopper, on_ready=ready.set_result))
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    async with aiohttp.ClientSession() as session:
        yield Running(task, stopper, ready.result(), session)
    stopper.stop()
    stopper.stop()
    async with asyncio.timeout(10):
        await task


@pytest.fixture
def slow(byte_tokenizer: Any) -> FakeEngine:
    return FakeEngine(tokenizer=byte_tokenizer, step_s=0.01)


async def wait_for_tokens(engine: FakeEngine, count: int = 1) -> None:
    async with asyncio.timeout(5):
        while engine.stats().generation_tokens_total < count:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
async def test_running_requests_finish_and_new_ones_are_refused(slow: FakeEngine, stream: bool) -> None:
    async with serving(slow, LOCAL) as server:
        task = asyncio.create_task(server.complete(max_tokens=26, temperature=0, stream=stream))
        await wait_for_tokens(slow)
        server.stopper.stop()
        await asyncio.sleep(0.02)
        async with aiohttp.ClientSession() as other:
            with pytest.raises(aiohttp.ClientConnectionError):
                await other.get(server.address + "/health")
        answer = await task
        if stream:
            assert answer.count('"finish_reason":"length"') == 1 and answer.endswith("data: [DONE]\n\n")
        else:
            assert answer["choices"][0]["text"] == "abcdefghijklmnopqrstuvwxyz"
        await asyncio.wait_for(server.task, 5)
    assert slow.is_shut_down and slow.held == {}


async def test_an_open_connection_gets_503_while_stopping(slow: FakeEngine) -> None:
    async with serving(slow, LOCAL) as server:
        async with server.session.get(server.address + "/health") as response:
            assert response.status == 200  # its connection stays open
        task = asyncio.create_task(server.complete(max_tokens=50))
        second = asyncio.create_task(server.session.get(server.address + "/version"))
        await second
        await wait_for_tokens(slow)
        server.stopper.stop()
        await asyncio.sleep(0.02)
        async with server.session.get(server.address + "/health") as response:
            assert response.status == 503
        await task


@pytest.mark.parametrize("stream", [False, True])
async def test_late_requests_are_aborted_at_the_deadline(slow: FakeEngine, stream: bool) -> None:
    async with serving(slow, replace(LOCAL, shutdown_timeout_s=0.1)) as server:
        task = asyncio.create_task(server.complete(max_tokens=250, stream=stream))
        await wait_for_tokens(slow)
        server.stopper.stop()
        answer = await task
        if stream:
            assert answer.count('"finish_reason":"abort"') == 1 and answer.endswith("data: [DONE]\n\n")
        else:
            assert answer["choices"][0]["finish_reason"] == "abort"
    assert slow.held == {}


async def test_a_second_signal_ends_it_at_once(slow: FakeEngine) -> None:
    async with serving(slow, replace(LOCAL, shutdown_timeout_s=1000)) as server:
        task = asyncio.create_task(server.complete(max_tokens=250))
        await wait_for_tokens(slow)
        server.stopper.stop()
        await asyncio.sleep(0.02)
        server.stopper.stop()
        assert (await task)["choices"][0]["finish_reason"] == "abort"


async def test_a_unix_socket(byte_tokenizer: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with serving(FakeEngine(tokenizer=byte_tokenizer), replace(LOCAL, uds=path)) as server:
        assert server.address == f"unix:{path}"
        connector = aiohttp.UnixConnector(path)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get("http://x/version") as response,
        ):
            assert response.status == 200


async def test_a_port_in_use_is_named(byte_tokenizer: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await serve(FakeEngine(tokenizer=byte_tokenizer), replace(LOCAL, port=port))


async def test_a_name_with_two_addresses(byte_tokenizer: Any) -> None:
    async with (
        serving(FakeEngine(tokenizer=byte_tokenizer), replace(LOCAL, host="localhost")) as server,
        server.session.get(server.address + "/health") as response,
    ):
        assert response.status == 200


def test_the_address_is_taken_before_there_is_an_engine() -> None:
    [first] = bind(LOCAL)
    with first:
        port = first.getsockname()[1]
        with socket.socket() as client, pytest.raises(ConnectionRefusedError):
            client.connect(("127.0.0.1", port))  # bound, but nobody listens
        first.listen()
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            bind(replace(LOCAL, port=port))
    for address in ({"host": "192.0.2.1"}, {"host": "no.such.host.invalid"}, {"uds": "/no/such/folder/s"}):
        with pytest.raises(ConfigError, match=r"cannot listen on .*; choose another address"):
            bind(replace(LOCAL, **address))


def test_a_unix_socket_of_a_running_server_is_left_alone(tmp_path: Path) -> None:
    config = replace(LOCAL, uds=str(tmp_path / "s"))
    [first] = bind(config)
    with first:
        first.listen()
        with pytest.raises(ConfigError, match="Address already in use"):
            bind(config)
    [second] = bind(config)  # the first has ended, but its socket is still in the folder
    second.close()
    (tmp_path / "s").unlink()
    (tmp_path / "s").write_text("a file that is no socket")
    with pytest.raises(ConfigError, match="Address already in use"):
        bind(config)
    assert (tmp_path / "s").read_text() == "a file that is no socket"


async def test_two_that_bound_one_address(byte_tokenizer: Any) -> None:
    [first] = bind(LOCAL)
    port = first.getsockname()[1]
    config = replace(LOCAL, port=port)
    engine = FakeEngine(tokenizer=byte_tokenizer)
    with first:
        second = bind(config)  # both are loading
        first.listen()
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await serve(engine, config, sockets=second)
    assert engine.is_shut_down and second[0].fileno() == -1


async def test_what_clients_do_wrong_fills_no_log(byte_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(tokenizer=byte_tokenizer, step_s=0.01)
    body = b'{"prompt": "hi", "max_tokens": 100, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    async with serving(engine, LOCAL) as server:
        port = int(server.address.rsplit(":", 1)[1])
        for garbage in (b"GET / HTTP/9.9\r\n\r\n", head + b"Content-Length: -1\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(garbage)
            assert b" 400 " in await reader.readline()
            writer.close()
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            await asyncio.sleep(0.02)
            writer.transport.abort()
        await asyncio.sleep(0.1)
    assert [r for r in caplog.records if r.exc_info or r.levelno > logging.WARNING or "\n" in r.getMessage()] == []
    assert sum("refused what is not HTTP" in r.getMessage() for r in caplog.records) == 2


async def test_log_lines(byte_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="jaxpaged")
    config = replace(LOCAL, log_interval_s=0.05)
    async with serving(FakeEngine(tokenizer=byte_tokenizer), config) as server:
        assert [r.message for r in caplog.records] == [f"serving fake on {server.address}"]
        await asyncio.sleep(0.15)
        assert len(caplog.records) == 1  # nothing while idle
        await server.complete()
        await asyncio.sleep(0.15)
        busy = [r.message for r in caplog.records[1:]]
        # One line, or two where a line was due while the request ran.
        assert 1 <= len(busy) <= 2 and busy[-1].startswith("running 0, waiting 0, in ")
        await asyncio.sleep(0.15)
        assert len(caplog.records) == 1 + len(busy)


def test_activity_line(byte_tokenizer: Any) -> None:
    before = FakeEngine(tokenizer=byte_tokenizer).stats()
    scheduler = replace(
        before.scheduler,
        num_running=3,
        num_waiting=2,
        num_swapped=1,
        num_free_blocks=96,
        num_total_blocks=128,
        prefix_queries_total=200,
        prefix_hits_total=50,
    )
    after = replace(before, scheduler=scheduler, prompt_tokens_total=200, generation_tokens_total=15)
    assert describe_activity(before, after, 10.0) == (
        "running 3, waiting 3, in 20.0 tokens/s, out 1.5 tokens/s, pool 25.0 %, prefix hits 25.0 %"
    )


SCRIPT = """
import logging, sys
sys.path.insert(0, {tests!r})
from server.fake_engine import FakeEngine
from jaxpaged.server import ServerConfig, run_server
logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
run_server(FakeEngine(step_s=0.01), ServerConfig(host="127.0.0.1", port=0, shutdown_timeout_s=5))
print("ended well")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals(number: signal.Signals) -> None:
    tests = str(Path(__file__).parents[1])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT.format(tests=tests), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        async with asyncio.timeout(60):
            while not (line := (await process.stderr.readline()).decode()).startswith("serving"):
                assert line
            address = line.split()[-1]
            body = {"prompt": "hi", "max_tokens": 26, "temperature": 0, "stream": True}
            async with (
                aiohttp.ClientSession() as session,
                session.post(address + "/v1/completions", json=body) as response,
            ):
                await response.content.readline()
                process.send_signal(number)
                assert (await response.text()).count('"finish_reason":"length"') == 1
            assert await process.wait() == 0
        assert await process.stdout.read() == b"ended well\n"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
