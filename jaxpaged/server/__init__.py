"""The OpenAI-compatible HTTP server."""

from jaxpaged.server.config import ServerConfig
from jaxpaged.server.listen import bind
from jaxpaged.server.serve import run_server, serve

__all__ = ["ServerConfig", "bind", "run_server", "serve"]
