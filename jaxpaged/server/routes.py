"""The small endpoints: models, health, version, metrics, load, tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from jaxpaged.engine.async_engine import INLINE_TOKENIZE_CHARS
from jaxpaged.errors import InvalidRequestError
from jaxpaged.server.body import parse, read_json
from jaxpaged.server.chat_protocol import TokenizeChatRequest
from jaxpaged.server.chat_template import render_body
from jaxpaged.server.generation import json_response
from jaxpaged.server.openapi import openapi_document
from jaxpaged.server.protocol import DetokenizeRequest, TokenizeTextRequest
from jaxpaged.server.responses import (
    DetokenizeResponse,
    LoadResponse,
    ModelCard,
    ModelList,
    ModelPermission,
    TokenizeResponse,
    VersionResponse,
)
from jaxpaged.server.state import STATE, VERSION, ServerState


async def health(request: web.Request) -> web.Response:
    """200 while requests are taken, else 503; no body."""
    return web.Response(status=200 if request.app[STATE].engine.is_running else 503)


async def show_version(_request: web.Request) -> web.Response:
    return json_response(VersionResponse(version=VERSION))


async def load(request: web.Request) -> web.Response:
    return json_response(LoadResponse(server_load=request.app[STATE].load))


async def metrics(request: web.Request) -> web.Response:
    body = request.app[STATE].metrics.render()
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def list_models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return json_response(ModelList(data=[_card(state, name) for name in state.model_names]))


async def show_model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return json_response(_card(state, state.resolve_model(request.match_info["model"])))


async def tokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    raw = await read_json(request)
    is_chat = "messages" in raw
    body = parse(TokenizeChatRequest, raw) if is_chat else parse(TokenizeTextRequest, raw)
    state.resolve_model(body.model)
    tokenizer = _tokenizer(state)
    if isinstance(body, TokenizeChatRequest):
        text = await render_body(
            body,
            tokenizer,
            template=state.config.chat_template,
            trust_request=state.config.trust_request_chat_template,
        )
    else:
        text = body.prompt
    [tokens] = await state.engine.tokenize([text], add_special_tokens=body.add_special_tokens)
    return json_response(
        TokenizeResponse(
            count=len(tokens),
            max_model_len=state.max_model_len,
            tokens=tokens,
            token_strs=tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None,
        )
    )


async def detokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = parse(DetokenizeRequest, await read_json(request))
    state.resolve_model(body.model)
    tokenizer = _tokenizer(state)
    _check_vocabulary(body.tokens, state.vocab_size)
    if len(body.tokens) <= INLINE_TOKENIZE_CHARS:
        text = tokenizer.decode(body.tokens)
    else:
        text = await asyncio.to_thread(tokenizer.decode, body.tokens)
    return json_response(DetokenizeResponse(prompt=text))


async def openapi(_request: web.Request) -> web.Response:
    return web.json_response(openapi_document())


async def reset_prefix_cache(request: web.Request) -> web.Response:
    await request.app[STATE].engine.reset_prefix_cache()
    return web.Response()


def _card(state: ServerState, name: str) -> ModelCard:
    permission = ModelPermission(id=f"modelperm-{name}", created=state.created)
    return ModelCard(
        id=name,
        created=state.created,
        root=state.engine.engine.model_name,
        max_model_len=state.max_model_len,
        permission=[permission],
    )


def _tokenizer(state: ServerState) -> Any:
    tokenizer = state.engine.engine.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("this server has no tokenizer; send token ids to /v1/completions")
    return tokenizer


def _check_vocabulary(tokens: Sequence[int], vocab_size: int) -> None:
    bad = next((t for t in tokens if t >= vocab_size), None)
    if bad is not None:
        raise InvalidRequestError(
            f"Token id {bad} is out of vocabulary: ids go from 0 to {vocab_size - 1}", param="tokens"
        )
