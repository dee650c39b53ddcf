"""Outputs of requests on their way from the engine's thread to the tasks that wait for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType

from jaxpaged.core.grammar import Grammar
from jaxpaged.errors import EngineDeadError
from jaxpaged.outputs import RequestOutput
from jaxpaged.pooling import PoolingParams
from jaxpaged.request import SamplingParams


@dataclass(frozen=True)
class EngineRequest:
    """One prompt to generate from, or to make an embedding of; `prompt` is text or token ids."""

    request_id: str
    prompt: str | list[int]
    params: SamplingParams | PoolingParams
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True)
class OpenRequest:
    """A request that has not finished."""

    request: EngineRequest
    token_ids: list[int]
    arrival_time: float
    grammar: Grammar | None = None


class RequestStream:
    """Outputs of one or more requests, as they come; made by `AsyncEngine.submit`, for one task to read.

    Closing it (or leaving its `async with` block) aborts what has not finished. Iteration ends when every request has
    finished, and raises EngineDeadError when the engine stops.
    """

    def __init__(self, requests: Iterable[OpenRequest], release: Callable[[list[str]], object]) -> None:
        """
        Args:
            release: frees what the requests with these ids hold.
        """
        self._release = release
        self._open = {r.request.request_id: r for r in requests}
        self._news: deque[RequestOutput] = deque()
        self._consumer: Callable[[list[RequestOutput]], bool] | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[RequestOutput]:
        """All that has come since the last call, at least one output; empty where iteration would end.

        Raises:
            EngineDeadError: the engine has stopped, and there is nothing left to take.
            Exception: as the consumer raised it.
        """
        await self._wait()
        news = list(self._news)
        self._news.clear()
        return news

    def hand_to(self, consumer: Callable[[list[RequestOutput]], bool]) -> None:
        """From now on `consumer` gets what comes, as soon as it comes: it saves a turn of the reader's task.

        Args:
            consumer: takes outputs, or returns False to leave them to the reader. What it raises, the reader gets.
        """
        self._consumer = consumer

    def put(self, output: RequestOutput) -> bool:
        """Takes news of a request; True when that request is over. `notify` must follow."""
        request = self._open.get(output.request_id)
        if request is None:
            return False
        if output.prompt is None and isinstance(request.request.prompt, str):
            output.prompt = request.request.prompt
        if output.finished:
            del self._open[output.request_id]
        if self._error is None:  # else it would be read before the error, behind a gap
            self._news.append(output)
        return output.finished

    def notify(self) -> None:
        """Has the news taken that were put."""
        # While the reader is busy with earlier ones, these must wait for it.
        if self._consumer is not None and self._waiter is not None and not self._waiter.done():
            try:
                if self._consumer(list(self._news)):
                    self._news.clear()
            except Exception as error:
                self._news.clear()
                self._error = error
        if self._news or not self._open or self._error is not None:
            self._wake()

    def fail(self, error: EngineDeadError) -> None:
        if self._open:
            self._open.clear()
            self._error = EngineDeadError(str(error))  # each stream raises its own
            self._wake()

    def close(self) -> None:
        """Aborts what has not finished; its blocks are free before the next step."""
        open_ids, self._open = list(self._open), {}
        self._news.clear()
        self._error = self._consumer = None
        self._wake()
        if open_ids:
            self._release(open_ids)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        await self._wait()
        if not self._news:
            raise StopAsyncIteration
        return self._news.popleft()

    async def _wait(self) -> None:
        """Returns once there is an output, or none will come."""
        if not self._news and self._open and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._news and self._error is not None:
            error, self._error = self._error, None
            raise error

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
