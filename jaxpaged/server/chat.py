"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web

from jaxpaged.outputs import CompletionOutput, RequestOutput
from jaxpaged.server.body import parse, read_json
from jaxpaged.server.chat_template import render_body
from jaxpaged.server.generation import ChunkMaker, Generation, json_response, start_generation, stream_events
from jaxpaged.server.logprobs import chat_logprobs
from jaxpaged.server.params import chat_params
from jaxpaged.server.protocol import ChatCompletionRequest
from jaxpaged.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
)
from jaxpaged.server.state import STATE, ServerState


async def chat_completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    body = parse(ChatCompletionRequest, await read_json(request))
    model = state.resolve_model(body.model)
    engine = state.engine.engine
    params = chat_params(body, engine.generation, state.vocab_size)
    text = await render_body(
        body,
        engine.tokenizer,
        template=state.config.chat_template,
        trust_request=state.config.trust_request_chat_template,
    )
    prompts = await state.engine.tokenize([text], add_special_tokens=body.add_special_tokens)
    async with start_generation(
        request, state, body, model=model, params=params, prompts=prompts, prefix="chatcmpl"
    ) as generation:
        if body.stream:
            stream = _ChatStream(state, body, generation, num_top=params.logprobs or 0)
            return await stream_events(request, generation, stream.chunks, stream.last)
        [output] = await generation.collect()
        return json_response(_completion(state, body, generation, output, num_top=params.logprobs or 0))


def _completion(
    state: ServerState, body: ChatCompletionRequest, generation: Generation, output: RequestOutput, *, num_top: int
) -> ChatCompletion:
    choices = [
        ChatChoice(
            index=o.index,
            message=AssistantMessage(role=state.config.response_role, content=o.text),
            logprobs=_logprobs(body, o, num_top),
            finish_reason=o.finish_reason or "stop",
            stop_reason=o.stop_reason,
            token_ids=o.token_ids if body.return_token_ids else None,
        )
        for o in output.outputs
    ]
    return ChatCompletion(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=choices,
        usage=generation.usage,
        system_fingerprint=state.system_fingerprint,
        prompt_token_ids=generation.prompts[0] if body.return_token_ids else None,
    )


def _logprobs(body: ChatCompletionRequest, output: CompletionOutput, num_top: int) -> ChatLogprobs | None:
    return chat_logprobs(output.logprobs, num_top, as_token_ids=bool(body.return_tokens_as_token_ids))


class _ChatStream(ChunkMaker[ChatChunk]):
    """Makes the chunks of one streamed answer: a role chunk for each choice, then deltas."""

    chunk_type = ChatChunk
    object_name = "chat.completion.chunk"

    def __init__(
        self, state: ServerState, body: ChatCompletionRequest, generation: Generation, *, num_top: int
    ) -> None:
        super().__init__(state, generation, body.stream_options)
        self._body = body
        self._num_top = num_top
        self._started = False

    def chunks(self, _prompt: int, output: RequestOutput) -> Iterator[ChatChunk]:
        if not self._started:
            self._started = True
            yield from self._role_chunks()
        for o in output.outputs:
            choice = ChatChunkChoice(
                index=o.index,
                delta=Delta(content=o.text),
                logprobs=_logprobs(self._body, o, self._num_top),
                finish_reason=o.finish_reason,
            )
            if o.finished:
                choice.stop_reason = o.stop_reason
            if self._body.return_token_ids:
                choice.token_ids = o.token_ids
            yield self._chunk([choice])

    def _role_chunks(self) -> Iterator[ChatChunk]:
        for index in range(self._generation.n):
            delta = Delta(role=self._state.config.response_role, content="")
            chunk = self._chunk([ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)])
            if self._body.return_token_ids:
                chunk.prompt_token_ids = self._generation.prompts[0]
            yield chunk
