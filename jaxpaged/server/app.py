"""The web application: routes and middlewares around an AsyncEngine."""

from __future__ import annotations

from aiohttp import web

from jaxpaged.engine.async_engine import AsyncEngine
from jaxpaged.server import middleware, routes
from jaxpaged.server.chat import chat_completions
from jaxpaged.server.completions import completions
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.dashboard import Dashboard
from jaxpaged.server.embeddings import embeddings
from jaxpaged.server.metrics import ServerMetrics
from jaxpaged.server.responses_api import ResponsesApi
from jaxpaged.server.state import STATE, ServerState


def make_app(engine: AsyncEngine, config: ServerConfig) -> web.Application:
    """The application. Serve it with `handler_cancellation=True`, so that a client that leaves ends its request."""
    app = web.Application(
        client_max_size=config.max_request_bytes,
        middlewares=[middleware.errors, middleware.preflight, middleware.authenticate, middleware.limit_size],
    )
    names = config.model_names(engine.engine.model_name)
    metrics = ServerMetrics(names[0], engine.stats, engine.engine.cache_config, vllm_aliases=config.vllm_metric_aliases)
    engine.on_step = metrics.observe_step
    app[STATE] = state = ServerState(engine, config, metrics)
    app.on_response_prepare.append(middleware.add_headers)
    app.add_routes(
        [
            web.post("/v1/chat/completions", middleware.counted(chat_completions)),
            web.post("/v1/completions", middleware.counted(completions)),
            web.post("/v1/embeddings", middleware.counted(embeddings)),
            web.get("/v1/models", routes.list_models),
            web.get(r"/v1/models/{model:[\s\S]+}", routes.show_model),
            web.post("/tokenize", routes.tokenize),
            web.post("/detokenize", routes.detokenize),
            web.get("/health", routes.health),
            web.get("/ping", routes.health),
            web.post("/ping", routes.health),
            web.get("/version", routes.show_version),
            web.get("/load", routes.load),
            web.get("/metrics", routes.metrics),
            web.get("/openapi.json", routes.openapi),
        ]
    )
    ResponsesApi(state).add_to(app)
    if config.enable_dev_endpoints:
        app.router.add_post("/reset_prefix_cache", routes.reset_prefix_cache)
    if config.dashboard:
        Dashboard(engine, config, metrics).add_to(app)
    return app
