"""Server-sent events: order and content of the chunks of both APIs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from server.fake_engine import BOS, EOS
from server.live_server import Client, StartServer

from jaxpaged.server.responses import ChatChunk, CompletionChunk

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def choices(chunks: list[Any]) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


async def test_chat_chunks(client: Client) -> None:
    chunks = await client.events(CHAT, messages=USER, max_tokens=3)
    for chunk in chunks:
        ChatChunk.model_validate(chunk, strict=True)
        assert chunk["object"] == "chat.completion.chunk" and "usage" not in chunk
    assert len({c["id"] for c in chunks}) == 1 and chunks[0]["id"].startswith("chatcmpl-")
    base = {"index": 0, "logprobs": None, "finish_reason": None}
    assert choices(chunks) == [
        {**base, "delta": {"role": "assistant", "content": ""}},
        {**base, "delta": {"content": "a"}},
        {**base, "delta": {"content": "b"}},
        {**base, "delta": {"content": "c"}, "finish_reason": "length", "stop_reason": None},
    ]


async def test_completion_chunks(client: Client) -> None:
    chunks = await client.events(COMPLETIONS, prompt="hi", max_tokens=3)
    for chunk in chunks:
        CompletionChunk.model_validate(chunk, strict=True)
        assert chunk["object"] == "text_completion" and chunk["id"].startswith("cmpl-")
    base = {"index": 0, "logprobs": None, "finish_reason": None}
    assert choices(chunks) == [
        {**base, "text": "a"},
        {**base, "text": "b"},
        {**base, "text": "c", "finish_reason": "length", "stop_reason": None},
    ]


async def test_every_choice_starts_with_its_role(client: Client) -> None:
    chunks = choices(await client.events(CHAT, messages=USER, max_tokens=4, n=3, temperature=1))
    assert [c["index"] for c in chunks[:3]] == [0, 1, 2]
    assert all(c["delta"] == {"role": "assistant", "content": ""} for c in chunks[:3])
    texts = {i: "".join(c["delta"]["content"] for c in chunks if c["index"] == i) for i in range(3)}
    assert texts == {0: "abcd", 1: "bcde", 2: "cdef"}
    for i in range(3):
        reasons = [c["finish_reason"] for c in chunks[3:] if c["index"] == i]
        assert reasons == [None, None, None, "length"]


async def test_several_prompts_in_one_stream(client: Client) -> None:
    client.engine.scripts["x"] = client.engine.ids("XYZ")
    chunks = choices(await client.events(COMPLETIONS, prompt=["hi", "x"], n=2, max_tokens=3, temperature=1))
    texts = {i: "".join(c["text"] for c in chunks if c["index"] == i) for i in range(4)}
    assert texts == {0: "abc", 1: "bcd", 2: "XYZ", 3: "XYZ"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_chunk(client: Client, path: str) -> None:
    body = {"max_tokens": 3, **({"messages": USER} if path == CHAT else {"prompt": "hi"})}
    num_prompt = 22 if path == CHAT else 3

    def usage(num_output: int) -> dict[str, int | None]:
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": None,
        }

    *chunks, last = await client.events(path, stream_options={"include_usage": True}, **body)
    assert last["choices"] == [] and last["usage"] == usage(3)
    assert all(c["choices"] and "usage" not in c for c in chunks)
    for options in ({}, {"include_usage": False}, {"continuous_usage_stats": True}, None):
        chunks = await client.events(path, stream_options=options, **body)
        assert all(c["choices"] and "usage" not in c for c in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await client.events(path, stream_options=options, **body)
    assert last["choices"] == [] and last["usage"] == usage(3)
    assert [c["usage"] for c in chunks][-3:] == [usage(1), usage(2), usage(3)]


async def test_the_last_delta_carries_text_and_the_stop_string(client: Client) -> None:
    chunks = choices(await client.events(COMPLETIONS, prompt="hi", stop="de"))
    assert "".join(c["text"] for c in chunks) == "abc"
    assert [c["finish_reason"] for c in chunks].count(None) == len(chunks) - 1
    assert chunks[-1]["finish_reason"] == "stop" and chunks[-1]["stop_reason"] == "de"


async def test_characters_come_whole(client: Client) -> None:
    text = "naïve 🦊 日本"
    client.engine.scripts["hi"] = [*client.engine.ids(text), EOS]
    chunks = choices(await client.events(COMPLETIONS, prompt="hi", max_tokens=100))
    assert "".join(c["text"] for c in chunks) == text
    assert not any("\ufffd" in c["text"] for c in chunks)


async def test_streamed_logprobs(client: Client) -> None:
    chunks = choices(await client.events(COMPLETIONS, prompt="hi", max_tokens=3, logprobs=1))
    assert [c["logprobs"] for c in chunks] == [
        {
            "tokens": [t],
            "token_logprobs": [-1.0],
            "text_offset": [i],
            "top_logprobs": [{t: -1.0, chr(ord(t) - 1): -0.5}],
        }
        for i, t in enumerate("abc")
    ]
    chunks = choices(await client.events(CHAT, messages=USER, max_tokens=2, logprobs=True))
    assert chunks[0]["logprobs"] is None
    assert [c["logprobs"]["content"][0]["token"] for c in chunks[1:]] == ["a", "b"]


async def test_streamed_token_ids(client: Client) -> None:
    chunks = choices(await client.events(COMPLETIONS, prompt="hi", max_tokens=2, return_token_ids=True))
    assert chunks[0]["prompt_token_ids"] == [BOS, 71, 72] and "prompt_token_ids" not in chunks[1]
    assert [c["token_ids"] for c in chunks] == [[64], [65]]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_error_on_the_way_is_an_event(start_server: StartServer, path: str) -> None:
    client = await start_server({"step_s": 0.01})
    body = {"messages": USER} if path == CHAT else {"prompt": "hi", "max_tokens": 100}
    task = asyncio.create_task(client.events(path, **body))
    while client.engine.stats().generation_tokens_total < 3:
        await asyncio.sleep(0.005)
    client.engine.fail_steps = 1
    *chunks, last = await task
    assert choices(chunks)
    assert last == {
        "error": {
            "message": "the request failed: RuntimeError: out of memory",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
    }
    assert len(await client.events(COMPLETIONS, prompt="hi", max_tokens=2)) == 2  # the server goes on


async def test_a_dead_engine_ends_streams_with_an_error(start_server: StartServer) -> None:
    client = await start_server({"step_s": 0.01})
    task = asyncio.create_task(client.events(COMPLETIONS, prompt="hi", max_tokens=200))
    while not client.engine.held:
        await asyncio.sleep(0.005)
    client.engine.dies = True
    last = (await task)[-1]
    assert last["error"]["code"] == 503 and "the device is gone" in last["error"]["message"]
    for path in ("/health", "/ping"):
        assert await client.get(path) == (503, "")
    error = await client.error(COMPLETIONS, {"prompt": "hi"}, 503)
    assert error["type"] == "ServiceUnavailableError"
    assert (await client.get("/metrics"))[0] == 200


async def test_a_bad_request_for_a_stream_gets_a_plain_error(client: Client) -> None:
    error = await client.error(COMPLETIONS, {"prompt": [1] * 300, "stream": True})
    assert error["param"] == "input_tokens"
