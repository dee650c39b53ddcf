"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web

from jaxpaged.engine.async_engine import AsyncEngine
from jaxpaged.outputs import RequestOutput
from jaxpaged.server.body import parse, read_json
from jaxpaged.server.generation import ChunkMaker, Generation, json_response, start_generation, stream_events
from jaxpaged.server.logprobs import completion_logprobs
from jaxpaged.server.params import completion_params
from jaxpaged.server.protocol import CompletionRequest
from jaxpaged.server.responses import Completion, CompletionChoice, CompletionChunk, CompletionChunkChoice
from jaxpaged.server.state import STATE, ServerState


async def completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    body = parse(CompletionRequest, await read_json(request))
    model = state.resolve_model(body.model)
    params = completion_params(body, state.engine.engine.generation, state.vocab_size)
    prompts = await _prompt_token_ids(body, state.engine)
    async with start_generation(
        request, state, body, model=model, params=params, prompts=prompts, prefix="cmpl"
    ) as generation:
        if body.stream:
            stream = _CompletionStream(state, body, generation)
            return await stream_events(request, generation, stream.chunks, stream.last)
        outputs = await generation.collect()
        return json_response(_completion(state, body, generation, outputs))


async def _prompt_token_ids(body: CompletionRequest, engine: AsyncEngine) -> list[list[int]]:
    prompts = [body.prompt] if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else body.prompt
    texts = [p for p in prompts if isinstance(p, str)]
    if texts:
        return await engine.tokenize(texts, add_special_tokens=body.add_special_tokens)
    return [p for p in prompts if isinstance(p, list)]


def _completion(
    state: ServerState, body: CompletionRequest, generation: Generation, outputs: list[RequestOutput]
) -> Completion:
    choices = []
    for prompt_index, output in enumerate(outputs):
        for o in output.outputs:
            logprobs, _ = completion_logprobs(o.logprobs, 0, as_token_ids=bool(body.return_tokens_as_token_ids))
            choice = CompletionChoice(
                index=prompt_index * generation.n + o.index,
                text=o.text,
                logprobs=logprobs,
                finish_reason=o.finish_reason,
                stop_reason=o.stop_reason,
            )
            if body.return_token_ids:
                choice.token_ids = o.token_ids
                choice.prompt_token_ids = generation.prompts[prompt_index]
            choices.append(choice)
    return Completion(
        id=generation.id,
        created=generation.created,
        model=generation.model,
        choices=choices,
        usage=generation.usage,
        system_fingerprint=state.system_fingerprint,
    )


class _CompletionStream(ChunkMaker[CompletionChunk]):
    """Makes the chunks of one streamed answer."""

    chunk_type = CompletionChunk
    object_name = "text_completion"

    def __init__(self, state: ServerState, body: CompletionRequest, generation: Generation) -> None:
        super().__init__(state, generation, body.stream_options)
        self._body = body
        self._text_offsets: dict[int, int] = {}

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[CompletionChunk]:
        for o in output.outputs:
            index = prompt_index * self._generation.n + o.index
            is_first = index not in self._text_offsets
            logprobs, self._text_offsets[index] = completion_logprobs(
                o.logprobs,
                self._text_offsets.get(index, 0),
                as_token_ids=bool(self._body.return_tokens_as_token_ids),
            )
            choice = CompletionChunkChoice(index=index, text=o.text, logprobs=logprobs, finish_reason=o.finish_reason)
            if o.finished:
                choice.stop_reason = o.stop_reason
            if self._body.return_token_ids:
                choice.token_ids = o.token_ids
                if is_first:
                    choice.prompt_token_ids = self._generation.prompts[prompt_index]
            yield self._chunk([choice])
