"""What the engine promises around its tokens: log-probabilities, stops, sharing, failures, weights, compilation."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import EOS, NUM_TOKENS, Alone, make_tiny_tokenizer, random_model, tiny_config

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.errors import ConfigError, InvalidRequestError, QueueFullError
from jaxpaged.outputs import RequestOutput
from jaxpaged.request import OutputKind, SamplingParams
from jaxpaged.structured_outputs import StructuredOutputs
from jaxpaged.weights import GenerationConfig

SMALL = EngineConfig(
    block_size=4,
    num_blocks=40,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_logprobs=5,
    compilation_cache="",
    warmup=False,
    debug_checks=True,
)
PROMPT = list(b"The cat sat on the mat")


def with_changes(config: EngineConfig, **changes: object) -> EngineConfig:
    return EngineConfig(**{**vars(config), **changes})


@pytest.fixture(scope="module")
def engine(tiny_model: nnx.Module, tiny_tokenizer: object) -> Engine:
    return Engine(tiny_model, tiny_tokenizer, SMALL, generation=GenerationConfig(eos_token_ids=(EOS,)))


def run(engine: Engine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def generate(engine: Engine, prompt: list[int] | str, **params: object) -> RequestOutput:
    engine.add_request("only", prompt, SamplingParams(**{"temperature": 0.0, **params}))
    return run(engine)[-1]


def test_logprobs_are_the_dense_log_softmax(engine: Engine, tiny_model: nnx.Module) -> None:
    completion = generate(engine, PROMPT, max_tokens=8, logprobs=3, temperature=1.3, seed=5).outputs[0]
    tokens = PROMPT + completion.token_ids
    logits = np.asarray(tiny_model(jnp.array([tokens]))[0], np.float64)
    reference = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
    for i, entry in enumerate(completion.logprobs):
        row = reference[len(PROMPT) + i - 1][:NUM_TOKENS]  # padded ids are never drawn, nor named, nor ranked
        best = np.argsort(-row)[:3]
        drawn = completion.token_ids[i]
        assert next(iter(entry)) == drawn and set(entry) == {drawn, *best.tolist()}
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[token], abs=1e-4)
            assert logprob.rank == 1 + (row > row[token]).sum()
    total = sum(reference[len(PROMPT) + i - 1, t] for i, t in enumerate(completion.token_ids))
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_a_request_without_logprobs_beside_one_with(engine: Engine) -> None:
    engine.add_request("with", PROMPT, SamplingParams(temperature=0.0, max_tokens=4, logprobs=0))
    engine.add_request("without", PROMPT, SamplingParams(temperature=0.0, max_tokens=4))
    outputs = {o.request_id: o.outputs[0] for o in run(engine)}
    assert outputs["without"].logprobs is None and outputs["without"].cumulative_logprob is None
    assert [list(entry) for entry in outputs["with"].logprobs or []] == [[t] for t in outputs["with"].token_ids]


def test_deltas_add_up_to_the_cumulative_output(engine: Engine, alone: Alone) -> None:
    for name, kind in (("delta", OutputKind.DELTA), ("cumulative", OutputKind.CUMULATIVE)):
        params = SamplingParams(
            n=2, temperature=1.0, seed=3, max_tokens=9, output_kind=kind, ignore_eos=True, logprobs=1
        )
        engine.add_request(name, PROMPT, params)
    outputs = run(engine)
    for index in range(2):
        parts = [c for o in outputs if o.request_id == "delta" for c in o.outputs if c.index == index]
        whole = [c for o in outputs if o.request_id == "cumulative" for c in o.outputs if c.index == index][-1]
        assert (
            [t for c in parts for t in c.token_ids]
            == whole.token_ids
            == alone(PROMPT, 9, temperature=1.0, seed=3 + index)
        )
        assert "".join(c.text for c in parts) == whole.text
        assert [entry for c in parts for entry in c.logprobs or []] == whole.logprobs
        assert [c.finish_reason for c in parts] == [None] * (len(parts) - 1) + ["length"]


def test_a_stop_string_ends_the_output_before_itself(engine: Engine, alone: Alone) -> None:
    text = engine.tokenizer.decode(alone(PROMPT, 12))
    stop = text[5:7]
    completion = generate(engine, PROMPT, max_tokens=12, stop=stop, ignore_eos=True).outputs[0]
    assert completion.finish_reason == "stop" and completion.stop_reason == stop
    assert completion.text == text[: text.index(stop)]
    included = generate(engine, PROMPT, max_tokens=12, stop=[stop], include_stop_str_in_output=True).outputs[0]
    assert included.text == text[: text.index(stop) + len(stop)]


def test_a_stop_string_that_the_last_token_completes_is_why_it_ended(engine: Engine, alone: Alone) -> None:
    text = engine.tokenizer.decode(alone(PROMPT, 12))
    stop = text[5:7]
    length = text.index(stop) + len(stop)  # a token a character
    completion = generate(engine, PROMPT, max_tokens=length, stop=stop, ignore_eos=True).outputs[0]
    assert len(completion.token_ids) == length
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == text[: text.index(stop)]


def test_a_stop_token_ends_the_output_and_is_not_its_text(engine: Engine, alone: Alone) -> None:
    tokens = alone(PROMPT, 12)
    stop = tokens[6]
    expected = tokens[: tokens.index(stop) + 1]
    completion = generate(engine, PROMPT, max_tokens=12, stop_token_ids=[stop]).outputs[0]
    assert completion.token_ids == expected
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == engine.tokenizer.decode(expected[:-1])


def test_text_prompts_are_tokenized(engine: Engine) -> None:
    from_text, from_ids = generate(engine, "hello", max_tokens=4), generate(engine, list(b"hello"), max_tokens=4)
    # The tokenizer's byte symbols are sorted, so ids are not byte values: the two prompts differ, their lengths do not.
    assert from_text.prompt == "hello" and from_ids.prompt is None
    assert from_text.prompt_token_ids == engine.tokenizer("hello")["input_ids"]


def test_the_length_limit_clips_max_tokens(engine: Engine) -> None:
    prompt = [1] * 120
    output = generate(engine, prompt, max_tokens=100, ignore_eos=True).outputs[0]
    assert len(output.token_ids) == 8 and output.finish_reason == "length"


def test_siblings_share_the_prompt_and_copy_only_its_last_block(tiny_model: nnx.Module) -> None:
    engine = Engine(tiny_model, None, with_changes(SMALL, enable_prefix_caching=False, async_scheduling=False))
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=3, ignore_eos=True)
    engine.add_request("r", PROMPT, params)  # 22 tokens: 5 full blocks and half a block
    used = []
    while engine.has_unfinished_requests():
        engine.step()
        scheduler = engine.stats().scheduler
        used.append(scheduler.num_total_blocks - scheduler.num_free_blocks)
    # Two steps of prefill (16 + 6 tokens), then each sibling holds the shared 5 blocks and its own last one.
    assert used == [4, 6, 5 + 3, 0]


@pytest.mark.parametrize(
    ("prompt", "params", "param", "message"),
    [
        ([], {}, "prompt", "empty"),
        ([1, 999], {}, "prompt", "999 is out of vocabulary"),
        ([-1], {}, "prompt", "-1 is out of vocabulary"),
        ([1] * 128, {}, "input_tokens", "maximum context length is 128 .* 128 input tokens"),
        ([1] * 300, {}, "input_tokens", "contains 300 input tokens, which exceeds this limit"),
        ([1], {"n": 5}, "n", "n is 5, .* at most 4"),
        ([1], {"max_tokens": 129}, "max_tokens", "129.*128"),
        ([1], {"logprobs": 6}, "logprobs", "6.*at most 5"),
        ([1], {"stop_token_ids": [272]}, "stop_token_ids", "272"),
        ([1] * 100, {"n": 4, "max_tokens": 28}, None, "blocks"),
    ],
)
def test_a_bad_request_is_refused_before_anything_is_queued(
    engine: Engine, prompt: list[int], params: dict[str, object], param: str | None, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        engine.add_request("bad", prompt, SamplingParams(**params))
    if param is not None:
        assert caught.value.param == param
    assert not engine.has_unfinished_requests()
    assert engine.abort_request("bad") is None


def test_a_full_queue_refuses(tiny_model: nnx.Module) -> None:
    engine = Engine(tiny_model, None, with_changes(SMALL, max_num_queued_requests=2))
    for name in "ab":
        engine.add_request(name, PROMPT, SamplingParams())
    with pytest.raises(QueueFullError, match="2"):
        engine.add_request("c", PROMPT, SamplingParams())
    engine.shutdown()
    assert not engine.has_unfinished_requests()


def test_a_padded_id_is_never_drawn(tiny_model: nnx.Module, tiny_tokenizer: object) -> None:
    """The embedding has 272 rows, the tokenizer 260 tokens; make the padding rows win every argmax."""
    graphdef, state = nnx.split(tiny_model)
    model = nnx.merge(graphdef, jax.tree.map(lambda x: x, state))
    model.lm_head.weight[...] = model.lm_head.weight[...].at[NUM_TOKENS:].multiply(100.0)
    engine = Engine(model, tiny_tokenizer, SMALL)
    for temperature in (0.0, 1.0):
        tokens = generate(engine, PROMPT, max_tokens=20, temperature=temperature, ignore_eos=True).outputs[0].token_ids
        assert max(tokens) < NUM_TOKENS


def test_nan_logits_end_their_own_request_with_an_error(
    tiny_model: nnx.Module, tiny_tokenizer: object, alone: Alone
) -> None:
    """The embedding of one token is NaN: whoever has it in the prompt fails, its neighbour does not notice."""
    graphdef, state = nnx.split(tiny_model)
    model = nnx.merge(graphdef, jax.tree.map(lambda x: x, state))
    model.model.embed_tokens.weight[...] = model.model.embed_tokens.weight[...].at[NUM_TOKENS + 1].set(jnp.nan)
    engine = Engine(model, tiny_tokenizer, SMALL)
    engine.add_request("bad", [1, NUM_TOKENS + 1, 2], SamplingParams(n=2, temperature=1.0))
    engine.add_request("good", PROMPT, SamplingParams(temperature=0.0, max_tokens=6))
    outputs = {o.request_id: o for o in run(engine)}
    assert outputs["bad"].finished and "NaN" in (outputs["bad"].error or "")
    assert [c.finish_reason for c in outputs["bad"].outputs] == ["error", "error"]
    assert outputs["good"].outputs[0].token_ids == alone(PROMPT, 6)
    after = generate(engine, PROMPT[::-1], max_tokens=6)  # in the blocks that held NaN
    assert after.outputs[0].token_ids == alone(PROMPT[::-1], 6)


class TestFailure:
    """A step that fails ends its own requests, is logged once, and the next request is served as ever."""

    @pytest.mark.parametrize("loses_pool", [False, True])
    def test_neighbours_and_successors_are_right(
        self,
        tiny_model: nnx.Module,
        tiny_tokenizer: object,
        alone: Alone,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        loses_pool: bool,
    ) -> None:
        engine = Engine(tiny_model, tiny_tokenizer, SMALL)
        params = SamplingParams(temperature=0.0, max_tokens=6)
        engine.add_request("fails", PROMPT, params)
        engine.step()
        runner = engine._runner
        launch = runner.launch

        def fail(plan: object) -> None:
            if loses_pool:
                for pair in runner.cache.pools:
                    for array in pair:
                        array.delete()
            raise RuntimeError("device is on fire")

        monkeypatch.setattr(runner, "launch", fail)
        engine.add_request("late", PROMPT[:3], params, arrival_time=1e9)
        with caplog.at_level(logging.ERROR):
            (failed,) = [o for o in engine.step() if o.request_id == "fails"]
        assert failed.finished and failed.outputs[0].finish_reason == "error"
        assert failed.error is not None and "device is on fire" in failed.error
        assert sum(r.levelno >= logging.ERROR for r in caplog.records) == 1
        monkeypatch.setattr(runner, "launch", launch)
        engine.add_request("next", PROMPT, params)
        outputs = {o.request_id: o for o in run(engine)}
        assert outputs["next"].outputs[0].token_ids == alone(PROMPT, 6)
        scheduler = engine.stats().scheduler
        assert scheduler.num_free_blocks == scheduler.num_total_blocks


class TestWeights:
    def test_the_weights_of_a_module_are_used_where_they_are(self, tiny_model: nnx.Module) -> None:
        engine = Engine(tiny_model, None, SMALL)
        mine = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(nnx.state(tiny_model))]
        assert [x.unsafe_buffer_pointer() for x in engine._runner._leaves] == mine

    def test_new_weights_take_effect_with_no_compilation_and_no_stale_prefix(
        self, tiny_model: nnx.Module, tiny_tokenizer: object
    ) -> None:
        other = random_model(tiny_config(), seed=1)
        engine, reference = (Engine(m, tiny_tokenizer, SMALL) for m in (tiny_model, other))
        old = generate(engine, PROMPT, max_tokens=8)
        engine.add_request("running", PROMPT[::-1], SamplingParams(temperature=0.0, max_tokens=8))
        engine.step()
        compiled = engine._runner.guard.count
        engine.update_weights(nnx.state(other))
        run(engine)  # the running request goes on, on the new weights
        new = generate(engine, PROMPT, max_tokens=8)
        assert engine._runner.guard.count == compiled
        assert new.num_cached_tokens == 0
        expected = generate(reference, PROMPT, max_tokens=8).outputs[0].token_ids
        assert new.outputs[0].token_ids == expected != old.outputs[0].token_ids

    def test_weights_that_do_not_fit_are_refused_by_name(self, engine: Engine) -> None:
        with pytest.raises(ConfigError, match="structure"):
            engine.update_weights(nnx.state(random_model(tiny_config(num_layers=1))))
        with pytest.raises(ConfigError, match=r"down_proj.*float32\[32, 48\].*float32\[32, 64\]"):
            engine.update_weights(nnx.state(random_model(tiny_config(intermediate_size=48))))


class TestStart:
    def test_a_pool_too_small_for_one_request_is_refused_with_the_numbers(self, tiny_model: nnx.Module) -> None:
        # 128 tokens are 32 blocks of 4, and the null block: 33 of 1 KiB each.
        with pytest.raises(ConfigError, match=r"max_model_len=128.*33\.00 KiB.*32\.00 KiB.*124 tokens.*num_blocks"):
            Engine(tiny_model, None, with_changes(SMALL, num_blocks=32))
        assert Engine(tiny_model, None, with_changes(SMALL, num_blocks=33)).cache_config.num_blocks == 33

    def test_the_pool_is_as_large_as_asked(self, tiny_model: nnx.Module) -> None:
        engine = Engine(tiny_model, None, with_changes(SMALL, num_blocks=None, kv_cache_memory=100 * 1024 + 5))
        assert engine.cache_config.num_blocks == 100
        assert sum(x.nbytes for pair in engine._runner.cache.pools for x in pair) == 100 * 1024

    def test_a_length_beyond_the_model_is_refused(self, tiny_model: nnx.Module) -> None:
        with pytest.raises(ConfigError, match=r"129.*max_position_embeddings=128"):
            Engine(tiny_model, None, with_changes(SMALL, max_model_len=129))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def warm(request: pytest.FixtureRequest) -> Engine:
    model = random_model(tiny_config(), dtype=jnp.dtype(request.param))
    # A pool that is large beside everything else in a step, so that a copy of one layer of it shows.
    config = with_changes(SMALL, warmup=True, num_blocks=16384, swap_space=1 << 20)
    return Engine(model, make_tiny_tokenizer(), config)


class TestPrograms:
    """Compiled programs: no compile after warm-up, no copy of the pool."""

    def test_nothing_compiles_after_warm_up(self, warm: Engine) -> None:
        rng = np.random.default_rng(3)
        unusual: list[dict[str, object]] = [
            {},
            {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "prompt_logprobs": 2},
            {"logit_bias": {7: 1.5}, "min_tokens": 1, "logprob_token_ids": [3]},
            {"logit_bias": dict.fromkeys(range(272), 0.5), "allowed_token_ids": range(0, 270, 3)},
            {"structured_outputs": StructuredOutputs(json_object=True), "presence_penalty": 0.1},
        ]
        for round_ in range(4):
            for i in range(6):
                params = SamplingParams(
                    n=int(rng.integers(1, 4)),
                    temperature=float(rng.choice([0.0, 1.0])),
                    top_k=int(rng.choice([0, 3])),
                    min_p=float(rng.choice([0.0, 0.1])),
                    logprobs=None if rng.integers(2) else int(rng.integers(0, 6)),
                    max_tokens=int(rng.integers(1, 9)),
                    **unusual[int(rng.integers(len(unusual)))],
                )
                warm.add_request(f"{round_}-{i}", rng.integers(0, 256, rng.integers(1, 60)).tolist(), params)
            warm.step()
            warm.abort_request(f"{round_}-0")
            run(warm)
        assert warm.stats().compiles_after_warmup == 0
        assert warm.stats().generation_tokens_total > 50

    def test_a_compilation_would_be_seen(self, warm: Engine) -> None:
        guard = warm._runner.guard
        before = guard.count
        jax.jit(lambda x: x + 1)(np.zeros(before + 3))
        assert guard.count > before
        guard.reset()
        assert warm.stats().compiles_after_warmup == 0

    def test_no_program_copies_the_pool(self, warm: Engine) -> None:
        one_layer = warm._runner.cache.shape.bytes_per_layer
        temporaries = warm.temporaries()
        assert set(temporaries) == {"decode[2]", "decode[4]", "mixed[32]"}
        assert all(size < one_layer / 4 for size in temporaries.values()), (temporaries, one_layer)


@pytest.mark.parametrize("option", ["attention", "linear"])
def test_an_implementation_that_is_not_there(
    tiny_model: nnx.Module, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    choice: dict[str, Any] = {option: "fortran"}
    with pytest.raises(
        ConfigError, match=f"{option} is 'fortran', but must be one of .*native, .*xla.* in this version"
    ):
        Engine(tiny_model, None, EngineConfig(warmup=False, **choice))
    monkeypatch.setattr("jaxpaged_kernels.native.why_unavailable", lambda: "there is no compiler")
    choice = {option: "native"}
    with pytest.raises(ConfigError, match=f"{option} is 'native', but there is no compiler"):
        Engine(tiny_model, None, EngineConfig(warmup=False, **choice))
