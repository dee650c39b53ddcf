"""Launching steps ahead changes nothing that a caller gets: the same requests to an engine that does and one that does
not.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import EOS, NUM_TOKENS

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.output_builder import OutputBuilder
from jaxpaged.outputs import CompletionOutput, RequestOutput
from jaxpaged.request import OutputKind, SamplingParams
from jaxpaged.runner.runner import Launched
from jaxpaged.weights import GenerationConfig

# Bytes of a block of 4 tokens of the tiny model: 2 layers, K and V, 2 heads of 8, float32, and 4 token ids.
BLOCK_BYTES = 4 * 2 * 2 * 2 * 8 * 4
CONFIG = EngineConfig(
    block_size=4,
    num_blocks=25,
    max_model_len=64,
    max_num_seqs=6,
    max_num_batched_tokens=16,
    max_logprobs=2,
    debug_checks=True,
    warmup=False,
    compilation_cache="",
)
CONFIGS = {"recompute": CONFIG, "swap": replace(CONFIG, swap_space=20 * BLOCK_BYTES)}
STREAMS = np.random.default_rng(1).integers(0, NUM_TOKENS - 4, (3, 30)).tolist()


class TroubleError(Exception):
    """What an injected failure raises."""


@dataclass
class Job:
    """A request; `abort_after` steps it is aborted, but only where there is trouble."""

    prompt: list[int]
    params: SamplingParams
    arrival: int
    abort_after: int | None
    parts: list[RequestOutput] = field(default_factory=list)
    is_aborted: bool = False


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    params = SamplingParams(
        n=draw(st.sampled_from([1, 1, 1, 2])),
        temperature=draw(st.sampled_from([0.0, 0.0, 1.0])),
        seed=draw(st.integers(0, 2**32)),
        max_tokens=draw(st.integers(1, 14)),
        ignore_eos=draw(st.booleans()),
        stop=draw(st.sampled_from([(), (), ("a",), ("\x10", "K")])),
        stop_token_ids=draw(st.sampled_from([(), (), range(0, 260, 9)])),
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, 1])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 1.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        min_tokens=draw(st.sampled_from([0, 0, 1])),
        bad_words=draw(st.sampled_from([(), (), ("ab", "x")])),
        logit_bias=draw(st.sampled_from([None, None, {5: 3.0}])),
        output_kind=OutputKind.DELTA,
    )
    return Job(
        prompt=draw(st.sampled_from(STREAMS))[: draw(st.integers(1, 24))],
        params=params,
        arrival=draw(st.integers(0, 10)),
        abort_after=draw(st.sampled_from([None, None, None, 0, 2, 5])),
    )


@pytest.fixture(scope="module")
def engines(tiny_model: nnx.Module, tiny_tokenizer: object) -> dict[str, tuple[Engine, Engine]]:
    """By name of the configuration: one that launches ahead, one that does not."""

    def start(config: EngineConfig) -> Engine:
        return Engine(tiny_model, tiny_tokenizer, config, generation=GenerationConfig(eos_token_ids=(EOS,)))

    return {name: (start(config), start(replace(config, async_scheduling=False))) for name, config in CONFIGS.items()}


def run(engine: Engine, batch: list[Job], *, aborts: bool) -> None:
    by_id = {str(i): job for i, job in enumerate(batch)}
    step = 0
    while engine.has_unfinished_requests() or any(job.arrival >= step for job in batch):
        assert step < 2_000, "the engine makes no progress"
        for request_id, job in by_id.items():
            if job.arrival == step:
                engine.add_request(request_id, job.prompt, job.params)
            if aborts and job.abort_after is not None and job.arrival + job.abort_after == step:
                last = engine.abort_request(request_id)
                if last is not None:
                    job.parts.append(last)
                    job.is_aborted = True
        for output in engine.step():
            assert not by_id[output.request_id].is_aborted, "an output after the last"
            by_id[output.request_id].parts.append(output)
        step += 1


def joined(job: Job, index: int) -> CompletionOutput | None:
    """All parts of one sequence as one."""
    parts = [o for part in job.parts for o in part.outputs if o.index == index]
    if not parts:
        return None
    return replace(
        parts[-1],
        text="".join(p.text for p in parts),
        token_ids=[t for p in parts for t in p.token_ids],
        logprobs=[e for p in parts for e in p.logprobs or []],
    )


def check_same(job: Job, expected: Job) -> None:
    assert [p.finished for p in job.parts] == [False] * (len(job.parts) - 1) + [True]
    for index in range(job.params.n):
        got, wanted = joined(job, index), joined(expected, index)
        assert wanted is not None and wanted.finished
        if got is None or got.finish_reason in ("abort", "error"):
            assert got is None or got.token_ids == wanted.token_ids[: len(got.token_ids)]
            continue
        for name in ("text", "token_ids", "finish_reason", "stop_reason"):
            assert getattr(got, name) == getattr(wanted, name), name
        for entry, other in zip(got.logprobs or [], wanted.logprobs or [], strict=True):
            assert entry.keys() == other.keys()
            for token, value in entry.items():
                assert value.logprob == pytest.approx(other[token].logprob, abs=1e-4)
                assert value.rank == other[token].rank
    if job.params.prompt_logprobs is not None and job.parts[-1].error is None and not job.is_aborted:
        told = [[entry for p in j.parts for entry in p.prompt_logprobs or []] for j in (job, expected)]
        assert [e and list(e) for e in told[0]] == [e and list(e) for e in told[1]]


def check_idle(engine: Engine) -> None:
    scheduler = engine.stats().scheduler
    assert scheduler.num_free_blocks == scheduler.num_total_blocks
    assert scheduler.num_running == scheduler.num_waiting == scheduler.num_swapped == 0


@pytest.mark.parametrize("name", CONFIGS)
@given(batch=st.lists(jobs(), min_size=1, max_size=6), fails=st.sets(st.integers(0, 25), max_size=2), data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_comes_of_it_as_in_turn(
    engines: dict[str, tuple[Engine, Engine]], name: str, batch: list[Job], fails: set[int], data: st.DataObject
) -> None:
    """Also with requests aborted, and steps that fail when they are launched or when they are fetched."""
    ahead, in_turn = engines[name]
    expected = [replace(job, parts=[]) for job in batch]
    run(in_turn, expected, aborts=False)
    when = data.draw(st.sampled_from(["launch", "fetch"])) if fails else "never"
    runner, calls = ahead._runner, iter(range(10_000))

    def or_fail(function: Any) -> Any:
        def call(argument: Any) -> Any:
            result = function(argument)
            if next(calls) in fails:
                raise TroubleError("the device is on fire")
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        if fails:
            patch.setattr(runner, when, or_fail(getattr(runner, when)))
        run(ahead, batch, aborts=True)
    for job, other in zip(batch, expected, strict=True):
        check_same(job, other)
        if job.parts[-1].error is not None:
            assert fails and "on fire" in job.parts[-1].error
    check_idle(ahead)


def test_the_host_is_one_step_ahead(engines: dict[str, tuple[Engine, Engine]], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engines["recompute"]
    runner, seen = engine._runner, []
    launch, fetch = runner.launch, runner.fetch

    def launched(plan: Any) -> Launched:
        seen.append(("launch", int(plan.kv_lens[0])))
        return launch(plan)

    def fetched(step: Launched) -> Any:
        seen.append(("fetch", int(step.plan.kv_lens[0])))
        return fetch(step)

    monkeypatch.setattr(runner, "launch", launched)
    monkeypatch.setattr(runner, "fetch", fetched)
    engine.add_request("r", STREAMS[0][:5], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    counts = []
    while engine.has_unfinished_requests():
        counts.append(len(engine.step()))
    assert seen == [
        ("launch", 5),
        ("launch", 6),
        ("fetch", 5),
        ("launch", 7),
        ("fetch", 6),
        ("fetch", 7),
    ]
    assert counts == [0, 0, 0, 1]


def test_a_bad_word_of_several_tokens_makes_it_wait(engines: dict[str, tuple[Engine, Engine]]) -> None:
    """Its next draw depends on the last token, which the host must know."""
    engine, _ = engines["recompute"]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, bad_words=["ab"])
    engine.add_request("r", STREAMS[0][:5], params)
    engine.step()
    assert engine._scheduler.schedule() is None
    while engine.has_unfinished_requests():
        engine.step()
    check_idle(engine)


def test_a_step_that_nobody_needs_any_more_is_waited_for(engines: dict[str, tuple[Engine, Engine]]) -> None:
    """A stop token was drawn when the next step was under way already; the engine goes on after its shutdown."""
    for engine in engines["recompute"]:
        params = SamplingParams(max_tokens=9, temperature=0.0, stop_token_ids=range(NUM_TOKENS))
        engine.add_request("r", STREAMS[1][:9], params)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert [len(o.outputs[0].token_ids) for o in outputs] == [1]
        engine.shutdown()
        check_idle(engine)
        for request_id in ("s", "t"):
            engine.add_request(request_id, STREAMS[1][:9], replace(params, stop_token_ids=(), ignore_eos=True))
        done = []
        while engine.has_unfinished_requests():
            done += [o for o in engine.step() if o.finished]
        assert [len(o.outputs[0].token_ids) for o in done] == [9, 9]


@pytest.mark.parametrize("when", ["launch", "fetch"])
def test_an_interrupt_leaves_the_requests(engines: dict[str, tuple[Engine, Engine]], when: str) -> None:
    ahead, in_turn = engines["recompute"]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    outputs = {}
    for engine in (in_turn, ahead):
        engine.add_request("r", STREAMS[1][:9], params)
        for _ in range(4):
            engine.step()
        with pytest.MonkeyPatch.context() as patch:
            if engine is ahead:
                patch.setattr(engine._runner, when, interrupt)
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[engine] = output.outputs[0].token_ids
    assert outputs[ahead] == outputs[in_turn] and len(outputs[ahead]) == 8
    check_idle(ahead)


def interrupt(_: object) -> None:
    raise KeyboardInterrupt


def test_new_weights_reach_a_step_that_was_launched_ahead(
    engines: dict[str, tuple[Engine, Engine]], tiny_model: nnx.Module
) -> None:
    """The step with the old ones counts as never run."""
    engine, in_turn = engines["recompute"]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    in_turn.add_request("r", STREAMS[2][:7], params)
    engine.add_request("r", STREAMS[2][:7], params)
    tokens = []
    for e in (in_turn, engine):
        e.step()
        e.step()
        e.update_weights(tiny_model)
        while e.has_unfinished_requests():
            tokens += [o.outputs[0].token_ids for o in e.step()]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 6
    check_idle(engine)


GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    """The last output of each request."""
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    return last


def expected_tokens(engines: dict[str, tuple[Engine, Engine]], *prompts: list[int]) -> list[list[int]]:
    _, in_turn = engines["recompute"]
    for i, prompt in enumerate(prompts):
        in_turn.add_request(str(i), prompt, GREEDY)
    last = finish(in_turn)
    return [last[str(i)].outputs[0].token_ids for i in range(len(prompts))]


def raise_once(function: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    calls = iter([True])

    def call(*args: Any) -> Any:
        is_first = next(calls, False)
        if is_first and not after:
            raise TroubleError("once")
        result = function(*args)
        if is_first:
            raise TroubleError("once")
        return result

    return call


@pytest.mark.parametrize("part", ["_collector.accept", "_collector.note_scheduled", "_scheduler.schedule"])
def test_after_an_exception_of_its_own_it_goes_on(
    engines: dict[str, tuple[Engine, Engine]], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Between the launch of a step and the results of the last: the requests compute again what was half done."""
    engine, _ = engines["recompute"]
    expected = expected_tokens(engines, STREAMS[1][:9])
    engine.add_request("r", STREAMS[1][:9], GREEDY)
    for _ in range(4):
        engine.step()
    holder, name = part.split(".")
    with monkeypatch.context() as patch:
        owner = getattr(engine, holder)
        patch.setattr(owner, name, raise_once(getattr(owner, name), after=False))
        with pytest.raises(TroubleError):
            engine.step()
    assert finish(engine)["r"].outputs[0].token_ids == expected[0]
    check_idle(engine)


@pytest.mark.parametrize("num_tokens", [8, 2])
def test_tokens_that_an_exception_took_end_their_request_with_an_error(
    engines: dict[str, tuple[Engine, Engine]], monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """They are the request's, but cannot be told any more; one that came later is complete. Of 2 tokens the lost one
    is the last: the request has ended, but nobody knows."""
    engine, _ = engines["recompute"]
    expected = expected_tokens(engines, STREAMS[2][:6])
    engine.add_request("lost", STREAMS[1][:9], replace(GREEDY, max_tokens=num_tokens))
    for _ in range(2):
        engine.step()
    engine.add_request("other", STREAMS[2][:6], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine._collector, "accept", raise_once(engine._collector.accept, after=True))
        with pytest.raises(TroubleError):
            engine.step()
    last = finish(engine)
    assert last["lost"].finished and "the engine failed" in (last["lost"].error or "")
    assert last["other"].error is None and last["other"].outputs[0].token_ids == expected[0]
    check_idle(engine)


def test_an_observer_that_raises_is_told_no_more(
    engines: dict[str, tuple[Engine, Engine]], caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = engines["recompute"]
    expected = expected_tokens(engines, STREAMS[1][:9])
    told: dict[str, list[object]] = {"bad": [], "good": []}

    def bad(_: object, plan: object) -> None:
        told["bad"].append(plan)
        raise TroubleError("disk full")

    def good(_: object, plan: object) -> None:
        told["good"].append(plan)

    observers = [bad, good]
    engine.observers.extend(observers)
    with caplog.at_level(logging.ERROR):
        engine.add_request("r", STREAMS[1][:9], GREEDY)
        assert finish(engine)["r"].outputs[0].token_ids == expected[0]
    for observer in observers:
        engine.observers.remove(observer)
    assert len(told["bad"]) == 1 and len(told["good"]) == 9 and told["good"][-1] is None
    assert len([r for r in caplog.records if "told no more" in r.message]) == 1


def test_both_failures_of_two_steps_are_logged(
    engines: dict[str, tuple[Engine, Engine]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = engines["recompute"]
    engine.add_request("r", STREAMS[1][:9], GREEDY)
    engine.step()

    def fail(what: str) -> Callable[[object], None]:
        def call(_: object) -> None:
            raise TroubleError(what)

        return call

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(engine._runner, "launch", fail("at the launch"))
        patch.setattr(engine._runner, "fetch", fail("at the fetch"))
        outputs = engine.step()
    assert [o.error for o in outputs] == ["TroubleError: at the fetch"]
    logged = [str(r.exc_info[1]) for r in caplog.records if r.exc_info is not None]
    assert sorted(logged) == ["at the fetch", "at the launch"]
    check_idle(engine)


@pytest.mark.parametrize("ended_by", ["a token", "an abort"])
def test_an_idle_engine_holds_no_request(engines: dict[str, tuple[Engine, Engine]], ended_by: str) -> None:
    """Also where a step for it was under way when it ended."""
    engine, _ = engines["recompute"]
    params = replace(GREEDY, stop_token_ids=range(NUM_TOKENS) if ended_by == "a token" else ())
    engine.add_request("r", STREAMS[1][:9], params)
    request = weakref.ref(engine._scheduler.groups["r"].request)
    if ended_by == "a token":
        finish(engine)
    else:
        engine.step()
        engine.step()
        engine.abort_request("r")
    gc.collect()
    assert request() is None


def test_void_steps_are_waited_for(
    engines: dict[str, tuple[Engine, Engine]], tiny_model: nnx.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = engines["recompute"]
    engine.add_request("r", STREAMS[1][:9], GREEDY)
    engine.step()
    (step,) = engine._loop._under_way
    engine.update_weights(tiny_model)
    assert all(array.is_ready() for array in step.wanted.values())
    engine.step()
    (step,) = engine._loop._under_way
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "fetch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert all(array.is_ready() for array in step.wanted.values())
    finish(engine)
    check_idle(engine)


@pytest.mark.parametrize("name", ["append", "append_prompt", "build"])
def test_an_output_that_cannot_be_made_is_its_own_requests_trouble(
    engines: dict[str, tuple[Engine, Engine]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The others of the step lose nothing."""
    engine, _ = engines["recompute"]
    prompts = [STREAMS[0][:5], STREAMS[1][:5], STREAMS[2][:5]]
    expected = expected_tokens(engines, *prompts)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, replace(GREEDY, prompt_logprobs=1))
    function, calls = getattr(OutputBuilder, name), iter(range(10_000))

    def call(builder: OutputBuilder, *args: Any) -> Any:
        if builder.request.request_id == "1" and next(calls) == 0:
            raise TroubleError("no such character")
        return function(builder, *args)

    monkeypatch.setattr(OutputBuilder, name, call)
    last = finish(engine)
    assert last["1"].error == "TroubleError: no such character" and last["1"].finished
    assert last["1"].outputs[0].finish_reason == "error"
    for i in (0, 2):
        assert last[str(i)].error is None and last[str(i)].outputs[0].token_ids == expected[i]
    check_idle(engine)
