"""Everything that a server refuses, and how it says so."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server.live_server import Client, StartServer

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 1.5}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 10**40}, "seed"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": "x"}, "stop_token_ids"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": -2}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a" * 129}, "cache_salt"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"cache_salt": "a@b"}, "cache_salt"),
        ({"cache_salt": "a\\b"}, "cache_salt"),
        ({"cache_salt": "a\0b"}, "cache_salt"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
    ],
)
async def test_fields_that_do_not_fit(client: Client, change: dict[str, Any], param: str) -> None:
    error = await client.error(PATH, {"prompt": "hi", **change})
    assert error["type"] == "Bad Request" and error["param"] == f"body.{param}"
    assert client.engine.all_requests == []


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"prompt": [99_999]}, "prompt", "Token id 99999 is out of vocabulary"),
        ({"prompt": [-1]}, "prompt", "Token id -1 is out of vocabulary"),
        ({"prompt": [10**30]}, "prompt", "out of vocabulary"),
        (
            {"prompt": [1] * 300},
            "input_tokens",
            "This model's maximum context length is 256 tokens. However, your prompt contains 300 input tokens, which "
            "exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
            "(parameter=input_tokens, value=300)",
        ),
        ({"prompt": [1] * 256}, "input_tokens", "256"),
        ({"max_tokens": 257}, "max_tokens", "256"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": -1}, "logprobs", "logprobs is -1 (all 260), but this engine reports at most 20"),
        ({"n": 9}, "n", "8"),
        ({"stop_token_ids": [260]}, "stop_token_ids", "out of vocabulary"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "token ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves nothing"),
    ],
)
async def test_requests_that_cannot_be_served(client: Client, change: dict[str, Any], param: str, words: str) -> None:
    error = await client.error(PATH, {"prompt": "hi", **change})
    assert error["type"] == "BadRequestError" and error["param"] == param and words in error["message"]
    assert client.engine.all_requests == []


UNSUPPORTED: dict[str, Any] = {
    "suffix": "end",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "thinking_token_budget": 10,
    "repetition_detection": {"max_pattern_size": 3},
    "prompt_embeds": "AAAA",
    "logits_processors": ["x"],
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "web_search_options": {},
}


@pytest.mark.parametrize(
    ("path", "name"),
    [*[(PATH, name) for name in UNSUPPORTED], *[("/v1/chat/completions", n) for n in UNSUPPORTED if "tool" not in n]],
)
async def test_what_would_change_the_result_is_not_ignored(client: Client, path: str, name: str) -> None:
    body = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], name: UNSUPPORTED[name]}
    error = await client.error(path, body)
    assert error["param"] == name and f"{name} is not supported yet" in error["message"]


@pytest.mark.parametrize(
    "neutral",
    [
        dict.fromkeys([*UNSUPPORTED, "best_of", "guided_json", "guided_regex", "stream_options", "n", "stop"]),
        {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "min_tokens": 0, "logit_bias": {}},
        {"bad_words": [], "echo": False, "suffix": "", "tool_choice": "none", "response_format": {"type": "text"}},
        {"use_beam_search": False, "length_penalty": 1.0, "n": 1, "stop": [], "modalities": ["text"], "stream": False},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "no_such_field": [1, {"a": None}]},
        {"cache_salt": "a" * 128, "priority": 0, "session_id": "s", "stream_interval": 2},
    ],
)
async def test_neutral_and_unknown_fields_are_accepted(client: Client, neutral: dict[str, Any]) -> None:
    assert (await client.complete(**neutral))["choices"][0]["text"] == "abcdefghijklmnop"
    assert (await client.chat(**neutral))["choices"][0]["message"]["content"] == "abcde"


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_unknown_models(client: Client, path: str) -> None:
    body = {"model": "x", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "tokens": [1]}
    error = await client.error(path, body, 404)
    assert error["message"] == "The model `x` does not exist."
    assert error["type"] == "NotFoundError" and error["param"] == "model"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"not json",
        b'{"prompt": "hi"} x',
        b'"hi"',
        b"[1]",
        b"null",
        b'{"prompt": "hi", "temperature": NaN}',
        b'{"prompt": "hi", "temperature": Infinity}',
        b'{"prompt": "hi", "temperature": -Infinity}',
        b'{"prompt": "hi", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "hi", "x": ' + b"[" * 100_000,
        b'{"prompt": "hi", "seed": ' + b"9" * 10_000 + b"}",
    ],
)
async def test_bodies_that_are_no_json_object(client: Client, data: bytes) -> None:
    status, answer = await client.post(PATH, data=data, headers={"Content-Type": "application/json"})
    assert status == 400 and answer["error"]["type"] == "Bad Request", answer


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""])
async def test_other_content_types(client: Client, content_type: str) -> None:
    status, answer = await client.post(
        PATH, data=json.dumps({"prompt": "hi"}).encode(), headers={"Content-Type": content_type}
    )
    assert status == 400 and "application/json" in answer["error"]["message"]


async def test_a_charset_is_fine(client: Client) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    status, _ = await client.post(PATH, data=json.dumps({"prompt": "hi"}).encode(), headers=headers)
    assert status == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_does_not_decompress(client: Client, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    status, answer = await client.post(PATH, data=b"\x01\x02 no such thing", headers=headers)
    assert status == 400 and answer["error"]["param"] == "body"
    assert f"Content-Encoding ('{encoding}')" in answer["error"]["message"]


async def test_no_route_and_no_method(client: Client) -> None:
    assert await client.get("/v1/nothing") == (404, {"detail": "Not Found"})
    assert await client.post("/v1/nothing", {}) == (404, {"detail": "Not Found"})
    assert await client.get(PATH) == (405, {"detail": "Method Not Allowed"})
    assert await client.post("/v1/models", {}) == (405, {"detail": "Method Not Allowed"})


async def test_a_bad_priority_header(client: Client) -> None:
    status, answer = await client.post(PATH, {"prompt": "hi"}, headers={"X-Vllm-Priority": "high"})
    assert status == 400 and answer["error"]["param"] == "X-Vllm-Priority"


async def test_a_failed_step_is_a_500(client: Client) -> None:
    client.engine.fail_steps = 1
    error = await client.error(PATH, {"prompt": "hi"}, 500)
    assert error["type"] == "InternalServerError" and "out of memory" in error["message"]
    await client.complete()


async def test_an_unforeseen_failure_is_a_500(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(client.engine, "add_request", fail)
    error = await client.error(PATH, {"prompt": "hi"}, 500)
    assert "secret" not in error["message"] and "ZeroDivisionError" in error["message"]


async def test_a_full_queue_is_a_503(start_server: StartServer) -> None:
    client = await start_server({"max_num_seqs": 1, "max_queued": 1, "step_s": 0.01})
    url, session = client.url + PATH, client.session
    async with session.post(url, json={"prompt": "hi", "max_tokens": 200, "stream": True}) as running:
        await running.content.readline()
        async with session.post(url, json={"prompt": "hi", "max_tokens": 200, "stream": True}) as waiting:
            assert waiting.status == 200
            async with session.post(url, json={"prompt": "hi"}) as late:
                assert late.status == 503 and late.headers["Retry-After"] == "1"
                assert (await late.json())["error"]["type"] == "ServiceUnavailableError"
    _, metrics = await client.get("/metrics")
    assert 'jaxpaged:admission_rejections_total{engine="0",model_name="fake",reason="queue_full"} 1.0' in metrics
    await client.settled()


async def test_too_many_requests_at_once_is_a_503(start_server: StartServer) -> None:
    client = await start_server({"step_s": 0.01}, max_concurrent_requests=1)
    body = {"prompt": "hi", "max_tokens": 200, "stream": True}
    async with client.session.post(client.url + PATH, json=body) as running:
        await running.content.readline()
        assert (await client.get("/load"))[1] == {"server_load": 1}
        error = await client.error(PATH, {"prompt": "hi"}, 503)
        assert "the limit" in error["message"]
    await client.settled()
    assert (await client.get("/load"))[1] == {"server_load": 0}
    await client.complete()
