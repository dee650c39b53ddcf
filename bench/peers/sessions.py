"""One contestant, started and ready to be loaded: a server over HTTP, or an engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import serve
from http_client import HTTPClient
from peers.processes import Process
from peers.workloads import Load, Outcome, Request
from startup import free_port, is_healthy

START_TIMEOUT_S = 900.0
REQUEST_TIMEOUT_S = 300.0
DRIVER = Path(__file__).parent / "inside" / "driver.py"
# Of any vocabulary, and short: what it takes to make the first token.
FIRST_LOAD = Load([Request(list(range(1000, 1008)), 1)], 1)


@dataclass(frozen=True)
class Command:
    """Attributes:
    argv: "{port}" stands for the port, where it is a server.
    env: on top of this process's environment.
    model: the server's name for the model.
    """

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    model: str = "m"


class Session(Protocol):
    process: Process

    def run(self, load: Load) -> Outcome: ...


class HTTPSession:
    """An OpenAI server on a loopback port, and `serve.py` as its client."""

    def __init__(self, process: Process, port: int, model: str) -> None:
        self.process = process
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._model = model

    def run(self, load: Load) -> Outcome:
        return asyncio.run(self._run(load))

    async def _run(self, load: Load) -> Outcome:
        work = [serve.Workload(self._body(r), len(r.prompt), r.output_len) for r in load.requests]
        arrivals = [request.arrival for request in load.requests]
        # It makes a connection for each request: some servers close those that they have answered on, now and then
        # just as the next request is sent there.
        client = HTTPClient(REQUEST_TIMEOUT_S)
        results, duration, most = await serve.send_all(
            client, self._url, work, arrivals, load.max_concurrency, lambda done: None
        )
        for result, request in zip(results, load.requests, strict=True):
            check_length(result, request)
        return Outcome(results, duration, most)

    def _body(self, request: Request) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.output_len,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


class DriverSession:
    """An engine that `inside/driver.py` holds, in a Python of its own; a line of JSON each way for a load."""

    def __init__(self, process: Process, time_limit_s: float) -> None:
        self.process = process
        self._time_limit_s = time_limit_s

    def receive(self) -> dict[str, Any]:
        assert self.process.popen.stdout is not None
        line = self.process.popen.stdout.readline()
        if not line:
            self.process.popen.wait()
            self.process.check()
        message: dict[str, Any] = json.loads(line)
        return message

    def run(self, load: Load) -> Outcome:
        assert self.process.popen.stdin is not None
        message = {
            "requests": [[r.prompt, r.output_len, r.arrival] for r in load.requests],
            "max_concurrency": load.max_concurrency,
            "time_limit_s": self._time_limit_s,
        }
        try:
            self.process.popen.stdin.write(json.dumps(message) + "\n")
            self.process.popen.stdin.flush()
        except BrokenPipeError:
            self.process.popen.wait()
            self.process.check()
        answer = self.receive()
        results = [
            driver_result(request, start, times)
            for request, (start, times) in zip(load.requests, answer["results"], strict=True)
            if start is not None  # else the time limit came before its turn
        ]
        return Outcome(results, answer["duration"], answer["max_concurrent"])


def driver_result(request: Request, start: float, times: Sequence[float]) -> serve.Result:
    """Args:
    start, times: seconds since the load began, when the request began and when each of its tokens came.
    """
    result = serve.Result(start=start, input_len=len(request.prompt), output_len=len(times), finished=bool(times))
    if times:
        result.ttft = times[0] - start
        result.latency = times[-1] - start
        result.itls = [after - before for before, after in itertools.pairwise(times)]
    check_length(result, request)
    return result


def check_length(result: serve.Result, request: Request) -> None:
    """A request that ended early did less work: it has failed."""
    if not result.error and result.output_len != request.output_len:
        result.error = f"{result.output_len} tokens instead of {request.output_len}"


@contextlib.contextmanager
def http_session(command: Command, log: Path) -> Iterator[tuple[HTTPSession, float]]:
    """Starts a server, waits until it is healthy and has answered. Yields it, and seconds until its first token.

    Raises:
        StartError: it ended, or did not get there in time.
    """
    port = free_port()
    argv = [part.format(port=port) if part == "{port}" else part for part in command.argv]
    with Process(argv, os.environ | command.env, log) as process:
        while not is_healthy(port):
            process.check()
            if time.perf_counter() - process.started > START_TIMEOUT_S:
                raise process.failure(f"not ready after {START_TIMEOUT_S:.0f} s")
            time.sleep(0.1)
        session = HTTPSession(process, port, command.model)
        yield session, _first_token(session)


@contextlib.contextmanager
def driver_session(command: Command, log: Path, time_limit_s: float) -> Iterator[tuple[DriverSession, float]]:
    """The same for an engine in a process of its own; `command` runs `DRIVER`."""
    with Process(command.argv, os.environ | command.env, log, pipe=True) as process:
        session = DriverSession(process, time_limit_s)
        session.receive()
        yield session, _first_token(session)


def _first_token(session: Session) -> float:
    """Seconds from the start of the process until it has answered a short prompt.

    Raises:
        StartError: the answer is an error.
    """
    result = session.run(FIRST_LOAD).results[0]
    if not result.success:
        raise session.process.failure(f"the first request failed: {result.error}")
    return time.perf_counter() - session.process.started
