"""What the two completion endpoints share: requests to the engine, their outputs, and streaming."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from aiohttp import web
from pydantic import BaseModel

from jaxpaged.engine.request_stream import EngineRequest, RequestStream
from jaxpaged.errors import InvalidRequestError
from jaxpaged.outputs import CompletionOutput, RequestOutput
from jaxpaged.request import SamplingParams
from jaxpaged.server.errors import ApiError, error_response, internal_error, renamed, to_api_error
from jaxpaged.server.intervals import Intervals
from jaxpaged.server.metrics import RequestObserver
from jaxpaged.server.params import request_priority, truncate
from jaxpaged.server.protocol import GenerationRequest, PromptFields, StreamOptions
from jaxpaged.server.responses import ChatChunk, CompletionChunk, Usage
from jaxpaged.server.sse import Event, EventStream, TextFrame
from jaxpaged.server.state import ServerState, clean_header, random_id
from jaxpaged.structured_outputs import GRAMMAR_ERROR

logger = logging.getLogger(__name__)

Chunk = TypeVar("Chunk", ChatChunk, CompletionChunk)


class Generation:
    """The requests that one call to the API makes: one a prompt.

    Attributes:
        id: id of the answer.
        created: Unix time, seconds.
        model: name to answer with.
        n: choices a prompt.
        prompts: token ids of each prompt.
    """

    def __init__(
        self,
        state: ServerState,
        stream: RequestStream,
        *,
        id: str,
        model: str,
        params: SamplingParams,
        prompts: dict[str, list[int]],
        stream_interval: int = 1,
    ) -> None:
        self._state = state
        self._stream = stream
        self.id = id
        self.created = int(time.time())
        self.model = model
        self.n = params.n
        self.prompts = list(prompts.values())
        self._index = {request_id: i for i, request_id in enumerate(prompts)}
        self._intervals = Intervals(stream_interval)
        self._observer = RequestObserver(state.metrics, params)
        self._completion_tokens = 0
        self._cached_tokens: dict[str, int] = {}

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return self._state.usage(sum(len(p) for p in self.prompts), self._completion_tokens, self.cached_tokens)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache, as far as that is known."""
        return sum(self._cached_tokens.values())

    async def batches(
        self, consumer: Callable[[Iterator[tuple[int, RequestOutput]]], bool] | None = None
    ) -> AsyncIterator[Iterator[tuple[int, RequestOutput]]]:
        """Outputs that came together, each with the index of its prompt; to be read to the end before the next.

        Args:
            consumer: is given them first, as soon as they come, and returns whether it has read them.

        Raises:
            ApiError: also while they are read: a request failed inside the engine.
        """
        if consumer is not None:
            self._stream.hand_to(lambda outputs: consumer(self._read(outputs)))
        while outputs := await self._stream.take():
            yield self._read(outputs)

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Each output with the index of its prompt.

        Raises:
            ApiError: a request failed inside the engine.
        """
        async for batch in self.batches():
            for pair in batch:
                yield pair

    def _read(self, outputs: list[RequestOutput]) -> Iterator[tuple[int, RequestOutput]]:
        for output in outputs:
            self._observer.update(output)
            self._completion_tokens += sum(len(o.token_ids) for o in output.outputs)
            self._cached_tokens[output.request_id] = output.num_cached_tokens
            if output.error is not None:
                raise _failure(output.error)
            if (ready := self._intervals.take(output)) is not None:
                yield self._index[output.request_id], ready

    async def collect(self) -> list[RequestOutput]:
        """The last output of each prompt, in order."""
        last = {index: output async for index, output in self.outputs()}
        return [last[i] for i in range(len(self.prompts))]


def _failure(reason: str) -> ApiError:
    if reason.startswith(GRAMMAR_ERROR):  # its own fault, though it took some tokens to find out
        return ApiError(reason, param="structured_outputs")
    return ApiError(f"the request failed: {reason}", status=500)


class ChunkMaker(Generic[Chunk]):
    """What the streams of both endpoints share: the frame of a chunk, and the usage at the end.

    Attributes:
        chunk_type: of the endpoint.
        object_name: what the `object` field of its chunks says.
    """

    chunk_type: type[Chunk]
    object_name: Any  # a literal type of its own in each chunk

    def __init__(self, state: ServerState, generation: Generation, options: StreamOptions | None) -> None:
        self._state = state
        self._generation = generation
        self._options = options or StreamOptions()
        self._shows_usage = bool(self._options.include_usage and self._options.continuous_usage_stats)
        self._frames: dict[Hashable, TextFrame] = {}

    def first(self) -> Iterable[Event]:
        return ()

    async def last(self) -> Iterable[Event]:
        """The chunk with the whole usage, if the client wants it."""
        if not self._options.include_usage:
            return []
        chunk = self._chunk([])
        chunk.usage = self._generation.usage
        return [chunk]

    def failed(self, error: ApiError) -> Iterable[Event]:
        return [error_response(error)]

    def _tells_text_only(self, output: CompletionOutput) -> bool:
        """Whether a chunk differs in its text only from others of its choice; most are like that."""
        return output.finish_reason is None and output.logprobs is None and not self._shows_usage

    def _text_chunk(self, kind: Hashable, text: str, make: Callable[[str], Chunk]) -> str:
        """The chunk that `make` makes of a text, as JSON.

        Args:
            kind: of chunk; those of one kind differ in their texts only.
        """
        frame = self._frames.get(kind)
        if frame is None:
            frame = self._frames[kind] = TextFrame(make)
        return frame.fill(text)

    def _chunk(self, choices: list[Any]) -> Chunk:
        generation = self._generation
        chunk = self.chunk_type(
            id=generation.id,
            object=self.object_name,
            created=generation.created,
            model=generation.model,
            choices=choices,
            system_fingerprint=self._state.system_fingerprint,
        )
        if self._shows_usage:
            chunk.usage = generation.usage
        return chunk


@asynccontextmanager
async def start_generation(
    request: web.Request,
    state: ServerState,
    body: GenerationRequest,
    *,
    model: str,
    params: SamplingParams,
    prompts: Sequence[list[int]],
    id: str,
    names: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[Generation]:
    """Queues one request a prompt; on leaving the block, aborts what has not finished.

    Args:
        id: of the answer.
        names: what the endpoint calls parameters of the engine, where it has other names.

    Raises:
        InvalidRequestError, QueueFullError, EngineDeadError: as `AsyncEngine.submit`.
    """
    priority = request_priority(body, request.headers.get("X-Vllm-Priority"))
    # Clients may use one id twice; the engine's ids must differ.
    unique = f"{id}-{random_id()[:8]}"
    cut = {f"{unique}-{i}": truncate(p, body, state.max_model_len - 1) for i, p in enumerate(prompts)}
    requests = [EngineRequest(i, ids, params, priority, body.cache_salt) for i, ids in cut.items()]
    try:
        submitted = await state.engine.submit(requests)
    except InvalidRequestError as error:
        raise renamed(error, names) from None
    async with submitted as stream:
        interval = body.stream_interval or state.config.stream_interval
        yield Generation(state, stream, id=id, model=model, params=params, prompts=cut, stream_interval=interval)


def answer_id(request: web.Request, body: PromptFields, prefix: str) -> str:
    """Id of an answer: the client's own, from its header or the body, behind `prefix`, or a new one."""
    return f"{prefix}-{clean_header(request, 'X-Request-Id') or body.request_id or random_id()}"


class AnswerEvents(Protocol):
    """What a streamed answer consists of."""

    def first(self) -> Iterable[Event]:
        """Events before there is any output."""

    def chunks(self, prompt_index: int, output: RequestOutput, /) -> Iterable[Event]:
        """Events that an output makes."""

    async def last(self) -> Iterable[Event]:
        """Events after all output."""

    def failed(self, error: ApiError) -> Iterable[Event]:
        """Events instead of the rest."""


async def stream_events(
    request: web.Request, generation: Generation, answer: AnswerEvents, *, named: bool = False
) -> web.StreamResponse:
    """Answers with events as the output comes; an error on the way becomes an event.

    Args:
        named: as of `EventStream`.
    """
    events = EventStream(named=named)

    def send_at_once(batch: Iterable[tuple[int, RequestOutput]]) -> bool:
        if not events.is_clear:
            return False
        for index, output in batch:
            events.add(answer.chunks(index, output))
        events.flush_at_once()
        return True

    await events.open(request)
    try:
        events.add(answer.first())
        await events.flush()
        async for batch in generation.batches(send_at_once):
            for index, output in batch:
                events.add(answer.chunks(index, output))
                if events.is_full:
                    await events.flush()
            await events.flush()
        events.add(await answer.last())
    except ConnectionError:
        raise  # the client has gone
    except Exception as error:
        events.add(answer.failed(told_error(error)))
    await events.close()
    return events.response


def told_error(error: Exception) -> ApiError:
    """What a client is told of a failure after the answer has begun; logs one that nobody foresaw."""
    api_error = to_api_error(error)
    if api_error is None:
        logger.error("an answer failed", exc_info=error)
        api_error = internal_error(error)
    return api_error


def json_response(body: BaseModel) -> web.Response:
    return web.Response(body=body.model_dump_json(), content_type="application/json")
