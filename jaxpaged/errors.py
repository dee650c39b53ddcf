"""The errors that jaxpaged raises on purpose. Each message names the value, the limit and the remedy."""

from __future__ import annotations


class JaxpagedError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(JaxpagedError, ValueError):
    """An engine option is wrong, or the options do not fit each other or the machine."""


class ModelLoadError(JaxpagedError):
    """A model folder or file is missing, corrupt, unsupported or does not fit its own config."""


class ConvertError(JaxpagedError):
    """A converted model cannot be written where it was asked for."""


class InvalidRequestError(JaxpagedError, ValueError):
    """A request that can never be served as asked. The server answers 400 (or `status`).

    Attributes:
        param: name of the offending parameter, as the API spells it, or None.
        status: HTTP status that the server answers with.
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class QueueFullError(JaxpagedError):
    """The queue of waiting requests is at its limit; the server answers 503."""


class EngineDeadError(JaxpagedError):
    """The engine has stopped after a failure it could not contain, or was shut down."""
