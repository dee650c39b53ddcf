"""Runs the server: listens, logs, and ends gracefully on SIGINT and SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from jaxpaged.engine.async_engine import AsyncEngine
from jaxpaged.server.app import make_app
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.http_log import http_logger
from jaxpaged.server.listen import bind, cannot_listen

if TYPE_CHECKING:
    from jaxpaged.engine.engine import Engine
    from jaxpaged.engine.stats import EngineStats

logger = logging.getLogger(__name__)

# How long handlers have to write their last bytes once the engine has ended every request.
FLUSH_S = 2.0


class Stopper:
    """Asks a running server to stop: once gracefully, twice at once."""

    def __init__(self) -> None:
        self.graceful = asyncio.Event()
        self.immediate = asyncio.Event()

    def stop(self) -> None:
        (self.immediate if self.graceful.is_set() else self.graceful).set()


def run_server(engine: Engine, config: ServerConfig, sockets: Sequence[socket.socket] | None = None) -> None:
    """Serves until SIGINT or SIGTERM; running requests then have `config.shutdown_timeout_s` to finish.

    Args:
        sockets: from `bind(config)`, for a caller that takes the address before it loads a model; closed at the end.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    asyncio.run(_serve_until_signal(engine, config, sockets))


async def _serve_until_signal(engine: Engine, config: ServerConfig, sockets: Sequence[socket.socket] | None) -> None:
    loop, stopper = asyncio.get_running_loop(), Stopper()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopper.stop)
    await serve(engine, config, sockets=sockets, stopper=stopper)


async def serve(
    engine: Engine,
    config: ServerConfig,
    *,
    sockets: Sequence[socket.socket] | None = None,
    stopper: Stopper | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serves until `stopper` says stop (None: until cancelled).

    Args:
        sockets: from `bind(config)`, which None stands for; closed at the end.
        on_ready: called with the address once requests are taken.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    stopper = stopper or Stopper()
    sockets = bind(config) if sockets is None else sockets
    async_engine = AsyncEngine(engine)
    app = make_app(async_engine, config)
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=FLUSH_S, logger=http_logger()
    )
    await runner.setup()
    try:
        sites = await _listen(runner, sockets, config)
        address = _address(runner, config)
        logger.info("serving %s on %s", ", ".join(config.model_names(engine.model_name)), address)
        if on_ready is not None:
            on_ready(address)
        log_task = asyncio.create_task(_log_activity(async_engine, config.log_interval_s))
        try:
            await stopper.graceful.wait()
            for site in sites:
                await site.stop()
            await _drain(async_engine, config.shutdown_timeout_s, stopper)
        finally:
            log_task.cancel()
    finally:
        await async_engine.shutdown()
        await runner.cleanup()
        for sock in sockets:
            sock.close()


async def _listen(runner: web.AppRunner, sockets: Sequence[socket.socket], config: ServerConfig) -> list[web.SockSite]:
    sites = [web.SockSite(runner, sock) for sock in sockets]
    try:
        for site in sites:
            await site.start()
    except OSError as error:  # somebody else bound the address too, and was the first to listen
        raise cannot_listen(config, error) from error
    return sites


def _address(runner: web.AppRunner, config: ServerConfig) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    port = runner.addresses[0][1]  # the real one where port 0 was asked for
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{port}"


async def _drain(engine: AsyncEngine, deadline_s: float, stopper: Stopper) -> None:
    """Lets requests finish within the deadline, or until a second request to stop."""
    logger.info("stopping: %d requests have %g s to finish", engine.num_open_requests, deadline_s)
    drain = asyncio.create_task(engine.shutdown(deadline_s))
    hurry = asyncio.create_task(stopper.immediate.wait())
    await asyncio.wait((drain, hurry), return_when=asyncio.FIRST_COMPLETED)
    for task in (drain, hurry):
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await drain


async def _log_activity(engine: AsyncEngine, interval_s: float) -> None:
    """One line each interval in which the engine worked."""
    before, then = engine.stats(), time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        after, now = engine.stats(), time.monotonic()
        if after.steps_total > before.steps_total:
            logger.info("%s", describe_activity(before, after, now - then))
        before, then = after, now


def describe_activity(before: EngineStats, after: EngineStats, seconds: float) -> str:
    """What happened between two moments, for the log."""
    scheduler, earlier = after.scheduler, before.scheduler
    queries = scheduler.prefix_queries_total - earlier.prefix_queries_total
    hits = scheduler.prefix_hits_total - earlier.prefix_hits_total
    used = 1 - scheduler.num_free_blocks / max(scheduler.num_total_blocks, 1)
    return (
        f"running {scheduler.num_running}, waiting {scheduler.num_waiting + scheduler.num_swapped}, "
        f"in {(after.prompt_tokens_total - before.prompt_tokens_total) / seconds:.1f} tokens/s, "
        f"out {(after.generation_tokens_total - before.generation_tokens_total) / seconds:.1f} tokens/s, "
        f"pool {100 * used:.1f} %, prefix hits {100 * hits / max(queries, 1):.1f} %"
    )
