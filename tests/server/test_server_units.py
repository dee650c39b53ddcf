"""Parts of the server that need no server."""

from __future__ import annotations

import math
import threading

import pytest
from server.fake_engine import FakeEngine

from jaxpaged.engine.async_engine import AsyncEngine
from jaxpaged.errors import ConfigError
from jaxpaged.outputs import Logprob
from jaxpaged.request import OutputKind
from jaxpaged.server.chat_protocol import ChatCompletionRequest
from jaxpaged.server.chat_template import render_body
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.logprobs import chat_logprobs, completion_logprobs
from jaxpaged.server.params import chat_params, completion_params
from jaxpaged.server.protocol import CompletionRequest
from jaxpaged.weights.generation import GenerationConfig

STEP = {5: Logprob(-math.inf, 9, "é"), 1: Logprob(-0.1, 1, "x"), 2: Logprob(-0.2, 2, "x"), 3: Logprob(-0.3, 3, "y")}


def test_minus_infinity_is_minus_9999() -> None:
    logprobs = completion_logprobs([STEP], [0])
    assert logprobs is not None and logprobs.token_logprobs == [-9999.0]
    chat = chat_logprobs([STEP], 1)
    assert chat is not None and chat.content[0].logprob == -9999.0


def test_tokens_of_one_text_collapse_to_the_more_probable() -> None:
    logprobs = completion_logprobs([None, STEP], [7, 8], first="f")
    assert logprobs is not None
    assert logprobs.top_logprobs == [None, {"é": -9999.0, "x": -0.1, "y": -0.3}]
    assert logprobs.token_logprobs == [None, -9999.0] and logprobs.tokens == ["f", "é"]
    assert logprobs.text_offset == [7, 8]


def test_chat_logprobs_have_utf8_bytes_and_the_most_probable_tokens() -> None:
    logprobs = chat_logprobs([STEP], 3)
    assert logprobs is not None
    [entry] = logprobs.content
    assert entry.token == "é" and entry.bytes == [0xC3, 0xA9]
    assert [(t.token, t.logprob) for t in entry.top_logprobs] == [("x", -0.1), ("x", -0.2), ("y", -0.3)]


def test_all_log_probabilities() -> None:
    logprobs = chat_logprobs([STEP], -1)
    assert logprobs is not None
    assert [t.logprob for t in logprobs.content[0].top_logprobs] == [-0.1, -0.2, -0.3, -9999.0]


def test_names_by_token_id() -> None:
    logprobs = chat_logprobs([STEP], 1, as_token_ids=True)
    assert logprobs is not None
    assert logprobs.content[0].token == "token_id:5" and logprobs.content[0].top_logprobs[0].token == "token_id:1"


def test_no_logprobs() -> None:
    assert chat_logprobs(None, 0) is None and completion_logprobs(None, []) is None


@pytest.mark.parametrize(
    ("asked", "model", "expected"), [(None, None, 1.0), (None, 0.7, 0.7), (0.0, 0.7, 0.0), (0.2, None, 0.2)]
)
def test_temperature_defaults(asked: float | None, model: float | None, expected: float) -> None:
    defaults = GenerationConfig(temperature=model)
    body = CompletionRequest(prompt="x", temperature=asked)
    assert completion_params(body, defaults).temperature == expected


def test_model_defaults_of_top_p_and_top_k() -> None:
    defaults = GenerationConfig(top_p=0.8, top_k=20)
    chat = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], top_k=0)
    params = chat_params(chat, defaults)
    assert (params.top_p, params.top_k) == (0.8, 0)
    assert completion_params(CompletionRequest(prompt="x"), defaults).top_k == 20


def test_output_kind_follows_stream() -> None:
    for stream, kind in ((True, OutputKind.DELTA), (False, OutputKind.FINAL_ONLY), (None, OutputKind.FINAL_ONLY)):
        body = CompletionRequest(prompt="x", stream=stream)
        assert completion_params(body, GenerationConfig()).output_kind is kind


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": 70_000}, "port is 70000"),
        ({"max_request_bytes": 10}, "at least 1024"),
        ({"max_concurrent_requests": 0}, "at least 1"),
        ({"shutdown_timeout_s": -1}, "at least 0"),
        ({"shutdown_timeout_s": math.nan}, "at least 0"),
        ({"log_interval_s": 0}, "above 0"),
        ({"stream_interval": 0}, "at least 1"),
        ({"response_store_bytes": -1}, "at least 0"),
        ({"api_keys": ("a", "")}, "empty"),
    ],
)
def test_bad_options(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**options)


async def test_an_engine_without_tokenizer_takes_token_ids() -> None:
    engine = FakeEngine()
    engine.tokenizer = None
    with pytest.raises(ValueError, match="needs a tokenizer"):
        await AsyncEngine(engine).tokenize(["hi"])


async def test_a_tokenizer_that_is_still_to_be_loaded_does_not_stop_the_loop() -> None:
    threads = []

    class Slow:
        chat_template = "of its own"
        is_loaded = False

        def apply_chat_template(self, messages: object, **_: object) -> str:
            threads.append(threading.get_ident())
            self.is_loaded = True
            return "hi"

    tokenizer, body = Slow(), ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}])
    for _ in range(2):
        assert await render_body(body, tokenizer, template=None, trust_request=False) == "hi"
    assert [thread == threading.get_ident() for thread in threads] == [False, True]
