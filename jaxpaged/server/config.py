"""Options of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpaged.config import MIB
from jaxpaged.errors import ConfigError
from jaxpaged.pooling import POOLINGS, Pooling
from jaxpaged.server.tools import REASONING_PARSERS, TOOL_PARSERS
from jaxpaged.tokenizer import check_template


@dataclass(frozen=True)
class ServerConfig:
    """How the server listens, whom it lets in and how it answers. The engine's options are `EngineConfig`.

    Attributes:
        host: address to listen on.
        port: TCP port, 0 = any free one.
        uds: path of a Unix domain socket to listen on instead of host and port.
        api_keys: keys of which a client must send one as `Authorization: Bearer KEY`; empty = open.
        metrics_public: /metrics needs no key.
        allowed_origins: origins that browsers may call from (CORS); "*" is any.
        max_request_bytes: largest request body.
        max_concurrent_requests: generation requests in progress, waiting ones included; more get 503. None = no limit.
        shutdown_timeout_s: seconds that running requests have to finish after SIGINT or SIGTERM.
        served_model_names: names that clients may use; the first is the one in answers. Empty = the engine's.
        response_role: role of generated chat messages.
        chat_template: Jinja chat template to use instead of the tokenizer's.
        trust_request_chat_template: let a request bring its own chat template.
        enable_auto_tool_choice: let the model decide to call tools; needs a tool_call_parser.
        tool_call_parser: name of the format in which the model writes tool calls; one of `TOOL_PARSERS`.
        reasoning_parser: name of the format in which the model writes its reasoning; one of `REASONING_PARSERS`. None =
            it is not told apart from the answer.
        pooling: what embeddings are made of; as of `PoolingParams`.
        stream_interval: tokens of a choice in each chunk of a stream after the first.
        response_store_bytes: memory, about, for the responses that clients of /v1/responses can come back to; those not
            used for the longest time are forgotten first. 0 keeps none.
        enable_request_id_headers: answer with X-Request-Id, the client's own or a new one.
        enable_prompt_tokens_details: report cached prompt tokens in `usage`.
        vllm_metric_aliases: export each metric under `vllm:` too.
        log_interval_s: seconds between log lines while busy.
        enable_dev_endpoints: offer POST /reset_prefix_cache.
        dashboard: show the KV memory live at /dashboard.
        dashboard_public: /dashboard needs no key.

    Raises:
        ConfigError: a value out of its range.
    """

    host: str = "0.0.0.0"
    port: int = 8000
    uds: str | None = None
    api_keys: tuple[str, ...] = ()
    metrics_public: bool = False
    allowed_origins: tuple[str, ...] = ()
    max_request_bytes: int = 4 * MIB
    max_concurrent_requests: int | None = None
    shutdown_timeout_s: float = 30.0
    served_model_names: tuple[str, ...] = ()
    response_role: str = "assistant"
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    pooling: Pooling = "last"
    stream_interval: int = 1
    response_store_bytes: int = 64 * MIB
    enable_request_id_headers: bool = False
    enable_prompt_tokens_details: bool = False
    vllm_metric_aliases: bool = True
    log_interval_s: float = 10.0
    enable_dev_endpoints: bool = False
    dashboard: bool = False
    dashboard_public: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}, but must be between 0 and 65535")
        if self.max_request_bytes < 1024:
            raise ConfigError(f"max_request_bytes is {self.max_request_bytes}, but must be at least 1024")
        if self.stream_interval < 1:
            raise ConfigError(f"stream_interval is {self.stream_interval}, but must be at least 1")
        if self.pooling not in POOLINGS:
            raise ConfigError(f"pooling is {self.pooling!r}, but must be one of {', '.join(POOLINGS)}")
        if self.response_store_bytes < 0:
            raise ConfigError(f"response_store_bytes is {self.response_store_bytes}, but must be at least 0")
        if self.max_concurrent_requests is not None and self.max_concurrent_requests < 1:
            raise ConfigError(f"max_concurrent_requests is {self.max_concurrent_requests}, but must be at least 1")
        if not self.shutdown_timeout_s >= 0:
            raise ConfigError(f"shutdown_timeout_s is {self.shutdown_timeout_s}, but must be at least 0")
        if not self.log_interval_s > 0:
            raise ConfigError(f"log_interval_s is {self.log_interval_s}, but must be above 0")
        if any(not key for key in self.api_keys):
            raise ConfigError("an API key is empty; give a non-empty key, or none to leave the server open")
        if self.chat_template is not None:
            check_template(self.chat_template)
        for name, value, known in (
            ("tool_call_parser", self.tool_call_parser, TOOL_PARSERS),
            ("reasoning_parser", self.reasoning_parser, REASONING_PARSERS),
        ):
            if value is not None and value not in known:
                raise ConfigError(f"{name} is {value!r}, but must be one of {', '.join(known)}")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError(
                "enable_auto_tool_choice needs a tool_call_parser; choose the model's: " + ", ".join(TOOL_PARSERS)
            )

    def model_names(self, default: str) -> tuple[str, ...]:
        """Names that clients may use, the one in answers first; `default` where none was given."""
        return self.served_model_names or (default,)
