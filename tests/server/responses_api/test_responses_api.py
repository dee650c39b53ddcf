"""/v1/responses against the openai package, whose types are an independent account of the shapes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from server.fake_engine import EOS
from server.live_server import Client, StartServer

PATH = "/v1/responses"
ALL_ON = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
TOOLS: list[Any] = [
    {"type": "function", "name": n, "parameters": {"properties": {"city": {"type": "string"}}}, "strict": False}
    for n in ("f", "g")
]
CALLS = (
    "<think>Hm, héllo.</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "f", "arguments": {"city": "Zü 🦊"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PROMPT = "user\nhi\nassistant\n"


@pytest.fixture
async def client(start_server: StartServer) -> Client:
    return await start_server(**ALL_ON)


@pytest.fixture
async def ai(client: Client) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=client.url + "/v1", api_key="x", max_retries=0) as ai:
        yield ai


def writes(client: Client, text: str, prompt: str = PROMPT) -> None:
    client.engine.scripts[prompt] = [*client.engine.ids(text), EOS]


def prompt_text(client: Client) -> str:
    return client.engine.tokenizer.decode(client.engine.all_requests[-1].prompt_token_ids)


async def respond(client: Client, status: int = 200, **body: Any) -> Any:
    got, answer = await client.post(PATH, {"input": "hi", "max_output_tokens": 5, **body})
    assert got == status, answer
    return answer


async def stream(client: Client, **body: Any) -> list[dict[str, Any]]:
    """Events of a streamed response, each of which fits its type in the openai package."""
    async with client.session.post(client.url + PATH, json={"input": "hi", "stream": True, **body}) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        text = await response.text()
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event, strict=True)
        events.append(event)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    return events


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items that the events between the first two and the last tell of; checks their order."""
    items: list[dict[str, Any]] = []
    is_open = False
    texts: dict[str, str] = {}
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not is_open and event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            assert not event["item"].get("content") and not event["item"].get("arguments")
            items.append(event["item"])
            is_open = True
            texts = {}
            continue
        assert is_open and event["output_index"] == len(items) - 1
        if kind == "output_item.done":
            assert event["item"]["id"] == items[-1]["id"] and event["item"]["status"] != "in_progress"
            assert texts["delta"] == texts["done"]
            items[-1] = event["item"]
            is_open = False
            continue
        assert event["item_id"] == items[-1]["id"]
        if kind == "content_part.added":
            assert event["part"]["text"] == "" and texts == {}
        elif kind == "content_part.done":
            assert event["part"]["text"] == texts["done"]
        elif kind.endswith(".delta"):
            texts["delta"] = texts.get("delta", "") + event["delta"]
        else:
            assert kind.endswith(".done")
            texts["done"] = event["arguments" if "arguments" in event else "text"]
            texts.setdefault("delta", "")
    assert not is_open
    return items


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def message(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "status": status, "content": [part]}


async def test_fields(client: Client) -> None:
    answer = await respond(client, max_output_tokens=3, metadata={"a": "b"}, temperature=0.5, user="me")
    Response.model_validate(answer, strict=True)
    assert answer["id"].startswith("resp_") and answer["object"] == "response" and answer["model"] == "fake"
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert without_ids(answer["output"]) == [message("abc", "incomplete")]
    assert (answer["metadata"], answer["user"], answer["temperature"], answer["top_p"]) == ({"a": "b"}, "me", 0.5, 0.9)
    assert answer["tools"] == [] and answer["tool_choice"] == "none" and answer["store"] is True
    assert prompt_text(client) == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    num_prompt = len(client.engine.all_requests[-1].prompt_token_ids)
    assert answer["usage"] == {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": num_prompt // 16 * 16, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + 3,
    }


async def test_whole_and_streamed_answers_are_alike(client: Client) -> None:
    writes(client, CALLS)
    whole = await respond(client, tools=TOOLS, max_output_tokens=None)
    Response.model_validate(whole, strict=True)
    events = await stream(client, tools=TOOLS)
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    assert all(e["response"]["status"] == "in_progress" and e["response"]["output"] == [] for e in events[:2])
    assert events[-1]["type"] == "response.completed"
    streamed = events[-1]["response"]
    assert put_together(events[2:-1]) == streamed["output"]
    assert without_ids(streamed["output"]) == without_ids(whole["output"])
    assert without_ids(whole["output"]) == [
        {
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm, héllo."}],
        },
        message("\n\nLet me see."),
        {"type": "function_call", "status": "completed", "name": "f", "arguments": '{"city": "Zü 🦊"}'},
        {"type": "function_call", "status": "completed", "name": "g", "arguments": "{}"},
    ]
    assert streamed["usage"] == whole["usage"]
    # One token a byte.
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": len("Hm, héllo.".encode())}
    assert whole["usage"]["output_tokens"] == len(CALLS.encode()) + 1
    drop = ("id", "output", "created_at", "completed_at")
    assert {k: v for k, v in streamed.items() if k not in drop} == {k: v for k, v in whole.items() if k not in drop}


async def test_order_of_events(client: Client) -> None:
    writes(client, "ok")
    assert [e["type"] for e in await stream(client)] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    writes(client, '<think>h</think><tool_call>{"name": "g", "arguments": {}}</tool_call>')
    kinds = [e["type"] for e in await stream(client, tools=TOOLS)]
    assert [k for i, k in enumerate(kinds) if k != kinds[i - 1]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_an_answer_cut_anywhere(client: Client) -> None:
    writes(client, CALLS)
    for num_tokens in range(1, len(CALLS.encode()) + 1, 3):
        body = {"tools": TOOLS, "max_output_tokens": num_tokens}
        whole, events = await respond(client, **body), await stream(client, **body)
        assert whole["status"] == "incomplete" and events[-1]["type"] == "response.incomplete"
        assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])
        assert put_together(events[2:-1]) == events[-1]["response"]["output"]
        for call in (item for item in whole["output"] if item["type"] == "function_call"):
            assert call["status"] == ("completed" if call["arguments"] in ('{"city": "Zü 🦊"}', "{}") else "incomplete")


async def test_the_openai_package(client: Client, ai: openai.AsyncOpenAI) -> None:
    writes(client, CALLS)
    answer = await ai.responses.create(model="fake", input="hi", tools=TOOLS)
    assert answer.status == "completed" and answer.output_text == "\n\nLet me see."
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    again = await ai.responses.retrieve(answer.id)
    assert again == answer
    async with ai.responses.stream(model="fake", input="hi", tools=TOOLS) as events:
        kinds = [event.type async for event in events]
        final = await events.get_final_response()
    assert kinds[-1] == "response.completed" and final.output_text == answer.output_text
    assert [c.arguments for c in final.output if c.type == "function_call"] == ['{"city": "Zü 🦊"}', "{}"]
    with pytest.raises(openai.NotFoundError, match="not found"):
        await ai.responses.retrieve("resp_x")
    with pytest.raises(openai.BadRequestError, match="in the background"):
        await ai.responses.cancel(answer.id)


async def test_a_conversation_goes_on(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[Any] = []

    def render(messages: list[Any], **_: Any) -> str:
        rendered.append(messages)
        return "prompt"

    monkeypatch.setattr(client.engine.tokenizer, "apply_chat_template", render)
    items: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"city": "X"}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
    ]  # fmt: skip
    first = await respond(client, input=items, instructions="Rule.", max_output_tokens=2)
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"city": "X"}}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {}}},
    ]
    turns = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
            "content": "Wait.",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain", "name": "f"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun", "name": "g"},
    ]
    assert rendered.pop() == [{"role": "system", "content": "Rule."}, *turns]
    # Instructions are not carried over, the rest is, through a chain.
    second = await respond(client, input="more", previous_response_id=first["id"], max_output_tokens=1)
    turns += [{"role": "assistant", "content": "ab"}, {"role": "user", "content": "more"}]
    assert rendered.pop() == turns and second["previous_response_id"] == first["id"]
    await stream(client, input="and", previous_response_id=second["id"], instructions="New.", max_output_tokens=1)
    turns += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "and"}]
    assert rendered.pop() == [{"role": "system", "content": "New."}, *turns]


async def test_what_is_stored(start_server: StartServer) -> None:
    client = await start_server(response_store_bytes=24_000)
    kept = await respond(client)
    assert await client.get(f"{PATH}/{kept['id']}") == (200, kept)
    streamed = (await stream(client, max_output_tokens=2))[-1]["response"]
    assert await client.get(f"{PATH}/{streamed['id']}") == (200, streamed)
    unkept = await respond(client, store=False)
    assert unkept["store"] is False
    for response_id in (unkept["id"], "resp_x"):
        assert (await client.get(f"{PATH}/{response_id}"))[0] == 404
        error = await client.error(PATH, {"input": "x", "previous_response_id": response_id}, 404)
        assert error["param"] == "previous_response_id"
        assert (await client.post(f"{PATH}/{response_id}/cancel"))[0] == 404
    assert (await client.get(f"{PATH}/{kept['id']}?stream=true"))[0] == 400
    # Those used last stay.
    others = [await respond(client, metadata={"a": "x" * 3000}) for _ in range(3)]
    assert (await client.get(f"{PATH}/{kept['id']}"))[0] == 200
    others += [await respond(client, metadata={"a": "x" * 3000}) for _ in range(2)]
    found = [(await client.get(f"{PATH}/{r['id']}"))[0] for r in (streamed, kept, *others)]
    assert found == [404, 200, 404, 200, 200, 200, 200]
    await respond(client, metadata={"a": "x" * 30_000})  # one that is too large takes nobody's place
    assert (await client.get(f"{PATH}/{kept['id']}"))[0] == 200
    none = await start_server(response_store_bytes=0)
    assert (await none.get(f"{PATH}/{(await respond(none))['id']}"))[0] == 404


async def test_background(start_server: StartServer) -> None:
    client = await start_server({"step_s": 0.02})
    begun = await respond(client, background=True, max_output_tokens=5)
    assert begun["status"] == "in_progress" and begun["output"] == [] and begun["background"]
    assert (await client.get("/load"))[1] == {"server_load": 1}
    error = await client.error(PATH, {"input": "x", "previous_response_id": begun["id"]})
    assert "in progress" in error["message"]
    await client.settled()
    status, done = await client.get(f"{PATH}/{begun['id']}")
    assert status == 200 and done["status"] == "incomplete" and done["output"][0]["content"][0]["text"] == "abcde"
    assert (await client.get("/load"))[1] == {"server_load": 0}

    begun = await respond(client, background=True, max_output_tokens=200)
    status, cancelled = await client.post(f"{PATH}/{begun['id']}/cancel")
    assert status == 200 and cancelled["status"] == "cancelled" and cancelled["id"] == begun["id"]
    Response.model_validate(cancelled, strict=True)
    await client.settled()
    assert client.engine.stats().finished["abort"] == 1
    assert (await client.get(f"{PATH}/{begun['id']}"))[1]["status"] == "cancelled"
    assert (await client.post(f"{PATH}/{begun['id']}/cancel"))[0] == 400

    client.engine.fail_steps = 1
    begun = await respond(client, background=True, max_output_tokens=200)
    await client.settled()
    await asyncio.sleep(0.01)
    failed = (await client.get(f"{PATH}/{begun['id']}"))[1]
    assert failed["status"] == "failed" and failed["error"]["code"] == "server_error"
    assert "out of memory" in failed["error"]["message"]
    error = await client.error(PATH, {"input": "x", "previous_response_id": begun["id"]})
    assert "is failed" in error["message"]


async def test_failures(start_server: StartServer) -> None:
    client = await start_server({"step_s": 0.01})
    client.engine.fail_steps = 1
    assert "out of memory" in (await client.error(PATH, {"input": "hi"}, 500))["message"]
    client.engine.fail_steps = 1
    events = await stream(client)
    assert [e["type"] for e in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1]["response"]["error"]["code"] == "server_error"
    # One that fails on the way tells what there was.
    async with client.session.post(client.url + PATH, json={"input": "hi", "stream": True}) as response:
        while b"text.delta" not in await response.content.readline():
            pass
        client.engine.fail_steps = 1
        text = await response.text()
    last = json.loads(text.strip().rsplit("data: ", 1)[1])
    [item] = last["response"]["output"]
    assert last["type"] == "response.failed" and item["status"] == "incomplete"
    assert item["content"][0]["text"].startswith("a") and "event: response.output_item.done\n" in text
    # A client that leaves ends its request.
    async with client.session.post(client.url + PATH, json={"input": "hi", "stream": True}) as response:
        await response.content.readline()
    await client.settled()
    assert client.engine.stats().finished["abort"] == 1


async def test_logprobs(start_server: StartServer) -> None:
    client = await start_server()
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 3}
    [item] = (await respond(client, **body))["output"]
    logprobs = item["content"][0]["logprobs"]
    assert [(e["token"], e["logprob"], len(e["top_logprobs"])) for e in logprobs] == [
        ("a", -1.0, 2),
        ("b", -1.0, 2),
        ("c", -1.0, 2),
    ]
    events = await stream(client, **body)
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == logprobs
    assert [e for event in events if event["type"].endswith("text.delta") for e in event["logprobs"]] == logprobs
    assert (await client.error(PATH, {"input": "hi", "top_logprobs": 2}))["param"] == "top_logprobs"


async def test_logprobs_beside_reasoning_are_refused(client: Client) -> None:
    # The prompt shows no <think>, so that there may be reasoning.
    include = {"include": ["message.output_text.logprobs"]}
    error = await client.error(PATH, {"input": "hi", **include})
    assert error["param"] == "include"
    answer = await respond(client, **include, chat_template_kwargs={"extra": "<think>\n</think>"})
    assert [e["token"] for e in answer["output"][0]["content"][0]["logprobs"]] == ["a", "b", "c", "d", "e"]


async def test_a_tool_choice_that_is_the_default(client: Client) -> None:
    answer = await respond(client, tool_choice="auto")
    assert (answer["tool_choice"], answer["tools"]) == ("auto", [])
    assert answer["output"][0]["type"] == "message"


async def test_an_answer_that_ends_within_a_call_cannot_be_gone_on_from(client: Client) -> None:
    writes(client, CALLS)
    cut = len(CALLS[: CALLS.index("Zü")].encode())
    answer = await respond(client, tools=TOOLS, max_output_tokens=cut)
    assert answer["output"][-1]["arguments"] == '{"city": "'
    error = await client.error(PATH, {"input": "hi", "previous_response_id": answer["id"]})
    assert error["param"] == "previous_response_id" and "ends within a call" in error["message"]


async def test_sampling_fields_reach_the_engine(client: Client) -> None:
    await respond(client, top_k=4, seed=7, stop=["x"], ignore_eos=True, priority=3, cache_salt="s", top_p=0.4)
    request = client.engine.all_requests[-1]
    params = request.params
    assert (params.top_k, params.seed, params.stop, params.ignore_eos, params.top_p) == (4, 7, ("x",), True, 0.4)
    assert (request.priority, request.cache_salt) == (3, "s")
    await client.post(PATH, {"input": "hi"}, headers={"X-Vllm-Priority": "9"})
    assert client.engine.all_requests[-1].priority == 9


async def test_reasoning_effort_and_truncation(start_server: StartServer) -> None:
    client = await start_server(chat_template="{{ reasoning_effort }}:{{ extra }}:{{ messages[0].content }}")
    await respond(client, reasoning={"effort": "low", "summary": "auto"}, chat_template_kwargs={"extra": 1})
    assert prompt_text(client) == "low:1:hi"
    error = await client.error(PATH, {"input": "x" * 300})
    assert error["param"] == "input_tokens"
    await respond(client, input="x" * 300, truncation="auto", max_output_tokens=None)
    assert len(client.engine.all_requests[-1].prompt_token_ids) == 255


ARGUMENTS = "body.input.0.arguments"


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"input": None}, "body.input", "valid list"),
        ({"input": []}, "body.input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "body.input.0", "must be message, function_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "input_image"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            ARGUMENTS,
            "JSON object",
        ),
        ({"tools": [{"type": "web_search"}]}, None, "function"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, None, ""),
        ({"max_output_tokens": 0}, "body.max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 257}, "max_output_tokens", "256"),
        ({"text": {"format": {"type": "xml"}}}, "body.text.format.type", "json_schema"),
        ({"n": 2}, "n", "not supported in responses"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text.format"),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"background": True, "stream": True}, "background", "exclude"),
        ({"background": True, "store": False}, "background", "store"),
        ({"metadata": {str(i): "" for i in range(17)}}, "body.metadata", "at most 16"),
        ({"best_of": 2}, "best_of", "removed"),
    ],
)
async def test_bad_requests(client: Client, change: dict[str, Any], param: str | None, words: str) -> None:
    error = await client.error(PATH, {"input": "hi", **change})
    assert words in error["message"], error
    assert param is None or error["param"] == param
    assert client.engine.all_requests == []


async def test_unknown_model_and_key(start_server: StartServer) -> None:
    client = await start_server(api_keys=("k",))
    assert (await client.error(PATH, {"input": "hi"}, 401))["type"] == "AuthenticationError"
    assert (await client.get(f"{PATH}/resp_x"))[0] == 401
    client = await start_server()
    assert (await client.error(PATH, {"input": "hi", "model": "x"}, 404))["param"] == "model"
