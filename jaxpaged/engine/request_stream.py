"""Outputs of requests on their way from the engine's thread to the tasks that wait for them."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import TracebackType

from jaxpaged.errors import EngineDeadError
from jaxpaged.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxpaged.request import OutputKind, SamplingParams


@dataclass(frozen=True)
class EngineRequest:
    """One prompt to generate from; `prompt` is text or token ids."""

    request_id: str
    prompt: str | list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


class OpenRequest:
    """What is known of a request that has not finished: enough to end it with "abort"."""

    def __init__(self, request: EngineRequest, token_ids: list[int], arrival_time: float) -> None:
        self.request = request
        self.token_ids = token_ids
        self.arrival_time = arrival_time
        self._latest: RequestOutput | None = None
        self._sequences: dict[int, CompletionOutput] = {}

    def note(self, output: RequestOutput) -> None:
        self._latest = output
        self._sequences.update((o.index, o) for o in output.outputs)

    def aborted(self) -> RequestOutput:
        """The last output of this request, all of whose running sequences end with "abort"."""
        latest = self._latest
        metrics = copy.copy(latest.metrics) if latest else RequestMetrics(self.arrival_time)
        metrics.finished_time = time.monotonic()
        indices = [i for i in range(self.request.params.n) if i not in self._sequences or self._is_running(i)]
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt if isinstance(self.request.prompt, str) else None,
            prompt_token_ids=self.token_ids,
            outputs=[self._aborted_sequence(i) for i in indices],
            finished=True,
            metrics=metrics,
            num_cached_tokens=latest.num_cached_tokens if latest else 0,
        )

    def _is_running(self, index: int) -> bool:
        return not self._sequences[index].finished

    def _aborted_sequence(self, index: int) -> CompletionOutput:
        sequence = self._sequences.get(index)
        if sequence is not None and self.request.params.output_kind is OutputKind.CUMULATIVE:
            return replace(sequence, finish_reason="abort")
        return CompletionOutput(index, "", [], finish_reason="abort")


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
        request.note(output)
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

    def end_with_abort(self, request_id: str) -> bool:
        """Ends a request's output with finish_reason "abort"; False if it was over."""
        request = self._open.get(request_id)
        return request is not None and self.put(request.aborted())

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
