"""Random bodies: always an answer or a clear refusal, never an internal error or a leak."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from server.live_server import Client

from jaxpaged.server.chat_protocol import ChatCompletionRequest, TokenizeChatRequest
from jaxpaged.server.embeddings_protocol import EmbeddingsChatRequest, EmbeddingsRequest
from jaxpaged.server.protocol import CompletionRequest, DetokenizeRequest, TokenizeTextRequest
from jaxpaged.server.responses_api.protocol import ResponsesRequest

MODELS = {
    "/v1/completions": (CompletionRequest,),
    "/v1/chat/completions": (ChatCompletionRequest,),
    "/v1/responses": (ResponsesRequest,),
    "/v1/embeddings": (EmbeddingsRequest, EmbeddingsChatRequest),
    "/tokenize": (TokenizeTextRequest, TokenizeChatRequest),
    "/detokenize": (DetokenizeRequest,),
}
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, -1, 5, 16, 255, 256, 257, 2**31, 2**63, -(2**63), 10**30, 0.0, 0.5, 1.0, -0.5, 1e308,
    "", "a", "auto", "none", "text", "left", "\0", "é🦊", "<s>", "x" * 300, [], [1], [1, 2], [260], [-1], ["a"], [""],
    ["a", "b"], [[]], [[1]], [[1], ["a"]], [None], {}, {"type": "text"}, {"include_usage": True}, {"tokenize": True},
    {"role": "user", "content": "x"}, [{"role": "user", "content": "x"}], [{"role": "bad", "content": []}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": ["x", 1]}], [{}],
    [{"role": "user", "content": None}, {"role": "assistant", "content": "y", "tool_calls": [1]}],
    [{"type": "function", "function": {"name": "f"}}], {"type": "function", "function": {"name": "f"}},
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
]  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("path", MODELS)
async def test_random_bodies(client: Client, path: str, seed: int) -> None:
    rng = random.Random(seed)
    names = [name for model in MODELS[path] for name in model.model_fields]
    good = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "tokens": [1], "input": "hi"}
    if path == "/v1/responses":
        del good["prompt"]  # something else there
    statuses = set()
    for _ in range(100):
        body = {name: rng.choice(VALUES) for name in rng.sample(names, rng.randint(0, min(3, len(names))))}
        # Mostly valid where it is required, so that the other fields are reached.
        body |= {name: value for name, value in good.items() if name in names and rng.random() < 0.9}
        if path in ("/tokenize", "/v1/embeddings"):  # of a text, or of a chat
            body.pop(rng.choice(["prompt" if path == "/tokenize" else "input", "messages"]), None)
        status, answer = await client.post(path, body)
        statuses.add(status)
        assert status in (200, 400, 404), (body, answer)
        if status != 200:
            assert answer["error"]["message"] and answer["error"]["code"] == status
        elif body.get("stream"):
            if path == "/v1/responses":
                assert "\nevent: response.completed\n" in answer or "\nevent: response.incomplete\n" in answer
            else:
                assert answer.endswith("data: [DONE]\n\n") and '"error"' not in answer
        else:
            json.dumps(answer, allow_nan=False)
    assert {200, 400} <= statuses
    await client.settled()
