"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import time
from typing import Any

import numpy as np
from aiohttp import web

from jaxpaged.core.plan import FloatArray
from jaxpaged.engine.request_stream import EngineRequest
from jaxpaged.errors import InvalidRequestError
from jaxpaged.pooling import PoolingParams
from jaxpaged.server.body import parse, read_json
from jaxpaged.server.chat_template import render_body
from jaxpaged.server.completions import prompt_token_ids
from jaxpaged.server.embeddings_protocol import (
    Embedding,
    EmbeddingFields,
    Embeddings,
    EmbeddingsChatRequest,
    EmbeddingsRequest,
)
from jaxpaged.server.errors import ApiError, renamed
from jaxpaged.server.generation import answer_id, json_response
from jaxpaged.server.params import request_priority, truncate
from jaxpaged.server.state import STATE, ServerState, random_id


async def embeddings(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = _parse(await read_json(request))
    model = state.resolve_model(body.model)
    _check_dimensions(body, model, state.hidden_size)
    priority = request_priority(body, request.headers.get("X-Vllm-Priority"))
    prompts = await _token_ids(state, body)
    prompts = [truncate(p, body, state.max_model_len, side="right") for p in prompts]
    answer = answer_id(request, body, "embd")
    unique = f"{answer}-{random_id()[:8]}"
    params = PoolingParams(state.config.pooling, body.normalizes)
    requests = [EngineRequest(f"{unique}-{i}", p, params, priority, body.cache_salt) for i, p in enumerate(prompts)]
    try:
        found, num_cached = await _run(state, requests)
    except InvalidRequestError as error:
        raise renamed(error, {"prompt": "input"}) from None
    return json_response(
        Embeddings(
            id=answer,
            created=int(time.time()),
            model=model,
            data=[Embedding(index=i, embedding=_encode(e, body)) for i, e in enumerate(found)],
            usage=state.usage(sum(map(len, prompts)), 0, num_cached),
        )
    )


def _parse(raw: dict[str, Any]) -> EmbeddingsRequest | EmbeddingsChatRequest:
    if "messages" not in raw:
        return parse(EmbeddingsRequest, raw)
    if "input" in raw:
        raise InvalidRequestError("input and messages exclude each other; leave one of them out", param="input")
    return parse(EmbeddingsChatRequest, raw)


async def _token_ids(state: ServerState, body: EmbeddingsRequest | EmbeddingsChatRequest) -> list[list[int]]:
    """Token ids of the one or more prompts of a body."""
    if isinstance(body, EmbeddingsRequest):
        return await prompt_token_ids(body.input, state.engine, add_special_tokens=body.add_special_tokens)
    text = await render_body(
        body,
        state.engine.engine.tokenizer,
        template=state.config.chat_template,
        trust_request=state.config.trust_request_chat_template,
    )
    return await state.engine.tokenize([text], add_special_tokens=body.add_special_tokens)


def _check_dimensions(body: EmbeddingFields, model: str, hidden_size: int) -> None:
    if body.dimensions not in (None, hidden_size):
        raise InvalidRequestError(
            f"dimensions is {body.dimensions}, but the model `{model}` does not support matryoshka representation: its "
            f"embeddings have {hidden_size} numbers; leave dimensions out",
            param="dimensions",
        )


async def _run(state: ServerState, requests: list[EngineRequest]) -> tuple[list[FloatArray], int]:
    """The embeddings, in order, and how many prompt tokens came from the prefix cache.

    Raises:
        ApiError: a request failed inside the engine.
    """
    found: dict[str, FloatArray] = {}
    num_cached = 0
    async with await state.engine.submit(requests) as stream:
        async for output in stream:
            if output.embedding is None:
                raise ApiError(f"the request failed: {output.error or 'it was aborted'}", status=500)
            state.metrics.observe_embedding(output)
            found[output.request_id] = output.embedding
            num_cached += output.num_cached_tokens
    return [found[r.request_id] for r in requests], num_cached


def _encode(embedding: FloatArray, body: EmbeddingFields) -> list[float] | str:
    if body.encoding_format == "float":
        numbers: list[float] = embedding.tolist()
        return numbers
    order = ">" if body.endianness == "big" else "<"
    return base64.b64encode(embedding.astype(np.dtype(f"{order}f4")).tobytes()).decode("ascii")
