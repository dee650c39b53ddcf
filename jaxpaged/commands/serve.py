"""`jaxpaged serve`: a model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.commands.options import MODEL_HELP, add_command, add_engine_options, count, engine_options, size
from jaxpaged.commands.trace import add_trace_options, trace_file
from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError

if TYPE_CHECKING:
    from jaxpaged.server import ServerConfig

API_KEY_VARIABLE = "JAXPAGED_API_KEY"


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "serve",
        run,
        summary="answer OpenAI clients over HTTP",
        description="Serve a model over an OpenAI-compatible HTTP API. Ctrl-C lets running requests finish, then ends.",
        example=(
            "  jaxpaged serve smollm2-135m-instruct --port 8000\n"
            "  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\\n"
            '    -d \'{"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hi!"}]}\''
        ),
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    _add_server_options(parser)
    add_trace_options(parser)
    add_engine_options(parser)


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    """Flags of `ServerConfig`; one that is not given leaves the config's default."""
    unset: dict[str, Any] = {"default": argparse.SUPPRESS}
    flag: dict[str, Any] = {"action": "store_true", **unset}

    http = parser.add_argument_group("HTTP server")
    add = http.add_argument
    add("--host", metavar="ADDRESS", help="address to listen on (default: 0.0.0.0, every interface)", **unset)
    add("--port", type=int, metavar="N", help="TCP port, 0 for any free one (default: 8000)", **unset)
    add("--uds", metavar="PATH", help="listen on a Unix domain socket instead", **unset)
    add(
        "--api-key",
        dest="api_keys",
        nargs="+",
        metavar="KEY",
        help=f"keys of which a client must send one (default: ${API_KEY_VARIABLE} if set, else the server is open)",
        **unset,
    )
    add("--metrics-public", help="/metrics needs no key", **flag)
    add(
        "--allowed-origins",
        nargs="+",
        metavar="ORIGIN",
        help="origins that browsers may call from, * for any (default: none)",
        **unset,
    )
    add("--max-request-bytes", type=size, metavar="SIZE", help="largest request body (default: 4MiB)", **unset)
    add(
        "--max-concurrent-requests",
        type=count,
        metavar="N",
        help="requests in progress, waiting ones included; more are refused (default: no limit)",
        **unset,
    )
    add(
        "--shutdown-timeout",
        dest="shutdown_timeout_s",
        type=float,
        metavar="SECONDS",
        help="how long running requests may take to finish after Ctrl-C (default: 30)",
        **unset,
    )
    add(
        "--response-store-size",
        dest="response_store_bytes",
        type=size,
        metavar="SIZE",
        help="memory for the responses of /v1/responses that clients can come back to, 0 for none (default: 64MiB)",
        **unset,
    )
    add("--enable-request-id-headers", help="answer with X-Request-Id", **flag)
    add("--dashboard", help="show the KV memory live at /dashboard", **flag)
    add("--dashboard-public", help="/dashboard needs no key", **flag)
    add("--enable-dev-endpoints", help="offer POST /reset_prefix_cache", **flag)
    add(
        "--no-vllm-metric-aliases",
        dest="vllm_metric_aliases",
        action="store_false",
        help="do not export the metrics under vllm: too",
        **unset,
    )

    api = parser.add_argument_group("API")
    add = api.add_argument
    add(
        "--served-model-name",
        dest="served_model_names",
        nargs="+",
        metavar="NAME",
        help="names that clients use; the first is the one in answers (default: MODEL)",
        **unset,
    )
    add("--chat-template", metavar="FILE", help="Jinja file, or the template itself (default: the model's)", **unset)
    add("--trust-request-chat-template", help="let requests bring their own chat template", **flag)
    add("--enable-auto-tool-choice", help="let the model decide to call tools; with --tool-call-parser", **flag)
    add(
        "--tool-call-parser",
        metavar="NAME",
        help="how the model writes tool calls: hermes (also Qwen 2.5 and 3), llama3_json, qwen3_coder or qwen3_xml "
        "(XML), qwen (hermes or XML) (default: calls are not looked for)",
        **unset,
    )
    add(
        "--reasoning-parser",
        metavar="NAME",
        help="how the model writes its reasoning: deepseek_r1 or qwen3 (default: it stays in the text)",
        **unset,
    )
    add(
        "--pooling",
        metavar="NAME",
        help="what embeddings are made of: the hidden state of the last token, or the mean of all: last or mean "
        "(default: last)",
        **unset,
    )
    add(
        "--stream-interval",
        type=count,
        metavar="N",
        help="tokens of a choice in each chunk of a stream after the first (default: 1)",
        **unset,
    )
    add("--response-role", metavar="ROLE", help="role of generated messages (default: assistant)", **unset)
    add("--enable-prompt-tokens-details", help="report cached prompt tokens in usage", **flag)


def server_config(args: argparse.Namespace, environ_key: str | None) -> ServerConfig:
    """The server's options from the command line.

    Args:
        environ_key: key from the environment, used where the command line gives none.

    Raises:
        ConfigError: a bad value.
    """
    from jaxpaged.server import ServerConfig

    names = ServerConfig.__dataclass_fields__
    options: dict[str, Any] = {name: value for name, value in vars(args).items() if name in names}
    if environ_key is not None:
        options.setdefault("api_keys", [environ_key])
    if "allowed_origins" in options:
        options["allowed_origins"] = _json_list(options["allowed_origins"])
    if "chat_template" in options:
        options["chat_template"] = _read_template(options["chat_template"])
    for name in ("api_keys", "allowed_origins", "served_model_names"):
        if name in options:
            options[name] = tuple(options[name])
    return ServerConfig(**options)


def run(args: argparse.Namespace) -> int:
    engine_config = EngineConfig.from_options(engine_options(args))
    config = server_config(args, os.environ.get(API_KEY_VARIABLE))
    _log_to_stderr()
    sockets: list[socket.socket] = []
    loading: threading.Thread | None = None
    # Nearly all that a start makes stays; a collector that looks through it again and again takes a twentieth of it.
    gc.disable()
    try:
        from jaxpaged.engine.engine import Engine
        from jaxpaged.server import bind, run_server
        from jaxpaged.trace import recording
        from jaxpaged.weights.stored_tokenizer import StoredTokenizer

        gc.freeze()  # modules: the collection to come need not look at them
        sockets += bind(config)  # loading and compiling take minutes: an address in use is better known before
        with trace_file(args.trace, args.trace_limit) as file:
            engine = Engine.from_pretrained(args.model, engine_config)
            if isinstance(engine.tokenizer, StoredTokenizer):
                # A start does without transformers, but the first chat needs it.
                loading = threading.Thread(target=engine.tokenizer.load, name="tokenizer", daemon=True)
                loading.start()
            # What is loaded by now stays: looking at it while serving would take 3 % of the time.
            gc.collect()
            gc.freeze()
            gc.enable()
            with recording(engine, file):
                run_server(engine, config, sockets)
    finally:
        gc.enable()
        for sock in sockets:
            sock.close()
        if loading is not None:  # a process that ends amid its imports may crash
            loading.join()
    return 0


def _log_to_stderr() -> None:
    """What jaxpaged says, and warnings of everything else."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("jaxpaged", "jaxpaged_kernels"):
        logging.getLogger(name).setLevel(logging.INFO)


def _json_list(values: list[str]) -> list[str]:
    """`values`, or the JSON list that is their only one: vLLM's way to write several."""
    if len(values) != 1 or not values[0].startswith("["):
        return values
    try:
        origins = json.loads(values[0])
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--allowed-origins {values[0]!r} is no JSON list: {error}") from error
    if not all(isinstance(origin, str) for origin in origins):
        raise ConfigError(f"--allowed-origins {values[0]!r} is no JSON list of strings")
    return list(origins)


def _read_template(text: str) -> str:
    """The template in the file `text`, or `text` itself where it is one."""
    if "{" in text:
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {text}: {error}") from error
