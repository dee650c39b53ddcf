"""docs/compatibility.md and the files it is made from tell the truth."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from server.fake_engine import FakeEngine
from server.live_server import Client
from server.test_bad_requests import UNSUPPORTED

import compatibility
from jaxpaged.engine.async_engine import AsyncEngine
from jaxpaged.server.app import make_app
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.protocol import GenerationRequest, UnsupportedInText
from jaxpaged.server.responses_api.conversation import REFUSED

DATA = compatibility.load("compatibility.json")


def test_the_page_is_up_to_date() -> None:
    assert compatibility.OUTPUT.read_text() == compatibility.page(), "run python tools/compatibility.py"


def test_no_parameter_is_forgotten() -> None:
    assert compatibility.missing_parameters(DATA) == []
    more = copy.deepcopy(DATA)
    more["anchor"]["chat"].append("brand_new")
    assert compatibility.missing_parameters(more) == ["chat: brand_new"]


def test_endpoints_are_those_of_the_server() -> None:
    app = make_app(AsyncEngine(FakeEngine()), ServerConfig(enable_dev_endpoints=True))
    routes = [r for r in app.router.routes() if r.method != "HEAD"]
    served = {f"{r.method} {r.resource.canonical}" for r in routes if r.resource is not None}
    assert served == {name for name, status, _ in DATA["endpoints"] if status != "no"}
    assert all(status in ("yes", "no", "differs") for _, status, _ in DATA["endpoints"])


async def test_metrics_are_those_of_the_server(client: Client) -> None:
    await client.complete()
    text = (await client.get("/metrics"))[1]
    names = {line.partition("{")[0] for line in text.splitlines() if line.startswith(("jaxpaged:", "vllm:"))}
    # A counter that nothing was counted on has no sample yet.
    names |= {f"{line.split()[2]}" for line in text.splitlines() if line.startswith("# TYPE")}
    names = {name.removesuffix("_bucket") for name in names}
    for name, status in DATA["metrics"]:
        for prefix in ("jaxpaged:", "vllm:"):
            assert (f"{prefix}{name}" in names) == (status == "yes"), name


def test_every_refused_parameter_has_a_value_that_is_tried() -> None:
    names = [*GenerationRequest.model_fields, *UnsupportedInText.model_fields]
    refused = {n for n in names if compatibility.status(compatibility.CompletionRequest, n, DATA)[0] == "no"}
    assert refused <= UNSUPPORTED.keys()


VALUES: dict[str, Any] = {
    "n": 2,
    "echo": True,
    "response_format": {"type": "json_object"},
    "use_beam_search": True,
    "prompt_logprobs": 0,
    "logprob_token_ids": [1],
    "conversation": "c",
    "prompt": {"id": "p"},
    "context_management": [{"type": "compaction"}],
    "moderation": {"model": "m"},
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_responses_refuse(client: Client, name: str) -> None:
    error = await client.error("/v1/responses", {"input": "hi", name: VALUES.get(name, True)})
    assert error["param"] == name and f"{name} is not supported in responses" in error["message"]
    assert client.engine.all_requests == []
