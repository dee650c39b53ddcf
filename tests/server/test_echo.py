"""Answers that begin with the prompt, and that show it in other ways; streams with fewer chunks."""

from __future__ import annotations

from typing import Any

import pytest
from server.fake_engine import BOS, EOS
from server.live_server import Client, StartServer

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"


def joined(events: list[Any]) -> dict[int, dict[str, Any]]:
    """Choices of a streamed completion, as they would be when not streamed."""
    choices: dict[int, dict[str, Any]] = {}
    for part in (c for event in events for c in event["choices"]):
        choice = choices.setdefault(part["index"], {"text": "", "logprobs": None})
        choice["text"] += part["text"]
        for name, values in (part["logprobs"] or {}).items():
            choice["logprobs"] = choice["logprobs"] or {}
            choice["logprobs"].setdefault(name, []).extend(values)
        choice["finish_reason"] = part["finish_reason"]
        assert ("prompt_text" in part) == (choice["text"] == part["text"] and "prompt_text" not in choice)
        choice.setdefault("prompt_text", part.get("prompt_text"))
    return choices


async def test_echo_beside_asked_tokens(client: Client) -> None:
    """Log-probabilities that are reported for tokens by their ids only are those of outputs; the prompt has its own."""
    body = {"prompt": "hi", "echo": True, "logprob_token_ids": [5], "max_tokens": 1, "return_prompt_text": True}
    [choice] = (await client.complete(**body))["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["<s>", "h", "i", "a"] and logprobs["token_logprobs"] == [None, -1.0, -1.0, -1.0]
    asked = client.engine.tokenizer.decode([5])
    assert [list(top) for top in logprobs["top_logprobs"][1:]] == [["h"], ["i"], ["a", asked]]
    assert joined(await client.events(PATH, **body))[0]["logprobs"] == logprobs


@pytest.mark.parametrize(("max_tokens", "logprobs"), [(0, None), (0, 0), (0, 2), (1, 2), (3, None), (3, 0)])
@pytest.mark.parametrize("prompt", ["hé", ["hé", "x"], [71, 128, 105], [[71], [BOS, 72, 0]]])
async def test_echo(client: Client, prompt: Any, logprobs: int | None, max_tokens: int) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": logprobs, "max_tokens": max_tokens, "temperature": 0, "n": 2}
    answer = await client.complete(**body, return_token_ids=True, return_prompt_text=True)
    prompts = [r.prompt_token_ids for r in client.engine.all_requests]
    texts = {"hé": "hé", "x": "x"}
    engine = client.engine
    for choice in answer["choices"]:
        ids = prompts[choice["index"] // 2]
        given = (
            prompt if isinstance(prompt, str) else prompt[choice["index"] // 2] if prompt != [71, 128, 105] else None
        )
        text = texts.get(given) if isinstance(given, str) else None
        text = text or engine.tokenizer.decode(ids, skip_special_tokens=True)
        assert choice["prompt_text"] == text and choice["prompt_token_ids"] == ids
        assert choice["text"] == text + "abc"[:max_tokens] and choice["finish_reason"] == "length"
        assert len(choice["token_ids"]) == max_tokens and choice["prompt_logprobs"] is None
        if logprobs is None:
            assert choice["logprobs"] is None
            continue
        shown = [*ids, *choice["token_ids"]]
        got = choice["logprobs"]
        assert {len(v) for v in got.values()} == {len(shown)}
        assert got["tokens"] == [engine.tokenizer.decode([t]) for t in shown]
        # -inf, which the fake engine gives to token 0, is not JSON.
        assert got["token_logprobs"] == [None, *(-9999.0 if t == 0 else -1.0 for t in ids[1:]), *[-1.0] * max_tokens]
        assert got["top_logprobs"][0] is None
        for token, top in zip(got["tokens"][1:], got["top_logprobs"][1:], strict=True):
            assert token in top and len(top) <= 1 + logprobs
    # The token that is drawn for max_tokens 0 counts, streamed or not.
    events = await client.events(PATH, **body, return_prompt_text=True, stream_options={"include_usage": True})
    assert events[-1]["usage"] == answer["usage"]
    assert answer["usage"]["completion_tokens"] == max(max_tokens, 1) * len(answer["choices"])
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    for index, choice in joined(events[:-1]).items():
        assert choice == {name: answer["choices"][index][name] for name in choice}


async def test_offsets_agree_with_the_text(client: Client) -> None:
    client.engine.scripts["é🦊"] = [*client.engine.ids("ü!"), EOS]
    for echo in (True, False):
        [choice] = (await client.complete(prompt="é🦊", echo=echo, logprobs=0, max_tokens=9, temperature=0))["choices"]
        offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
        # BOS and EOS have no text; a character of several tokens begins where its first one does.
        if echo:
            assert choice["text"] == "é🦊ü!" and offsets == [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 4]
        else:
            assert choice["text"] == "ü!" and offsets == [0, 0, 1, 2]
        assert tokens[-1] == "</s>" and choice["text"][offsets[-2]] == tokens[-2] == "!"


async def test_what_is_echoed_of_a_truncated_prompt(client: Client) -> None:
    body = {"prompt": "hello", "echo": True, "max_tokens": 0, "return_prompt_text": True, "logprobs": 0}
    [choice] = (await client.complete(**body, truncate_prompt_tokens=2))["choices"]
    assert choice["text"] == choice["prompt_text"] == "lo" and choice["logprobs"]["tokens"] == ["l", "o"]
    [choice] = (await client.complete(**body, truncate_prompt_tokens=3, truncation_side="right"))["choices"]
    assert choice["text"] == "he" and choice["logprobs"]["tokens"] == ["<s>", "h", "e"]


async def test_max_tokens_0_is_for_echo(client: Client) -> None:
    for body in ({}, {"echo": False}):
        error = await client.error(PATH, {"prompt": "hi", "max_tokens": 0, **body})
        assert error["param"] == "max_tokens"


async def test_prompt_logprobs_beside_an_echo(client: Client) -> None:
    body = {"prompt": [71, 72], "echo": True, "max_tokens": 0, "logprobs": 1, "prompt_logprobs": 2}
    [choice] = (await client.complete(**body))["choices"]
    assert choice["prompt_logprobs"][0] is None and choice["prompt_logprobs"][1].keys() == {"72", "71"}


async def test_chat_echo_and_prompt_text(client: Client) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    options = {"messages": turns, "add_generation_prompt": False, "continue_final_message": True, "max_tokens": 3}
    for echo, text in ((True, "Well, abc"), (False, "abc")):
        answer = await client.chat(**options, echo=echo, return_prompt_text=True, temperature=0)
        assert answer["choices"][0]["message"]["content"] == text
        prompt = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell, "
        assert answer["prompt_text"] == prompt
        assert client.engine.tokenizer.decode(client.engine.all_requests[-1].prompt_token_ids) == prompt
        events = await client.events(CHAT, **options, echo=echo, return_prompt_text=True, temperature=0)
        assert "".join(c["delta"].get("content", "") for e in events for c in e["choices"]) == text
        assert events[0]["prompt_text"] == prompt and "prompt_text" not in events[1]
    # A user's message is not echoed.
    assert (await client.chat(echo=True, max_tokens=3, temperature=0))["choices"][0]["message"]["content"] == "abc"
    assert (await client.chat(max_tokens=3))["prompt_text"] is None
    assert (await client.chat(return_prompt_text=True, truncate_prompt_tokens=4))["prompt_text"] == "ant\n"


async def test_documents_reach_the_template(start_server: StartServer) -> None:
    client = await start_server(chat_template="{% for d in documents %}[{{ d.title }}]{% endfor %}")
    await client.chat(documents=[{"title": "A", "text": "x"}, {"title": "B"}])
    assert client.engine.tokenizer.decode(client.engine.all_requests[-1].prompt_token_ids) == "[A][B]"


@pytest.mark.parametrize(("server", "request_"), [(1, 4), (4, None), (2, 4)])
async def test_stream_interval(start_server: StartServer, server: int, request_: int | None) -> None:
    client = await start_server(stream_interval=server)
    body = {"prompt": ["hi", "yo"], "max_tokens": 10, "n": 2, "temperature": 0, "logprobs": 0, "return_token_ids": True}
    whole = await client.complete(**body)
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await client.events(PATH, **body, stream_interval=request_, stream_options=options)
    for choice in whole["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert [len(c["token_ids"]) for c in parts] == [1, 4, 4, 1]
        assert "".join(c["text"] for c in parts) == choice["text"]
        assert [o for c in parts for o in c["logprobs"]["text_offset"]] == choice["logprobs"]["text_offset"]
        assert parts[-1]["finish_reason"] == "length"
    assert events[-1]["usage"] == whole["usage"]
    assert [len(e["choices"][0]["delta"]["content"]) for e in await client.events(
        CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=10, stream_interval=request_
    )] == [0, 1, 4, 4, 1]  # fmt: skip
    assert (await client.error(PATH, {"prompt": "hi", "stream_interval": 0}))["param"] == "body.stream_interval"
