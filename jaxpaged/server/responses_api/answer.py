"""One answer of /v1/responses, streamed or not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxpaged.outputs import RequestOutput
from jaxpaged.request import SamplingParams
from jaxpaged.server.chat import Chat
from jaxpaged.server.errors import ApiError
from jaxpaged.server.generation import Generation
from jaxpaged.server.logprobs import chat_logprobs
from jaxpaged.server.responses_api.items import OutputItems
from jaxpaged.server.responses_api.objects import (
    IncompleteDetails,
    InputTokensDetails,
    LifecycleEvent,
    OutputTokensDetails,
    ReasoningItem,
    ResponseError,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
    StreamEvent,
)
from jaxpaged.server.responses_api.protocol import (
    InputCall,
    InputItem,
    InputMessage,
    InputReasoning,
    InputThought,
    ResponsesRequest,
    TextFormat,
    TextOptions,
)
from jaxpaged.server.state import ServerState, random_id


class Answer:
    """Makes the response, and the events of a streamed one, from the engine's outputs.

    Args:
        on_end: called with the response when it is complete, before its client is told, or has failed.

    Attributes:
        response: as far as it is known.
    """

    def __init__(
        self, state: ServerState, body: ResponsesRequest, chat: Chat, on_end: Callable[[ResponseObject], None]
    ) -> None:
        self.response = _new_response(body, chat.model, chat.params)
        self._state = state
        self._on_end = on_end
        self._params = chat.params
        self._reply = chat.reading.new_reply()
        self._items = OutputItems()
        self._generation: Generation | None = None

    def of(self, generation: Generation) -> Answer:
        """Itself, told whose outputs it takes."""
        self._generation = generation
        return self

    def first(self) -> Iterator[StreamEvent]:
        yield self._lifecycle("response.created")
        yield self._lifecycle("response.in_progress")

    def chunks(self, _prompt: int, output: RequestOutput) -> Iterator[StreamEvent]:
        for o in output.outputs:
            logprobs = chat_logprobs(o.logprobs, self._params.logprobs or 0)
            found = self._reply.events(o.text, finished=o.finished)
            yield from self._items.take(found, logprobs.content if logprobs is not None else ())
            if o.finished:
                is_whole = o.finish_reason == "stop"
                yield from self._items.finish("completed" if is_whole else "incomplete")
                self.response.status = "completed" if is_whole else "incomplete"
                if not is_whole:
                    reason = "max_output_tokens" if o.finish_reason == "length" else None
                    self.response.incomplete_details = IncompleteDetails(reason=reason)  # type: ignore[arg-type]

    async def last(self) -> Iterable[StreamEvent]:
        await self._complete()
        is_whole = self.response.status == "completed"
        return [self._lifecycle("response.completed" if is_whole else "response.incomplete")]

    def failed(self, error: ApiError) -> Iterator[StreamEvent]:
        yield from self._items.finish("incomplete")
        self.fail(error)
        yield self._lifecycle("response.failed")

    def fail(self, error: ApiError) -> None:
        self.response.error = ResponseError(message=error.message)
        self._end("failed")

    def cancel(self) -> None:
        self._end("cancelled")

    async def collect(self, generation: Generation) -> None:
        """Makes the response without telling of it on the way.

        Raises:
            ApiError: the request failed inside the engine.
        """
        self.of(generation)
        async for prompt, output in generation.outputs():
            for _ in self.chunks(prompt, output):
                pass
        await self._complete()

    async def _complete(self) -> None:
        self.response.usage = await self._usage()
        self.response.completed_at = int(time.time())
        self._end(self.response.status)

    def _end(self, status: ResponseStatus) -> None:
        for _ in self._items.finish("incomplete"):
            pass  # it ended earlier, if there is anybody to tell
        self.response.status = status
        self.response.output = self._items.items
        self._on_end(self.response)

    async def _usage(self) -> ResponseUsage:
        assert self._generation is not None
        usage = self._generation.usage
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=self._generation.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=await self._reasoning_tokens()),
            total_tokens=usage.total_tokens,
        )

    async def _reasoning_tokens(self) -> int:
        thoughts = [part.text for item in self._items.items if isinstance(item, ReasoningItem) for part in item.content]
        if not thoughts:
            return 0
        return sum(map(len, await self._state.engine.tokenize(thoughts, add_special_tokens=False)))

    def _lifecycle(self, kind: str) -> LifecycleEvent:
        return LifecycleEvent(
            sequence_number=self._items.next_number(),
            type=kind,  # type: ignore[arg-type]
            response=self.response.model_copy(deep=True),
        )


def output_as_input(response: ResponseObject) -> Sequence[InputItem]:
    """What the model said, as the input of the response that goes on from it."""
    items: list[InputItem] = []
    for item in response.output:
        if item.type == "message":
            items.append(InputMessage(role="assistant", content="".join(part.text for part in item.content)))
        elif item.type == "reasoning":
            items.append(InputReasoning(type="reasoning", content=[InputThought(text=p.text) for p in item.content]))
        else:
            call = InputCall(type="function_call", call_id=item.call_id, name=item.name, arguments=item.arguments)
            items.append(call)
    return items


def _new_response(body: ResponsesRequest, model: str, params: SamplingParams) -> ResponseObject:
    return ResponseObject(
        id=f"resp_{random_id()}",
        created_at=int(time.time()),
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=body.reasoning,
        store=body.store is not False,
        temperature=params.temperature,
        text=body.text or TextOptions(format=TextFormat()),
        tool_choice=body.tool_choice or ("auto" if body.tools else "none"),
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )
