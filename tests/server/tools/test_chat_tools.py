"""Chats with tools and reasoning: requests, templates, answers and streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from server.fake_engine import EOS, make_tokenizer
from server.live_server import Client, StartServer
from tokenizers import AddedToken

from jaxpaged.errors import ConfigError
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.responses import ChatChunk

PATH = "/v1/chat/completions"
PROMPT = "user\nhi\nassistant\n"
USER: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": n, "parameters": {"properties": {"city": {"type": "string"}}}}}
    for n in ("f", "g")
]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"city": "Zü}\\"rich 🦊"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)
ALL_ON = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
ECHO = "{{ messages | tojson }}|{{ tools | tojson }}"  # shows what templates get


@pytest.fixture
async def client(start_server: StartServer) -> Client:
    return await start_server(**ALL_ON)


@pytest.fixture
async def ai(client: Client) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=client.url + "/v1", api_key="x", max_retries=0) as ai:
        yield ai


def writes(client: Client, text: str, *, ends: bool = True) -> None:
    client.engine.scripts[PROMPT] = [*client.engine.tokenizer.encode(text, add_special_tokens=False), *[EOS] * ends]


async def ask(client: Client, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The one choice of an answer, and the same put together from a stream, ids of calls left out."""
    body = {"max_tokens": None, "tools": TOOLS, **body}
    [choice] = (await client.chat(**body))["choices"]
    for call in choice["message"].get("tool_calls", []):
        assert call.pop("id").startswith("call_") and call.pop("type") == "function"
    message: dict[str, Any] = {"content": None, "reasoning": None}
    ids = set()
    chunks = await client.events(PATH, messages=USER, **body)
    for chunk in chunks:
        ChatChunk.model_validate(chunk, strict=True)
    for delta in (c["delta"] for chunk in chunks[1:] for c in chunk["choices"]):
        for name in ("content", "reasoning"):
            if name in delta:
                message[name] = (message[name] or "") + delta[name]
        for entry in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if entry["index"] == len(calls):
                assert entry.pop("type") == "function"
                ids.add(entry.pop("id"))
                calls.append({"function": entry["function"]})
            else:
                assert entry.keys() == {"index", "function"} and entry["function"].keys() == {"arguments"}
                calls[entry["index"]]["function"]["arguments"] += entry["function"]["arguments"]
    assert len(ids) == len(message.get("tool_calls", []))
    last = chunks[-1]["choices"][0]
    return choice, {"message": message, "finish_reason": last["finish_reason"], "stop_reason": last["stop_reason"]}


@pytest.mark.parametrize(
    ("text", "change", "message", "reason"),
    [
        ("hello", {}, {"content": "hello"}, "stop"),
        (
            CALLS,
            {},
            {"content": "Let me see.", "tool_calls": [("f", '{"city": "Zü}\\"rich 🦊"}'), ("g", "{}")]},
            "tool_calls",
        ),
        (
            CALLS,
            {"parallel_tool_calls": False},
            {"content": "Let me see.", "tool_calls": [("f", '{"city": "Zü}\\"rich 🦊"}')]},
            "tool_calls",
        ),
        (CALLS, {"tool_choice": "none"}, {"content": CALLS}, "stop"),
        (CALLS, {"tools": None}, {"content": CALLS}, "stop"),
        (
            CALLS,
            {"max_tokens": len(CALLS[: CALLS.index('\\"rich')].encode())},
            {"content": "Let me see.", "tool_calls": [("f", '{"city": "Zü}')]},
            "length",
        ),
        (CALLS, {"max_tokens": 40}, {"content": CALLS[:40]}, "length"),
        (
            f"<think>\nhm\n</think>\n\n{CALLS[12:]}",
            {"tool_choice": "auto"},
            {"reasoning": "\nhm\n", "tool_calls": [("f", '{"city": "Zü}\\"rich 🦊"}'), ("g", "{}")]},
            "tool_calls",
        ),
        ("<think>hm</think>yes", {"tools": None}, {"reasoning": "hm", "content": "yes"}, "stop"),
        ("<think>hm</think>yes", {"include_reasoning": False}, {"content": "yes"}, "stop"),
        ("<think>hm", {}, {"reasoning": "hm"}, "stop"),
        ("<tool_call>{bad} 🦊</tool_call>", {}, {"content": "<tool_call>{bad} 🦊</tool_call>"}, "stop"),
    ],
)
async def test_answers(client: Client, text: str, change: dict[str, Any], message: dict[str, Any], reason: str) -> None:
    writes(client, text)
    if "tool_calls" in message:
        calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in message["tool_calls"]]
        message = {**message, "tool_calls": calls}
    message = {"content": None, "reasoning": None, **message}
    choice, streamed = await ask(client, **change)
    assert choice["message"] == {"role": "assistant", "refusal": None, **message}
    assert choice["finish_reason"] == reason and choice["stop_reason"] is None
    assert streamed == {"message": message, "finish_reason": reason, "stop_reason": None}


async def test_every_choice_has_calls_of_its_own(client: Client) -> None:
    writes(client, CALLS)
    chunks = await client.events(PATH, messages=USER, tools=TOOLS, n=2)
    arguments: dict[tuple[int, int], str] = {}
    for choice in (c for chunk in chunks for c in chunk["choices"]):
        for call in choice["delta"].get("tool_calls", []):
            key = (choice["index"], call["index"])
            arguments[key] = arguments.get(key, "") + call["function"]["arguments"]
    assert arguments == {(i, j): text for i in (0, 1) for j, text in ((0, '{"city": "Zü}\\"rich 🦊"}'), (1, "{}"))}


async def test_what_is_held_back_makes_no_chunks_but_for_logprobs(client: Client) -> None:
    writes(client, '<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    chunks = await client.events(PATH, messages=USER, tools=TOOLS)
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"]]
    assert [sorted(d) for d in deltas] == [["content", "role"], ["tool_calls"], []]
    chunks = await client.events(PATH, messages=USER, tools=TOOLS, logprobs=True, return_token_ids=True)
    written = client.engine.scripts[PROMPT]
    assert [t for c in chunks for t in c["choices"][0].get("token_ids", [])] == written
    assert sum(len((c["choices"][0]["logprobs"] or {"content": []})["content"]) for c in chunks) == len(written)


async def test_openai_client(client: Client, ai: openai.AsyncOpenAI) -> None:
    writes(client, CALLS)
    options: dict[str, Any] = {"model": "fake", "messages": USER, "tools": TOOLS, "tool_choice": "auto"}
    answer = await ai.chat.completions.create(**options)
    async with ai.chat.completions.stream(**options) as stream:
        events = [e async for e in stream]
        streamed = await stream.get_final_completion()
    for choice in (answer.choices[0], streamed.choices[0]):
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
        assert choice.message.tool_calls is not None
        functions = [c.function for c in choice.message.tool_calls if c.type == "function"]
        assert [(f.name, json.loads(f.arguments)) for f in functions] == [("f", {"city": 'Zü}"rich 🦊'}), ("g", {})]
    fragments = [e.arguments_delta for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert "".join(fragments) == '{"city": "Zü}\\"rich 🦊"}{}' and len(fragments) > 10

    # The answer goes back as it came, with the tools' results.
    results = [
        {"role": "tool", "tool_call_id": c.id, "content": "sunny"} for c in answer.choices[0].message.tool_calls or ()
    ]
    again = await ai.chat.completions.create(
        model="fake",
        messages=[*USER, answer.choices[0].message.model_dump(), *results],
        max_tokens=3,  # type: ignore[list-item]
    )
    assert again.choices[0].message.content == "abc" and again.choices[0].message.tool_calls is None


def call_message(**function: Any) -> list[Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", **function}}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (call_message(arguments='{"x": {"é": [1]}}'), {"arguments": {"x": {"é": [1]}}}),
        (call_message(arguments={"x": 1}), {"arguments": {"x": 1}}),
        (call_message(arguments=None), {"arguments": {}}),
        (call_message(arguments=""), {"arguments": {}}),
        (call_message(), {"arguments": {}}),
    ],
)
async def test_calls_in_templates(start_server: StartServer, messages: list[Any], expected: dict[str, Any]) -> None:
    client = await start_server(chat_template=ECHO)
    await client.chat(messages=messages, max_tokens=1)
    [message] = json.loads(prompt(client).split("|")[0])
    call = {"id": "c1", "type": "function", "function": {"name": "f", **expected}}
    assert message == {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize("calls", [[], None])
async def test_no_calls_in_templates(start_server: StartServer, calls: Any) -> None:
    client = await start_server(chat_template=ECHO)
    turns = [
        {"role": "assistant", "content": "x", "tool_calls": calls, "reasoning": "y"},
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": [{"type": "text", "text": "sunny"}]},
    ]
    await client.chat(messages=turns, max_tokens=1)
    messages, tools = prompt(client).split("|")
    first, second = json.loads(messages)
    assert (first["content"], first["reasoning_content"]) == ("x", "y") and "tool_calls" not in first
    assert second == {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "sunny"}
    assert json.loads(tools) is None


async def test_results_are_named(start_server: StartServer) -> None:
    client = await start_server(chat_template="{% for m in messages %}{{ m.role }} {{ m.name }};{% endfor %}")
    ids = ["c1", "c1", "c2", 3]
    results: list[Any] = [{"role": "tool", "tool_call_id": i, "content": "x"} for i in ids]
    results[1]["name"] = "mine"
    await client.chat(messages=[*call_message(arguments={}), *results], max_tokens=1)
    assert prompt(client) == "assistant ;tool f;tool mine;tool ;tool ;"


@pytest.mark.parametrize("choice", ["auto", "none", None])
async def test_tools_in_templates(start_server: StartServer, choice: str | None) -> None:
    client = await start_server(chat_template=ECHO, **ALL_ON)
    await client.chat(max_tokens=1, tools=TOOLS[:1], tool_choice=choice)
    assert json.loads(prompt(client).split("|")[1]) == TOOLS[:1]
    status, answer = await client.post("/tokenize", {"messages": USER, "tools": TOOLS[:1]})
    assert status == 200 and answer["tokens"] == client.engine.all_requests[0].prompt_token_ids


def prompt(client: Client) -> str:
    return client.engine.tokenizer.decode(client.engine.all_requests[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("parser", "end", "reasoning", "content"),
    [
        ("qwen3", "", None, "a</think>b"),
        ("qwen3", "<think>\n", "a", "b"),
        ("qwen3", "<think>\n\n</think>\n\n", None, "a</think>b"),
        ("deepseek_r1", "", "a", "b"),
        ("deepseek_r1", "<think>\n", "a", "b"),
        ("deepseek_r1", "<think>\n\n</think>\n\n", None, "a</think>b"),
    ],
)
async def test_the_prompt_says_whether_it_thinks(
    start_server: StartServer, parser: str, end: str, reasoning: str | None, content: str
) -> None:
    client = await start_server(reasoning_parser=parser)
    client.engine.scripts[PROMPT + end] = [*client.engine.ids("a</think>b"), EOS]
    [choice] = (await client.chat(chat_template_kwargs={"extra": end}, max_tokens=None))["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (reasoning, content)


async def test_a_continued_message_may_be_inside_its_reasoning(start_server: StartServer) -> None:
    client = await start_server(reasoning_parser="qwen3")
    for begun, expected in (("<think>x", ("y", "z")), ("<think>x</think>", (None, "y</think>z"))):
        client.engine.scripts[f"assistant\n{begun}"] = [*client.engine.ids("y</think>z"), EOS]
        [choice] = (
            await client.chat(
                messages=[{"role": "assistant", "content": begun}],
                add_generation_prompt=False,
                continue_final_message=True,
                max_tokens=None,
            )
        )["choices"]
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == expected


async def test_markers_that_are_special_tokens_are_seen(start_server: StartServer) -> None:
    client = await start_server(enable_auto_tool_choice=True, tool_call_parser="llama3_json")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<|python_tag|>", special=True)])
    client.engine.tokenizer = tokenizer
    writes(client, 'It is <|python_tag|>{"name": "f", "parameters": {"city": "x"}}')
    choice, streamed = await ask(client)
    call = {"function": {"name": "f", "arguments": '{"city": "x"}'}}
    for message in (choice["message"], streamed["message"]):
        assert (message["content"], message["tool_calls"]) == ("It is", [call])
    [choice] = (await client.chat(max_tokens=None))["choices"]
    assert choice["message"]["content"].startswith('It is {"name"')  # without tools they are left out, as ever


@pytest.mark.parametrize(
    ("config", "change", "param", "words"),
    [
        ({}, {"tools": TOOLS}, "tool_choice", "--enable-auto-tool-choice and --tool-call-parser"),
        ({"tool_call_parser": "hermes"}, {"tools": TOOLS}, "tool_choice", "--enable-auto-tool-choice"),
        ({}, {"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {},
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}},
            "tool_choice",
            "none of the tools",
        ),
        (
            {},
            {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "exclude each other",
        ),
        (ALL_ON, {"tool_choice": "auto"}, "tool_choice", "needs tools"),
        (ALL_ON, {"tools": TOOLS, "tool_choice": "maybe"}, "body.tool_choice", "'none', 'auto' or 'required'"),
        (ALL_ON, {"tools": []}, "body.tools", "at least 1"),
        (ALL_ON, {"tools": [{"type": "function"}]}, "body.tools.0.function", "required"),
        (ALL_ON, {"tools": [{"type": "web", "function": {"name": "f"}}]}, "body.tools.0.type", "'function'"),
        (
            {},
            {"messages": call_message(arguments="{'a': 1}")},
            "body.messages.0.tool_calls.0.function.arguments",
            "must be a JSON object",
        ),
        (
            {},
            {"messages": call_message(arguments="[" * 100_000)},
            "body.messages.0.tool_calls.0.function.arguments",
            "must be a JSON object",
        ),
        (
            {},
            {"messages": call_message(arguments="[1]")},
            "body.messages.0.tool_calls.0.function.arguments",
            "must be a JSON object",
        ),
    ],
)
async def test_bad_requests(
    start_server: StartServer, config: dict[str, Any], change: dict[str, Any], param: str, words: str
) -> None:
    client = await start_server(**config)
    error = await client.error(PATH, {"messages": USER, **change})
    assert error["param"] == param and words in error["message"]
    assert client.engine.all_requests == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tool_call_parser": "herme"}, "tool_call_parser is 'herme', but must be one of hermes, llama3_json, qwen"),
        ({"reasoning_parser": "r1"}, "reasoning_parser is 'r1', but must be one of deepseek_r1, qwen3"),
        ({"enable_auto_tool_choice": True}, "needs a tool_call_parser"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**options)
