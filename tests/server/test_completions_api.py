"""POST /v1/completions: prompts, lengths, choices, log-probabilities."""

from __future__ import annotations

import asyncio

import pytest
from server.fake_engine import BOS, EOS, MAX_MODEL_LEN
from server.live_server import Client, StartServer

PATH = "/v1/completions"


async def test_fields_of_an_answer(client: Client) -> None:
    answer = await client.complete()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion" and answer["model"] == "fake"
    assert isinstance(answer["created"], int) and answer["system_fingerprint"].startswith("jaxpaged-")
    [choice] = answer["choices"]
    assert choice["index"] == 0 and choice["text"] == "abcdefghijklmnop"
    assert choice["finish_reason"] == "length" and choice["stop_reason"] is None and choice["logprobs"] is None
    # 16 tokens by default; the prompt has BOS.
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["usage"]["total_tokens"] == 19
    assert answer["usage"]["prompt_tokens_details"] is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [[BOS, 71, 72]]),
        (["hi", "h"], [[BOS, 71, 72], [BOS, 71]]),
        ([71, 72], [[71, 72]]),
        ([[71], [72, 71]], [[71], [72, 71]]),
    ],
)
async def test_forms_of_a_prompt(client: Client, prompt: object, expected: list[list[int]]) -> None:
    answer = await client.complete(prompt=prompt, max_tokens=1)
    assert [r.prompt_token_ids for r in client.engine.all_requests] == expected
    assert len(answer["choices"]) == len(expected)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_add_special_tokens(client: Client) -> None:
    await client.complete(add_special_tokens=False)
    assert client.engine.all_requests[0].prompt_token_ids == [71, 72]


async def test_choice_index_is_prompt_times_n_plus_i(client: Client) -> None:
    client.engine.scripts["x"] = client.engine.ids("XYZ")
    answer = await client.complete(prompt=["hi", "x"], n=2, max_tokens=3, temperature=1)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "abc"), (1, "bcd"), (2, "XYZ"), (3, "XYZ")]
    assert answer["usage"]["completion_tokens"] == 12


async def test_1024_prompts_are_taken_and_no_more(client: Client) -> None:
    answer = await client.complete(prompt=["a"] * 1024, max_tokens=1)
    assert [c["index"] for c in answer["choices"]] == list(range(1024))
    for prompt in (["a"] * 1025, [[1]] * 1025):
        error = await client.error(PATH, {"prompt": prompt})
        assert error["param"] == "body.prompt" and "1024" in error["message"] and "1025" in error["message"]


async def test_greedy_choices_are_alike(client: Client) -> None:
    answer = await client.complete(n=3, temperature=0, max_tokens=3)
    assert [c["text"] for c in answer["choices"]] == ["abc"] * 3


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "expected"),
    [
        (MAX_MODEL_LEN - 1, 16, 1),
        (MAX_MODEL_LEN - 1, 1, 1),
        (200, MAX_MODEL_LEN, 56),
        (200, 56, 56),
        (200, 57, 56),
        (200, None, 16),
        (1, MAX_MODEL_LEN, 255),
    ],
)
async def test_output_is_clipped_to_the_model(
    client: Client, prompt_len: int, max_tokens: int | None, expected: int
) -> None:
    answer = await client.complete(prompt=[71] * prompt_len, max_tokens=max_tokens)
    assert answer["usage"]["completion_tokens"] == expected
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_stops(client: Client) -> None:
    engine = client.engine
    engine.scripts["eos"] = [*engine.ids("ok"), EOS]

    async def stopped(**body: object) -> tuple[str, str, object]:
        [choice] = (await client.complete(**body))["choices"]
        return choice["text"], choice["finish_reason"], choice["stop_reason"]

    assert await stopped(prompt="eos") == ("ok", "stop", None)
    assert await stopped(prompt="eos", ignore_eos=True, max_tokens=4) == ("oko", "length", None)
    assert await stopped(stop="de") == ("abc", "stop", "de")
    assert await stopped(stop=["zz", "de"], include_stop_str_in_output=True) == ("abcde", "stop", "de")
    [token] = engine.ids("c")
    assert await stopped(stop_token_ids=[token]) == ("ab", "stop", token)


async def test_sampling_defaults_come_from_the_model(client: Client) -> None:
    await client.complete()
    await client.complete(temperature=0, top_p=1, top_k=7, min_p=0.1, seed=-5, ignore_eos=True, max_tokens=3)
    first, second = client.engine.params.values()
    # The fake model's generation config: temperature 0.6, top_p 0.9, nothing about top_k.
    assert (first.temperature, first.top_p, first.top_k, first.min_p, first.seed) == (0.6, 0.9, 0, 0, None)
    assert (second.temperature, second.top_p, second.top_k, second.min_p, second.seed) == (0, 1, 7, 0.1, -5)
    assert second.ignore_eos and second.max_tokens == 3


async def test_logprobs(client: Client) -> None:
    [choice] = (await client.complete(max_tokens=3, logprobs=2, temperature=0))["choices"]
    # The fake engine draws the second most probable token, at -1; the one before it in the vocabulary has -0.5.
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-1.0, -1.0, -1.0],
        "text_offset": [0, 1, 2],
        "top_logprobs": [{"a": -1.0, "`": -0.5}, {"b": -1.0, "a": -0.5}, {"c": -1.0, "b": -0.5}],
    }
    [choice] = (await client.complete(max_tokens=1, logprobs=0, return_tokens_as_token_ids=True))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["token_id:64"],
        "token_logprobs": [-1.0],
        "text_offset": [0],
        "top_logprobs": [{"token_id:64": -1.0}],
    }


async def test_token_ids(client: Client) -> None:
    [choice] = (await client.complete(max_tokens=2, return_token_ids=True))["choices"]
    assert choice["prompt_token_ids"] == [BOS, 71, 72] and choice["token_ids"] == [64, 65]


async def test_truncation(client: Client) -> None:
    prompt = [i % 200 for i in range(300)]
    for body in (
        {"truncate_prompt_tokens": 3},
        {"truncate_prompt_tokens": 3, "truncation_side": "right"},
        {"truncate_prompt_tokens": -1},
    ):
        await client.complete(prompt=prompt, max_tokens=1, **body)
    seen = [r.prompt_token_ids for r in client.engine.all_requests]
    assert seen == [prompt[-3:], prompt[:3], prompt[-255:]]


async def test_priority_and_cache_salt(client: Client) -> None:
    await client.complete(priority=3, cache_salt="tenant-1")
    await client.post(PATH, {"prompt": "hi", "priority": 3}, headers={"X-Vllm-Priority": "-2"})
    first, second = client.engine.all_requests
    assert (first.priority, first.cache_salt) == (3, "tenant-1")
    assert (second.priority, second.cache_salt) == (-2, None)


async def test_request_ids(client: Client) -> None:
    assert (await client.complete(request_id="mine"))["id"] == "cmpl-mine"
    _, answer = await client.post(PATH, {"prompt": "hi"}, headers={"X-Request-Id": "theirs"})
    assert answer["id"] == "cmpl-theirs"


async def test_one_request_id_may_be_used_twice_at_once(start_server: StartServer) -> None:
    client = await start_server({"step_s": 0.005})
    answers = await asyncio.gather(*(client.complete(request_id="same") for _ in range(3)))
    assert {a["id"] for a in answers} == {"cmpl-same"}


async def test_cached_tokens_are_reported_where_wanted(start_server: StartServer) -> None:
    client = await start_server(enable_prompt_tokens_details=True)
    usage = (await client.complete(prompt=[71] * 40))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 32}
