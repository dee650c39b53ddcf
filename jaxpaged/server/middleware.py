"""What happens around every request: errors, keys, CORS, request ids and size."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from jaxpaged.errors import QueueFullError
from jaxpaged.server.body import too_large
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.errors import ApiError, internal_error, to_api_error, to_http
from jaxpaged.server.state import STATE, clean_header, random_id

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# The dashboard asks for the key itself, as browsers can.
_OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/dashboard", "/dashboard/events"})


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns exceptions into the API's error bodies."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        # No route or no such method; the rest of the routing errors keep their own text.
        details = {404: "Not Found", 405: "Method Not Allowed"}
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return web.json_response(
            {"detail": details.get(error.status, error.reason)}, status=error.status, headers=headers
        )
    except ConnectionError:
        raise  # the client has gone: nobody to answer
    except Exception as error:
        if isinstance(error, QueueFullError):
            request.app[STATE].metrics.reject("queue_full")
        api_error = to_api_error(error)
        if api_error is None:
            logger.exception("%s %s failed", request.method, request.path)
            api_error = internal_error(error)
        return to_http(api_error)


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Asks for one of the server's keys, if it has any."""
    config = request.app[STATE].config
    is_open = request.path in _OPEN_PATHS or (config.metrics_public and request.path == "/metrics")
    if config.api_keys and not is_open and request.method != "OPTIONS" and not _has_key(request, config):
        raise ApiError("missing or wrong API key; send one as 'Authorization: Bearer KEY'", status=401)
    return await handler(request)


def _has_key(request: web.Request, config: ServerConfig) -> bool:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return is_key(key.strip(), config) and scheme.lower() == "bearer"


def is_key(sent: str, config: ServerConfig) -> bool:
    """Whether `sent` is one of the server's keys."""
    # Every key is compared, in constant time: how long it takes tells nothing.
    matches = [hmac.compare_digest(sent.encode("utf-8", errors="surrogateescape"), k.encode()) for k in config.api_keys]
    return any(matches)


@web.middleware
async def limit_size(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses a body that says it is too large before reading any of it."""
    if request.content_length is not None and request.content_length > request.client_max_size:
        response = to_http(too_large(request.client_max_size))
        response.force_close()
        return response
    return await handler(request)


@web.middleware
async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers the question that browsers ask before a request from another origin."""
    if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
        return await handler(request)
    if _allowed_origin(request) is None:
        return web.Response(status=403, text="this origin is not allowed")
    return web.Response(
        headers={
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Allow-Headers": clean_header(request, "Access-Control-Request-Headers") or "*",
            "Access-Control-Max-Age": "600",
        }
    )


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: CORS and request id headers, on streams too."""
    config = request.app[STATE].config
    origin = _allowed_origin(request)
    if origin is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Vary"] = "Origin"
    if config.enable_request_id_headers:
        response.headers["X-Request-Id"] = clean_header(request, "X-Request-Id") or random_id()


def counted(handler: Handler) -> Handler:
    """Counts requests in progress, for /load, and keeps them below the server's limit."""

    async def count(request: web.Request) -> web.StreamResponse:
        state = request.app[STATE]
        limit = state.config.max_concurrent_requests
        if limit is not None and state.load >= limit:
            state.metrics.reject("concurrency")
            raise ApiError(f"{state.load} requests are in progress, the limit of this server; try later", status=503)
        state.load += 1
        try:
            return await handler(request)
        finally:
            state.load -= 1

    return count


def _allowed_origin(request: web.Request) -> str | None:
    allowed = request.app[STATE].config.allowed_origins
    origin = request.headers.get("Origin")
    if origin is None or not allowed:
        return None
    if "*" in allowed:
        return "*"
    return origin if origin in allowed else None
