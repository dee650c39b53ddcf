"""/v1/responses: chats whose answers are lists of items, and that the server can keep."""

from jaxpaged.server.responses_api.handlers import ResponsesApi

__all__ = ["ResponsesApi"]
