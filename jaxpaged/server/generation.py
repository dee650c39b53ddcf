"""What the two completion endpoints share: requests to the engine, their outputs, and streaming."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from aiohttp import web
from pydantic import BaseModel

from jaxpaged.engine.request_stream import EngineRequest, RequestStream
from jaxpaged.outputs import RequestOutput
from jaxpaged.request import SamplingParams
from jaxpaged.server.errors import ApiError, error_response, internal_error, to_api_error
from jaxpaged.server.metrics import RequestObserver
from jaxpaged.server.params import request_priority, truncate
from jaxpaged.server.protocol import GenerationRequest, StreamOptions
from jaxpaged.server.responses import ChatChunk, CompletionChunk, Usage
from jaxpaged.server.sse import EventStream
from jaxpaged.server.state import ServerState, clean_header, random_id

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
    ) -> None:
        self._state = state
        self._stream = stream
        self.id = id
        self.created = int(time.time())
        self.model = model
        self.n = params.n
        self.prompts = list(prompts.values())
        self._index = {request_id: i for i, request_id in enumerate(prompts)}
        self._observer = RequestObserver(state.metrics, params)
        self._completion_tokens = 0
        self._cached_tokens: dict[str, int] = {}

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return self._state.usage(
            sum(len(p) for p in self.prompts), self._completion_tokens, sum(self._cached_tokens.values())
        )

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Each output with the index of its prompt.

        Raises:
            ApiError: a request failed inside the engine.
        """
        async for output in self._stream:
            self._observer.update(output)
            self._completion_tokens += sum(len(o.token_ids) for o in output.outputs)
            self._cached_tokens[output.request_id] = output.num_cached_tokens
            if output.error is not None:
                raise ApiError(f"the request failed: {output.error}", status=500)
            yield self._index[output.request_id], output

    async def collect(self) -> list[RequestOutput]:
        """The last output of each prompt, in order."""
        last = {index: output async for index, output in self.outputs()}
        return [last[i] for i in range(len(self.prompts))]


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

    def last(self) -> Iterable[Chunk]:
        """The chunk with the whole usage, if the client wants it."""
        if self._options.include_usage:
            chunk = self._chunk([])
            chunk.usage = self._generation.usage
            yield chunk

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
        if self._options.include_usage and self._options.continuous_usage_stats:
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
    prefix: str,
) -> AsyncIterator[Generation]:
    """Queues one request a prompt; on leaving the block, aborts what has not finished.

    Args:
        prefix: of the answer's id, e.g. "chatcmpl".

    Raises:
        InvalidRequestError, QueueFullError, EngineDeadError: as `AsyncEngine.submit`.
    """
    response_id = f"{prefix}-{clean_header(request, 'X-Request-Id') or body.request_id or random_id()}"
    priority = request_priority(body, request.headers.get("X-Vllm-Priority"))
    # Clients may use one id twice; the engine's ids must differ.
    unique = f"{response_id}-{random_id()[:8]}"
    cut = {f"{unique}-{i}": truncate(p, body, state.max_model_len) for i, p in enumerate(prompts)}
    requests = [EngineRequest(i, ids, params, priority, body.cache_salt) for i, ids in cut.items()]
    async with await state.engine.submit(requests) as stream:
        yield Generation(state, stream, id=response_id, model=model, params=params, prompts=cut)


async def stream_events(
    request: web.Request,
    generation: Generation,
    chunks: Callable[[int, RequestOutput], Iterable[BaseModel]],
    last: Callable[[], Iterable[BaseModel]],
) -> web.StreamResponse:
    """Answers with events: `chunks` of each output, then `last`; an error on the way becomes an event."""
    events = EventStream()
    await events.open(request)
    try:
        async for index, output in generation.outputs():
            await events.send(chunks(index, output))
        await events.send(last())
    except ConnectionError:
        raise  # the client has gone
    except Exception as error:
        api_error = to_api_error(error)
        if api_error is None:
            logger.exception("a stream failed")
            api_error = internal_error(error)
        await events.send([error_response(api_error)])
    await events.close()
    return events.response


def json_response(body: BaseModel) -> web.Response:
    return web.Response(body=body.model_dump_json(), content_type="application/json")
