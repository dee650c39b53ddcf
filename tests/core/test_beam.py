"""The logic of beam search against brute force, and on small cases that can be followed by hand."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from beam_reference import beam_search
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_model import PagedModel, tokens_alone

from jaxpaged.config import CacheConfig, SchedulerConfig
from jaxpaged.core.admission import Admission
from jaxpaged.core.beam import BeamSearch, BeamSettings, num_candidates, place, rank
from jaxpaged.core.group import SequenceGroup
from jaxpaged.core.kv_manager import KVManager
from jaxpaged.core.plan import StepResult
from jaxpaged.core.rows import BatchRows
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.request import FinishReason, Request, SamplingParams, SequenceStatus

VOCAB = 12


def top(logprobs: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` most probable tokens of each row [W, V]: ids and log-probabilities."""
    ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :count].astype(np.int32)
    return ids, np.take_along_axis(logprobs, ids, axis=1).astype(np.float32)


@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.integers(1, 5),
    stop_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=4),
    vocab_size=st.integers(9, VOCAB),
)
@settings(deadline=None, max_examples=200)
def test_ranking_needs_no_more_than_its_candidates(
    seed: int, width: int, stop_ids: frozenset[int], vocab_size: int
) -> None:
    rng = np.random.default_rng(seed)
    sums, logprobs = -10 * rng.random(width), np.log(rng.dirichlet(np.ones(VOCAB), width)).astype(np.float32)
    logprobs[:, vocab_size:] = -np.inf
    everything = sorted(
        ((sums[b] + logprobs[b, t], b, t) for b in range(width) for t in range(vocab_size)), reverse=True
    )
    ranking = rank(sums, *top(logprobs, num_candidates(width, stop_ids)), stop_ids, vocab_size)
    best = everything[:width]
    survivors = [c for c in everything if c[2] not in stop_ids][:width]
    for found, expected in (
        (ranking.best, best),
        (ranking.ended, [c for c in best if c[2] in stop_ids]),
        (ranking.survivors, survivors),
    ):
        assert [(s.parent, s.token_id) for s in found] == [(b, t) for _, b, t in expected]
        assert [s.logprob for s in found] == [p for p, _, _ in expected]


def test_padding_is_no_token() -> None:
    ids, logprobs = np.int32([[11, 3, 10, 4]]), np.float32([[-1, -2, -3, -4]])
    assert [s.token_id for s in rank(np.zeros(1), ids, logprobs, (), 10).best] == [3]


@given(parents=st.integers(1, 6).flatmap(lambda n: st.lists(st.integers(0, n - 1), min_size=n, max_size=n)))
def test_every_survivor_has_a_place_and_parents_keep_theirs(parents: list[int]) -> None:
    places = place(parents, len(parents))
    assert sorted(places) == list(range(len(parents)))
    for index in set(parents):
        assert places[parents.index(index)] == index


@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 8),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 3.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
    stop_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=4),
)
@settings(deadline=None, max_examples=200)
def test_search_equals_brute_force(
    seed: int,
    width: int,
    max_tokens: int,
    length_penalty: float,
    early_stopping: bool | str,
    stop_ids: frozenset[int],
) -> None:
    def next_logprobs(tokens: list[int]) -> np.ndarray:
        logits = 2 * np.random.default_rng([seed, *tokens]).normal(size=VOCAB)
        return (logits - np.log(np.exp(logits).sum())).astype(np.float32)

    found = beam_search(
        next_logprobs,
        width=width,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    search = BeamSearch(BeamSettings(length_penalty, early_stopping), width)
    beams: list[list[int]] = [[] for _ in range(width)]
    while not search.is_done:
        logprobs = np.stack([next_logprobs(tokens) for tokens in beams])
        candidates = top(logprobs, num_candidates(width, stop_ids))
        going_on = search.advance(beams, *candidates, stop_ids=stop_ids, vocab_size=VOCAB, max_tokens=max_tokens)
        beams = [[*beams[going_on[i].parent], going_on[i].token_id] for i in sorted(going_on)]
    assert [h.token_ids for h in search.hypotheses] == [f.token_ids for f in found]
    assert [h.logprob for h in search.hypotheses] == pytest.approx([f.logprob for f in found])
    assert [h.score for h in search.hypotheses] == pytest.approx([f.score for f in found])


def test_too_few_tokens_leave_beams_that_do_not_count() -> None:
    search = BeamSearch(BeamSettings(), 3)
    ids, logprobs = np.int32([[0, 1, 2]] * 3), np.float32([[-1, -np.inf, -np.inf]] * 3)
    going_on = search.advance([[], [], []], ids, logprobs, stop_ids=(), vocab_size=9, max_tokens=2)
    assert [(going_on[i].parent, going_on[i].token_id) for i in range(3)] == [(0, 0)] * 3
    assert search.logprobs.tolist() == [-1, -np.inf, -np.inf]
    search.advance([[0]] * 3, ids, logprobs, stop_ids=(), vocab_size=9, max_tokens=2)
    assert search.is_done and [h.token_ids for h in search.hypotheses] == [[0, 0]]


# With the scheduler


def scheduler_with(width: int, prompt: int, block_size: int, **options: object) -> tuple[Scheduler, Request]:
    cache = CacheConfig(num_blocks=60, block_size=block_size)
    scheduler = Scheduler(SchedulerConfig(max_model_len=64, max_num_seqs=8, debug_checks=True), cache)
    params = SamplingParams(n=width, max_tokens=20, beam_search=BeamSettings(), **options)
    request = Request("a", list(range(prompt)), params, 20, seed=0, eos_token_ids=frozenset({7}))
    scheduler.add(request)
    return scheduler, request


def draw(scheduler: Scheduler, continuations: dict[int, list[tuple[int, float]]]) -> tuple[int, int]:
    """One step, in which each beam's most probable tokens are given; copies made and blocks in use before the step's
    result is taken in.
    """
    plan = scheduler.schedule()
    assert plan is not None
    K = plan.sample.num_logprobs
    ids, logprobs = np.zeros((len(plan.sampled), K), np.int32), np.full((len(plan.sampled), K), -np.inf, np.float32)
    for i, sequence in enumerate(plan.sampled):
        for k, (token, logprob) in enumerate(continuations.get(sequence.index, [])):
            ids[i, k], logprobs[i, k] = token, logprob
    stats = scheduler.stats()
    result = StepResult(np.zeros(len(plan.sampled), np.int32), top_token_ids=ids, top_logprobs=logprobs)
    assert scheduler.update(plan, result) == []
    return len(plan.copies), stats.num_total_blocks - stats.num_free_blocks


def outputs(request: Request) -> list[list[int]]:
    return [s.output_token_ids for s in request.sequences]


def test_blocks_of_beams_that_go_on_and_of_those_that_do_not() -> None:
    """Blocks of 4, a prompt of 6: one whole block, one half full."""
    scheduler, request = scheduler_with(3, 6, 4)
    assert draw(scheduler, {0: [(10, -1), (11, -2), (12, -3)]}) == (0, 2)
    assert outputs(request) == [[10], [11], [12]]
    # Three write into the shared block: two copies, and the third has it for itself.
    assert draw(scheduler, {0: [(20, -1), (21, -2)], 1: [(22, -0.5)], 2: [(23, -9)]}) == (2, 4)
    # Beam 2 is dropped and its block with it; beam 0 goes on twice.
    assert outputs(request) == [[10, 20], [11, 22], [10, 21]]
    tables = [s.block_table for s in request.sequences]
    assert tables[0] == tables[2] != tables[1] and tables[0][0] == tables[1][0]
    assert draw(scheduler, {i: [(30 + i, -1)] for i in range(3)}) == (1, 4)
    # The blocks are full now: what comes next is each beam's own, and nothing is copied, whoever forks.
    assert draw(scheduler, {0: [(40, -1), (41, -1.1), (42, -1.2)]}) == (0, 7)
    assert outputs(request) == [[10, 20, 30, 40], [10, 20, 30, 41], [10, 20, 30, 42]]
    assert len({s.block_table[2] for s in request.sequences}) == 1


def test_a_prompt_of_whole_blocks_is_not_copied() -> None:
    scheduler, request = scheduler_with(4, 8, 4)
    assert draw(scheduler, {0: [(10 + i, -1 - i) for i in range(4)]}) == (0, 2)
    assert draw(scheduler, {i: [(20, -1)] for i in range(4)}) == (0, 6)
    assert [s.block_table[:2] for s in request.sequences] == [request.sequences[0].block_table[:2]] * 4


def test_a_beam_that_ends_frees_its_place_and_the_others_go_on() -> None:
    scheduler, request = scheduler_with(2, 3, 4)
    draw(scheduler, {0: [(10, -1), (11, -2)]})
    draw(scheduler, {0: [(7, -0.5), (12, -3)], 1: [(13, -1), (14, -4)]})  # [10, 7] is complete
    assert outputs(request) == [[10, 12], [11, 13]] and not request.is_finished
    draw(scheduler, {0: [(7, -0.1), (15, -8)], 1: [(7, -0.2), (16, -9)]})  # so are both others
    assert request.is_finished
    # Scores: -1.5 / 2; -3.2 / 3 for 11, 13; -4.1 / 3 for 10, 12.
    assert outputs(request) == [[10, 7], [11, 13, 7]]
    assert {s.finish_reason for s in request.sequences} == {FinishReason.STOP}
    assert scheduler.stats().num_free_blocks == scheduler.stats().num_total_blocks


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_nothing_is_held_twice(block_size: int) -> None:
    """Blocks in use are exactly the different heads of outputs that end a block: what differs is copied, no more."""
    cache = CacheConfig(num_blocks=300, block_size=block_size, enable_prefix_caching=False)
    scheduler = Scheduler(SchedulerConfig(max_model_len=64, max_num_seqs=12, debug_checks=True), cache)
    model, requests = PagedModel(cache), []
    for i, (width, prompt_len) in enumerate([(4, 12), (3, 7), (5, 1)]):
        params = SamplingParams(n=width, max_tokens=25, beam_search=BeamSettings(0.5, "never"))
        prompt = [100 * i + k for k in range(prompt_len)]
        requests.append(Request(str(i), prompt, params, 25, seed=0, eos_token_ids=frozenset({7})))
        scheduler.add(requests[-1])
    while (plan := scheduler.schedule()) is not None:
        heads = set()
        for sequence in plan.scheduled:
            tokens = sequence.tokens(0, sequence.num_tokens)
            for start in range(0, len(tokens), block_size):
                heads.add((sequence.request.request_id, *tokens[: start + block_size]))
        stats = scheduler.stats()
        assert stats.num_total_blocks - stats.num_free_blocks == len(heads)
        scheduler.update(plan, model.run(plan))
    assert all(r.is_finished for r in requests)
    assert (scheduler.stats().copied_blocks_total > 10) == (block_size > 1)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_all_beams_are_computed_in_one_step_or_none(mode: Literal["recompute", "swap"]) -> None:
    """A small budget, and long searches that make each other give way."""
    cache = CacheConfig(num_blocks=30, block_size=2, num_host_blocks=40 if mode == "swap" else 0)
    config = SchedulerConfig(
        max_model_len=40,
        max_num_seqs=8,
        max_num_batched_tokens=8,
        preemption_mode=mode,
        watermark=0.0,
        debug_checks=True,
    )
    scheduler, model = Scheduler(config, cache), PagedModel(cache)
    params = SamplingParams(n=3, max_tokens=14, ignore_eos=True, beam_search=BeamSettings())
    requests = [Request(name, [ord(name)] * 5, params, 14, seed=0) for name in "abc"]
    # Whose long prompts take all but a little of the budget of some steps.
    requests += [Request(name, [ord(name)] * 20, SamplingParams(ignore_eos=True), 4, seed=0) for name in "de"]
    for request in requests:
        scheduler.add(request)
    while (plan := scheduler.schedule()) is not None:
        drawn: dict[str, int] = {}
        for sequence in plan.sampled:
            drawn[sequence.request.request_id] = drawn.get(sequence.request.request_id, 0) + 1
        for name, count in drawn.items():
            if name in "de":
                continue
            is_first = not next(s for s in plan.sampled if s.request.request_id == name).output_token_ids
            assert count == (1 if is_first else 3)
        scheduler.update(plan, model.run(plan))
    assert scheduler.stats().preemptions_total > 0
    assert (scheduler.stats().swapped_out_blocks_total > 0) == (mode == "swap")
    for request in requests:
        assert [s.output_token_ids for s in request.sequences] == tokens_alone(request, 40)


@pytest.mark.parametrize(("lags", "budget", "written"), [([1, 1, 1], 2, None), ([1, 1, 1], 3, [9, 9, 9])])
def test_swapped_beams_come_back_together(lags: list[int], budget: int, written: list[int] | None) -> None:
    assert _written_on_return(lags, budget) == written


@pytest.mark.parametrize(
    ("lags", "budget", "written"),
    [([4, 1, 1], 2, [7]), ([1, 1, 3], 9, [8]), ([3, 2, 1], 9, [8, 8]), ([1, 4, 4], 5, [8, 7])],
)
def test_swapped_beams_that_lag_catch_up_but_for_the_newest_token(
    lags: list[int], budget: int, written: list[int]
) -> None:
    assert _written_on_return(lags, budget) == written


def _written_on_return(lags: list[int], budget: int) -> list[int] | None:
    """Ends of what is computed first of swapped beams of 9 tokens, of which so many are to be computed."""
    config = SchedulerConfig(max_model_len=40, max_num_seqs=8)
    params = SamplingParams(n=3, max_tokens=14, beam_search=BeamSettings())
    request = Request("a", [1, 2, 3], params, 14, seed=0)
    for sequence, lag in zip(request.sequences, lags, strict=True):
        sequence.output_token_ids = [4] * 6
        sequence.num_computed = 9 - lag
        sequence.status = SequenceStatus.SWAPPED
    group = SequenceGroup(request, (0, 0.0, 0))
    group.forked = True
    offer = Admission(config, KVManager(CacheConfig(50)), BatchRows(8, 10)).consider(group, budget)
    return None if offer is None else [end for _, end in offer.writes]
