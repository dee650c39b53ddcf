"""Any two parameters together: an answer comes, it agrees with itself, and its stream says the same."""

from __future__ import annotations

from typing import Any

import pytest
from pairwise import pairwise
from server.fake_engine import EOS
from server.live_server import Client, StartServer

TEXT = '<think>mö</think>So 🦊: <tool_call>\n{"name": "f", "arguments": {"x": [1, "é"]}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]
PROMPT = "user\nhi\nassistant\n"
COMMON: dict[str, list[Any]] = {
    "n": [1, 2],
    "stop": [None, "o", [": <", "ö"]],
    "include_stop_str_in_output": [False, True],
    "min_tokens": [0, 3],
    "stop_token_ids": [[], [72]],
    "ignore_eos": [False, True],
    "skip_special_tokens": [True, False],
    "logprob_token_ids": [[], [5, 0]],
    "return_token_ids": [False, True],
    "return_tokens_as_token_ids": [False, True],
    "return_prompt_text": [False, True],
    "truncate_prompt_tokens": [None, 3, -1],
    "stream_interval": [1, 3, 1000],
    "stream_options": [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}],
    "echo": [False, True],
    "temperature": [0, 1],
}
COMPLETIONS = COMMON | {
    "prompt": ["hi", ["hi", "hé"], [71, 72], [[71], [0, 72, 128]]],
    "max_tokens": [3, 4, 40, 200],
    "logprobs": [None, 0, 2],
    "add_special_tokens": [True, False],
}
CHATS = COMMON | {
    "max_tokens": [3, 9, 60, 200],
    "logprobs": [False, True],
    "tools": [None, TOOLS],
    "parallel_tool_calls": [True, False],
    "include_reasoning": [True, False],
}


def put_together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What the parts of one choice of a stream add up to."""
    whole: dict[str, Any] = {}
    for part in parts:
        assert whole.get("finish_reason") is None, "nothing follows the last part"
        for name, value in part.items():
            if name in ("text", "token_ids") and value is not None:
                whole[name] = whole.get(name, type(value)()) + value
            elif name == "logprobs" and value is not None:
                lists = whole.setdefault(name, {}) or {}
                whole[name] = {key: lists.get(key, []) + more for key, more in value.items()}
            elif name == "delta":
                whole["message"] = with_delta(whole.get("message", {}), value)
            elif whole.get(name) is None:
                whole[name] = value
    return whole


def with_delta(message: dict[str, Any], delta: dict[str, Any]) -> dict[str, Any]:
    for name in ("role", "content", "reasoning"):
        if delta.get(name) is not None:
            message[name] = message.get(name, "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({"name": call["function"]["name"], "arguments": ""})
        calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return message


def simplified(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice without what only one of the two forms has, and without ids of calls."""
    choice = {name: value for name, value in choice.items() if value is not None}
    message = choice.get("message", {})
    if "tool_calls" in message:
        message["tool_calls"] = [call.get("function", call) for call in message["tool_calls"]]
    choice["message"] = {name: value for name, value in message.items() if value}
    choice.pop("prompt_logprobs", None)
    return choice


async def check(client: Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer to `body`, after a look at the streamed one."""
    whole_body = {name: value for name, value in body.items() if name != "stream_options"}
    status, answer = await client.post(path, whole_body)
    assert status == 200, (body, answer)
    *events, last = await client.events(path, **body)
    assert last["choices"] == [] and last["usage"] == answer["usage"], body
    for choice in answer["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert simplified(put_together(parts)) == simplified(choice), body
    await client.settled()
    return answer


@pytest.mark.parametrize("case", range(3))
async def test_completions(start_server: StartServer, case: int) -> None:
    client = await start_server()
    for text in ("hi", "hé"):
        client.engine.scripts[text] = [*client.engine.ids(TEXT), EOS]
    for body in pairwise(COMPLETIONS)[case::3]:
        answer = await check(client, "/v1/completions", body)
        num_prompts = (
            len(body["prompt"]) if isinstance(body["prompt"][0], (list, str)) and body["prompt"] != "hi" else 1
        )
        assert [c["index"] for c in answer["choices"]] == list(range(num_prompts * body["n"]))
        if body["return_token_ids"]:
            count = sum(len(c["token_ids"]) for c in answer["choices"])
            assert answer["usage"]["completion_tokens"] == count <= body["max_tokens"] * len(answer["choices"])
        for choice in answer["choices"]:
            logprobs = choice["logprobs"]
            assert (logprobs is None) == (body["logprobs"] is None and not body["logprob_token_ids"])
            if logprobs is not None and body["return_token_ids"]:
                num_prompt = len(choice["prompt_token_ids"]) if body["echo"] else 0
                assert {len(v) for v in logprobs.values()} == {num_prompt + len(choice["token_ids"])}
                assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


@pytest.mark.parametrize("case", range(3))
async def test_chats(start_server: StartServer, case: int) -> None:
    options = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    client = await start_server(**options)
    client.engine.scripts[PROMPT] = [*client.engine.ids(TEXT), EOS]
    for body in pairwise(CHATS)[case::3]:
        answer = await check(client, "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "hi"}]})
        assert [c["index"] for c in answer["choices"]] == list(range(body["n"]))
        for choice in answer["choices"]:
            wants_logprobs = body["logprobs"] or body["logprob_token_ids"]
            assert (choice["logprobs"] is not None) == bool(wants_logprobs)
            if choice["logprobs"] is not None and body["return_token_ids"]:
                assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
            if choice["finish_reason"] == "tool_calls":
                assert choice["message"]["tool_calls"], body
