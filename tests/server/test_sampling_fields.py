"""The sampling parameters of both completion endpoints: what reaches the engine, what comes back, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from server.live_server import Client

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]

FIELDS: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "min_tokens": 3,
    "bad_words": ["x y"],
    "allowed_token_ids": [97, 98],
    "logprob_token_ids": [5, 6],
    "prompt_logprobs": 0,
    "min_p": 0.25,
    "seed": -7,
}


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_fields_reach_the_engine(client: Client, path: str) -> None:
    body = {"prompt": "hi", "messages": MESSAGES, "max_tokens": 5, "logit_bias": {"5": 200, "6": -1.5}, **FIELDS}
    assert (await client.post(path, body))[0] == 200
    [params] = client.engine.params.values()
    for name, value in FIELDS.items():
        found = getattr(params, name)
        assert (list(found) if isinstance(value, list) else found) == value, name
    assert params.logit_bias == {5: 100, 6: -1.5}


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0),
        ("min_tokens", -1),
        ("min_tokens", 6),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1.5": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"260": 1}),
        ("logit_bias", {"5": "much"}),
        ("logit_bias", dict.fromkeys(map(str, range(1025)), 1)),
        ("bad_words", [""]),
        ("bad_words", [" "]),
        ("bad_words", ["x"] * 129),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [260]),
        ("logprob_token_ids", list(range(129))),
        ("logprob_token_ids", [260]),
        ("prompt_logprobs", -2),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop_token_ids", [260]),
    ],
)
async def test_bad_values_are_refused_by_name(client: Client, path: str, name: str, value: Any) -> None:
    error = await client.error(path, {"prompt": "hi", "messages": MESSAGES, "max_tokens": 5, name: value})
    assert name in error["param"]
    assert client.engine.params == {}


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_prompt_logprobs(client: Client, path: str) -> None:
    body = {"prompt": [0, 104, 0], "messages": MESSAGES, "max_tokens": 2, "prompt_logprobs": 2}
    answer = (await client.post(path, body))[1]
    found = answer["prompt_logprobs"] if path == CHAT else answer["choices"][0]["prompt_logprobs"]
    if path == TEXT:
        decode = client.engine.tokenizer.decode
        assert found == [
            None,
            {
                "104": {"logprob": -1.0, "rank": 2, "decoded_token": decode([104])},
                "103": {"logprob": -0.5, "rank": 1, "decoded_token": decode([103])},
            },
            {
                "0": {"logprob": -9999.0, "rank": 2, "decoded_token": decode([0])},
                "259": {"logprob": -0.5, "rank": 1, "decoded_token": decode([259])},
            },
        ]
    else:
        assert found[0] is None and all(len(entry) == 2 for entry in found[1:])
    error = await client.error(path, {**body, "stream": True})
    assert error["param"] == "body.prompt_logprobs" and "stream" in error["message"]
    plain = (await client.post(path, {"prompt": "hi", "messages": MESSAGES}))[1]
    assert (plain if path == CHAT else plain["choices"][0])["prompt_logprobs"] is None


async def test_logprobs_of_asked_tokens_and_minus_infinity(client: Client) -> None:
    [choice] = (await client.complete(max_tokens=1, logprob_token_ids=[5, 6]))["choices"]
    decode = client.engine.tokenizer.decode
    [top] = choice["logprobs"]["top_logprobs"]
    assert top == {choice["text"]: -1.0, decode([5]): -9999.0, decode([6]): -9999.0}
    [choice] = (await client.chat(max_tokens=1, logprobs=True, top_logprobs=1, logprob_token_ids=[5]))["choices"]
    [entry] = choice["logprobs"]["content"]
    assert [t["logprob"] for t in entry["top_logprobs"]] == [-0.5, -9999.0]


async def test_defaults_of_the_model_hold_unless_the_body_says_otherwise(client: Client) -> None:
    client.engine.generation = type(client.engine.generation)(min_p=0.1, repetition_penalty=1.05)
    await client.complete()
    await client.complete(min_p=0, repetition_penalty=1)
    defaults, own = client.engine.params.values()
    assert (defaults.min_p, defaults.repetition_penalty) == (0.1, 1.05)
    assert (own.min_p, own.repetition_penalty) == (0, 1)
