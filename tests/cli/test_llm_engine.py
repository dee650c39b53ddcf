"""`LLM` over the real engine: a module in memory, its weights swapped, answers computed without paging."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from beam_reference import beam_search
from flax import nnx
from support import EOS, NUM_TOKENS, Alone, dense_logprobs, make_tiny_tokenizer, random_model, tiny_config

from jaxpaged import LLM, BeamSearchParams, SamplingParams
from jaxpaged.beam_search import BeamSearchOutput
from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError, InvalidRequestError
from jaxpaged.outputs import CompletionOutput, RequestMetrics, RequestOutput

PROMPTS = ["The cat", "sat on the mat, and then", "x"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "warmup": False}
    with LLM.from_module(random_model(tiny_config()), make_tiny_tokenizer(), compilation_cache="", **options) as llm:
        yield llm


def greedy(model: nnx.Module, prompt: list[int], count: int) -> list[int]:
    """The most probable tokens by the dense forward pass."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and tokens[-1] != EOS:
        logits = np.asarray(model(jnp.array([tokens]))[0, -1])
        tokens.append(int(logits[:NUM_TOKENS].argmax()))
    return tokens[len(prompt) :]


def test_generate_chat_and_stream_give_the_models_tokens(llm: LLM, alone: Alone) -> None:
    tokenizer = llm.get_tokenizer()
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    expected = [alone(prompt, 8, stop=frozenset([EOS])) for prompt in ids]
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == expected
    assert [o.outputs[0].token_ids for o in llm.generate(ids, GREEDY, use_tqdm=False)] == expected
    pieces = [output.outputs[0] for output in llm.stream(PROMPTS[1], GREEDY)]
    assert [t for piece in pieces for t in piece.token_ids] == expected[1]
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(expected[1], skip_special_tokens=True)

    [answer] = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
    assert answer.prompt == "<user>Hi<bot>"
    assert answer.outputs[0].token_ids == alone(tokenizer(answer.prompt).input_ids, 8, stop=frozenset([EOS]))


def test_beam_search_gives_the_most_probable_outputs(llm: LLM) -> None:
    tokenizer, next_logprobs = llm.get_tokenizer(), dense_logprobs(random_model(tiny_config()))
    params = BeamSearchParams(beam_width=3, max_tokens=10, length_penalty=0.0)
    prompts = ["The cat", {"prompt": "x"}, tokenizer("sat on").input_ids, {"prompt_token_ids": [5, 6]}]
    outputs = llm.beam_search(prompts, params)
    ids = [tokenizer(PROMPTS[0]).input_ids, tokenizer("x").input_ids, prompts[2], [5, 6]]
    for prompt, output in zip(ids, outputs, strict=True):
        found = beam_search(
            lambda tokens, prompt=prompt: next_logprobs(prompt + tokens),
            width=3,
            max_tokens=10,
            stop_ids={EOS},
            length_penalty=0.0,
            early_stopping=False,
        )
        shown = [[t for t in f.token_ids if t != EOS] for f in found]
        assert [s.tokens for s in output.sequences] == [prompt + tokens for tokens in shown]
        assert [s.text for s in output.sequences] == [tokenizer.decode(prompt + tokens) for tokens in shown]
        assert [s.cum_logprob for s in output.sequences] == pytest.approx([f.logprob for f in found], abs=1e-3)
        assert [s.score for s in output.sequences] == [s.cum_logprob for s in output.sequences]
    [alone] = llm.beam_search("x", params)
    assert alone == outputs[1]


def test_an_end_of_sequence_token_is_kept_where_it_is_wanted() -> None:
    params = BeamSearchParams(1, 8, length_penalty=2.0)
    ended = CompletionOutput(0, "", [8, EOS], cumulative_logprob=-8.0, finish_reason="stop")
    output = RequestOutput("a", None, [7], [ended], True, RequestMetrics(0.0))
    [without] = BeamSearchOutput.of(output, params, None).sequences
    [kept] = BeamSearchOutput.of(output, replace(params, include_stop_str_in_output=True), None).sequences
    assert (without.tokens, kept.tokens) == ([7, 8], [7, 8, EOS])
    assert without.score == kept.score == -8 / 2**2 and without.finish_reason == "stop" and without.text is None


def test_beam_search_takes_its_own_parameters(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="no BeamSearchParams"):
        llm.beam_search("x", GREEDY)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="n is 5, but this engine runs at most 4"):
        llm.beam_search("x", BeamSearchParams(5, 4))


def test_a_bad_prompt_among_good_ones_computes_nothing(llm: LLM) -> None:
    steps = llm.stats().steps_total
    with pytest.raises(InvalidRequestError, match="out of vocabulary"):
        llm.generate([[1, 2], [999_999]], GREEDY)
    assert llm.stats().scheduler.num_waiting == 0
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=1))[0].finished
    assert llm.stats().steps_total == steps + 1


def test_an_abandoned_stream_gives_its_blocks_back(llm: LLM) -> None:
    llm.reset_prefix_cache()
    free = llm.stats().scheduler.num_free_blocks
    for _ in llm.stream(PROMPTS[1], GREEDY):
        break
    stats = llm.stats().scheduler
    assert (stats.num_running, stats.num_free_blocks) == (0, free)


def test_new_weights_answer_as_the_new_model(llm: LLM) -> None:
    """After a first run whose prefix is cached: KV of the old weights must not be used."""
    trained = random_model(tiny_config(), seed=5)
    prompt = llm.get_tokenizer()(PROMPTS[1]).input_ids
    [before] = llm.generate([prompt], GREEDY)
    llm.update_weights(nnx.state(trained))
    [after] = llm.generate([prompt], GREEDY)
    assert after.num_cached_tokens == 0
    assert after.outputs[0].token_ids == greedy(trained, prompt, 8) != before.outputs[0].token_ids


def is_idle(llm: LLM) -> bool:
    scheduler = llm.stats().scheduler
    return scheduler.num_free_blocks == scheduler.num_total_blocks and not llm._engine.has_unfinished_requests()


def test_ctrl_c_at_any_moment_leaves_it_usable(llm: LLM, alone: Alone, tiny_model: nnx.Module) -> None:
    llm.update_weights(tiny_model)
    prompts = [f"prompt {i}" for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=24)
    expected = [alone(llm.get_tokenizer()(p).input_ids, 24, stop=frozenset([EOS])) for p in prompts]
    rng = random.Random(0)
    interrupted = 0
    for _ in range(60):
        timer = threading.Timer(rng.random() * 0.03, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            llm.generate(prompts, params, use_tqdm=False)
            timer.join()
        except KeyboardInterrupt:
            interrupted += 1
        assert is_idle(llm)
    assert interrupted > 0
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)] == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    "prompts", [None, 5, b"ab", {"a": 1}, {"a"}, [None], [1.5], [[1.5]], "a\ud800", ["fine", [-1]], [[1], "a\ud800"]]
)
def test_prompts_of_other_types(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError):
        llm.stream(prompts, GREEDY)
    assert is_idle(llm)


@pytest.mark.parametrize("params", [{"temperature": 0}, "x", 5, [None], [GREEDY, GREEDY], SamplingParams])
def test_sampling_parameters_of_other_types(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate("a", params, use_tqdm=False)


@pytest.mark.parametrize(
    "field",
    [
        {"skip_special_tokens": "no"},
        {"ignore_eos": 1},
        {"include_stop_str_in_output": None},
        {"output_kind": "delta"},
        {"stop": 5},
        {"stop_token_ids": 5},
    ],
)
def test_fields_of_other_types(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(field))):
        SamplingParams(**field)


@pytest.mark.parametrize("priority", [["x"], [None], [1.5]])
def test_a_priority_of_another_type_queues_nothing(llm: LLM, priority: list[Any], alone: Alone) -> None:
    with pytest.raises(InvalidRequestError, match="priority"):
        llm.generate("a", GREEDY, priority=priority, use_tqdm=False)
    assert is_idle(llm)


def test_a_request_without_a_detokenizer_is_not_queued(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no detokenizer today")

    with monkeypatch.context() as patch:
        patch.setattr("jaxpaged.engine.collector.OutputBuilder", broken)
        with pytest.raises(RuntimeError, match="today"):
            llm.generate("a", GREEDY, use_tqdm=False)
    assert is_idle(llm)
    llm.generate("a", GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    "option",
    [
        {"max_model_len": "4K"},
        {"max_model_len": True},
        {"max_num_seqs": 2.5},
        {"seed": "x"},
        {"warmup": "no"},
        {"compilation_cache": 5},
        {"watermark": "x"},
        {"kv_cache_memory": 1e9},
        {"swap_space": "9" * 400},
    ],
)
def test_options_of_other_types(option: dict[str, Any]) -> None:
    [(name, _)] = option.items()
    with pytest.raises(ConfigError, match=f"{name}|is not a size in bytes"):
        EngineConfig.from_options(option)


def test_what_cannot_be_served(tiny_model: nnx.Module, tiny_tokenizer: Any) -> None:
    options = {"compilation_cache": "", "warmup": False, "num_blocks": 40, "block_size": 4}
    for model, tokenizer, more, words in (
        (None, tiny_tokenizer, {}, "NoneType is no model"),
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tiny_tokenizer, {}, "Linear is no model"),
        (tiny_model, "x", {}, "str is not a fast tokenizer"),
        (tiny_model, tiny_tokenizer, {"attention": "nope"}, "must be one of triton, native, xla"),
        (tiny_model, tiny_tokenizer, {"swap_space": "99999TiB"}, "lower swap_space"),
    ):
        with pytest.raises(ConfigError, match=words):
            LLM.from_module(model, tokenizer, **options, **more)
