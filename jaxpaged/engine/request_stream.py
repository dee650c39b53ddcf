"""Outputs of requests on their way from the engine's thread to the tasks that wait for them."""

from __future__ import annotations

import asyncio
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
    """Outputs of one or more requests, as they come; made by `AsyncEngine.submit`.

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
        self._queue: asyncio.Queue[RequestOutput | EngineDeadError] = asyncio.Queue()
        self._closed = False

    def put(self, output: RequestOutput) -> bool:
        """Takes news of a request; True when that request is over."""
        request = self._open.get(output.request_id)
        if request is None:
            return False
        if output.prompt is None and isinstance(request.request.prompt, str):
            output.prompt = request.request.prompt
        if output.finished:
            del self._open[output.request_id]
        self._queue.put_nowait(output)
        return output.finished

    def fail(self, error: EngineDeadError) -> None:
        if self._open:
            self._open.clear()
            self._queue.put_nowait(error)

    def close(self) -> None:
        """Aborts what has not finished; its blocks are free before the next step."""
        self._closed = True
        open_ids, self._open = list(self._open), {}
        if open_ids:
            self._release(open_ids)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._closed or (not self._open and self._queue.empty()):
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, EngineDeadError):
            self._closed = True
            raise EngineDeadError(str(item))  # each stream raises its own
        return item

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
