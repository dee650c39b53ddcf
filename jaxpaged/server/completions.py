"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from jaxpaged.engine.async_engine import INLINE_TOKENIZE_CHARS, AsyncEngine
from jaxpaged.engine.detokenizer import token_text
from jaxpaged.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from jaxpaged.request import SamplingParams
from jaxpaged.server.body import parse, read_json
from jaxpaged.server.generation import (
    ChunkMaker,
    Generation,
    answer_id,
    json_response,
    start_generation,
    stream_events,
)
from jaxpaged.server.logprobs import TextOffsets, completion_logprobs, prompt_logprobs, token_name
from jaxpaged.server.params import completion_params
from jaxpaged.server.protocol import CompletionRequest, Prompt
from jaxpaged.server.responses import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
)
from jaxpaged.server.sse import Event
from jaxpaged.server.state import STATE, ServerState

Choice = TypeVar("Choice", CompletionChoice, CompletionChunkChoice)


async def completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    body = parse(CompletionRequest, await read_json(request))
    model = state.resolve_model(body.model)
    params = completion_params(body, state.engine.engine.generation)
    prompts = await prompt_token_ids(body.prompt, state.engine, add_special_tokens=body.add_special_tokens)
    async with start_generation(
        request, state, body, model=model, params=params, prompts=prompts, id=answer_id(request, body, "cmpl")
    ) as generation:
        texts: list[str] = []
        if body.echo or body.return_prompt_text:
            texts = await _prompt_texts(state, body, prompts, generation.prompts)
        choices = _ChoiceMaker(state, body, generation, params, texts)
        if body.stream:
            return await stream_events(request, generation, _CompletionStream(state, body, generation, choices))
        outputs = await generation.collect()
        return json_response(_completion(state, generation, outputs, choices))


def _given_prompts(prompt: Prompt) -> Sequence[str | list[int]]:
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return [prompt] if is_one else prompt  # type: ignore[list-item, return-value]


async def prompt_token_ids(prompt: Prompt, engine: AsyncEngine, *, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of the one or more prompts of a body."""
    prompts = _given_prompts(prompt)
    texts = [p for p in prompts if isinstance(p, str)]
    if texts:
        return await engine.tokenize(texts, add_special_tokens=add_special_tokens)
    return [p for p in prompts if isinstance(p, list)]


async def _prompt_texts(
    state: ServerState, body: CompletionRequest, whole: Sequence[list[int]], cut: Sequence[list[int]]
) -> list[str]:
    """Each prompt's text: as it was given if all of it was taken, else that of its tokens.

    Args:
        whole: tokens of the prompts as given.
        cut: what was taken of them.
    """
    tokenizer: Any = state.engine.engine.tokenizer

    def decode_all() -> list[str]:
        return [
            given
            if isinstance(given, str) and len(taken) == len(tokens)
            else tokenizer.decode(taken, skip_special_tokens=body.skip_special_tokens)
            for given, tokens, taken in zip(_given_prompts(body.prompt), whole, cut, strict=True)
        ]

    if tokenizer is None:
        return [""] * len(cut)
    is_short = sum(map(len, cut)) <= INLINE_TOKENIZE_CHARS
    return decode_all() if is_short else await asyncio.to_thread(decode_all)


class _ChoiceMaker:
    """Makes the choices of an answer from outputs, whole ones or new parts.

    Args:
        prompt_texts: empty unless they are asked for.
    """

    def __init__(
        self,
        state: ServerState,
        body: CompletionRequest,
        generation: Generation,
        params: SamplingParams,
        prompt_texts: Sequence[str],
    ) -> None:
        self._tokenizer = state.engine.engine.tokenizer
        self._body = body
        self._generation = generation
        self._params = params
        self._prompt_texts = prompt_texts
        self._prompt_steps: dict[int, list[TokenLogprobs | None]] = {}
        self._offsets: dict[int, TextOffsets] = {}

    def note_prompt(self, prompt_index: int, output: RequestOutput) -> None:
        """Takes what `output` says of its prompt; before its choices are made."""
        if output.prompt_logprobs is not None:
            self._prompt_steps[prompt_index] = output.prompt_logprobs

    def is_begun(self, prompt_index: int, output: CompletionOutput) -> bool:
        """Whether a choice has been told of already: the first time there is more to tell."""
        return prompt_index * self._generation.n + output.index in self._offsets

    def choice(self, kind: type[Choice], prompt_index: int, o: CompletionOutput) -> Choice:
        body = self._body
        prompt: list[int] = self._generation.prompts[prompt_index]
        index = prompt_index * self._generation.n + o.index
        is_first = index not in self._offsets
        if is_first:
            self._offsets[index] = TextOffsets(self._tokenizer, self._params, () if body.echo else prompt)
        text = o.text
        token_ids: list[int] = o.token_ids
        steps: list[TokenLogprobs | None] | None = None if o.logprobs is None else list(o.logprobs)
        finish_reason, stop_reason = o.finish_reason, o.stop_reason
        if body.max_tokens == 0:  # the token that was drawn all the same is not shown
            text, token_ids, steps = "", [], None if steps is None else []
            finish_reason, stop_reason = finish_reason and "length", None
        shown: list[int] = token_ids
        if body.echo and is_first:
            text, shown = self._prompt_texts[prompt_index] + text, prompt + token_ids
            steps = None if steps is None else self._prompt_steps[prompt_index] + steps
        choice = kind(index=index, text=text, logprobs=None, finish_reason=finish_reason)
        if steps is not None:
            choice.logprobs = self._logprobs(index, shown, steps)
        if o.finished:
            choice.stop_reason = stop_reason
        if body.return_token_ids:
            choice.token_ids = token_ids
            if is_first:
                choice.prompt_token_ids = prompt
        if body.return_prompt_text and is_first:
            choice.prompt_text = self._prompt_texts[prompt_index]
        if isinstance(choice, CompletionChoice) and body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._prompt_steps.get(prompt_index))
        return choice

    def _logprobs(
        self, index: int, token_ids: Sequence[int], steps: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs | None:
        as_token_ids, first = bool(self._body.return_tokens_as_token_ids), ""
        if steps and steps[0] is None:
            text = "" if self._tokenizer is None else token_text(self._tokenizer, token_ids[0])
            first = token_name(token_ids[0], text, as_token_ids)
        offsets = self._offsets[index].of(token_ids)
        return completion_logprobs(steps, offsets, first=first, as_token_ids=as_token_ids)


def _completion(
    state: ServerState, generation: Generation, outputs: list[RequestOutput], maker: _ChoiceMaker
) -> Completion:
    choices = []
    for prompt_index, output in enumerate(outputs):
        maker.note_prompt(prompt_index, output)
        choices += [maker.choice(CompletionChoice, prompt_index, o) for o in output.outputs]
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

    def __init__(
        self, state: ServerState, body: CompletionRequest, generation: Generation, choices: _ChoiceMaker
    ) -> None:
        super().__init__(state, generation, body.stream_options)
        self._choices = choices
        self._return_token_ids = bool(body.return_token_ids)

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[Event]:
        self._choices.note_prompt(prompt_index, output)
        for o in output.outputs:
            if self._tells_text_only(o) and not self._return_token_ids and self._choices.is_begun(prompt_index, o):
                make = partial(self._with_text, prompt_index, o)
                yield self._text_chunk((prompt_index, o.index), o.text, make)
            else:
                yield self._choice_chunk(prompt_index, o)

    def _with_text(self, prompt_index: int, output: CompletionOutput, text: str) -> CompletionChunk:
        return self._choice_chunk(prompt_index, replace(output, text=text))

    def _choice_chunk(self, prompt_index: int, output: CompletionOutput) -> CompletionChunk:
        return self._chunk([self._choices.choice(CompletionChunkChoice, prompt_index, output)])
