"""From exceptions to the API's error bodies."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web
from pydantic import ValidationError

from jaxpaged.errors import EngineDeadError, InvalidRequestError, QueueFullError
from jaxpaged.server.responses import ErrorDetail, ErrorResponse

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        param: the offending field, or None.
        type: class of the error; by default the one of the status.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, type: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.type = type or _TYPES.get(status, "APIError")


def to_api_error(error: Exception) -> ApiError | None:
    """The answer to an exception raised on purpose; None for one that was not."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return ApiError(str(error), status=error.status, param=error.param)
        case QueueFullError() | EngineDeadError():
            return ApiError(str(error), status=503)
        case _:
            return None


def renamed(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """A refusal in the terms of an endpoint.

    Args:
        names: of parameters, by the names that the engine has for them.
    """
    name = names.get(error.param or "")
    if name is None:
        return error
    return InvalidRequestError(str(error).replace(error.param or "", name, 1), param=name, status=error.status)


def internal_error(error: Exception) -> ApiError:
    """The answer to a failure nobody foresaw; its details stay in the log."""
    return ApiError(f"internal error ({type(error).__name__}); the server's log has the details", status=500)


def from_validation(error: ValidationError) -> ApiError:
    """The first problem of a body that does not fit its model, e.g. param "body.temperature"."""
    first = error.errors(include_url=False)[0]
    where = [str(part) for part in first["loc"] if not _is_type_name(part)]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequestError):  # says itself which fields do not go together
        return ApiError(str(cause), param=f"body.{cause.param}", type="Bad Request")
    message = first["msg"].removeprefix("Value error, ")
    value = first["input"]
    if isinstance(value, (bool, int, float, str)) and first["type"] != "missing":
        message = f"{message} (got {_short(value)})"
    if where:
        message = f"{'.'.join(where)}: {message}"
    return ApiError(message, param=".".join(["body", *where]), type="Bad Request")


def error_response(error: ApiError) -> ErrorResponse:
    return ErrorResponse(
        error=ErrorDetail(message=error.message, type=error.type, param=error.param, code=error.status)
    )


def to_http(error: ApiError) -> web.Response:
    return web.Response(
        status=error.status,
        body=error_response(error).model_dump_json(),
        content_type="application/json",
        headers=_HEADERS.get(error.status),
    )


def _is_type_name(part: int | str) -> bool:
    """pydantic puts the branch of a union into the location, e.g. "str" or "list[str]"."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool", "ContentPart") or "[" in part)


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
