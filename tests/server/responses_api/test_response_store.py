"""Stored responses come back as they were, and take no more memory than they may."""

from __future__ import annotations

import tracemalloc

from jaxpaged.server.responses import ChatLogprob
from jaxpaged.server.responses_api.objects import (
    CallItem,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseObject,
)
from jaxpaged.server.responses_api.protocol import ResponsesRequest
from jaxpaged.server.responses_api.store import ResponseStore, StoredResponse


def response(response_id: str, num_tokens: int = 1) -> ResponseObject:
    """One with reasoning, a text with log-probabilities, and a call that was cut off."""
    logprobs = [ChatLogprob(token="é", logprob=-1.5, bytes=[0xC3, 0xA9], top_logprobs=[]) for _ in range(num_tokens)]
    return ResponseObject(
        id=response_id,
        created_at=7,
        status="incomplete",
        background=False,
        instructions=None,
        max_output_tokens=5,
        max_tool_calls=None,
        metadata={"k": "v"},
        model="m",
        output=[
            ReasoningItem(id="rs", content=[ReasoningText(text="r")]),
            MessageItem(id="msg", status="completed", content=[OutputText(text="a 🦊", logprobs=logprobs)]),
            CallItem(id="fc", call_id="c", name="f", arguments='{"x', status="incomplete"),
        ],
        parallel_tool_calls=True,
        previous_response_id=None,
        reasoning=None,
        store=True,
        temperature=1.0,
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        tool_choice={"type": "function", "name": "f"},
        tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}, "more": 1}],
        top_logprobs=0,
        top_p=0.5,
        truncation="auto",
        user="u",
    )


def test_what_was_stored_comes_back() -> None:
    body = [
        {"role": "user", "content": [{"type": "input_text", "text": "🦊", "more": {"y": [1]}}, "b"]},
        {"type": "reasoning", "content": [{"text": "why"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": "é"}'},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
    ]
    items = ResponsesRequest.model_validate({"input": body}).input
    store = ResponseStore(100_000)
    store.put(StoredResponse(response("resp_1"), items))
    found = store.get("resp_1")
    assert found is not None and found.response == response("resp_1")
    assert list(found.items) == items
    assert [item.model_dump(exclude_unset=True) for item in found.items] == body
    assert store.get("resp_2") is None


def test_no_more_memory_than_allowed() -> None:
    limit = 200_000
    store = ResponseStore(limit)
    tracemalloc.start()
    try:
        for i in range(300):
            store.put(StoredResponse(response(f"resp_{i}", num_tokens=i % 40), []))
        assert tracemalloc.get_traced_memory()[0] < limit
    finally:
        tracemalloc.stop()
    assert store.get("resp_299") is not None and store.get("resp_0") is None
