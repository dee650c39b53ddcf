"""The openai package against a live server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from server.fake_engine import EOS
from server.live_server import Client, StartServer

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def server(start_server: StartServer) -> Client:
    return await start_server(api_keys=("secret",), enable_prompt_tokens_details=True)


@pytest.fixture
async def ai(server: Client) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0) as client:
        yield client


async def test_chat(ai: openai.AsyncOpenAI) -> None:
    answer = await ai.chat.completions.create(model="fake", messages=USER, max_tokens=3, n=2, temperature=1)
    assert [c.message.content for c in answer.choices] == ["abc", "bcd"]
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.role == "assistant"
    assert answer.usage is not None and answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


async def test_chat_logprobs(ai: openai.AsyncOpenAI) -> None:
    answer = await ai.chat.completions.create(model="fake", messages=USER, max_tokens=2, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [(e.token, e.bytes, e.logprob, len(e.top_logprobs)) for e in logprobs.content] == [
        ("a", [97], -1.0, 3),
        ("b", [98], -1.0, 3),
    ]


async def test_chat_stream(ai: openai.AsyncOpenAI) -> None:
    stream = await ai.chat.completions.create(
        model="fake", messages=USER, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    chunks = [c async for c in stream]
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert deltas[0].role == "assistant" and "".join(d.content or "" for d in deltas) == "abcd"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 4


async def test_chat_stream_helper(ai: openai.AsyncOpenAI, server: Client) -> None:
    server.engine.scripts["user\nhi\nassistant\n"] = [*server.engine.ids("abcd"), EOS]
    async with ai.chat.completions.stream(model="fake", messages=USER, max_tokens=9) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "abcd"


async def test_completions(ai: openai.AsyncOpenAI, server: Client) -> None:
    server.engine.scripts["bye"] = [*server.engine.ids("ok"), EOS]
    answer = await ai.completions.create(model="fake", prompt=["hi", "bye"], max_tokens=3, logprobs=1, seed=1)
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(0, "abc", "length"), (1, "ok", "stop")]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"] and logprobs.text_offset == [0, 1, 2]
    stream = await ai.completions.create(model="fake", prompt="hi", max_tokens=3, stream=True)
    assert [c.choices[0].text async for c in stream] == ["a", "b", "c"]


async def test_extra_body(ai: openai.AsyncOpenAI, server: Client) -> None:
    await ai.completions.create(model="fake", prompt="hi", extra_body={"top_k": 4, "min_p": 0.2, "ignore_eos": True})
    [params] = server.engine.params.values()
    assert (params.top_k, params.min_p, params.ignore_eos) == (4, 0.2, True)


async def test_raw_response(ai: openai.AsyncOpenAI) -> None:
    raw = await ai.chat.completions.with_raw_response.create(model="fake", messages=USER, max_tokens=2)
    assert raw.status_code == 200 and raw.headers["content-type"].startswith("application/json")
    assert raw.parse().choices[0].message.content == "ab"


async def test_models(ai: openai.AsyncOpenAI) -> None:
    assert [m.id async for m in ai.models.list()] == ["fake"]
    assert (await ai.models.retrieve("fake")).owned_by == "jaxpaged"
    with pytest.raises(openai.NotFoundError):
        await ai.models.retrieve("other")


async def test_typed_errors(ai: openai.AsyncOpenAI, server: Client) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await ai.chat.completions.create(model="fake", messages=USER, temperature=3)
    assert bad.value.param == "body.temperature" and bad.value.type == "Bad Request"
    with pytest.raises(openai.NotFoundError) as missing:
        await ai.chat.completions.create(model="other", messages=USER)
    assert missing.value.param == "model" and "`other` does not exist" in missing.value.message
    with pytest.raises(openai.AuthenticationError):
        await ai.with_options(api_key="wrong").models.list()
    server.engine.fail_steps = 1
    with pytest.raises(openai.InternalServerError):
        await ai.completions.create(model="fake", prompt="hi")


async def test_an_error_in_a_stream_is_raised(ai: openai.AsyncOpenAI, server: Client) -> None:
    server.engine.step_s = 0.01
    stream = await ai.completions.create(model="fake", prompt="hi", max_tokens=200, stream=True)
    await anext(stream)
    server.engine.fail_steps = 1
    with pytest.raises(openai.APIError, match="out of memory"):
        async for _ in stream:
            pass


async def test_leaving_a_stream_ends_the_request(ai: openai.AsyncOpenAI, server: Client) -> None:
    server.engine.step_s = 0.01
    async with await ai.completions.create(model="fake", prompt="hi", max_tokens=200, stream=True) as stream:
        await anext(stream)
    await server.settled()
    assert server.engine.stats().finished == {"abort": 1}
