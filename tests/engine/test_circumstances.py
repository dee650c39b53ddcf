"""The tokens of a request do not depend on circumstances: whatever the schedule, they are its tokens alone.

Expected tokens come from dense attention over the whole sequence, one token at a time (the `alone` fixture); the engine
reaches them through a pool of a few blocks, with neighbours, chunks, prefix hits, forks, preemptions and aborts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import EOS, NUM_TOKENS, Alone

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import SamplingParams
from jaxpaged.weights import GenerationConfig

# Bytes of a block of 4 tokens of the tiny model: 2 layers, K and V, 2 heads of 8, float32.
BLOCK_BYTES = 4 * 2 * 2 * 2 * 8 * 4
CONFIGS = {
    "recompute": EngineConfig(block_size=4, num_blocks=25, max_model_len=64, max_num_seqs=6, max_num_batched_tokens=16),
    "swap": EngineConfig(
        block_size=4,
        num_blocks=25,
        max_model_len=64,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        swap_space=20 * BLOCK_BYTES,
    ),
    "whole prompts, no prefix cache": EngineConfig(
        block_size=8,
        num_blocks=13,
        max_model_len=64,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
    ),
    "priority, odd sizes": EngineConfig(
        block_size=3,
        num_blocks=30,
        max_model_len=64,
        max_num_seqs=5,
        max_num_batched_tokens=11,
        scheduling_policy="priority",
        long_prefill_token_threshold=5,
        watermark=0.1,
    ),
}
# Every other engine waits for the results of each step before the next.
CONFIGS |= {f"{name}, in turn": replace(config, async_scheduling=False) for name, config in CONFIGS.items()}
# Prompts are heads of these, so that they share prefixes of any length.
STREAMS = np.random.default_rng(0).integers(0, NUM_TOKENS - 4, (3, 40)).tolist()


@dataclass
class Job:
    """One request and what happens to it; steps are counted from the start of the run."""

    prompt: list[int]
    params: SamplingParams
    arrival: int
    priority: int
    abort_after: int | None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    outcome: str = "waiting"


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    n = draw(st.sampled_from([1, 1, 1, 2, 3]))
    length = draw(st.integers(1, 40 if n == 1 else 20))
    params = SamplingParams(
        n=n,
        temperature=draw(st.sampled_from([0.0, 0.0, 1.0])),
        top_k=draw(st.sampled_from([0, 5])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        max_tokens=draw(st.integers(1, 16)),
        ignore_eos=draw(st.booleans()),
    )
    return Job(
        prompt=draw(st.sampled_from(STREAMS))[:length],
        params=params,
        arrival=draw(st.integers(0, 12)),
        priority=draw(st.integers(-1, 1)),
        abort_after=draw(st.sampled_from([None, None, None, 0, 3, 9])),
    )


@pytest.fixture(scope="module")
def engines(tiny_model: nnx.Module, tiny_tokenizer: object) -> dict[str, Engine]:
    def start(config: EngineConfig) -> Engine:
        checked = replace(config, debug_checks=True, warmup=False, compilation_cache="", max_logprobs=2)
        return Engine(tiny_model, tiny_tokenizer, checked, generation=GenerationConfig(eos_token_ids=(EOS,)))

    return {name: start(config) for name, config in CONFIGS.items()}


def run(engine: Engine, batch: list[Job]) -> None:
    step = 0
    while any(job.outcome in ("waiting", "running") for job in batch):
        assert step < 5_000, "the engine makes no progress"
        for i, job in enumerate(batch):
            if job.outcome == "waiting" and job.arrival <= step:
                try:
                    engine.add_request(str(i), job.prompt, job.params, arrival_time=float(step), priority=job.priority)
                    job.outcome = "running"
                except InvalidRequestError as refusal:
                    assert "blocks" in str(refusal)
                    job.outcome = "never fits"
            if job.outcome == "running" and job.abort_after is not None and step >= job.arrival + job.abort_after:
                engine.abort_request(str(i))
                job.outcome = "aborted"
        for output in engine.step():
            assert output.finished and output.error is None
            job = batch[int(output.request_id)]
            job.tokens = {completion.index: completion.token_ids for completion in output.outputs}
            job.outcome = "finished"
        step += 1


@pytest.mark.parametrize("name", CONFIGS)
@given(batch=st.lists(jobs(), min_size=1, max_size=8))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tokens_are_those_of_the_request_alone(
    engines: dict[str, Engine], alone: Alone, name: str, batch: list[Job]
) -> None:
    engine = engines[name]
    run(engine, batch)
    for job in batch:
        if job.outcome != "finished":
            continue
        stop = frozenset() if job.params.ignore_eos else frozenset({EOS})
        for index in range(job.params.n):
            expected = alone(
                job.prompt,
                job.params.max_tokens,
                temperature=job.params.temperature,
                top_k=job.params.top_k if job.params.temperature else 0,
                top_p=job.params.top_p if job.params.temperature else 1.0,
                seed=(job.params.seed + index) % 2**64 if job.params.temperature else 0,
                stop=stop,
            )
            assert job.tokens[index] == expected
    scheduler = engine.stats().scheduler
    assert scheduler.num_free_blocks == scheduler.num_total_blocks
    assert not engine.has_unfinished_requests()


def test_the_pools_are_small_enough_to_preempt(engines: dict[str, Engine]) -> None:
    """Guards the test above: it would prove little if nothing had ever been preempted, swapped or hit."""
    heavy = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    for engine in engines.values():
        before = engine.stats().scheduler
        batches = [[(str(i), STREAMS[i % 3][i : i + 14]) for i in range(6)], [("a", STREAMS[0])], [("b", STREAMS[0])]]
        for batch in batches:
            for name, prompt in batch:
                engine.add_request(name, prompt, heavy)
            while engine.has_unfinished_requests():
                engine.step()
        after = engine.stats().scheduler
        assert after.preemptions_total > before.preemptions_total
        if engine.config.enable_prefix_caching:
            assert after.prefix_hits_total > before.prefix_hits_total
        if engine.config.swap_space:
            assert after.swapped_out_blocks_total > before.swapped_out_blocks_total
