"""/v1/embeddings: what is asked of the engine, what comes back, and what is refused."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import openai
import pytest
from server.fake_engine import BOS, HIDDEN_SIZE, MAX_MODEL_LEN, VOCAB_SIZE
from server.live_server import Client, StartServer

from jaxpaged.errors import ConfigError
from jaxpaged.server.config import ServerConfig

PATH = "/v1/embeddings"


async def embed(client: Client, **body: Any) -> dict[str, Any]:
    status, answer = await client.post(PATH, body)
    assert status == 200, answer
    assert [d["index"] for d in answer["data"]] == list(range(len(answer["data"])))
    await client.settled()
    return answer


def raw(token_ids: list[int], mean: bool = False) -> list[float]:
    return [len(token_ids), token_ids[-1], token_ids[0], float(mean)]


def unit(vector: list[float]) -> list[float]:
    return [x / math.hypot(*vector) for x in vector]


HI, HO = [BOS, 71, 72], [BOS, 71, 78]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("hi", [HI]), (["hi", "ho", "hi"], [HI, HO, HI]), ([5, 6], [[5, 6]]), ([[5, 6], [7]], [[5, 6], [7]])],
)
async def test_one_embedding_a_prompt_in_their_order(client: Client, given: Any, prompts: list[list[int]]) -> None:
    answer = await embed(client, input=given, model="fake")
    assert answer["object"] == "list" and answer["model"] == "fake" and answer["id"].startswith("embd-")
    assert [d["object"] for d in answer["data"]] == ["embedding"] * len(prompts)
    for found, prompt in zip(answer["data"], prompts, strict=True):
        assert found["embedding"] == pytest.approx(unit(raw(prompt)), abs=1e-7)
    total = sum(map(len, prompts))
    usage = {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0, "prompt_tokens_details": None}
    assert answer["usage"] == usage


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
RENDERED = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho"


@pytest.mark.parametrize(
    ("options", "end", "first"),
    [
        ({}, "<|im_end|>\n", []),
        ({"add_generation_prompt": True}, "<|im_end|>\n<|im_start|>assistant\n", []),
        ({"continue_final_message": True}, "", []),
        ({"chat_template_kwargs": {"extra": "!"}, "add_special_tokens": True}, "<|im_end|>\n!", [BOS]),
    ],
)
async def test_a_chat(client: Client, options: dict[str, Any], end: str, first: list[int]) -> None:
    prompt = first + client.engine.ids(RENDERED + end)
    answer = await embed(client, messages=CHAT, use_activation=False, **options)
    assert [d["embedding"] for d in answer["data"]] == [raw(prompt)]
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    await embed(client, messages=CHAT, truncate_prompt_tokens=3, **options)
    assert client.engine.all_requests[-1].prompt_token_ids == prompt[:3]


async def test_encodings(client: Client) -> None:
    for endianness, dtype in (("native", "<f4"), ("little", "<f4"), ("big", ">f4")):
        body = {"encoding_format": "base64", "use_activation": False, "endianness": endianness}
        [found] = (await embed(client, input=[9, 8], **body))["data"]
        assert np.frombuffer(base64.b64decode(found["embedding"]), dtype).tolist() == raw([9, 8])
    for name in ("use_activation", "normalize"):
        [found] = (await embed(client, input=[9, 8], **{name: False}))["data"]
        assert found["embedding"] == raw([9, 8])


async def test_options(start_server: StartServer) -> None:
    client = await start_server(pooling="mean", enable_prompt_tokens_details=True)
    body = {"priority": 3, "cache_salt": "s", "request_id": "mine", "user": "u", "dimensions": HIDDEN_SIZE}
    answer = await embed(client, input="hi", add_special_tokens=False, use_activation=False, **body)
    assert answer["data"][0]["embedding"] == raw(HI[1:], mean=True) and answer["id"] == "embd-mine"
    [request] = client.engine.all_requests
    assert (request.priority, request.cache_salt) == (3, "s")
    answer = await embed(client, input=[4] * 40)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


def test_an_unknown_pooling_is_refused() -> None:
    with pytest.raises(ConfigError, match="pooling is 'cls', but must be one of last, mean"):
        ServerConfig(pooling="cls")  # type: ignore[arg-type]


async def test_prompts_are_cut_on_the_right_unless_told_otherwise(client: Client) -> None:
    for options, kept in (
        ({"truncate_prompt_tokens": 2}, [1, 2]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, [2, 3]),
        ({"truncate_prompt_tokens": 9}, [1, 2, 3]),
        ({"truncate_prompt_tokens": -1}, [1, 2, 3]),
    ):
        answer = await embed(client, input=[1, 2, 3], **options)
        assert client.engine.all_requests[-1].prompt_token_ids == kept
        assert answer["usage"]["prompt_tokens"] == len(kept)
    await embed(client, input=[1] * MAX_MODEL_LEN)
    await embed(client, input=[1] * (MAX_MODEL_LEN + 1), truncate_prompt_tokens=-1)
    assert len(client.engine.all_requests[-1].prompt_token_ids) == MAX_MODEL_LEN
    error = await client.error(PATH, {"input": [1] * (MAX_MODEL_LEN + 1)})
    assert f"{MAX_MODEL_LEN + 1} input tokens" in error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input: Field required"),
        ({"input": ""}, "the prompt is empty"),
        ({"input": []}, "the prompt is empty"),
        ({"input": ["a", ""]}, "the prompt is empty"),
        ({"input": [VOCAB_SIZE]}, "out of vocabulary"),
        ({"input": ["a", [1]]}, "must be a string"),
        ({"input": "a", "dimensions": 3}, "does not support matryoshka representation"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "leaves nothing of the prompt"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input and messages exclude each other"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "bad", "content": "a"}]}, "no such role"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "--trust-request-chat-template"),
        ({"messages": [{"role": "user", "content": "a" * MAX_MODEL_LEN}]}, "maximum context length"),
        ({"input": "a", "padding": "max_length"}, "padding"),
    ],
)
async def test_refused(client: Client, body: dict[str, Any], message: str) -> None:
    assert message in (await client.error(PATH, body))["message"]
    assert client.engine.all_requests == []


async def test_an_id_that_is_no_token_is_an_error_of_the_input(client: Client) -> None:
    assert (await client.error(PATH, {"input": [VOCAB_SIZE]}))["param"] == "input"


async def test_an_unknown_model_and_a_failing_engine(client: Client) -> None:
    await client.error(PATH, {"input": "hi", "model": "other"}, 404)
    client.engine.fail_steps = 1
    error = await client.error(PATH, {"input": ["hi", "ho"]}, 500)
    assert "out of memory" in error["message"]
    await client.settled()
    await embed(client, input="hi")


async def test_metrics_count_prompts_and_no_tokens(client: Client) -> None:
    await embed(client, input=["hi", "ho"])
    lines = dict(line.rsplit(" ", 1) for line in (await client.get("/metrics"))[1].splitlines() if line[:1] != "#")
    labels = 'engine="0",model_name="fake"'
    for name, value in (
        ("prompt_tokens_total", 6), ("generation_tokens_total", 0), ("request_prompt_tokens_sum", 6),
        ("request_prompt_tokens_count", 2), ("e2e_request_latency_seconds_count", 2),
        ("time_to_first_token_seconds_count", 0), ("request_generation_tokens_count", 0),
    ):  # fmt: skip
        assert float(lines[f"jaxpaged:{name}{{{labels}}}"]) == value, name


async def test_openai_client(client: Client) -> None:
    async with openai.AsyncOpenAI(base_url=client.url + "/v1", api_key="x", max_retries=0) as ai:
        for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = await ai.embeddings.create(model="fake", input=["hi", "ho"], **options)  # type: ignore[arg-type]
            for found, prompt in zip(answer.data, (HI, HO), strict=True):
                vector = found.embedding
                if options.get("encoding_format") == "base64":
                    vector = np.frombuffer(base64.b64decode(vector), "<f4").tolist()  # type: ignore[arg-type]
                assert vector == pytest.approx(unit(raw(prompt)), abs=1e-7)
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == 6
        with pytest.raises(openai.BadRequestError, match="matryoshka"):
            await ai.embeddings.create(model="fake", input="hi", dimensions=2)
