"""`use_beam_search` of both completion endpoints: what reaches the engine, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from server.live_server import Client

from jaxpaged.core.beam import BeamSettings

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODY: dict[str, Any] = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "use_beam_search": True}


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_fields_reach_the_engine(client: Client, path: str) -> None:
    """The defaults of the model, a temperature and a top_p, are for drawing."""
    status, answer = await client.post(
        path, {**BODY, "n": 3, "max_tokens": 5, "length_penalty": -0.5, "temperature": 0.7, "seed": 3, "top_k": -1}
    )
    assert status == 200 and len(answer["choices"]) == 3
    assert answer["usage"]["completion_tokens"] == 15
    [params] = client.engine.params.values()
    assert params.beam_search == BeamSettings(length_penalty=-0.5, early_stopping=False)
    assert (params.n, params.max_tokens, params.temperature, params.top_p) == (3, 5, 0.0, 1.0)


async def test_without_it_length_penalty_changes_nothing(client: Client) -> None:
    await client.complete(use_beam_search=False, length_penalty=2.0)
    [params] = client.engine.params.values()
    assert params.beam_search is None and params.top_p == 0.9


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", True),
        ("stop", ["x"]),
        ("top_p", 0.5),
        ("top_k", 5),
        ("min_p", 0.1),
        ("frequency_penalty", 0.5),
        ("presence_penalty", 0.5),
        ("repetition_penalty", 1.5),
        ("logit_bias", {"5": 1}),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [5]),
        ("min_tokens", 2),
        ("prompt_logprobs", 1),
        ("logprob_token_ids", [5]),
        ("length_penalty", 21),
    ],
)
async def test_what_a_search_cannot_heed_is_refused_by_name(client: Client, path: str, name: str, value: Any) -> None:
    error = await client.error(path, {**BODY, name: value})
    assert name in error["param"] and client.engine.params == {}


async def test_logprobs_are_refused(client: Client) -> None:
    for path, fields in ((TEXT, {"logprobs": 1}), (TEXT, {"logprobs": 0, "echo": True}), (CHAT, {"logprobs": True})):
        error = await client.error(path, {**BODY, **fields})
        assert error["param"] == "logprobs" and "beam search" in error["message"]
