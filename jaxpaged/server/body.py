"""Reads and checks request bodies."""

from __future__ import annotations

from typing import Any, TypeVar

import pydantic_core
from aiohttp import web
from pydantic import BaseModel, ValidationError

from jaxpaged.server.errors import ApiError, from_validation

M = TypeVar("M", bound=BaseModel)


def too_large(limit: int) -> ApiError:
    return ApiError(f"the request body is larger than {limit:,} bytes, the limit of this server", status=413)


async def read_json(request: web.Request) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        ApiError: 400, not application/json or not a JSON object; 413, too large.
    """
    if request.content_type != "application/json" or "Content-Type" not in request.headers:
        raise ApiError(
            f"the content type is {request.headers.get('Content-Type', 'missing')!r}, but must be application/json",
            param="header.content-type",
            type="Bad Request",
        )
    try:
        data = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large(request.client_max_size) from None
    except web.RequestPayloadError:
        encoding = request.headers.get("Content-Encoding", "identity")
        raise ApiError(
            f"the body is damaged, or not encoded as its Content-Encoding ({encoding!r}) says",
            param="body",
            type="Bad Request",
        ) from None
    try:
        body = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(
            f"the body is not valid JSON (which knows no NaN or Infinity): {error}", param="body", type="Bad Request"
        ) from None
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object", param="body", type="Bad Request")
    return body


def parse(model: type[M], body: dict[str, Any]) -> M:
    """`body` as a `model`.

    Raises:
        ApiError: 400, names the first field that does not fit.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
    except RecursionError:
        raise ApiError("the body is nested too deeply", param="body", type="Bad Request") from None
