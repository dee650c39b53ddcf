"""What plans carry for parameters that constrain draws, and that they carry nothing for those that do not."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpaged.config import CacheConfig, SchedulerConfig
from jaxpaged.core.constraints import Constraints, bitmask
from jaxpaged.core.plan import StepPlan, StepResult
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.request import Request, SamplingParams


def make_request(
    name: str = "r",
    prompt: list[int] | None = None,
    *,
    bad_words: tuple[tuple[int, ...], ...] = (),
    eos: tuple[int, ...] = (2, 7),
    vocab_size: int = 100,
    **params: object,
) -> Request:
    settings = SamplingParams(**{"max_tokens": 8, **params})
    return Request(
        name,
        prompt or [5, 6, 5],
        settings,
        max_tokens=8,
        seed=0,
        eos_token_ids=frozenset(eos),
        bad_words=bad_words,
        vocab_size=vocab_size,
    )


def edits_after(request: Request, output: list[int]) -> dict[int, float]:
    assert request.constraints is not None
    request.sequences[0].output_token_ids[:] = output
    sequence = request.sequences[0]
    edits = request.constraints.edits(sequence, len(sequence.output_token_ids))
    assert len(edits.token_ids) == len(edits.values)
    total: dict[int, float] = {}
    for token, value in zip(edits.token_ids.tolist(), edits.values.tolist(), strict=True):
        total[token] = total.get(token, 0.0) + value
    return total


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.0, "top_k": 3, "seed": 1, "stop_token_ids": [9]}, {"repetition_penalty": 1.2}]
)
def test_plain_requests_have_no_constraints(params: dict[str, object]) -> None:
    assert Constraints.of(make_request(**params)) is None


def test_min_tokens_forbids_every_end_until_then() -> None:
    request = make_request(min_tokens=2, stop_token_ids=[9, 99], ignore_eos=True, eos=(2, 7, 100, 5000))
    forbidden = dict.fromkeys([2, 7, 9, 99], -np.inf)  # not those beyond the vocabulary
    assert edits_after(request, []) == edits_after(request, [1]) == forbidden
    assert edits_after(request, [1, 1]) == {}


def test_bias_and_bad_words_add_up() -> None:
    request = make_request(logit_bias={3: 1.5, 4: 200, 150: 1}, bad_words=((4,), (8, 9), (1, 8, 10), (8, 11), (4,)))
    assert edits_after(request, []) == {3: 1.5, 4: -np.inf}
    assert edits_after(request, [8]) == {3: 1.5, 4: -np.inf, 9: -np.inf, 11: -np.inf}
    assert edits_after(request, [1, 8]) == {3: 1.5, 4: -np.inf, 9: -np.inf, 10: -np.inf, 11: -np.inf}
    assert edits_after(request, [8, 1]) == {3: 1.5, 4: -np.inf}


def test_bits_of_a_mask() -> None:
    assert bitmask([0, 31, 32, 70]).tolist() == [1 | 1 << 31, 1, 1 << 6]
    assert bitmask([3, 3]).tolist() == [8]


def make_scheduler(**config: object) -> Scheduler:
    settings = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 8, "debug_checks": True, **config}
    return Scheduler(SchedulerConfig(**settings), CacheConfig(num_blocks=40, block_size=4))


def step(scheduler: Scheduler, token: int = 50) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan, StepResult(np.full(len(plan.sampled), token, np.int32)))
    return plan


def test_a_plan_carries_what_its_draws_need_and_nothing_else() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("plain"))
    scheduler.add(make_request("min", min_tokens=2, logprob_token_ids=[4, 3]))
    assert step(scheduler).adjustments is not None
    scheduler.add(make_request("penalty", [1, 2], presence_penalty=0.5, logit_bias={8: -1}, allowed_token_ids=[8, 40]))
    adjustments = step(scheduler).adjustments
    assert adjustments is not None and adjustments.penalties is not None
    edits = zip(
        adjustments.edit_draws.tolist(),
        adjustments.edit_token_ids.tolist(),
        adjustments.edit_values.tolist(),
        strict=True,
    )
    assert sorted(edits) == [(1, 2, -np.inf), (1, 7, -np.inf), (2, 8, -1.0)]
    assert {d: m.tolist() for d, m in adjustments.masks.items()} == {2: [1 << 8, 1 << 8]}
    assert {d: i.tolist() for d, i in adjustments.logprob_token_ids.items()} == {1: [4, 3]}
    assert adjustments.penalties.presence.tolist() == [0, 0, 0.5]
    assert adjustments.penalties.prompt_len.tolist()[2] == 2
    scheduler.abort("penalty")
    later = step(scheduler).adjustments
    # min_tokens is over, its log-probabilities go on
    assert later is not None and later.penalties is None and not later.masks and not len(later.edit_draws)
    scheduler.abort("min")
    assert step(scheduler).adjustments is None


def spans(plan: StepPlan) -> list[tuple[str, int, list[int]]]:
    return [(s.request.request_id, s.start, s.target_ids.tolist()) for s in plan.prompt_spans]


def test_prompt_spans_cover_each_position_once() -> None:
    """Two prompts in chunks, a preemption in between, and a cache that is warm."""
    prompt = list(range(10, 31))
    scheduler = make_scheduler()
    scheduler.add(make_request("first", prompt, max_tokens=1))
    while scheduler.has_unfinished():
        step(scheduler)
    scheduler.add(make_request("r", prompt, prompt_logprobs=1))
    scheduler.add(make_request("hit", prompt))
    seen = []
    for chunk in range(7):
        plan = step(scheduler)
        for name, start, targets in spans(plan):
            assert name == "r"
            for i, target in enumerate(targets):
                assert plan.token_ids[start + i] == target - 1  # tokens of the prompt count up
            seen += targets
        if chunk == 1:
            scheduler.drop_kv()
    step(scheduler)
    assert seen == prompt[1:]
    stats = scheduler.stats()
    assert stats.prefix_queries_total == 2 * len(prompt)  # not of the request that does not read
