"""Chunks that are put together from parts made once, against the same chunks made whole."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.fake_engine import EOS
from server.live_server import Client, StartServer

from jaxpaged.server.generation import ChunkMaker
from jaxpaged.server.responses import CompletionChunk, CompletionChunkChoice
from jaxpaged.server.sse import TextFrame

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = 'He said: "\\no"\n\tnaïve 🦊 \u2028\x00\x1f\x7f</a> {"text":null} 日本'
THOUGHT = f"<think>\n{TEXT}\n</think>\n\n{TEXT}"
CALL = 'ok <tool_call>\n{"name": "f", "arguments": {"a": "\\"b\\""}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]
SHOWN = {
    "plain": {},
    "choices": {"n": 3, "temperature": 1},
    "logprobs": {"logprobs": 1},
    "token ids": {"return_token_ids": True},
    "usage": {"stream_options": {"include_usage": True}},
    "usage of each": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "echo": {"echo": True},
    "interval": {"stream_interval": 3},
    "stop string": {"stop": ["fox", "日本"]},
    "cut off": {"max_tokens": 7},
    "special tokens": {"skip_special_tokens": False},
}


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(max_size=5))
def test_a_frame_gives_the_bytes_of_the_whole_chunk(text: str, model: str) -> None:
    def make(text: str) -> CompletionChunk:
        choice = CompletionChunkChoice(index=1, text=text, logprobs=None, finish_reason=None)
        return CompletionChunk(id="cmpl-1", object="text_completion", created=1, model=model, choices=[choice])

    try:
        whole = make(text).model_dump_json(exclude_unset=True)
    except ValueError:  # a lone surrogate in the name
        return
    assert TextFrame(make).fill(text) == whole


async def both_ways(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str, **body: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Chunks of the same request as they are sent, and with each made whole; without what time and chance give."""
    answers = []
    for is_whole in (False, True):
        if is_whole:
            monkeypatch.setattr(ChunkMaker, "_tells_text_only", lambda *_: False)
        chunks = await client.events(path, request_id="r", **body)
        for chunk in chunks:
            assert isinstance(chunk.pop("created"), int)
            for choice in chunk["choices"]:
                for call in choice.get("delta", {}).get("tool_calls", []):
                    call.pop("id", None)
        answers.append(chunks)
    return answers[0], answers[1]


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_streams_equal_those_of_whole_chunks(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str, name: str
) -> None:
    tokens = [*client.engine.ids(TEXT), EOS]
    client.engine.scripts = {"hi": tokens, "user\nhi\nassistant\n": tokens}
    body = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": ["hi", "ho"]}
    shown = dict(SHOWN[name])
    if path == CHAT and name == "logprobs":
        shown = {"logprobs": True, "top_logprobs": 2}
    if name == "interval" and path == CHAT:
        shown["n"] = 2
    sent, whole = await both_ways(client, monkeypatch, path, **{"max_tokens": 100, **body, **shown})
    assert sent == whole
    assert len(sent) > 5


@pytest.mark.parametrize("text", [TEXT, THOUGHT, CALL], ids=["text", "thought", "call"])
async def test_chats_with_parsers_equal_those_of_whole_chunks(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    client = await start_server(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")
    client.engine.scripts["user\nhi\nassistant\n"] = [*client.engine.ids(text), EOS]
    messages = [{"role": "user", "content": "hi"}]
    sent, whole = await both_ways(client, monkeypatch, CHAT, messages=messages, tools=TOOLS, max_tokens=150)
    assert sent == whole
    fields = set(itertools.chain(*(choice["delta"] for chunk in sent for choice in chunk["choices"])))
    assert fields >= {"role", "content"} | ({"reasoning"} if text is THOUGHT else set())
    assert ("tool_calls" in fields) == (text is CALL)


async def test_most_chunks_of_a_stream_are_put_together(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[str] = []
    fill = TextFrame.fill
    monkeypatch.setattr(TextFrame, "fill", lambda frame, text: filled.append(text) or fill(frame, text))
    for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": [{"role": "user", "content": "hi"}]})):
        filled.clear()
        chunks = await client.events(path, max_tokens=26, temperature=0, **body)
        assert "".join(filled) == "abcdefghijklmnopqrstuvwxyz"[path == COMPLETIONS : -1]
        assert json.dumps(chunks).count('"finish_reason": null') >= len(filled)
