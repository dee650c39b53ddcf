"""The engine for asyncio: a thread of its own steps it, and outputs come back to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from jaxpaged.core.grammar import Grammar
from jaxpaged.engine.request_stream import EngineRequest, OpenRequest, RequestStream
from jaxpaged.engine.validation import check_params, check_prompt
from jaxpaged.errors import EngineDeadError, InvalidRequestError
from jaxpaged.outputs import RequestOutput
from jaxpaged.pooling import PoolingParams
from jaxpaged.request import SamplingParams
from jaxpaged.structured_outputs import grammar_error
from jaxpaged.tokenizer import encode

if TYPE_CHECKING:
    from jaxpaged.engine.engine import Engine
    from jaxpaged.engine.stats import EngineStats

logger = logging.getLogger(__name__)

# A longer text is tokenized in a worker thread, so that the event loop goes on (about 1 ms of work at this size).
INLINE_TOKENIZE_CHARS = 4096
# How long `shutdown` waits for the step in progress before it leaves the thread behind.
STOP_GRACE_S = 10.0
# How long a request waits for its grammar.
COMPILE_GRAMMAR_S = 30.0


class _Call:
    """A function for the engine's thread to run between two steps, and the future that waits for its result."""

    def __init__(self, function: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self._function = function
        self.future = future
        self._result: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._result = self._function()
        except Exception as error:
            self._error = error

    def resolve(self) -> None:
        if self._error is not None:
            self.fail(self._error)
        elif not self.future.done():
            self.future.set_result(self._result)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # a caller that was cancelled does not fetch it


class AsyncEngine:
    """Runs a synchronous `Engine` in a thread and serves any number of concurrent tasks of one event loop.

    The thread starts with the first request; from then on nothing else may call the engine. Use it as
    `async with AsyncEngine(engine) as async_engine`, or call `shutdown` at the end.

    Attributes:
        engine: for reading its attributes (tokenizer, configs, model name) only.
        on_step: called in the event loop after each step.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.on_step: Callable[[EngineStats], None] | None = None
        self._wakeup = threading.Condition()
        self._inbox: deque[_Call] = deque()  # guarded by _wakeup
        self._stopping = False  # guarded by _wakeup
        self._thread: threading.Thread | None = None
        self._last_outputs: list[RequestOutput] = []  # of aborted requests; belongs to the engine's thread
        # The rest belongs to the event loop.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, RequestStream] = {}
        self._calls: set[_Call] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopped = asyncio.Event()
        self._draining = False
        self._dead: EngineDeadError | None = None
        self._stats = engine.stats()

    # -- state

    @property
    def is_running(self) -> bool:
        """It takes requests: neither failed nor shut down."""
        return self._dead is None and not self._draining

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why it stopped for good, or None."""
        return self._dead

    @property
    def num_open_requests(self) -> int:
        """Requests whose blocks may still be held."""
        return len(self._streams)

    def stats(self) -> EngineStats:
        """The engine's counters after the latest step."""
        return self._stats

    # -- requests

    async def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text.

        Raises:
            InvalidRequestError: the engine has no tokenizer, or a text is not valid Unicode.
        """
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequestError("a text prompt needs a tokenizer; give token ids", param="prompt")

        def encode_all() -> list[list[int]]:
            return [encode(tokenizer, text, add_special_tokens=add_special_tokens) for text in texts]

        return encode_all() if sum(map(len, texts)) <= INLINE_TOKENIZE_CHARS else await asyncio.to_thread(encode_all)

    async def submit(self, requests: Sequence[EngineRequest]) -> RequestStream:
        """Queues requests, all or none, and returns the stream of their outputs once the engine has taken them.

        Raises:
            InvalidRequestError: one can never be served as asked.
            QueueFullError: too many requests are waiting.
            EngineDeadError: the engine has stopped or is shutting down.
        """
        self._check_running()
        arrival_time = time.monotonic()
        opened = [
            OpenRequest(r, await self._checked_token_ids(r), arrival_time, await self._grammar(r)) for r in requests
        ]
        self._check_running()
        for request in requests:
            if request.request_id in self._streams:
                raise InvalidRequestError(
                    f"request id {request.request_id!r} is in use; give each request its own", param="request_id"
                )
        self._start()
        stream = RequestStream(opened, self.release)
        self._streams.update((r.request_id, stream) for r in requests)
        self._idle.clear()
        try:
            await self._call(partial(self._add_all, opened))
        except asyncio.CancelledError:
            stream.close()
            raise
        except Exception:  # the engine has taken none of them
            self._forget([r.request_id for r in requests])
            raise
        return stream

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams | PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request, by `params.output_kind`, or one output with the prompt's embedding. Closing or
        cancelling the iterator aborts the request.

        Raises:
            InvalidRequestError, QueueFullError, EngineDeadError: as `submit`.
        """
        request = EngineRequest(request_id, prompt, params, priority, cache_salt)
        async with await self.submit([request]) as stream:
            async for output in stream:
                yield output

    async def abort(self, request_id: str) -> bool:
        """Ends a request, whose stream then ends with finish_reason "abort". False if it is not there."""
        if request_id not in self._streams:
            return False
        (ended,) = await asyncio.shield(self.release([request_id]))  # it is freed even if the caller is cancelled
        return bool(ended)

    def release(self, request_ids: list[str]) -> asyncio.Future[Any]:
        """Ends requests and frees what they hold, before the next step; their streams get the last output.

        Returns:
            A future: whether each was still there. When it is done the ids can be used again.
        """
        call = self._call(partial(self._abort_all, request_ids))
        call.add_done_callback(partial(self._released, request_ids))
        return call

    async def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix."""
        self._check_running()
        self._start()
        await self._call(self.engine.reset_prefix_cache)

    async def tell_observers(self) -> None:
        """Tells the observers of the steps that the engine has nothing to do, if so; else the next step tells them."""
        self._check_running()
        self._start()
        await self._call(self.engine.note_idle)

    # -- end of life

    async def shutdown(self, deadline_s: float = 0.0) -> None:
        """Stops admitting, lets requests finish for `deadline_s` seconds, aborts the rest and ends the thread."""
        self._draining = True
        if self._thread is None:
            self._dead = self._dead or EngineDeadError("the engine was shut down")
            self.engine.shutdown()
            return
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("aborting %d requests that did not finish within %g s", len(self._streams), deadline_s)
        if self._streams:
            self.release(list(self._streams))
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify()
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await self._stopped.wait()
        except TimeoutError:
            logger.error("the step in progress did not end within %g s; its thread is left behind", STOP_GRACE_S)
            return
        # It has said its last word and is as good as over. If the process ended meanwhile it would be aborted: JAX does
        # not survive it when Python stops a thread that lets go of arrays and programs.
        self._thread.join()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.shutdown()

    # -- in the event loop

    def _check_running(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))
        if self._draining:
            raise EngineDeadError("the engine is shutting down and takes no more requests")

    def _start(self) -> None:
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, name="jaxpaged-engine", daemon=True)
            self._thread.start()
        elif self._loop is not asyncio.get_running_loop():
            raise RuntimeError("an AsyncEngine serves one event loop; make another one for this loop")

    async def _checked_token_ids(self, request: EngineRequest) -> list[int]:
        """Token ids of a request that the engine can serve; checked here so that it fails before any wait."""
        engine = self.engine
        if draws := isinstance(request.params, SamplingParams):
            check_params(
                request.params,
                vocab_size=engine.model_config.vocab_size,
                max_model_len=engine.scheduler_config.max_model_len,
                max_num_seqs=engine.scheduler_config.max_num_seqs,
                max_logprobs=engine.config.max_logprobs,
            )
        prompt = request.prompt
        token_ids = (await self.tokenize([prompt]))[0] if isinstance(prompt, str) else prompt
        check_prompt(
            token_ids,
            vocab_size=engine.model_config.vocab_size,
            max_model_len=engine.scheduler_config.max_model_len,
            draws=draws,
        )
        return token_ids

    async def _grammar(self, request: EngineRequest) -> Grammar | None:
        """The grammar of a request, which waits outside of the engine until it is compiled."""
        wanted = request.params.structured_outputs if isinstance(request.params, SamplingParams) else None
        if wanted is None:
            return None
        # Others may wait for the same compilation: it goes on if this caller is cancelled.
        compiling = asyncio.shield(asyncio.wrap_future(self.engine.compile_grammar(wanted)))
        try:
            async with asyncio.timeout(COMPILE_GRAMMAR_S):
                return await compiling
        except TimeoutError:
            raise grammar_error(f"it takes longer than {COMPILE_GRAMMAR_S:g} s to compile; make it smaller") from None

    def _call(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Has the engine's thread run `function` before its next step."""
        assert self._loop is not None
        call = _Call(function, self._loop.create_future())
        if self._dead is not None:
            call.fail(self._dead)
            return call.future
        self._calls.add(call)
        with self._wakeup:
            self._inbox.append(call)
            self._wakeup.notify()
        return call.future

    def _deliver(self, calls: list[_Call], outputs: list[RequestOutput], stats: EngineStats) -> None:
        self._stats = stats
        for call in calls:
            self._calls.discard(call)
            call.resolve()
        touched: dict[RequestStream, None] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                touched[stream] = None
                if stream.put(output):
                    self._forget([output.request_id])
        for stream in touched:
            stream.notify()
        if self.on_step is not None:
            self.on_step(stats)

    def _released(self, request_ids: list[str], call: asyncio.Future[Any]) -> None:
        error = call.exception()
        if error is not None and not isinstance(error, EngineDeadError):
            logger.error("could not abort %s", ", ".join(request_ids), exc_info=error)
        self._forget(request_ids)

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()

    def _end(self, failure: Exception | None) -> None:
        """The thread is over: everyone who waits is told."""
        reason = f"the engine failed: {type(failure).__name__}: {failure}" if failure else "the engine was shut down"
        error = self._dead = EngineDeadError(reason)
        for call in self._calls:
            call.fail(error)
        self._calls.clear()
        for stream in set(self._streams.values()):
            stream.fail(error)
        self._streams.clear()
        self._idle.set()
        self._stopped.set()

    # -- in the engine's thread

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            while (calls := self._next_calls()) is not None:
                for call in calls:
                    call.run()
                outputs, self._last_outputs = self._last_outputs, []
                if self.engine.has_unfinished_requests():
                    outputs += self.engine.step()
                for output in outputs:
                    output.metrics = output.metrics.copy()  # the engine goes on writing to its own
                if not self._post(self._deliver, calls, outputs, self.engine.stats()):
                    break
        except Exception as error:
            logger.exception("the engine has failed and takes no more requests")
            failure = error
        try:
            self.engine.shutdown()
        except Exception:
            logger.exception("the engine failed to shut down")
        self._post(self._end, failure)

    def _next_calls(self) -> list[_Call] | None:
        """The calls since last time; sleeps when there is nothing to do. None: stop."""
        with self._wakeup:
            while not (self._inbox or self._stopping or self.engine.has_unfinished_requests()):
                self._wakeup.wait()
            if self._stopping and not self._inbox:
                return None
            calls = list(self._inbox)
            self._inbox.clear()
            return calls

    def _add_all(self, requests: list[OpenRequest]) -> None:
        added: list[str] = []
        for opened in requests:
            request = opened.request
            try:
                self.engine.add_request(
                    request.request_id,
                    opened.token_ids,
                    request.params,
                    arrival_time=opened.arrival_time,
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    grammar=opened.grammar,
                )
            except Exception:
                for request_id in added:
                    self.engine.abort_request(request_id)
                raise
            added.append(request.request_id)

    def _abort_all(self, request_ids: list[str]) -> list[bool]:
        outputs = [self.engine.abort_request(i) for i in request_ids]
        self._last_outputs += [output for output in outputs if output is not None]
        return [output is not None for output in outputs]

    def _post(self, function: Callable[..., None], *args: Any) -> bool:
        """Runs `function` in the event loop; False when the loop is gone."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # closed
            return False
        return True
