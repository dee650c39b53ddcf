"""The endpoints under /v1/responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

from aiohttp import web

from jaxpaged.errors import InvalidRequestError
from jaxpaged.server import middleware
from jaxpaged.server.body import parse, read_json
from jaxpaged.server.chat import Chat, prepare_chat
from jaxpaged.server.errors import ApiError, renamed
from jaxpaged.server.generation import Generation, json_response, start_generation, stream_events, told_error
from jaxpaged.server.responses_api.answer import Answer, output_as_input
from jaxpaged.server.responses_api.conversation import NAMES, chat_request
from jaxpaged.server.responses_api.objects import CallItem, ResponseObject
from jaxpaged.server.responses_api.protocol import InputItem, ResponsesRequest
from jaxpaged.server.responses_api.store import ResponseStore, StoredResponse
from jaxpaged.server.state import ServerState
from jaxpaged.server.tools.thinking import Start

_ID = r"{response_id:[\s\S]+}"  # whatever it is, the answer is that there is none


class ResponsesApi:
    """Handlers, and what they share: stored responses, and those that are being made in the background."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._store = ResponseStore(state.config.response_store_bytes)
        self._running: dict[str, tuple[asyncio.Task[None], ResponseObject]] = {}

    def add_to(self, app: web.Application) -> None:
        app.add_routes(
            [
                web.post("/v1/responses", middleware.counted(self.create)),
                web.get(f"/v1/responses/{_ID}", self.show),
                web.post(f"/v1/responses/{_ID}/cancel", self.cancel),
            ]
        )
        app.cleanup_ctx.append(self._cleanup)

    async def create(self, request: web.Request) -> web.StreamResponse:
        body = parse(ResponsesRequest, await read_json(request))
        _check_options(body)
        items = [*self._previous(body.previous_response_id), *body.input]
        chat_body = chat_request(body, items)
        try:
            chat = await prepare_chat(self._state, chat_body)
            _check_logprobs(chat)
            answer = Answer(self._state, body, chat, lambda response: self._keep(response, items))
            async with AsyncExitStack() as stack:
                generation = await stack.enter_async_context(
                    start_generation(
                        request,
                        self._state,
                        chat_body,
                        model=chat.model,
                        params=chat.params,
                        prompts=[chat.token_ids],
                        id=answer.response.id,
                    )
                )
                if body.background:
                    self._run_in_background(answer, generation, stack.pop_all())
                elif body.stream:
                    return await stream_events(request, generation, answer.of(generation), named=True)
                else:
                    await answer.collect(generation)
        except InvalidRequestError as error:
            raise renamed(error, NAMES) from None
        return json_response(answer.response)

    async def show(self, request: web.Request) -> web.Response:
        if request.query.get("stream", "").lower() in ("true", "1"):
            raise InvalidRequestError("a stored response cannot be streamed; leave stream out", param="stream")
        response_id = request.match_info["response_id"]
        _, response = self._running.get(response_id, (None, None))
        return json_response(response or self._stored(response_id, "response_id").response)

    async def cancel(self, request: web.Request) -> web.Response:
        response_id = request.match_info["response_id"]
        task, response = self._running.get(response_id, (None, None))
        if task is None or response is None:
            status = self._stored(response_id, "response_id").response.status
            raise InvalidRequestError(
                f"the response is {status}: only one that is in progress in the background can be cancelled",
                param="response_id",
            )
        task.cancel()
        await asyncio.wait([task])
        return json_response(response)

    def _previous(self, response_id: str | None) -> Sequence[InputItem]:
        """The conversation that ends with a stored response."""
        if response_id is None:
            return ()
        name = "previous_response_id"
        if response_id in self._running:
            raise InvalidRequestError(f"the response {response_id!r} is still in progress; wait for it", param=name)
        stored = self._stored(response_id, name)
        if stored.response.status not in ("completed", "incomplete"):
            raise InvalidRequestError(f"the response {response_id!r} is {stored.response.status}", param=name)
        last = stored.response.output[-1] if stored.response.output else None
        if isinstance(last, CallItem) and last.status != "completed":
            raise InvalidRequestError(
                f"the response {response_id!r} ends within a call, and cannot be gone on from; raise max_output_tokens",
                param=name,
            )
        return stored.items

    def _stored(self, response_id: str, param: str) -> StoredResponse:
        stored = self._store.get(response_id)
        if stored is None:
            raise ApiError(f"Response with id '{response_id}' not found.", status=404, param=param)
        return stored

    def _keep(self, response: ResponseObject, items: Sequence[InputItem]) -> None:
        if response.store:
            self._store.put(StoredResponse(response, [*items, *output_as_input(response)]))

    def _run_in_background(self, answer: Answer, generation: Generation, stack: AsyncExitStack) -> None:
        task = asyncio.create_task(self._finish(answer, generation, stack))
        self._running[answer.response.id] = task, answer.response
        self._state.load += 1

    async def _finish(self, answer: Answer, generation: Generation, stack: AsyncExitStack) -> None:
        try:
            async with stack:
                await answer.collect(generation)
        except asyncio.CancelledError:
            answer.cancel()
        except Exception as error:
            answer.fail(told_error(error))
        finally:
            self._state.load -= 1
            del self._running[answer.response.id]

    async def _cleanup(self, _app: web.Application) -> AsyncIterator[None]:
        yield
        tasks = [task for task, _ in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)


def _check_options(body: ResponsesRequest) -> None:
    if body.background and body.stream:
        raise InvalidRequestError("background and stream exclude each other; leave one out", param="background")
    if body.background and body.store is False:
        raise InvalidRequestError("background needs store: there is no other way to the response", param="background")


def _check_logprobs(chat: Chat) -> None:
    may_think = chat.reading.thinking in (Start.THINKING, Start.UNDECIDED)
    if chat.params.logprobs is not None and (may_think or chat.reading.calls is not None):
        raise InvalidRequestError(
            "logprobs cannot be told apart from those of tool calls and reasoning; leave them, or the tools, out",
            param="include",
        )
