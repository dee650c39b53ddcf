"""Structured outputs and demanded tool calls over HTTP. The fake engine notes what its grammars do not allow."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from typing import Any

import pytest
from server.fake_engine import EOS
from server.live_server import Client, StartServer

from jaxpaged.core.grammar import Grammar
from jaxpaged.structured_outputs import StructuredOutputs

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PROMPT = "user\nhi\nassistant\n"
USER: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}


def writes(client: Client, text: str, prompt: str = PROMPT) -> None:
    client.engine.scripts[prompt] = [*client.engine.ids(text), EOS]


FORMS = [
    ({"structured_outputs": {"json": SCHEMA}}, '{"a": 1}'),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}, '{"a":1}'),
    ({"structured_outputs": {"json_object": True, "regex": None}}, '{"x": [1, {}]}'),
    ({"structured_outputs": {"regex": "[a-c]{3}"}}, "abc"),
    ({"structured_outputs": {"choice": ["yes", "no"], "_backend": "x"}}, "no"),
    ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]'}}, "a7"),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, 'So <f>{"a": 2}</f> it is'),
    ({"response_format": {"type": "json_object"}}, '{"x": "y"}'),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, '{\n  "a": 1\n}'),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}, "strict": False}}},
        "[1]",
    ),
    ({"response_format": {"type": "structural_tag", **TAG}}, 'So <f>{"a": 2}</f> it is'),
]


@pytest.mark.parametrize(("form", "text"), FORMS)
async def test_forms(client: Client, form: dict[str, Any], text: str) -> None:
    writes(client, text, "hi")
    writes(client, text)
    [choice] = (await client.complete(max_tokens=200, **form))["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    [choice] = (await client.chat(max_tokens=200, **form))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    chunks = await client.events(CHAT, messages=USER, max_tokens=200, **form)
    assert "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]) == text
    assert client.engine.broken == [] and all(r.grammar is not None for r in client.engine.all_requests)


async def test_the_fake_engine_notes_what_is_not_allowed(client: Client) -> None:
    await client.complete(structured_outputs={"regex": "b+"})  # it writes "abc..."
    assert client.engine.broken


async def test_text_is_any_form(client: Client) -> None:
    await client.chat(response_format={"type": "text"}, structured_outputs={"regex": "abc.*"})
    await client.chat(response_format={"type": "text"})
    assert [r.grammar is None for r in client.engine.all_requests] == [False, True]


BROKEN_SCHEMAS: list[Any] = [
    *({"type": t} for t in ("thing", 3, [], ["string", 1], "", None, "OBJECT")),
    *({"properties": p} for p in (1, [], "a", {"a": 1}, {"a": []}, {"a": None})),
    *({"type": "object", "required": r} for r in (1, "a", [1], {}, [None])),
    *({"type": "string", "minLength": n} for n in (-1, "x", 1.5, None, [])),
    *({"type": "array", "minItems": n} for n in (-1, "x", 1.5, None)),
    *({"type": "string", "pattern": p} for p in ("a(", "[", "(?=a)b", "(?<!a)b", "a{2,1}", 5, "\\1", "(a)\\1", "*")),
    *({"type": "number", "minimum": n} for n in ("a", [], {})),
    *({k: v} for k in ("anyOf", "oneOf", "allOf") for v in (1, "a", {}, [1], [None])),
    *({"$ref": r} for r in (1, "#/x", "#/$defs/a", "http://x.y/z", "#")),
    *({"enum": e} for e in ([], 1, "a")),
    *({k: {}} for k in ("not", "if", "contains", "dependentSchemas", "unevaluatedProperties")),
    *({"type": "integer", "multipleOf": m} for m in (0, "a")),
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"type": "string", "minLength": 3, "maxLength": 2},
    {"type": "array", "minItems": 3, "maxItems": 2},
    {"const": 1, "type": "string"},
    {"type": "string", "format": "nonsense"},
    {"uniqueItems": True, "type": "array"},
    {"additionalProperties": 1},
    {"items": "a"},
    "{",
    "[]",
    "null",
    "3",
    "",
]
BROKEN_OTHERS: list[dict[str, Any]] = [
    *(
        {"regex": r}
        for r in ("a(", "[b", "(?=a)", "a{3,1}", "*", "(?P<n", "\\", "\\p{Nope}", "(a)\\1", ")", "[z-a]", "(?", 3)
    ),
    *(
        {"grammar": g}
        for g in (
            "",
            "start: b",
            "x: y",
            "root ::= b",
            'start: "',
            "start: (",
            "start ::=",
            "::=",
            "{}",
            1,
            "start: /(/",
        )
    ),
    *({"choice": c} for c in ([], "a", [1], {}, [None])),
    *(
        {"structural_tag": t}
        for t in ("{", {}, {"triggers": []}, {**TAG, "triggers": ["x"]}, {**TAG, "structures": [1]})
    ),
    {"json": SCHEMA, "regex": "a"},
    {"json_object": False},
    {"whitespace_pattern": " ", "json": SCHEMA},
    {},
]
BROKEN = [{"json": schema} for schema in BROKEN_SCHEMAS] + BROKEN_OTHERS


async def test_what_is_malformed_is_refused_while_others_go_on(start_server: StartServer) -> None:
    client = await start_server({"step_s": 0.005})
    mate = asyncio.create_task(client.events(COMPLETIONS, prompt="mate", max_tokens=240))
    while not client.engine.all_requests:
        await asyncio.sleep(0.01)
    assert len(BROKEN) >= 100
    for fields in BROKEN:
        error = await client.error(COMPLETIONS, {"prompt": "hi", "structured_outputs": fields})
        assert error["param"] == "structured_outputs", fields
        assert error["type"] == "BadRequestError", fields
    for schema in (s for s in BROKEN_SCHEMAS if isinstance(s, dict)):
        body = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        error = await client.error(CHAT, {"messages": USER, "response_format": body, "stream": True})
        assert error["message"].startswith("Grammar error: "), schema
    [request] = client.engine.all_requests
    assert len(await mate) == 240 and request.sequences[0].is_finished
    assert len((await client.complete(max_tokens=3))["choices"][0]["text"]) == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"type": "xml"}, "must have one of text"),
        ({}, "has the type None"),
        ({"type": "json_schema"}, "needs"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "needs"),
        ({"type": "json_schema", "json_schema": {"schema": "{}"}}, "needs"),
        ({"type": "structural_tag", "format": {"type": "any_text"}}, '"structures" and "triggers"'),
    ],
)
async def test_malformed_formats(client: Client, given: dict[str, Any], words: str) -> None:
    for body in ({"prompt": "hi"}, {"messages": USER}):
        error = await client.error(CHAT if "messages" in body else COMPLETIONS, {**body, "response_format": given})
        assert error["param"] == "response_format" and words in error["message"]


async def test_what_does_not_go_together(client: Client) -> None:
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    error = await client.error(COMPLETIONS, {"prompt": "hi", **both})
    assert error["param"] == "structured_outputs" and "exclude each other" in error["message"]
    beams = {"use_beam_search": True, "n": 2, "response_format": {"type": "json_object"}}
    error = await client.error(COMPLETIONS, {"prompt": "hi", **beams})
    assert error["param"] == "structured_outputs" and "beam search" in error["message"]
    assert client.engine.all_requests == []


async def test_a_request_waits_for_its_grammar_outside_of_the_batch(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending: list[Future[Grammar]] = []
    compile_now = client.engine.compile_grammar

    def compile_later(wanted: StructuredOutputs) -> Future[Grammar]:
        pending.append(Future())
        return pending[-1]

    monkeypatch.setattr(client.engine, "compile_grammar", compile_later)
    waiting = [asyncio.create_task(client.complete(structured_outputs={"regex": "abc"})) for _ in range(2)]
    while len(pending) < 2:
        await asyncio.sleep(0.01)
    assert (await client.complete(max_tokens=3))["choices"][0]["text"] == "abc"
    assert len(client.engine.all_requests) == 1 and not any(task.done() for task in waiting)
    waiting[1].cancel()  # the client goes
    await asyncio.sleep(0.05)
    assert not pending[1].cancelled()
    pending[0].set_result(compile_now(StructuredOutputs(regex="abc")).result())
    [choice] = (await waiting[0])["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")


async def test_a_grammar_that_takes_too_long(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpaged.engine.async_engine.COMPILE_GRAMMAR_S", 0.05)
    monkeypatch.setattr(client.engine, "compile_grammar", lambda wanted: Future())
    error = await client.error(COMPLETIONS, {"prompt": "hi", "structured_outputs": {"regex": "a"}})
    assert error["message"].startswith("Grammar error: it takes longer than 0.05 s")


# -- calls that have to be made

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {
            "name": 'g"',
            "parameters": {"properties": {"city": {"$ref": "#/$defs/c"}}, "$defs": {"c": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "h"}},
]
NAMED = {"type": "function", "function": {"name": "f"}}
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
HERMES_G = '<tool_call>\n{"name": "g\\"", "arguments": {"city": "x"}}\n</tool_call>'
LLAMA, LLAMA_H = '{"name": "f", "parameters": {"a": 1}}', '{"name": "h", "parameters": {}}'
CALL = {"name": "f", "arguments": '{"a": 1}'}
CALL_G, CALL_H = {"name": 'g"', "arguments": '{"city": "x"}'}, {"name": "h", "arguments": "{}"}


@pytest.mark.parametrize(
    ("parser", "choice", "text", "calls", "reason"),
    [
        ("hermes", "required", HERMES, [CALL], "tool_calls"),
        ("hermes", "required", f"{HERMES}\n{HERMES_G}", [CALL, CALL_G], "tool_calls"),
        ("qwen", "required", HERMES, [CALL], "tool_calls"),
        ("llama3_json", "required", f"{LLAMA}; {LLAMA_H}", [CALL, CALL_H], "tool_calls"),
        ("qwen3_coder", "required", LLAMA, [CALL], "tool_calls"),
        (None, "required", LLAMA, [CALL], "tool_calls"),
        ("hermes", NAMED, HERMES, [CALL], "stop"),
        (None, NAMED, LLAMA, [CALL], "stop"),
    ],
)
async def test_demanded_calls(
    start_server: StartServer, parser: str | None, choice: Any, text: str, calls: list[Any], reason: str
) -> None:
    client = await start_server(tool_call_parser=parser)
    writes(client, text)
    body = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    [answer] = (await client.chat(**body))["choices"]
    assert [c["function"] for c in answer["message"]["tool_calls"]] == calls
    assert answer["finish_reason"] == reason and answer["message"]["content"] is None
    chunks = await client.events(CHAT, messages=USER, **body)
    entries = [e for chunk in chunks for c in chunk["choices"] for e in c["delta"].get("tool_calls", ())]
    streamed = ["".join(e["function"]["arguments"] for e in entries if e["index"] == i) for i in range(len(calls))]
    assert streamed == [call["arguments"] for call in calls]
    assert chunks[-1]["choices"][0]["finish_reason"] == reason
    assert client.engine.broken == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tool_choice": "required"}, "It is sunny."),
        ({"tool_choice": "required"}, '{"name": "k", "parameters": {}}'),
        ({"tool_choice": "required"}, '{"name": "f", "parameters": {"a": "x"}}'),
        ({"tool_choice": "required"}, '{"name": "g\\"", "parameters": {"city": 1}}'),
        ({"tool_choice": "required"}, '{"name": "h", "parameters": 1}'),
        ({"tool_choice": "required", "parallel_tool_calls": False}, f"{LLAMA}; {LLAMA}"),
        ({"tool_choice": NAMED}, LLAMA_H),
    ],
)
async def test_what_demanded_calls_do_not_allow(client: Client, change: dict[str, Any], text: str) -> None:
    [choice] = (await ask_for(client, text, **change))["choices"]
    is_cut = choice["finish_reason"] in ("stop", "tool_calls") and len(choice["message"].get("tool_calls", ())) == 1
    assert client.engine.broken or is_cut


async def ask_for(client: Client, text: str, **body: Any) -> dict[str, Any]:
    writes(client, text)
    return await client.chat(**{"tools": TOOLS, "max_tokens": 200, **body})


async def test_schemas_of_tools_that_cannot_be_enforced(client: Client) -> None:
    def tools(**function: Any) -> list[Any]:
        schema = {"type": "object", "properties": {"a": {"type": "string", "format": "secret"}}}
        return [{"type": "function", "function": {"name": "f", "parameters": schema, **function}}]

    await ask_for(client, '{"name": "f", "parameters": {"a": "x"}}', tools=tools(), tool_choice="required")
    assert client.engine.broken == []
    body = {"messages": USER, "tools": tools(strict=True), "tool_choice": "required"}
    error = await client.error(CHAT, body)
    assert error["message"].startswith("Grammar error: ") and "Unknown format: secret" in error["message"]
    body["tools"] = tools(parameters={"type": "string"})
    await client.chat(**{**body, "tool_choice": "none"})
    assert (await client.error(CHAT, {**body, "tools": tools(parameters={"type": "thing"})}))["code"] == 400


THOUGHT = "<think>Well</think>\n\n"


@pytest.mark.parametrize(
    ("body", "text", "content"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}', '{"a": 1}'),
        ({"structured_outputs": {"choice": ["yes"]}}, "yes", "yes"),
        ({"tools": TOOLS, "tool_choice": "required"}, LLAMA, None),
    ],
)
async def test_the_form_is_that_of_the_answer_behind_reasoning(
    start_server: StartServer, body: dict[str, Any], text: str, content: str | None
) -> None:
    for parser, script in (("qwen3", THOUGHT + text), ("qwen3", text), ("deepseek_r1", THOUGHT[7:] + text)):
        client = await start_server(reasoning_parser=parser)
        writes(client, script)
        [choice] = (await client.chat(**body, max_tokens=200))["choices"]
        message = choice["message"]
        assert message["reasoning"] == (None if script is text else "Well")
        assert (message["content"] or "").strip() == (content or "") and client.engine.broken == []
        assert ("tool_calls" in message) == (content is None)


async def test_the_form_of_a_response(client: Client) -> None:
    writes(client, '{"a": 1}')
    formats = [
        {"type": "json_object"},
        {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True},
        {"type": "text"},
    ]
    for given in formats:
        status, answer = await client.post(RESPONSES, {"input": "hi", "text": {"format": given}})
        assert status == 200, answer
        assert answer["output"][-1]["content"][0]["text"] == '{"a": 1}'
    assert client.engine.broken == []
    assert [r.grammar is None for r in client.engine.all_requests] == [False, False, True]
    bad = {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "thing"}}}}
    assert (await client.error(RESPONSES, bad))["message"].startswith("Grammar error: ")
    tools = [{"type": "function", "name": "f", "parameters": SCHEMA}]
    writes(client, LLAMA)
    for choice in ("required", {"type": "function", "name": "f"}):
        status, answer = await client.post(RESPONSES, {"input": "hi", "tools": tools, "tool_choice": choice})
        [call] = answer["output"]
        assert status == 200 and (call["name"], call["arguments"]) == ("f", '{"a": 1}')
    assert client.engine.broken == []


async def test_a_grammar_that_fails_on_the_way_is_a_400(client: Client) -> None:
    """Also where the answer has begun, as an event."""
    client.engine.fail_reason = "Grammar error: Too many items"
    expected = {"message": "Grammar error: Too many items", "type": "BadRequestError"}
    for path, body in (
        ("/v1/completions", {"prompt": "hi", "structured_outputs": {"regex": "[a-z]+"}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        client.engine.fail_steps = 1
        error = await client.error(path, body)
        assert error.items() >= {**expected, "param": "structured_outputs", "code": 400}.items()
        client.engine.fail_steps = 1
        [event] = await client.events(path, **body)
        assert event["error"] == error
