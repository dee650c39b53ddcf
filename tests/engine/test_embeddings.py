"""Embeddings are the hidden states of the prompt alone, whatever the schedule, and cost others nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from engine.test_circumstances import CONFIGS, STREAMS
from flax import nnx
from models.test_families import build
from numpy.typing import NDArray
from support import EOS, GOLDENS, Alone, random_model, tiny_config
from tiny_models import token_ids

from jaxpaged import LLM
from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.errors import InvalidRequestError
from jaxpaged.models.attention import DenseAttention
from jaxpaged.outputs import RequestOutput
from jaxpaged.pooling import POOLINGS, Pooling, PoolingParams
from jaxpaged.request import SamplingParams
from jaxpaged.weights import GenerationConfig

SMALL = replace(CONFIGS["recompute"], warmup=False)
RAW = {pooling: PoolingParams(pooling, normalize=False) for pooling in POOLINGS}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
Dense = Callable[[list[int], PoolingParams], NDArray[np.float64]]
StartEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def dense(tiny_model: nnx.Module) -> Dense:
    """The embedding of a prompt from the model's own dense attention, in float64."""
    known: dict[tuple[int, ...], NDArray[np.float64]] = {}

    def embed(prompt: list[int], params: PoolingParams) -> NDArray[np.float64]:
        key = tuple(prompt)
        if key not in known:
            ids = jnp.asarray(prompt + [0] * (64 - len(prompt)))  # one shape; what follows does not reach back
            hidden = tiny_model.hidden_states(ids, jnp.arange(64), DenseAttention(1, 64))
            known[key] = np.asarray(hidden, np.float64)[: len(prompt)]
        states = known[key]
        embedding = states[-1] if params.pooling == "last" else states.mean(axis=0)
        return embedding / np.linalg.norm(embedding) if params.normalize else embedding

    return embed


@pytest.fixture(scope="module")
def start(tiny_model: nnx.Module, tiny_tokenizer: Any) -> StartEngine:
    engines: dict[EngineConfig, Engine] = {}

    def engine(config: EngineConfig = SMALL, **changes: Any) -> Engine:
        config = replace(config, **changes, debug_checks=True, compilation_cache="")
        if config not in engines:
            generation = GenerationConfig(eos_token_ids=(EOS,))
            engines[config] = Engine(tiny_model, tiny_tokenizer, config, generation=generation)
        engines[config].reset_prefix_cache()
        return engines[config]

    return engine


def finish(engine: Engine) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def embed(engine: Engine, prompt: list[int], params: PoolingParams) -> RequestOutput:
    engine.add_request("alone", prompt, params)
    [output] = finish(engine).values()
    return output


def check(output: RequestOutput, expected: NDArray[np.float64]) -> None:
    assert output.finished and output.error is None and output.outputs == []
    assert output.embedding is not None and output.embedding.dtype == np.float32
    np.testing.assert_allclose(output.embedding, expected, atol=1e-5 * max(1, np.abs(expected).max()), rtol=0)


@pytest.mark.parametrize("name", ["mistral_window"])
def test_they_are_those_of_transformers(name: str) -> None:
    engine = Engine(build(name), None, replace(SMALL, max_num_batched_tokens=11, compilation_cache=""))
    golden = np.load(GOLDENS / "embeddings.npz")[name]
    for i, prompt in enumerate(token_ids().tolist()):
        for pooling, expected in zip(("last", "mean"), golden[i], strict=True):
            engine.add_request(f"{i} {pooling}", prompt, PoolingParams(pooling, normalize=False))
            engine.add_request(f"{i} {pooling} unit", prompt, PoolingParams(pooling))
            outputs = finish(engine)
            check(outputs[f"{i} {pooling}"], expected)
            check(outputs[f"{i} {pooling} unit"], expected / np.linalg.norm(expected))


@pytest.mark.parametrize("name", ["recompute", "swap"])
def test_they_do_not_depend_on_circumstances(start: StartEngine, dense: Dense, alone: Alone, name: str) -> None:
    """Among requests that generate, in chunks, with prefix hits, preempted, next to some that are aborted."""
    engine = start(replace(CONFIGS[name], warmup=False))
    rng = np.random.default_rng(0)
    kinds: list[PoolingParams | SamplingParams] = [*RAW.values(), PoolingParams("mean"), GREEDY, GREEDY]
    for _ in range(4):
        asked: dict[str, tuple[list[int], PoolingParams | SamplingParams]] = {}
        outputs: dict[str, RequestOutput] = {}
        aborted = set()
        for request_id in map(str, range(24)):
            asked[request_id] = STREAMS[rng.integers(3)][: rng.integers(1, 41)], kinds[rng.integers(len(kinds))]
            engine.add_request(request_id, *asked[request_id], priority=int(rng.integers(3)))
            if rng.random() < 0.5:
                outputs |= {output.request_id: output for output in engine.step()}
            if rng.random() < 0.15 and request_id not in outputs:
                output = engine.abort_request(request_id)
                assert output is not None and output.finished and output.embedding is None
                aborted.add(request_id)
        outputs |= finish(engine)
        assert outputs.keys() == asked.keys() - aborted
        for request_id, output in outputs.items():
            prompt, params = asked[request_id]
            if isinstance(params, PoolingParams):
                check(output, dense(prompt, params))
            else:
                assert output.outputs[0].token_ids == alone(prompt, 8)
        stats = engine.stats().scheduler
        assert stats.num_free_blocks == stats.num_total_blocks


@pytest.mark.parametrize("name", ["recompute", "swap"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_prompt_that_gives_way_half_way_counts_once(
    start: StartEngine, dense: Dense, name: str, pooling: Pooling
) -> None:
    engine = start(replace(CONFIGS[name], warmup=False))
    prompt = STREAMS[0][20:] + STREAMS[1][20:]
    for i in range(3):
        engine.add_request(str(i), STREAMS[i][:16], replace(GREEDY, max_tokens=16))
    engine.add_request("a", prompt, RAW[pooling])
    output = finish(engine)["a"]
    assert output.metrics.num_preemptions > 0
    check(output, dense(prompt, RAW[pooling]))


def test_only_the_last_token_reads_the_prefix_cache(start: StartEngine, dense: Dense) -> None:
    engine = start()
    prompt = STREAMS[0][:33]
    engine.add_request("fill", prompt, GREEDY)
    finish(engine)
    last, mean = (embed(engine, prompt, RAW[pooling]) for pooling in ("last", "mean"))
    assert (last.num_cached_tokens, mean.num_cached_tokens) == (32, 0)
    check(last, dense(prompt, RAW["last"]))
    check(mean, dense(prompt, RAW["mean"]))
    # What an embedding has computed serves those who generate.
    engine.reset_prefix_cache()
    embed(engine, prompt, RAW["mean"])
    engine.add_request("hit", prompt, GREEDY)
    assert finish(engine)["hit"].num_cached_tokens == 32


def test_a_prompt_may_be_as_long_as_the_model_allows(start: StartEngine, dense: Dense) -> None:
    engine = start()
    prompt = [*STREAMS[0], *STREAMS[1]][:64]
    for pooling in POOLINGS:
        check(embed(engine, prompt, RAW[pooling]), dense(prompt, RAW[pooling]))
    with pytest.raises(InvalidRequestError, match="leaves no room"):
        engine.add_request("a", prompt, GREEDY)
    with pytest.raises(InvalidRequestError, match="65 input tokens, which exceeds"):
        engine.add_request("a", [*prompt, 1], RAW["last"])
    assert not engine.has_unfinished_requests()


def test_nothing_is_compiled_after_warm_up_and_times_are_told(start: StartEngine) -> None:
    engine = start(warmup=True, max_num_batched_tokens=32, max_num_seqs=2)
    for length in (1, 2, 33, 40):
        for pooling in POOLINGS:
            output = embed(engine, STREAMS[2][:length], RAW[pooling])
            times = output.metrics
            assert times.first_scheduled_time is not None and times.finished_time is not None
            assert times.arrival_time <= times.first_scheduled_time <= times.finished_time
            assert times.first_token_time == times.last_token_time
    stats = engine.stats()
    assert stats.compiles_after_warmup == 0
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (2 * 76, 0)
    assert stats.finished == {"stop": 8}


@pytest.mark.parametrize("pooling", POOLINGS)
def test_hidden_states_that_are_no_numbers_end_their_request_alone(
    start: StartEngine, dense: Dense, tiny_model: nnx.Module, pooling: Pooling
) -> None:
    engine = start()
    broken = random_model(tiny_config())
    weight = broken.model.embed_tokens.weight
    weight.set_value(weight.get_value().at[7].set(jnp.nan))
    engine.update_weights(broken)
    good = [t for t in STREAMS[0] if t != 7][:6]
    engine.add_request("bad", [*good, 7], RAW[pooling])
    engine.add_request("good", good, RAW[pooling])
    outputs = finish(engine)
    engine.update_weights(tiny_model)
    assert outputs["bad"].embedding is None and "hidden states are NaN" in (outputs["bad"].error or "")
    check(outputs["good"], dense(good, RAW[pooling]))


def test_a_step_that_fails_ends_its_requests(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    engine.add_request("a", STREAMS[0][:5], RAW["mean"])
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "launch", lambda plan: 1 / 0)
        [output] = engine.step()
    assert output.embedding is None and output.error is not None and "ZeroDivisionError" in output.error
    assert finish(engine) == {}


def test_new_weights_begin_the_sum_again(start: StartEngine, dense: Dense, tiny_model: nnx.Module) -> None:
    engine = start()
    engine.update_weights(random_model(tiny_config(), seed=5))
    prompt = [*STREAMS[1], *STREAMS[2]][:60]
    engine.add_request("a", prompt, RAW["mean"])
    assert engine.step() == [] and engine.step() == []
    engine.update_weights(tiny_model)
    check(finish(engine)["a"], dense(prompt, RAW["mean"]))


def test_from_python(start: StartEngine, tiny_tokenizer: Any, dense: Dense, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_: start())
    with LLM("tiny") as llm:
        texts = ["Hello", "Why not"]
        outputs = llm.embed(texts, use_tqdm=False)
        for text, output in zip(texts, outputs, strict=True):
            assert output.finished and output.error is None and output.outputs is not None
            assert output.prompt == text and output.prompt_token_ids == tiny_tokenizer.encode(text)
            assert output.outputs.hidden_size == 32
            expected = dense(output.prompt_token_ids, PoolingParams())
            np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-5)
        prompts, params = [[1, 2, 3], [4, 5]], [RAW["mean"], RAW["last"]]
        for prompt, one, output in zip(prompts, params, llm.embed(prompts, params, use_tqdm=False), strict=True):
            assert output.outputs is not None and output.prompt_token_ids == prompt
            np.testing.assert_allclose(output.outputs.embedding, dense(prompt, one), atol=1e-4)
        with pytest.raises(InvalidRequestError, match="is no PoolingParams"):
            llm.embed(texts, GREEDY)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="1 pooling parameters for 2 prompts"):
            llm.embed(texts, [PoolingParams()])
        with pytest.raises(InvalidRequestError, match="the prompt is empty"):
            llm.embed([[1], []])
        assert llm.embed([]) == []
        assert llm.stats().scheduler.num_running == 0


def test_pooling_params() -> None:
    with pytest.raises(InvalidRequestError, match="pooling is 'cls', but must be one of last, mean"):
        PoolingParams("cls")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="normalize is 1, but must be True or False"):
        PoolingParams(normalize=1)  # type: ignore[arg-type]
