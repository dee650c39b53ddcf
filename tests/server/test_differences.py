"""Each deliberate difference to the server that ours conforms to, as listed in differences.json."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from server.live_server import StartServer

PATH = "/v1/completions"
LISTED = [d["id"] for d in json.loads((Path(__file__).parent / "differences.json").read_text())["differences"]]


async def greedy_choices(start: StartServer) -> None:
    choices = (await (await start()).complete(n=2, temperature=0))["choices"]
    assert choices[0]["text"] == choices[1]["text"]


async def removed_parameters(start: StartServer) -> None:
    client = await start()
    error = await client.error(PATH, {"prompt": "hi", "best_of": 2})
    assert error["param"] == "best_of" and "with n" in error["message"]
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        error = await client.error(PATH, {"prompt": "hi", name: "x"})
        assert error["param"] == name and "structured_outputs" in error["message"]


async def unsupported_parameters(start: StartServer) -> None:
    error = await (await start()).error(PATH, {"prompt": "hi", "min_tokens": 2})
    assert error["param"] == "min_tokens" and "not supported yet" in error["message"]


async def unauthorized_body(start: StartServer) -> None:
    client = await start(api_keys=("key",))
    assert (await client.error("/tokenize", {"prompt": "hi"}, 401))["type"] == "AuthenticationError"
    assert [(await client.get(p))[0] for p in ("/health", "/ping", "/version", "/metrics")] == [200, 200, 200, 401]


async def aborts_counted(start: StartServer) -> None:
    client = await start({"step_s": 0.01})
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0.1):
            await client.complete(max_tokens=200)
    await client.settled()
    assert 'finished_reason="abort",model_name="fake"} 1.0' in (await client.get("/metrics"))[1]


async def metric_prefix(start: StartServer) -> None:
    for aliases in (True, False):
        text = (await (await start(vllm_metric_aliases=aliases)).get("/metrics"))[1]
        assert "jaxpaged:num_requests_running" in text and ("vllm:num_requests_running" in text) == aliases


async def owned_by(start: StartServer) -> None:
    assert (await (await start()).get("/v1/models"))[1]["data"][0]["owned_by"] == "jaxpaged"


async def top_logprobs(start: StartServer) -> None:
    [choice] = (await (await start()).chat(logprobs=True, top_logprobs=2, max_tokens=1))["choices"]
    [entry] = choice["logprobs"]["content"]
    assert entry["token"] == "a" and [t["token"] for t in entry["top_logprobs"]] == ["`", "a"]


async def engine_error_status(start: StartServer) -> None:
    client = await start()
    client.engine.dies = True
    await client.error(PATH, {"prompt": "hi"}, 503)


CHECKS: dict[str, Callable[[StartServer], Awaitable[None]]] = {
    f.__name__: f
    for f in (
        greedy_choices,
        removed_parameters,
        unsupported_parameters,
        unauthorized_body,
        aborts_counted,
        metric_prefix,
        owned_by,
        top_logprobs,
        engine_error_status,
    )
}


def test_every_difference_has_a_check() -> None:
    assert list(CHECKS) == LISTED


@pytest.mark.parametrize("difference", LISTED)
async def test_difference(start_server: StartServer, difference: str) -> None:
    await CHECKS[difference](start_server)
