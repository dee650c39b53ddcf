"""The real engine behind the real server, on a tiny random model: what comes out is what the model says alone."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import jax.numpy as jnp
import numpy as np
import openai
import pytest
from beam_reference import beam_search
from flax import nnx
from server.live_server import Client, running_server
from server.test_serve import LOCAL, serving
from support import EOS, Alone, dense_logprobs

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.models.attention import DenseAttention
from jaxpaged.server.config import ServerConfig
from jaxpaged.weights import GenerationConfig

MAX_QUEUED = 220
CONFIG = EngineConfig(
    block_size=4,
    num_blocks=60,
    max_num_seqs=6,
    max_num_batched_tokens=16,
    max_logprobs=5,
    max_num_queued_requests=MAX_QUEUED,
    compilation_cache="",
    warmup=False,
    debug_checks=True,
)
PATH = "/v1/completions"
PROMPT = "The cat sat on the mat"
SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01}


@pytest.fixture(scope="module")
def engine(tiny_model: nnx.Module, tiny_tokenizer: Any) -> Engine:
    generation = GenerationConfig(eos_token_ids=(EOS,))
    return Engine(tiny_model, tiny_tokenizer, CONFIG, model_name="tiny", generation=generation)


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[Client]:
    async with running_server(engine, ServerConfig()) as client:
        yield client
        await all_is_free(client)


@pytest.fixture
async def ai(client: Client) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=client.url + "/v1", api_key="x", max_retries=0) as ai:
        yield ai


class Expected:
    """Tokens and text of a request that has the model to itself."""

    def __init__(self, alone: Alone, tokenizer: Any, prompt: str, max_tokens: int, **sampling: Any) -> None:
        tokens = alone(tokenizer.encode(prompt), max_tokens, stop=frozenset({EOS}), **sampling)
        self.token_ids = tokens
        self.finish_reason = "stop" if tokens[-1] == EOS else "length"
        shown = tokens[:-1] if self.finish_reason == "stop" else tokens
        self.text = tokenizer.decode(shown, skip_special_tokens=True)

    def check(self, choice: dict[str, Any]) -> None:
        assert choice["token_ids"] == self.token_ids
        assert choice["text"] == self.text
        assert choice["finish_reason"] == self.finish_reason


async def all_is_free(client: Client) -> None:
    """Waits until nothing is open, then finds every block free and nothing running, by every account."""
    async with asyncio.timeout(20):
        while client.async_engine.num_open_requests:
            await asyncio.sleep(0.01)
        while (await client.get("/load"))[1] != {"server_load": 0}:
            await asyncio.sleep(0.01)
    stats = client.async_engine.stats().scheduler
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0)
    assert stats.num_free_blocks == stats.num_total_blocks == CONFIG.num_blocks - 1
    _, metrics = await client.get("/metrics")
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("jaxpaged:"))
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        [value] = [v for k, v in values.items() if k.startswith(f"jaxpaged:{name}{{")]
        assert float(value) == 0, name


def joined(events: list[Any], index: int = 0) -> dict[str, Any]:
    """One choice of a streamed completion, as it would be when not streamed."""
    parts = [c for event in events for c in event["choices"] if c["index"] == index]
    return {
        "text": "".join(p["text"] for p in parts),
        "token_ids": [t for p in parts for t in p["token_ids"]],
        "finish_reason": parts[-1]["finish_reason"],
    }


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {**SAMPLED, "seed": 7}, {**SAMPLED, "seed": -(2**63)}])
async def test_answers_are_the_models_own(
    client: Client, alone: Alone, tiny_tokenizer: Any, sampling: dict[str, Any]
) -> None:
    expected = Expected(alone, tiny_tokenizer, PROMPT, 40, **sampling)
    body = {"prompt": PROMPT, "max_tokens": 40, "return_token_ids": True, **sampling}
    for _ in range(2):  # prefix cache cold and warm
        expected.check((await client.complete(**body))["choices"][0])
        expected.check(joined(await client.events(PATH, **body)))


async def test_many_prompts_and_choices(client: Client, alone: Alone, tiny_tokenizer: Any) -> None:
    prompts = ["one", "two and a half", "three " * 8]
    body = {"prompt": prompts, "max_tokens": 12, "n": 3, "seed": 40, "return_token_ids": True, **SAMPLED}
    answer = await client.complete(**body)
    events = await client.events(PATH, **body)
    assert len(answer["choices"]) == 9
    for i, choice in enumerate(answer["choices"]):
        prompt, k = prompts[i // 3], i % 3
        expected = Expected(alone, tiny_tokenizer, prompt, 12, seed=40 + k, **SAMPLED)
        expected.check(choice)
        expected.check(joined(events, i))


async def test_beam_search(client: Client, tiny_model: nnx.Module, tiny_tokenizer: Any) -> None:
    prompt, next_logprobs = tiny_tokenizer.encode(PROMPT), dense_logprobs(tiny_model)
    found = beam_search(
        lambda output: next_logprobs(prompt + output),
        width=3,
        max_tokens=12,
        stop_ids=(),
        length_penalty=0.5,
        early_stopping=False,
    )
    body = {"prompt": PROMPT, "use_beam_search": True, "max_tokens": 12, "ignore_eos": True, "length_penalty": 0.5}
    answers = [client.complete(**body, n=3, return_token_ids=True), client.complete(prompt=PROMPT, max_tokens=12)]
    answer, _ = await asyncio.gather(*answers)
    for choice, expected in zip(answer["choices"], found, strict=True):
        assert choice["token_ids"] == expected.token_ids and choice["finish_reason"] == "length"
        assert choice["text"] == tiny_tokenizer.decode(expected.token_ids, skip_special_tokens=True)
    error = await client.error(PATH, {**body, "n": 6})
    assert error["param"] == "n" and "max_logprobs" in error["message"]


async def test_openai_chat(ai: openai.AsyncOpenAI, alone: Alone, tiny_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hé 👋"}]
    prompt_ids = tiny_tokenizer.encode("<user>hé 👋<bot>", add_special_tokens=False)
    for n, seed, sampling in ((1, 0, {"temperature": 0.0}), (3, 2**63 - 2, {"temperature": 0.7})):
        options: dict[str, Any] = {
            "model": "tiny",
            "messages": messages,
            "max_completion_tokens": 16,
            "n": n,
            "seed": seed,
            "extra_body": {"return_token_ids": True},
            **sampling,
        }
        answer = await ai.chat.completions.create(**options)
        content = dict.fromkeys(range(n), "")
        async for chunk in await ai.chat.completions.create(**options, stream=True):
            for choice in chunk.choices:
                content[choice.index] += choice.delta.content or ""
        assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt_ids)
        for k, choice in enumerate(answer.choices):
            tokens = alone(prompt_ids, 16, seed=seed + k, stop=frozenset({EOS}), **sampling)
            assert choice.model_extra is not None and choice.model_extra["token_ids"] == tokens
            text = tiny_tokenizer.decode([t for t in tokens if t != EOS], skip_special_tokens=True)
            assert choice.message.content == content[k] == text


async def test_logprobs(client: Client, alone: Alone, tiny_tokenizer: Any, tiny_model: nnx.Module) -> None:
    expected = Expected(alone, tiny_tokenizer, PROMPT, 10, temperature=0.0)
    body = {"prompt": PROMPT, "max_tokens": 10, "temperature": 0, "return_token_ids": True, "logprobs": 5}
    choice = (await client.complete(**body, return_tokens_as_token_ids=True))["choices"][0]
    expected.check(choice)
    tokens = [*tiny_tokenizer.encode(PROMPT), *expected.token_ids]
    logits = np.asarray(tiny_model(jnp.array([tokens]))[0], np.float64)
    reference = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for i, token in enumerate(expected.token_ids):
        row = reference[len(PROMPT) - 1 + i]
        best = np.argsort(-row)[:5]
        assert choice["logprobs"]["tokens"][i] == f"token_id:{token}"
        top = choice["logprobs"]["top_logprobs"][i]
        assert top == pytest.approx({f"token_id:{t}": row[t] for t in best}, abs=1e-4)
    events = await client.events(PATH, **body)
    streamed = [x for e in events for c in e["choices"] for x in c["logprobs"]["token_logprobs"]]
    assert streamed == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings(client: Client, alone: Alone, tiny_tokenizer: Any, include: bool) -> None:
    text = Expected(alone, tiny_tokenizer, PROMPT, 40, temperature=0.0).text
    stop = text[17:20]
    cut = text[: text.index(stop) + (len(stop) if include else 0)]
    body = {
        "prompt": PROMPT,
        "max_tokens": 40,
        "temperature": 0,
        "stop": [stop, "👩‍👩‍👧‍👦"],
        "include_stop_str_in_output": include,
        "return_token_ids": True,
    }
    choice = (await client.complete(**body))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (cut, "stop", stop)
    assert joined(await client.events(PATH, **body))["text"] == cut


async def test_prompts_at_the_length_limit(client: Client, alone: Alone, tiny_tokenizer: Any) -> None:
    for length in (126, 127):
        prompt = "x" * length
        answer = await client.complete(prompt=prompt, max_tokens=128, temperature=0, return_token_ids=True)
        Expected(alone, tiny_tokenizer, prompt, 128 - length, temperature=0.0).check(answer["choices"][0])
    error = await client.error(PATH, {"prompt": "x" * 128})
    assert "128 input tokens" in error["message"]


async def test_identical_prompts_at_once(client: Client, alone: Alone, tiny_tokenizer: Any) -> None:
    prompt = "the same long prefix for all of them, "
    expected = Expected(alone, tiny_tokenizer, prompt, 8, temperature=0.0)
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    for answer in await asyncio.gather(*[client.complete(**body) for _ in range(12)]):
        expected.check(answer["choices"][0])


async def test_what_never_fits_and_what_does_not_fit_now(client: Client) -> None:
    error = await client.error(PATH, {"prompt": "x" * 60, "max_tokens": 60, "n": 6})
    assert "KV blocks" in error["message"] and "59" in error["message"]
    error = await client.error(PATH, {"prompt": ["a"] * (MAX_QUEUED + 1)}, status=503)  # all or none
    assert str(MAX_QUEUED) in error["message"]


async def leave(client: Client, seed: int) -> None:
    """Sends a request, or half of one, and hangs up."""
    rng = random.Random(seed)
    body = {
        "prompt": "leaving " * rng.randrange(1, 9) + str(seed),
        "max_tokens": rng.randrange(1, 50),
        "n": rng.choice([1, 1, 3]),
        "seed": seed,
        "stream": rng.random() < 0.5,
        "logprobs": rng.choice([None, 3]),
    }
    data = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    raw = head.encode() + data
    if rng.random() < 0.25:
        raw = raw[: rng.randrange(len(raw))]
    await asyncio.sleep(rng.random())
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(raw)
    await writer.drain()
    if rng.random() < 0.3:
        with suppress(TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(rng.random()):
                await reader.readexactly(rng.randrange(1, 5000))
    else:
        await asyncio.sleep(rng.random() * 0.5)
    writer.transport.abort()


async def test_clients_that_leave_disturb_nobody(client: Client, alone: Alone, tiny_tokenizer: Any) -> None:
    asks = [
        {"prompt": "a steady neighbour", "max_tokens": 60, "temperature": 0.0},
        {"prompt": "another, who samples", "max_tokens": 50, "seed": 3, **SAMPLED},
        {"prompt": "leaving leaving leaving leaving ", "max_tokens": 40, "temperature": 0.0},
        {"prompt": "the fourth " * 4, "max_tokens": 30, "seed": 9, **SAMPLED},
    ]
    expected = [Expected(alone, tiny_tokenizer, **ask) for ask in asks]  # type: ignore[arg-type]
    gone = asyncio.Event()

    async def stay(ask: dict[str, Any], expected: Expected, stream: bool) -> int:
        rounds = 0
        while rounds == 0 or not gone.is_set():
            body = {**ask, "return_token_ids": True}
            expected.check(
                joined(await client.events(PATH, **body)) if stream else (await client.complete(**body))["choices"][0]
            )
            rounds += 1
        return rounds

    neighbours = [
        asyncio.create_task(stay(a, e, i % 2 == 0)) for i, (a, e) in enumerate(zip(asks, expected, strict=True))
    ]
    await asyncio.gather(*(leave(client, seed) for seed in range(200)))
    gone.set()
    assert all(rounds > 0 for rounds in await asyncio.gather(*neighbours))
    await all_is_free(client)
    assert client.async_engine.stats().finished["abort"] > 0


async def test_a_failed_step_ends_its_requests_only(
    client: Client, alone: Alone, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, fail = client.engine._runner.launch, asyncio.Event()

    def failing(plan: Any) -> Any:
        if fail.is_set():
            fail.clear()
            raise RuntimeError("the device has\nfallen over")
        return launch(plan)

    monkeypatch.setattr(client.engine._runner, "launch", failing)
    body = {"max_tokens": 100, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    # As many as run at once, and two that wait.
    running = [asyncio.create_task(client.events(PATH, prompt=f"r{i}", **body)) for i in range(CONFIG.max_num_seqs)]
    async with asyncio.timeout(10):
        while client.async_engine.stats().scheduler.num_running_sequences < CONFIG.max_num_seqs:
            await asyncio.sleep(0)
    waiting = [asyncio.create_task(client.complete(**{**body, "prompt": f"w{i}", "max_tokens": 9})) for i in (0, 1)]
    async with asyncio.timeout(10):
        while client.async_engine.num_open_requests < CONFIG.max_num_seqs + 2:
            await asyncio.sleep(0)
    fail.set()
    for events in await asyncio.gather(*running):
        error = events[-1]["error"]
        assert error["code"] == 500 and "RuntimeError: the device has fallen over" in error["message"]
        assert "\n" not in error["message"]
        assert all(c["finish_reason"] in (None, "error") for e in events[:-1] for c in e["choices"])
    for i, answer in enumerate(await asyncio.gather(*waiting)):
        tokens = alone(tiny_tokenizer.encode(f"w{i}"), 9)
        assert answer["choices"][0]["token_ids"] == tokens
    expected = Expected(alone, tiny_tokenizer, PROMPT, 10, temperature=0.0)
    answer = await client.complete(prompt=PROMPT, max_tokens=10, temperature=0, return_token_ids=True)
    expected.check(answer["choices"][0])


@pytest.mark.parametrize("timeout_s", [20.0, 0.2])
async def test_a_stop_under_load(
    engine: Engine, alone: Alone, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    step = engine.step

    def slow_step() -> Any:
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(engine, "step", slow_step)
    config = ServerConfig(**{**vars(LOCAL), "shutdown_timeout_s": timeout_s})
    body = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    async with serving(engine, config) as server:  # type: ignore[arg-type]
        tasks = [
            asyncio.create_task(server.complete(**{**body, "prompt": f"load {i}", "stream": i % 2 == 0}))
            for i in range(10)  # four of them wait
        ]
        before = engine.stats().generation_tokens_total
        async with asyncio.timeout(10):
            while engine.stats().generation_tokens_total < before + 40 or len(engine._collector.request_ids) < 10:
                await asyncio.sleep(0.005)
        server.stopper.stop()
        answers = await asyncio.gather(*tasks)
    reasons = set()
    for i, answer in enumerate(answers):
        if isinstance(answer, str):
            events = [json.loads(line[6:]) for line in answer.split("\n\n")[:-2]]
            assert answer.endswith("data: [DONE]\n\n")
            choices = [c for e in events for c in e["choices"]]
            text, reason = "".join(c["text"] for c in choices), choices[-1]["finish_reason"]
        else:
            text, reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
        whole = tiny_tokenizer.decode(alone(tiny_tokenizer.encode(f"load {i}"), 60), skip_special_tokens=True)
        assert text == whole if reason == "length" else whole.startswith(text.rstrip("\ufffd"))
        reasons.add(reason)
    assert reasons == ({"length"} if timeout_s > 1 else {"abort"})
    stats = engine.stats().scheduler
    assert stats.num_free_blocks == stats.num_total_blocks and not engine.has_unfinished_requests()


async def test_embeddings_beside_completions(
    ai: openai.AsyncOpenAI, tiny_model: nnx.Module, tiny_tokenizer: Any, alone: Alone
) -> None:
    texts = ["a", PROMPT, PROMPT * 3]
    answer, completion = await asyncio.gather(
        ai.embeddings.create(model="tiny", input=texts),
        ai.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, temperature=0),
    )
    assert completion.choices[0].text == Expected(alone, tiny_tokenizer, PROMPT, 9).text
    for text, found in zip(texts, answer.data, strict=True):
        ids = tiny_tokenizer.encode(text)
        attention = DenseAttention(1, len(ids))
        last = np.float64(tiny_model.hidden_states(jnp.array(ids), jnp.arange(len(ids)), attention)[-1])
        np.testing.assert_allclose(found.embedding, last / np.linalg.norm(last), atol=1e-5)
    assert answer.usage.prompt_tokens == sum(len(tiny_tokenizer.encode(text)) for text in texts)
