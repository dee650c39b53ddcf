"""What the handlers of one server share."""

from __future__ import annotations

import hashlib
import time
import uuid
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version

from aiohttp import web

from jaxpaged.engine.async_engine import AsyncEngine
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.errors import ApiError
from jaxpaged.server.metrics import ServerMetrics
from jaxpaged.server.responses import PromptTokensDetails, Usage

VERSION = version("jaxpaged")


@dataclass
class ServerState:
    """
    Attributes:
        created: Unix time of the start, in seconds.
        load: generation requests in progress.
    """

    engine: AsyncEngine
    config: ServerConfig
    metrics: ServerMetrics
    created: int = field(default_factory=lambda: int(time.time()))
    load: int = 0

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.config.model_names(self.engine.engine.model_name)

    @property
    def max_model_len(self) -> int:
        return self.engine.engine.scheduler_config.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.engine.engine.model_config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.engine.engine.model_config.hidden_size

    @cached_property
    def system_fingerprint(self) -> str:
        """Changes with the version, the model and the options that results may depend on."""
        source = f"{VERSION} {self.engine.engine.model_name} {self.engine.engine.config}"
        return f"jaxpaged-{VERSION}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"

    def resolve_model(self, name: str | None) -> str:
        """The name to answer with.

        Raises:
            ApiError: 404, this server has no such model.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(f"The model `{name}` does not exist.", status=404, param="model")
        return name

    def usage(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        wants_details = self.config.enable_prompt_tokens_details
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens) if wants_details else None,
        )


STATE = web.AppKey("state", ServerState)


def random_id() -> str:
    return uuid.uuid4().hex


def clean_header(request: web.Request, name: str) -> str:
    """A header's printable ASCII characters, at most 256, fit to be sent back; "" where it is missing."""
    return "".join(c for c in request.headers.get(name, "") if c.isascii() and c.isprintable())[:256]
