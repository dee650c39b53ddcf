"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aiohttp import web

from jaxpaged.outputs import CompletionOutput, RequestOutput
from jaxpaged.request import SamplingParams
from jaxpaged.server.body import parse, read_json
from jaxpaged.server.chat_protocol import ChatCompletionRequest
from jaxpaged.server.chat_template import message_text, render_body
from jaxpaged.server.generation import (
    ChunkMaker,
    Generation,
    answer_id,
    json_response,
    start_generation,
    stream_events,
)
from jaxpaged.server.logprobs import chat_logprobs, prompt_logprobs
from jaxpaged.server.params import chat_params
from jaxpaged.server.responses import (
    AssistantMessage,
    CallingMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    FunctionCall,
    ToolCall,
)
from jaxpaged.server.sse import Event
from jaxpaged.server.state import STATE, ServerState
from jaxpaged.server.tools.answer_format import AnswerFormat, answer_format, call_format


@dataclass(frozen=True)
class Chat:
    """A conversation, ready to be continued.

    Attributes:
        model: name to answer with.
        text: the prompt.
        token_ids: of the prompt.
        reading: how answers are to be read.
    """

    model: str
    params: SamplingParams
    text: str
    token_ids: list[int]
    reading: AnswerFormat


async def prepare_chat(state: ServerState, body: ChatCompletionRequest) -> Chat:
    """Checks `body` and makes its prompt.

    Raises:
        ApiError, InvalidRequestError: it cannot be served.
    """
    model = state.resolve_model(body.model)
    engine = state.engine.engine
    params = chat_params(body, engine.generation)
    calls = call_format(body, state.config)
    text = await render_body(
        body,
        engine.tokenizer,
        template=state.config.chat_template,
        trust_request=state.config.trust_request_chat_template,
    )
    reading = answer_format(body, state.config, calls, text)
    params = replace(params, structured_outputs=reading.form(params.structured_outputs))
    if reading.needs_special_tokens(engine.tokenizer):
        params = replace(params, skip_special_tokens=False)
    [token_ids] = await state.engine.tokenize([text], add_special_tokens=body.add_special_tokens)
    return Chat(model, params, text, token_ids, reading)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    body = parse(ChatCompletionRequest, await read_json(request))
    chat = await prepare_chat(state, body)
    async with start_generation(
        request,
        state,
        body,
        model=chat.model,
        params=chat.params,
        prompts=[chat.token_ids],
        id=answer_id(request, body, "chatcmpl"),
        names={"logprobs": "top_logprobs"} if body.top_logprobs else {},
    ) as generation:
        if body.stream:
            return await stream_events(request, generation, _ChatStream(state, body, generation, chat))
        [output] = await generation.collect()
        return json_response(_completion(state, body, generation, output, chat))


def _completion(
    state: ServerState,
    body: ChatCompletionRequest,
    generation: Generation,
    output: RequestOutput,
    chat: Chat,
) -> ChatCompletion:
    choices = []
    role = state.config.response_role
    for o in output.outputs:
        reply = chat.reading.new_reply()
        choices.append(
            ChatChoice(
                index=o.index,
                message=_message(role, reply.take(o.text, finished=True), _echoed(body, role)),
                logprobs=_logprobs(body, o, chat.params),
                finish_reason=reply.finish_reason(o.finish_reason or "stop"),
                stop_reason=o.stop_reason,
                token_ids=o.token_ids if body.return_token_ids else None,
            )
        )
    return ChatCompletion(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=choices,
        usage=generation.usage,
        system_fingerprint=state.system_fingerprint,
        prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
        prompt_token_ids=generation.prompts[0] if body.return_token_ids else None,
        prompt_text=_prompt_text(state, generation, chat) if body.return_prompt_text else None,
    )


def _prompt_text(state: ServerState, generation: Generation, chat: Chat) -> str:
    """Text of what was taken of the prompt."""
    [token_ids] = generation.prompts
    if len(token_ids) == len(chat.token_ids):
        return chat.text
    tokenizer: Any = state.engine.engine.tokenizer
    text: str = tokenizer.decode(token_ids)
    return text


def _echoed(body: ChatCompletionRequest, role: str) -> str:
    """What the answer begins with: the last message, if that is to be echoed and is the answering role's."""
    last = body.messages[-1]
    return message_text(last) if body.echo and last.role == role else ""


def _message(role: str, whole: Delta, echoed: str) -> AssistantMessage:
    """The message whose only delta is `whole`."""
    if echoed:
        whole.content = echoed + (whole.content or "")
    if whole.tool_calls is None:
        content = whole.content or ("" if whole.reasoning is None else None)
        return AssistantMessage(role=role, content=content, reasoning=whole.reasoning)
    calls = [
        ToolCall(id=c.id or "", function=FunctionCall(name=c.function.name or "", arguments=c.function.arguments))
        for c in whole.tool_calls
    ]
    return CallingMessage(role=role, content=whole.content, reasoning=whole.reasoning, tool_calls=calls)


def _logprobs(body: ChatCompletionRequest, output: CompletionOutput, params: SamplingParams) -> ChatLogprobs | None:
    return chat_logprobs(
        output.logprobs,
        params.logprobs or 0,
        asked_ids=tuple(params.logprob_token_ids),
        as_token_ids=bool(body.return_tokens_as_token_ids),
    )


class _ChatStream(ChunkMaker[ChatChunk]):
    """Makes the chunks of one streamed answer: a role chunk for each choice, then deltas."""

    chunk_type = ChatChunk
    object_name = "chat.completion.chunk"

    def __init__(self, state: ServerState, body: ChatCompletionRequest, generation: Generation, chat: Chat) -> None:
        super().__init__(state, generation, body.stream_options)
        self._replies = [chat.reading.new_reply() for _ in range(generation.n)]
        self._body = body
        self._chat = chat
        self._started = False

    def chunks(self, _prompt: int, output: RequestOutput) -> Iterator[Event]:
        if not self._started:
            self._started = True
            yield from self._role_chunks()
        for o in output.outputs:
            delta = self._replies[o.index].take(o.text, finished=o.finished)
            field = _only_text(delta)
            if field is not None and self._tells_text_only(o) and not self._body.return_token_ids:
                make = partial(self._with_text, o, field)
                yield self._text_chunk((o.index, field), getattr(delta, field), make)
            # What is held back needs no chunk of its own, unless it would tell something else.
            elif (
                delta.model_fields_set
                or o.finished
                or o.logprobs is not None
                or (self._body.return_token_ids and o.token_ids)
            ):
                yield self._choice_chunk(o, delta)

    def _with_text(self, o: CompletionOutput, field: str, text: str) -> ChatChunk:
        return self._choice_chunk(o, Delta.model_validate({field: text}))

    def _choice_chunk(self, o: CompletionOutput, delta: Delta) -> ChatChunk:
        choice = ChatChunkChoice(
            index=o.index, delta=delta, logprobs=_logprobs(self._body, o, self._chat.params), finish_reason=None
        )
        if o.finish_reason is not None:
            choice.finish_reason = self._replies[o.index].finish_reason(o.finish_reason)
            choice.stop_reason = o.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = o.token_ids
        return self._chunk([choice])

    def _role_chunks(self) -> Iterator[ChatChunk]:
        role = self._state.config.response_role
        for index in range(self._generation.n):
            delta = Delta(role=role, content=_echoed(self._body, role))
            chunk = self._chunk([ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)])
            if self._body.return_token_ids:
                chunk.prompt_token_ids = self._generation.prompts[0]
            if self._body.return_prompt_text:
                chunk.prompt_text = _prompt_text(self._state, self._generation, self._chat)
            yield chunk


def _only_text(delta: Delta) -> str | None:
    """The field of a delta that has one, and that a text; None for others."""
    fields = delta.model_fields_set
    if len(fields) != 1:
        return None
    [field] = fields
    return field if field in ("content", "reasoning") else None
