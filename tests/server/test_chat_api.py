"""POST /v1/chat/completions: messages, templates, choices, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
from server.fake_engine import BOS, EOS, FakeEngine
from server.live_server import Client, StartServer

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def prompt_text(engine: FakeEngine, index: int = -1) -> str:
    return engine.tokenizer.decode(engine.all_requests[index].prompt_token_ids)


async def test_fields_of_an_answer(client: Client) -> None:
    answer = await client.chat()
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "abcde", "refusal": None, "reasoning": None}
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    prompt = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_text(client.engine) == prompt
    num_prompt = 4 + len("user\nhi\nassistant\n")  # four special tokens
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 5,
        "total_tokens": num_prompt + 5,
        "prompt_tokens_details": None,
    }


async def test_bos_is_there_once(client: Client) -> None:
    await client.chat()
    await client.chat(add_special_tokens=True)
    first, second = (r.prompt_token_ids for r in client.engine.all_requests)
    assert first.count(BOS) == 1 and second == [BOS, *first]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a", "a"),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (None, ""),
    ],
)
async def test_content_parts(client: Client, content: Any, expected: str) -> None:
    await client.chat(messages=[{"role": "user", "content": content}])
    assert f"user\n{expected}<|im_end|>" in prompt_text(client.engine)


async def test_multiple_turns_and_template_options(client: Client) -> None:
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    ]
    await client.chat(messages=turns, add_generation_prompt=False, continue_final_message=True)
    text = prompt_text(client.engine)
    assert text == "<s><|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA"
    await client.chat(chat_template_kwargs={"extra": "!!"})
    assert prompt_text(client.engine).endswith("assistant\n!!")


async def test_length_goes_up_to_the_model_limit(client: Client) -> None:
    answer = await client.chat(max_tokens=None)
    assert answer["usage"]["total_tokens"] == 256 and answer["choices"][0]["finish_reason"] == "length"
    answer = await client.chat(max_tokens=9, max_completion_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2


async def test_choices(client: Client) -> None:
    answer = await client.chat(n=2, max_tokens=3, temperature=1)
    assert [(c["index"], c["message"]["content"]) for c in answer["choices"]] == [(0, "abc"), (1, "bcd")]


async def test_stop_at_eos(client: Client) -> None:
    engine = client.engine
    engine.scripts["user\nhi\nassistant\n"] = [*engine.ids("héllo"), EOS]
    [choice] = (await client.chat(max_tokens=100))["choices"]
    assert choice["message"]["content"] == "héllo"
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None


async def test_logprobs(client: Client) -> None:
    [choice] = (await client.chat(max_tokens=1, logprobs=True, top_logprobs=2))["choices"]
    a, backquote = {"token": "a", "logprob": -1.0, "bytes": [97]}, {"token": "`", "logprob": -0.5, "bytes": [96]}
    assert choice["logprobs"] == {"content": [{**a, "top_logprobs": [backquote, a]}]}
    [choice] = (await client.chat(max_tokens=1, logprobs=True))["choices"]
    assert choice["logprobs"] == {"content": [{**a, "top_logprobs": []}]}
    # The drawn token is not among the one most probable.
    [choice] = (await client.chat(max_tokens=1, logprobs=True, top_logprobs=1))["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == [backquote]
    [choice] = (await client.chat(max_tokens=1))["choices"]
    assert choice["logprobs"] is None


async def test_token_ids(client: Client) -> None:
    answer = await client.chat(max_tokens=2, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == [64, 65]
    assert answer["prompt_token_ids"] == client.engine.all_requests[0].prompt_token_ids


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"messages": []}, "body.messages", "at least 1"),
        ({"messages": [{"content": "x"}]}, "body.messages.0.role", "required"),
        ({"messages": [{"role": "bad", "content": "x"}]}, "messages", "no such role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            "image_url",
        ),
        ({"top_logprobs": 2}, "body.top_logprobs", "needs logprobs"),
        (
            {"logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            "top_logprobs is 21, but this engine reports at most 20",
        ),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "top_logprobs is -1 (all 260), but this engine"),
        ({"max_tokens": 0}, "body.max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 257}, "max_tokens", "256"),
        ({"continue_final_message": True}, "body.continue_final_message", "cannot both be true"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "--trust-request-chat-template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
        ({"response_format": {"type": "xml"}}, "response_format", "must have one of text, json_object"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "input_tokens", "maximum context length is 256"),
    ],
)
async def test_bad_requests(client: Client, change: dict[str, Any], param: str, words: str) -> None:
    error = await client.error(PATH, {"messages": USER, **change})
    assert error["param"] == param and words in error["message"]
    assert client.engine.all_requests == []


async def test_a_request_may_bring_its_template_where_allowed(start_server: StartServer) -> None:
    client = await start_server(trust_request_chat_template=True)
    await client.chat(chat_template="<{{ messages[0].content }}>")
    assert prompt_text(client.engine) == "<hi>"
    error = await client.error(PATH, {"messages": USER, "chat_template": "{{ x.y.z }}"})
    assert "Chat template error" in error["message"]
    error = await client.error(PATH, {"messages": USER, "chat_template": "{% if %}"})
    assert "Chat template error" in error["message"]


async def test_the_server_may_bring_a_template_and_a_role(start_server: StartServer) -> None:
    client = await start_server(chat_template="[{{ messages[0].content }}]", response_role="bot")
    answer = await client.chat()
    assert prompt_text(client.engine) == "[hi]" and answer["choices"][0]["message"]["role"] == "bot"


async def test_a_model_without_a_template_cannot_chat(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.engine.tokenizer, "chat_template", None)
    error = await client.error(PATH, {"messages": USER})
    assert "no chat template" in error["message"]
