"""The OpenAPI 3.1 document, made from the request and response models."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from jaxpaged.server import chat_protocol, protocol, responses
from jaxpaged.server.embeddings_protocol import Embeddings, EmbeddingsChatRequest, EmbeddingsRequest
from jaxpaged.server.responses_api.objects import (
    CallDelta,
    CallDone,
    ItemEvent,
    LifecycleEvent,
    PartEvent,
    ReasoningDelta,
    ReasoningDone,
    ResponseObject,
    TextDelta,
    TextDone,
)
from jaxpaged.server.responses_api.protocol import ResponsesRequest
from jaxpaged.server.state import VERSION

_REF = "#/components/schemas/{model}"


@dataclass(frozen=True)
class _Operation:
    method: str
    path: str
    summary: str
    answer: type[BaseModel] | str | None = None  # a string is a content type
    bodies: tuple[type[BaseModel], ...] = ()
    chunks: tuple[type[BaseModel], ...] = ()
    errors: tuple[int, ...] = ()


_BODY_ERRORS = (400, 401, 404, 413, 500, 503)
_OPERATIONS = (
    _Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation.",
        responses.ChatCompletion,
        (chat_protocol.ChatCompletionRequest,),
        (responses.ChatChunk,),
        _BODY_ERRORS,
    ),
    _Operation(
        "post",
        "/v1/completions",
        "Continue prompts.",
        responses.Completion,
        (protocol.CompletionRequest,),
        (responses.CompletionChunk,),
        _BODY_ERRORS,
    ),
    _Operation(
        "post",
        "/v1/responses",
        "Answer a conversation with items.",
        ResponseObject,
        (ResponsesRequest,),
        (LifecycleEvent, ItemEvent, PartEvent, TextDelta, TextDone, ReasoningDelta, ReasoningDone, CallDelta, CallDone),
        _BODY_ERRORS,
    ),
    _Operation("get", "/v1/responses/{response_id}", "Show a stored response.", ResponseObject, errors=(400, 401, 404)),
    _Operation(
        "post",
        "/v1/responses/{response_id}/cancel",
        "End a response that is made in the background.",
        ResponseObject,
        errors=(400, 401, 404),
    ),
    _Operation(
        "post",
        "/v1/embeddings",
        "Embeddings of prompts.",
        Embeddings,
        (EmbeddingsRequest, EmbeddingsChatRequest),
        errors=_BODY_ERRORS,
    ),
    _Operation("get", "/v1/models", "List the models.", responses.ModelList, errors=(401,)),
    _Operation("get", "/v1/models/{model}", "Show a model.", responses.ModelCard, errors=(401, 404)),
    _Operation(
        "post",
        "/tokenize",
        "Token ids of a text or a conversation.",
        responses.TokenizeResponse,
        (protocol.TokenizeTextRequest, chat_protocol.TokenizeChatRequest),
        errors=_BODY_ERRORS,
    ),
    _Operation(
        "post",
        "/detokenize",
        "Text of token ids.",
        responses.DetokenizeResponse,
        (protocol.DetokenizeRequest,),
        errors=_BODY_ERRORS,
    ),
    _Operation("get", "/health", "200 while requests are taken, else 503."),
    _Operation("get", "/ping", "The same as /health."),
    _Operation("post", "/ping", "The same as /health."),
    _Operation("get", "/version", "The server's version.", responses.VersionResponse),
    _Operation("get", "/load", "Generation requests in progress.", responses.LoadResponse, errors=(401,)),
    _Operation("get", "/metrics", "Prometheus metrics.", "text/plain", errors=(401,)),
    _Operation("get", "/openapi.json", "This document.", "application/json", errors=(401,)),
)


@cache
def openapi_document() -> dict[str, Any]:
    models: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {}
    for operation in _OPERATIONS:
        models |= {(m, "validation"): None for m in operation.bodies}
        models |= {(m, "serialization"): None for m in (operation.answer, *operation.chunks) if isinstance(m, type)}
    models[responses.ErrorResponse, "serialization"] = None
    _, schemas = models_json_schema(list(models), ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxpaged", "version": VERSION, "description": "OpenAI-compatible LLM server."},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"apiKey": []}],
    }


def _describe(operation: _Operation) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": operation.summary, "responses": _responses(operation)}
    if operation.bodies:
        content = {"application/json": {"schema": _any_of(operation.bodies)}}
        described["requestBody"] = {"required": True, "content": content}
    if "{" in operation.path:
        name = operation.path.partition("{")[2].partition("}")[0]
        schema = {"type": "string", "minLength": 1}
        described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    return described


def _responses(operation: _Operation) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "Success"}
    if isinstance(operation.answer, str):
        success["content"] = {operation.answer: {}}
    elif operation.answer is not None:
        success["content"] = {"application/json": {"schema": _ref(operation.answer)}}
    if operation.chunks:
        success["content"]["text/event-stream"] = {"schema": _any_of(operation.chunks)}
    described = {"200": success}
    for status in operation.errors:
        content = {"application/json": {"schema": _ref(responses.ErrorResponse)}}
        described[str(status)] = {"description": "Error", "content": content}
    if operation.path in ("/health", "/ping"):
        described["503"] = {"description": "The engine has stopped or is shutting down"}
    return described


def _any_of(models: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    refs = [_ref(m) for m in models]
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
