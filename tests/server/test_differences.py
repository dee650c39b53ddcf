"""Each deliberate difference to the server that ours conforms to, as listed in docs/differences.json."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from server.fake_engine import EOS
from server.live_server import Client, StartServer

from jaxpaged.core.beam import BeamSearch, BeamSettings
from jaxpaged.core.constraints import NOT_ALLOWED
from jaxpaged.engine.validation import check_constraints
from jaxpaged.errors import InvalidRequestError
from jaxpaged.ops.adjust import History, edit_logits, penalize, unless_empty
from jaxpaged.ops.sampling import gather_logprobs, sample
from jaxpaged.request import MIN_TEMPERATURE, Request, SamplingParams

PATH = "/v1/completions"
LISTED = [d["id"] for d in json.loads((Path(__file__).parents[2] / "docs/differences.json").read_text())["differences"]]


async def greedy_choices(start: StartServer) -> None:
    choices = (await (await start()).complete(n=2, temperature=0))["choices"]
    assert choices[0]["text"] == choices[1]["text"]


async def removed_parameters(start: StartServer) -> None:
    client = await start()
    error = await client.error(PATH, {"prompt": "hi", "best_of": 2})
    assert error["param"] == "best_of" and "with n" in error["message"]
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        error = await client.error(PATH, {"prompt": "hi", name: "x"})
        assert error["param"] == name and "structured_outputs" in error["message"]


async def unsupported_parameters(start: StartServer) -> None:
    error = await (await start()).error(PATH, {"prompt": "hi", "suffix": "end"})
    assert error["param"] == "suffix" and "not supported yet" in error["message"]


async def logit_bias_entries(start: StartServer) -> None:
    client = await start()
    keys = [f"{i % 250:0{3 + i // 250}d}" for i in range(1024)]  # of one id in several spellings
    await client.complete(logit_bias=dict.fromkeys(keys, 1.0))
    error = await client.error(PATH, {"prompt": "hi", "logit_bias": dict.fromkeys([*keys, "250"], 1.0)})
    assert error["param"] == "body.logit_bias" and "at most 1024" in error["message"]
    ids = {"stop_token_ids": list(range(129)), "max_tokens": 9}
    await client.complete(**ids)
    error = await client.error(PATH, {"prompt": "hi", **ids, "min_tokens": 1})
    assert error["param"] == "stop_token_ids" and "at most 128" in error["message"]


async def repetition_penalties(start: StartServer) -> None:
    client = await start()
    for penalty in (1e-30, 1e30):
        await client.complete(repetition_penalty=penalty)
    for penalty in (1e-31, 1e31, 1e-300, 1e300):
        error = await client.error(PATH, {"prompt": "hi", "repetition_penalty": penalty})
        assert error["param"] == "body.repetition_penalty"
    # The largest logits of models are some hundreds.
    logits, blocks = jnp.float32([[-1e3, 1e3, 1.0, 0.0]]), jnp.int32([[0]])
    for penalty in (1e-30, 1e30):
        history = History(jnp.int32([[0, 1, 2, 3]]), blocks, jnp.int32([4]))
        none = jnp.zeros(1)
        found = penalize(logits, history, jnp.int32([4]), jnp.float32([penalty]), none, none)
        assert np.isfinite(found / MIN_TEMPERATURE).all()


async def bans_that_leave_nothing(start: StartServer) -> None:
    logits, rows, ids = jnp.float32([[0.0, 1.0, -jnp.inf]]), jnp.int32([0, 0]), jnp.int32([0, 1])
    banned = edit_logits(logits, rows, ids, jnp.full(2, NOT_ALLOWED))
    assert (unless_empty(banned, logits) == logits).all()
    one_left = edit_logits(logits, rows[:1], ids[:1], jnp.full(1, NOT_ALLOWED))
    assert (unless_empty(one_left, logits) == one_left).all()
    request = Request(
        "r", [1], SamplingParams(allowed_token_ids=[5]), max_tokens=4, seed=0, bad_words=((5,),), vocab_size=9
    )
    with pytest.raises(InvalidRequestError, match="bad_words forbids every id"):
        check_constraints(request)


async def padded_ids(start: StartServer) -> None:
    logits = jnp.float32([[0.0, 2.0, 1.0, 9.0]])
    _, rank, top, _ = gather_logprobs(logits, jnp.int32([2]), 2, num_drawable=3)
    assert (rank.tolist(), top.tolist()) == ([2], [[1, 2]])
    one, zero = jnp.ones(1), jnp.zeros(1)
    seeds = jnp.zeros((1, 2), jnp.uint32)
    drawn = sample(logits, zero, jnp.int32([0]), one, zero, seeds, jnp.int32([0]), vocab_size=3)
    assert drawn.tolist() == [1]


async def unauthorized_body(start: StartServer) -> None:
    client = await start(api_keys=("key",))
    assert (await client.error("/tokenize", {"prompt": "hi"}, 401))["type"] == "AuthenticationError"
    assert [(await client.get(p))[0] for p in ("/health", "/ping", "/version", "/metrics")] == [200, 200, 200, 401]


async def aborts_counted(start: StartServer) -> None:
    client = await start({"step_s": 0.01})
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0.1):
            await client.complete(max_tokens=200)
    await client.settled()
    assert 'finished_reason="abort",model_name="fake"} 1.0' in (await client.get("/metrics"))[1]


async def metric_prefix(start: StartServer) -> None:
    for aliases in (True, False):
        text = (await (await start(vllm_metric_aliases=aliases)).get("/metrics"))[1]
        assert "jaxpaged:num_requests_running" in text and ("vllm:num_requests_running" in text) == aliases


async def owned_by(start: StartServer) -> None:
    assert (await (await start()).get("/v1/models"))[1]["data"][0]["owned_by"] == "jaxpaged"


async def top_logprobs(start: StartServer) -> None:
    [choice] = (await (await start()).chat(logprobs=True, top_logprobs=2, max_tokens=1))["choices"]
    [entry] = choice["logprobs"]["content"]
    assert entry["token"] == "a" and [t["token"] for t in entry["top_logprobs"]] == ["`", "a"]


async def engine_error_status(start: StartServer) -> None:
    client = await start()
    client.engine.dies = True
    await client.error(PATH, {"prompt": "hi"}, 503)


async def chat(client: Client, text: str, **body: Any) -> dict[str, Any]:
    """The choice that a model makes which writes `text`."""
    client.engine.scripts["user\nhi\nassistant\n"] = [*client.engine.ids(text), EOS]
    tools = [{"type": "function", "function": {"name": "f"}}]
    return (await client.chat(tools=tools, **{"max_tokens": None, **body}))["choices"][0]


async def malformed_tool_calls(start: StartServer) -> None:
    client = await start(enable_auto_tool_choice=True, tool_call_parser="hermes")
    early = '<tool_call>{"name": "f", "arguments": {x}}</tool_call>'
    assert (await chat(client, early))["message"].items() >= {"content": early}.items()
    message = (await chat(client, '<tool_call>{"name": "f", "arguments": {"x": 1 2}}</tool_call>'))["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"x": 1 '
    assert message["content"] == "2}}</tool_call>"


async def text_around_tool_calls(start: StartServer) -> None:
    client = await start(enable_auto_tool_choice=True, tool_call_parser="hermes")
    call = '\n<tool_call>\n{"name": "f"}\n</tool_call>\n'
    choice = await chat(client, f"a{call}{call}b{call}")
    assert choice["message"]["content"] == "a\nb" and len(choice["message"]["tool_calls"]) == 3


async def cut_tool_calls(start: StartServer) -> None:
    client = await start(enable_auto_tool_choice=True, tool_call_parser="hermes")
    text = '<tool_call>{"name": "f", "arguments": {"x": "abc'
    choice = await chat(client, text + '"}}', max_tokens=len(text))
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"x": "abc'


async def json_answers(start: StartServer) -> None:
    client = await start(enable_auto_tool_choice=True, tool_call_parser="llama3_json")
    text = '{"name": "h", "parameters": {}}'
    assert (await chat(client, text))["message"]["content"] == text
    assert "tool_calls" in (await chat(client, text.replace("h", "f")))["message"]


async def answers_without_reasoning(start: StartServer) -> None:
    message = (await chat(await start(reasoning_parser="qwen3"), "yes", tool_choice="none"))["message"]
    assert (message["content"], message["reasoning"]) == ("yes", None)


async def text_offsets(start: StartServer) -> None:
    [choice] = (await (await start()).complete(prompt="é", echo=True, logprobs=0, max_tokens=1))["choices"]
    assert choice["logprobs"]["tokens"][0] == "<s>" and choice["logprobs"]["text_offset"] == [0, 0, 0, 1]


async def echo_alone(start: StartServer) -> None:
    client = await start()
    client.engine.scripts["hi"] = [EOS]
    [choice] = (await client.complete(echo=True, max_tokens=0))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")


async def stored_responses(start: StartServer) -> None:
    client = await start()
    for store, status in ((None, 200), (True, 200), (False, 404)):
        _, answer = await client.post("/v1/responses", {"input": "hi", "store": store})
        assert (await client.get(f"/v1/responses/{answer['id']}"))[0] == status


async def response_logprobs(start: StartServer) -> None:
    include = {"input": "hi", "include": ["message.output_text.logprobs"]}
    tools = {"tools": [{"type": "function", "name": "f"}]}
    client = await start(enable_auto_tool_choice=True, tool_call_parser="hermes")
    assert (await client.error("/v1/responses", include | tools))["param"] == "include"
    assert (await client.post("/v1/responses", include | tools | {"tool_choice": "none"}))[0] == 200
    client = await start(reasoning_parser="qwen3")
    assert (await client.error("/v1/responses", include))["param"] == "include"


async def response_fields(start: StartServer) -> None:
    client = await start()
    for field in ({"n": 2}, {"echo": True}, {"prompt_logprobs": 1}, {"return_token_ids": True}):
        [name] = field
        assert (await client.error("/v1/responses", {"input": "hi", **field}))["param"] == name


async def response_ids(start: StartServer) -> None:
    client = await start()
    body = {"input": "hi", "request_id": "mine"}
    ids = {(await client.post("/v1/responses", body, headers={"X-Request-Id": "x"}))[1]["id"] for _ in "ab"}
    assert len(ids) == 2 and all(len(i) == len("resp_") + 32 for i in ids)


async def reasoning_parts(start: StartServer) -> None:
    client = await start(reasoning_parser="qwen3")
    client.engine.scripts["user\nhi\nassistant\n"] = [*client.engine.ids("<think>a</think>b"), EOS]
    _, text = await client.post("/v1/responses", {"input": "hi", "stream": True})
    assert text.count("event: response.content_part.added\n") == 2 and "reasoning_part." not in text


async def beam_search(start: StartServer) -> None:
    client = await start()
    search = BeamSearch(BeamSettings(length_penalty=2.0), width=1)
    search.advance([[]], np.int32([[5, 9]]), np.float32([[-1, -9]]), stop_ids={9}, vocab_size=10, max_tokens=9)
    search.advance([[5]], np.int32([[9, 5]]), np.float32([[-7, -9]]), stop_ids={9}, vocab_size=10, max_tokens=9)
    assert [(h.token_ids, h.score) for h in search.hypotheses] == [([5, 9], -8 / 2**2)]
    for field in ({"stream": True}, {"logprobs": 1}, {"stop": "x"}, {"top_p": 0.5}, {"presence_penalty": 1}):
        [name] = field
        error = await client.error(PATH, {"prompt": "hi", "use_beam_search": True, **field})
        assert error["param"] == name and "not available with" in error["message"]


SCHEMA = {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}


async def unenforceable_schemas(start: StartServer) -> None:
    client = await start()
    for strict, status in ((None, 400), (True, 400), (False, 200)):
        body = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": strict}}
        assert (await client.post(PATH, {"prompt": "hi", "response_format": body}))[0] == status
    for strict, status in ((None, 200), (True, 400), (False, 200)):
        tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": strict}}
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "tool_choice": "required"}
        assert (await client.post("/v1/chat/completions", body))[0] == status


async def two_forms(start: StartServer) -> None:
    client = await start()
    structured = {"prompt": "hi", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
    assert "exclude each other" in (await client.error(PATH, structured))["message"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"structured_outputs": {"regex": "a"}, "tools": tools, "tool_choice": "required"}
    body["messages"] = [{"role": "user", "content": "hi"}]
    assert "exclude each other" in (await client.error("/v1/chat/completions", body))["message"]


async def complete_outputs(start: StartServer) -> None:
    answer = await (await start()).complete(structured_outputs={"choice": ["abc"]}, return_token_ids=True)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], len(choice["token_ids"])) == ("abc", "stop", 3)


async def demanded_calls(start: StartServer) -> None:
    call = '{"name": "f", "arguments": {}}'
    for parser, text, is_allowed in (
        ("hermes", f"<tool_call>\n{call}\n</tool_call>", True),
        ("hermes", call, False),
        (None, call.replace("arguments", "parameters"), True),
        (None, f"[{call}]", False),
    ):
        client = await start(tool_call_parser=parser)
        await chat(client, text, tool_choice="required")
        assert (client.engine.broken == []) == is_allowed


async def white_space_in_json(start: StartServer) -> None:
    for text, is_allowed in (
        ('{    "a" :\n\t 1\r\n}', True),
        ('{     "a": 1}', False),
        ('{\n\n"a": 1}', False),
        ("{\n" + " " * 32 + '"a": 1}', True),
        ("{\n" + " " * 33 + '"a": 1}', False),
    ):
        client = await start()
        client.engine.scripts["hi"] = [*client.engine.ids(text), EOS]
        await client.complete(structured_outputs={"json_object": True}, max_tokens=99)
        assert (client.engine.broken == []) == is_allowed, text


async def structural_tags(start: StartServer) -> None:
    client = await start()
    tag = {"type": "structural_tag", "structures": [{"begin": "ab", "schema": {}, "end": ""}], "triggers": ["a"]}
    await client.complete(response_format=tag)
    body = {"prompt": "hi", "response_format": {"type": "structural_tag", "format": {"type": "any_text"}}}
    assert "structures" in (await client.error(PATH, body))["message"]


CHECKS: dict[str, Callable[[StartServer], Awaitable[None]]] = {
    f.__name__: f
    for f in (
        greedy_choices,
        removed_parameters,
        unsupported_parameters,
        logit_bias_entries,
        repetition_penalties,
        bans_that_leave_nothing,
        padded_ids,
        unauthorized_body,
        aborts_counted,
        metric_prefix,
        owned_by,
        top_logprobs,
        engine_error_status,
        malformed_tool_calls,
        text_around_tool_calls,
        cut_tool_calls,
        json_answers,
        answers_without_reasoning,
        text_offsets,
        echo_alone,
        stored_responses,
        response_logprobs,
        response_fields,
        response_ids,
        reasoning_parts,
        beam_search,
        unenforceable_schemas,
        two_forms,
        complete_outputs,
        demanded_calls,
        white_space_in_json,
        structural_tags,
    )
}


def test_every_difference_has_a_check() -> None:
    assert list(CHECKS) == LISTED


@pytest.mark.parametrize("difference", LISTED)
async def test_difference(start_server: StartServer, difference: str) -> None:
    await CHECKS[difference](start_server)
