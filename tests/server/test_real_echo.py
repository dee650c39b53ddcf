"""Log-probabilities of prompts over HTTP, against the model run densely in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from server.live_server import Client, running_server
from server.test_real_server import CONFIG, engine  # noqa: F401
from support import NUM_TOKENS

from jaxpaged.engine.engine import Engine
from jaxpaged.server.config import ServerConfig

PATH = "/v1/completions"


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[Client]:  # noqa: F811
    async with running_server(engine, ServerConfig(response_store_bytes=10_000)) as client:
        yield client


def reference(model: nnx.Module, tokens: list[int]) -> np.ndarray:
    """[L - 1, V] float64: log-probabilities after each token but the last."""
    logits = np.asarray(model(jnp.array([tokens]))[0], np.float64)[:-1]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def check(choice: dict[str, Any], prompt: list[int], model: nnx.Module, max_tokens: int) -> None:
    tokens = [*prompt, *choice["token_ids"]]
    assert len(choice["token_ids"]) == max_tokens
    expected = reference(model, tokens)
    got = choice["logprobs"]
    assert got["token_logprobs"][0] is None and got["top_logprobs"][0] is None
    own = expected[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(got["token_logprobs"][1:], own, atol=1e-4)
    assert got["tokens"] == [f"token_id:{t}" for t in tokens]
    for row, token, top in zip(expected, tokens[1:], got["top_logprobs"][1:], strict=True):
        best = int(row[:NUM_TOKENS].argmax())  # padded ids are not named
        assert top == pytest.approx({f"token_id:{token}": row[token], f"token_id:{best}": row[best]}, abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
async def test_loglikelihoods(client: Client, tiny_tokenizer: Any, tiny_model: nnx.Module, max_tokens: int) -> None:
    texts = ["The cat sat on the mat and then, héllo", "one", "x" * (CONFIG.block_size * 4), "The cat sat on the dog"]
    prompts = [tiny_tokenizer.encode(text) for text in texts]
    body = {
        "prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0,
        "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    for _ in range(2):  # prefix cache cold and warm
        answer = await client.complete(**body)
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            check(choice, prompt, tiny_model, max_tokens)
    events = await client.events(PATH, **body, stream_options={"include_usage": True})
    assert events[-1]["usage"] == answer["usage"]
    for choice in answer["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in parts) == choice["text"]
        streamed = [x for c in parts for x in c["logprobs"]["token_logprobs"]]
        assert streamed[0] is None
        np.testing.assert_allclose(streamed[1:], choice["logprobs"]["token_logprobs"][1:], atol=1e-4)


@pytest.mark.parametrize("echo", [False, True])
async def test_equal_prompts_in_one_step(
    client: Client, tiny_tokenizer: Any, tiny_model: nnx.Module, echo: bool
) -> None:
    """Prompts that end with a block: none may find a block that another one is about to compute."""
    prompt = tiny_tokenizer.encode("abcd" * 3)
    assert len(prompt) % CONFIG.block_size == 0
    body = {
        "prompt": [prompt] * 8, "echo": echo, "logprobs": 1, "max_tokens": 4, "temperature": 0,
        "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    await client.async_engine.reset_prefix_cache()
    answers = await asyncio.gather(
        client.complete(**body), *(client.complete(**body | {"prompt": prompt}) for _ in "ab")
    )
    choices = [c for answer in answers for c in answer["choices"]]
    assert len(choices) == 10
    for choice in choices:
        tokens = [*prompt, *choice["token_ids"]]
        expected = reference(tiny_model, tokens)
        own = expected[np.arange(len(tokens) - 1), tokens[1:]]
        assert choice["token_ids"] == expected[len(prompt) - 1 :].argmax(-1).tolist()
        got = choice["logprobs"]["token_logprobs"]
        np.testing.assert_allclose(got[1:] if echo else got, own if echo else own[len(prompt) - 1 :], atol=1e-4)


async def test_a_response_is_the_chat(client: Client) -> None:
    """/v1/responses on the real engine says what a chat says."""
    body = {"temperature": 0, "seed": 3}
    chat = await client.chat(**body, max_tokens=12)
    _, answer = await client.post("/v1/responses", {"input": "hi", "max_output_tokens": 12, **body})
    text = "".join(part["text"] for item in answer["output"] for part in item["content"])
    assert text == chat["choices"][0]["message"]["content"]
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
