"""Rules of the scheduler, one by one."""

from __future__ import annotations

import numpy as np
import pytest
from paged_model import PagedModel, next_token, tokens_alone

from jaxpaged.config import CacheConfig, SchedulerConfig
from jaxpaged.core.beam import BeamSettings
from jaxpaged.core.plan import StepPlan, StepResult
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.errors import InvalidRequestError, QueueFullError
from jaxpaged.request import FinishReason, Request, SamplingParams, SequenceStatus


class Rig:
    """A scheduler with a model behind it."""

    def __init__(self, *, num_blocks: int = 100, block_size: int = 4, host: int = 0, prefix: bool = True, **options):
        self.cache = CacheConfig(num_blocks + 1, block_size, host, prefix)
        options = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, **options}
        self.config = SchedulerConfig(**options, debug_checks=True)
        self.scheduler = Scheduler(self.config, self.cache)
        self.model = PagedModel(self.cache)
        self.requests: dict[str, Request] = {}

    def add(self, name: str, prompt: list[int] | int, max_tokens: int = 8, **options) -> Request:
        """A request whose prompt is given, or has so many tokens of its own."""
        tokens = [100 * ord(name[0]) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        fields = {k: options.pop(k) for k in ("arrival_time", "priority", "cache_salt") if k in options}
        params = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **options})
        request = Request(name, tokens, params, max_tokens, params.seed or 0, frozenset({7}), **fields)
        self.scheduler.add(request)
        self.requests[name] = request
        return request

    def schedule(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def step(self, times: int = 1) -> StepPlan:
        for _ in range(times):
            plan = self.schedule()
            self.scheduler.update(plan, self.model.run(plan))
        return plan

    def run(self) -> int:
        """To the end; the number of steps. Checks everyone's tokens."""
        steps = 0
        while (plan := self.scheduler.schedule()) is not None:
            self.scheduler.update(plan, self.model.run(plan))
            steps += 1
        for request in self.requests.values():
            outputs = [s.output_token_ids for s in request.sequences]
            assert outputs == tokens_alone(request, self.config.max_model_len)
        stats = self.scheduler.stats()
        assert stats.num_free_blocks == stats.num_total_blocks
        return steps

    @property
    def free(self) -> int:
        return self.scheduler.stats().num_free_blocks


def counts(plan: StepPlan) -> dict[str, int]:
    """Tokens of each request in the plan."""
    result: dict[str, int] = {}
    for sequence, count in zip(plan.scheduled, np.diff(plan.query_starts).tolist(), strict=True):
        result[sequence.request.request_id] = result.get(sequence.request.request_id, 0) + count
    return result


# Plans


def test_a_plan_of_decodes_draws_once_from_each_row_in_order() -> None:
    rig = Rig()
    for name in "abc":
        rig.add(name, 5)
    rig.step()
    plan = rig.step()
    assert plan.num_decodes == 3 and plan.num_tokens == 3
    assert plan.sample.token_index.tolist() == [0, 1, 2]
    assert plan.sampled == plan.scheduled
    assert plan.positions.tolist() == [5, 5, 5] and plan.kv_lens.tolist() == [6, 6, 6]
    assert plan.sample.position.tolist() == [6, 6, 6]
    assert plan.block_tables.shape == (3, 2)  # as wide as the longest table
    for array in (plan.token_ids, plan.positions, plan.query_starts, plan.kv_lens, plan.block_tables, plan.copies):
        assert array.dtype == np.int32
    rig.run()


def test_sampling_parameters_reach_the_row_as_the_device_wants_them() -> None:
    rig = Rig()
    rig.add("a", 3, temperature=1e-6, top_k=-1, seed=2**40 + 5)
    rig.add("b", 3, temperature=0.001, top_k=3, top_p=0.5, min_p=0.25, logprobs=2)
    rig.add("c", 3, temperature=0.7, logprobs=0)
    sample = rig.step().sample
    assert sample.temperature.tolist() == pytest.approx([0, 0.01, 0.7])
    assert sample.top_k.tolist() == [0, 3, 0]
    assert sample.top_p.tolist() == [1, 0.5, 1] and sample.min_p.tolist() == [0, 0.25, 0]
    assert sample.seed.tolist() == [[5, 256], [0, 0], [0, 0]]
    assert sample.num_logprobs == 2
    rig.scheduler.abort("b")
    assert rig.step().sample.num_logprobs == 0
    rig.scheduler.abort("c")
    assert rig.step().sample.num_logprobs == -1


def test_one_plan_ahead_and_no_more() -> None:
    rig = Rig()
    rig.add("a", 3)
    first = rig.schedule()
    result = rig.model.run(first)
    second = rig.schedule()
    assert second.token_ids.tolist() == [-1 - first.sample.row[0]] and second.positions.tolist() == [3]
    with pytest.raises(RuntimeError, match="two plans are under way"):
        rig.scheduler.schedule()
    with pytest.raises(RuntimeError, match="not the oldest plan"):
        rig.scheduler.update(second, result)
    assert rig.scheduler.update(first, result) == [0]
    with pytest.raises(RuntimeError, match="not the oldest plan"):
        rig.scheduler.update(first, result)
    assert rig.schedule().positions.tolist() == [4]


def test_nothing_is_planned_beyond_a_known_end() -> None:
    rig = Rig()
    rig.add("a", 3, max_tokens=2)
    first, second = rig.schedule(), rig.schedule()
    rig.scheduler.update(first, rig.model.run(first))
    assert rig.scheduler.schedule() is None and rig.scheduler.has_unfinished()
    rig.scheduler.update(second, rig.model.run(second))
    assert not rig.scheduler.has_unfinished()


def test_a_stop_token_ends_a_sequence_that_has_been_planned_further() -> None:
    rig = Rig()
    stop = next_token([*range(3)], seed=0)
    request = rig.add("a", [*range(3)], stop_token_ids=[stop])
    other = rig.add("b", 5)
    first, second = rig.schedule(), rig.schedule()
    results = [rig.model.run(first), rig.model.run(second)]
    rig.scheduler.update(first, results[0])
    sequence = request.sequences[0]
    assert (sequence.finish_reason, sequence.stop_reason, sequence.block_table) == (FinishReason.STOP, stop, [])
    assert [second.sampled[i].request for i in rig.scheduler.update(second, results[1])] == [other]
    assert sequence.output_token_ids == [stop]
    rig.run()


def test_nobody_gives_way_before_all_tokens_are_known() -> None:
    rig = Rig(num_blocks=4, block_size=2, prefix=False)
    rig.add("a", 3, max_tokens=4, arrival_time=0)
    rig.add("b", 3, max_tokens=4, arrival_time=1)
    first, second = rig.schedule(), rig.schedule()
    results = [rig.model.run(first), rig.model.run(second)]
    rig.scheduler.update(first, results[0])
    assert rig.scheduler.schedule() is None
    assert rig.scheduler.stats().preemptions_total == 0
    rig.scheduler.update(second, results[1])
    assert rig.schedule().scheduled == tuple(rig.requests["a"].sequences)
    assert rig.scheduler.stats().preemptions_total == 1


def test_who_depends_on_the_text_waits_for_it() -> None:
    rig = Rig()
    rig.add("a", 3, beam_search=BeamSettings(), n=2)
    rig.add("b", 5)
    plan = rig.schedule()
    assert rig.scheduler.schedule() is None  # though b could go on
    rig.scheduler.update(plan, rig.model.run(plan))
    assert rig.run() > 0


def test_a_prefix_planned_in_the_last_step_is_found_in_the_next() -> None:
    rig = Rig(block_size=4)
    rig.add("a", list(range(9)), arrival_time=0)
    first = rig.schedule()
    late = rig.add("b", list(range(9)), arrival_time=1)
    second = rig.schedule()
    assert late.num_cached_tokens == 8 and len(second.token_ids) == 2
    for plan in (first, second):
        rig.scheduler.update(plan, rig.model.run(plan))
    rig.run()


def test_a_plan_behind_a_failed_one_never_ran() -> None:
    rig = Rig(block_size=4)
    failing = rig.add("a", list(range(9)), arrival_time=0)
    first = rig.schedule()
    late = rig.add("b", list(range(9)), arrival_time=1)
    second = rig.schedule()
    assert rig.scheduler.fail(first) == [failing]
    with pytest.raises(RuntimeError, match="not the oldest plan"):
        rig.scheduler.update(second, StepResult(np.zeros(1, np.int32)))
    del rig.requests["a"]
    rig.run()
    assert late.sequences[0].finish_reason is FinishReason.LENGTH


# Who runs


def test_a_long_prompt_is_cut_to_what_the_decodes_leave() -> None:
    rig = Rig(max_num_batched_tokens=8)
    for name in "abc":
        rig.add(name, 2)
    rig.step()
    rig.add("d", 20, max_tokens=1)
    assert counts(rig.step()) == {"a": 1, "b": 1, "c": 1, "d": 5}
    assert counts(rig.step()) == {"a": 1, "b": 1, "c": 1, "d": 5}
    rig.run()


def test_threshold_leaves_room_for_the_next_prompt() -> None:
    rig = Rig(max_num_batched_tokens=8, long_prefill_token_threshold=3)
    rig.add("a", 20, max_tokens=1)
    rig.add("b", 20, max_tokens=1)
    assert counts(rig.step()) == {"a": 3, "b": 3}
    rig.run()


def test_whole_prompts_wait_until_they_fit_and_nobody_overtakes() -> None:
    rig = Rig(max_num_batched_tokens=64, enable_chunked_prefill=False)
    rig.add("a", 40, max_tokens=3)
    rig.add("b", 40, max_tokens=3)
    rig.add("c", 2, max_tokens=3)
    assert counts(rig.step()) == {"a": 40}
    assert counts(rig.step()) == {"a": 1, "b": 40, "c": 2}
    rig.run()


def test_nobody_overtakes_a_recompute_that_waits_for_the_budget() -> None:
    rig = Rig(enable_chunked_prefill=False)
    rig.add("a", 4, max_tokens=50, n=2)
    rig.step(36)
    rig.scheduler.drop_kv()
    assert counts(rig.step()) == {"a": 4}  # the prompt, once
    rig.add("b", 5)
    assert counts(rig.step()) == {"a": 36}  # one sibling's outputs; 28 of 64 are left, the other needs 36
    assert counts(rig.step()) == {"a": 37, "b": 5}
    rig.run()


def test_order_of_service() -> None:
    fcfs = Rig(max_num_seqs=1)
    fcfs.add("late", 2, max_tokens=1, arrival_time=2.0, priority=-5)
    fcfs.add("early", 2, max_tokens=1, arrival_time=1.0)
    fcfs.add("tie", 2, max_tokens=1, arrival_time=1.0)
    assert [list(counts(fcfs.step())) for _ in range(3)] == [["early"], ["tie"], ["late"]]
    priority = Rig(max_num_seqs=1, policy="priority")
    priority.add("early", 2, max_tokens=1, arrival_time=1.0)
    priority.add("urgent", 2, max_tokens=1, arrival_time=2.0, priority=-5)
    assert [list(counts(priority.step())) for _ in range(2)] == [["urgent"], ["early"]]


def test_priority_decides_who_gives_way() -> None:
    rig = Rig(num_blocks=4, policy="priority")
    rig.add("first", 8, priority=1)
    rig.add("urgent", 8, priority=0)
    rig.step()
    rig.step()
    assert rig.requests["first"].num_preemptions == 1
    assert rig.requests["urgent"].num_preemptions == 0
    rig.run()


def test_a_group_needs_a_row_for_each_sequence() -> None:
    rig = Rig(max_num_seqs=4)
    rig.add("a", 2, n=3)
    rig.add("b", 2, n=2)
    rig.add("c", 2)
    assert counts(rig.step()) == {"a": 2}
    assert rig.scheduler.stats().num_running_sequences == 3
    rig.run()


# What is refused


def test_refusals_name_value_limit_and_remedy() -> None:
    rig = Rig(num_blocks=10, max_num_queued_requests=1)
    with pytest.raises(InvalidRequestError, match=r"n is 9, but at most 8 .* raise max_num_seqs"):
        rig.add("a", 2, n=9)
    with pytest.raises(InvalidRequestError, match=r"64 tokens, .* 64 of max_model_len"):
        rig.add("a", 64)
    with pytest.raises(InvalidRequestError, match=r"can need 11 KV blocks .* the pool has 10; lower max_tokens"):
        rig.add("a", 2, max_tokens=40)
    rig.add("a", 2)
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        rig.add("a", 2)
    with pytest.raises(QueueFullError, match="1 requests are waiting"):
        rig.add("b", 2)
    rig.step()
    rig.add("b", 2)
    rig.run()


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("prompt_len", [4, 6, 7, 9])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 10])
def test_the_smallest_pool_that_is_accepted_is_just_enough(n: int, prompt_len: int, max_tokens: int) -> None:
    """Nothing is refused that would fit, and what is accepted completes alone without giving way."""
    for num_blocks in range(1, 40):
        rig = Rig(num_blocks=num_blocks)
        try:
            rig.add("a", prompt_len, max_tokens=max_tokens, n=n)
        except InvalidRequestError:
            continue
        break
    fewest_free = num_blocks
    while (plan := rig.scheduler.schedule()) is not None:
        fewest_free = min(fewest_free, rig.free)
        rig.scheduler.update(plan, rig.model.run(plan))
    assert fewest_free == 0
    assert rig.scheduler.stats().preemptions_total == 0


def test_the_models_length_bounds_what_is_needed() -> None:
    rig = Rig(num_blocks=16)
    request = rig.add("a", 60, max_tokens=1000)
    rig.run()
    assert request.sequences[0].finish_reason is FinishReason.LENGTH
    assert request.sequences[0].num_tokens == 64


# Sharing


def test_siblings_store_the_prompt_once_and_copy_its_last_block_when_they_diverge() -> None:
    rig = Rig()
    rig.add("a", 10, n=3, seed=5)
    plan = rig.step()
    assert len(plan.scheduled) == 1 and len(plan.sampled) == 3
    assert plan.sample.token_index.tolist() == [9, 9, 9]
    assert plan.sample.seed[:, 0].tolist() == [5, 6, 7]
    assert rig.free == 100 - 3
    plan = rig.step()
    shared = rig.requests["a"].sequences[0].block_table[:2]
    assert len(plan.copies) == 2  # the last owner writes in place
    assert plan.num_decodes == 3 and rig.free == 100 - 2 - 3
    assert (plan.block_tables[:, :2] == shared).all()
    assert len(set(plan.block_tables[:, 2].tolist())) == 3
    rig.run()
    assert rig.scheduler.stats().copied_blocks_total == 2


def test_siblings_copy_nothing_when_the_prompt_fills_its_blocks() -> None:
    rig = Rig()
    rig.add("a", 8, n=3)
    rig.run()
    assert rig.scheduler.stats().copied_blocks_total == 0


def test_outputs_are_found_by_the_next_turn() -> None:
    rig = Rig()
    first = rig.add("a", 6, max_tokens=8)
    rig.run()
    # 14 tokens, of which the last was never written: three full blocks.
    chat = first.prompt_token_ids + first.sequences[0].output_token_ids
    second = rig.add("b", [*chat, 1, 2])
    rig.run()
    assert second.num_cached_tokens == 12
    stats = rig.scheduler.stats()
    assert (stats.prefix_hits_total, stats.prefix_queries_total) == (12, 6 + 16)


def test_at_least_one_token_is_computed() -> None:
    rig = Rig()
    rig.add("a", list(range(8)))
    rig.run()
    again = rig.add("b", list(range(8)))
    assert counts(rig.step()) == {"b": 4}
    assert again.num_cached_tokens == 4
    rig.run()


def test_salt_and_reset_separate_what_is_equal() -> None:
    rig = Rig()
    for name, salt in (("a", None), ("b", ""), ("c", "x"), ("d", "x")):
        rig.add(name, list(range(9)), cache_salt=salt)
        rig.run()
    rig.scheduler.reset_prefix_cache()
    rig.add("e", list(range(9)))
    rig.run()
    assert [r.num_cached_tokens for r in rig.requests.values()] == [0, 0, 0, 8, 0]


def test_what_runs_across_a_reset_is_not_found_later() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.add("a", list(range(20)), max_tokens=4)
    rig.step()
    rig.scheduler.reset_prefix_cache()
    rig.step(2)
    second = rig.add("b", list(range(20)), max_tokens=4)
    rig.step(3)
    assert second.num_cached_tokens == 0
    third = rig.add("c", list(range(20)), max_tokens=4)
    rig.step()
    assert third.num_cached_tokens == 16
    assert third.sequences[0].block_table[:4] == second.sequences[0].block_table[:4]
    rig.run()


def test_who_waits_across_a_reset_finds_nothing_from_before() -> None:
    rig = Rig(num_blocks=8)
    rig.add("a", list(range(20)), max_tokens=2)
    late = rig.add("b", list(range(20)), max_tokens=2)
    plan = rig.schedule()
    assert counts(plan) == {"a": 20}
    rig.scheduler.reset_prefix_cache()
    rig.scheduler.update(plan, rig.model.run(plan))
    rig.run()
    assert late.num_cached_tokens == 0


def test_equal_prompts_of_one_step_are_computed_each_but_kept_once() -> None:
    rig = Rig()
    rig.add("a", list(range(9)), max_tokens=1)
    rig.add("b", list(range(9)), max_tokens=1)
    assert counts(rig.step()) == {"a": 9, "b": 9}
    assert rig.scheduler.stats().num_cached_blocks == 2
    rig.run()


def test_a_hit_on_a_free_block_takes_it_out_of_the_free_ones() -> None:
    rig = Rig(num_blocks=6)
    rig.add("a", list(range(8)), max_tokens=1)
    rig.run()  # leaves two cached and free blocks
    rig.add("c", 10, max_tokens=6)
    rig.step()
    assert rig.free == 3
    # Four blocks, two of them hits that are among the three free ones: one new block is there, two are needed.
    rig.add("b", [*range(8), *range(50, 58)], max_tokens=2)
    assert counts(rig.step()) == {"c": 1}
    rig.run()
    assert rig.requests["b"].num_preemptions == 0


# Giving way


def test_recompute_keeps_tokens_and_draws_none_again() -> None:
    rig = Rig(num_blocks=6, prefix=False)
    rig.add("a", 8, max_tokens=10)
    late = rig.add("b", 8, max_tokens=10)
    rig.step(5)
    kept = list(late.sequences[0].output_token_ids)
    rig.step()
    assert late.num_preemptions == 1 and late.sequences[0].status is SequenceStatus.WAITING
    while late.sequences[0].status is SequenceStatus.WAITING:
        rig.step()
    assert late.sequences[0].output_token_ids[: len(kept)] == kept
    assert len(late.sequences[0].output_token_ids) == len(kept) + 1
    rig.run()


def test_swapped_siblings_keep_shared_blocks_once_and_come_back_with_them() -> None:
    rig = Rig(num_blocks=13, host=20, preemption_mode="swap")
    rig.add("a", 18, max_tokens=20)
    rig.add("b", 10, max_tokens=4, n=3)
    rig.step(2)
    assert rig.free == 13 - 5 - 5
    rig.add("c", 9, max_tokens=3, arrival_time=-1.0)  # comes late, but is served first
    assert rig.step().swap_out.shape == (0, 2)
    plan = rig.step()
    swapped = rig.scheduler.stats()
    assert swapped.num_swapped == 1 and len(plan.swap_out) == 5  # two shared, one for each sibling
    assert swapped.num_free_host_blocks == 15
    swap_in = []
    while rig.requests["b"].sequences[0].status is SequenceStatus.SWAPPED:
        swap_in = rig.step().swap_in
    assert len(swap_in) == 5
    assert rig.scheduler.stats().num_free_host_blocks == 20
    rig.run()


def test_swap_falls_back_to_recompute_without_room() -> None:
    rig = Rig(num_blocks=6, host=1, preemption_mode="swap")
    rig.add("a", 8, max_tokens=10)
    rig.add("b", 8, max_tokens=10)
    rig.run()
    stats = rig.scheduler.stats()
    assert stats.preemptions_total > 0 and stats.swapped_out_blocks_total == 0


def test_a_prompt_that_is_not_yet_forked_is_not_swapped() -> None:
    rig = Rig(num_blocks=8, host=10, preemption_mode="swap", long_prefill_token_threshold=8, reserve_full_prompt=False)
    rig.add("a", 8, max_tokens=20)
    late = rig.add("b", 24, max_tokens=2, n=2)
    rig.step(3)
    assert late.sequences[0].num_computed == 0 and late.num_preemptions == 1
    assert late.sequences[0].status is SequenceStatus.WAITING
    rig.run()
    assert rig.scheduler.stats().swapped_out_blocks_total == 0


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    rig = Rig(num_blocks=6)
    rig.add("a", 8, max_tokens=10)
    rig.add("b", 8, max_tokens=10)
    rig.step(5)
    rig.add("c", 1, max_tokens=1, arrival_time=-1.0)  # at the head of the queue, and b leaves room for it
    assert counts(rig.step()) == {"a": 1}
    assert rig.scheduler.stats().preemptions_total == 1
    assert counts(rig.step()) == {"a": 1, "c": 1}
    rig.run()


def test_a_step_is_planned_again_when_all_that_was_planned_gave_way() -> None:
    """a waits for more budget than b's decodes leave, and then b, alone in the plan, gives way to a's one block."""
    rig = Rig(num_blocks=71, enable_chunked_prefill=False, reserve_full_prompt=False)
    rig.add("a", 1, max_tokens=63, n=2)
    rig.step(62)
    rig.scheduler.drop_kv()
    rig.add("b", 20, max_tokens=44, n=6)
    assert counts(rig.step()) == {"a": 1, "b": 20}
    while not rig.requests["b"].num_preemptions:
        plan = rig.step()
        assert counts(plan) in ({"b": 6}, {"a": 62})
    assert counts(plan) == {"a": 62}
    rig.run()


def test_whoever_comes_back_makes_progress() -> None:
    """Between coming back and giving way again, a sequence computes at least a block of new tokens."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        rig = Rig(num_blocks=24, max_num_batched_tokens=int(rng.integers(8, 40)), prefix=bool(seed % 2))
        for i in range(10):
            rig.add(chr(97 + i), int(rng.integers(1, 30)), max_tokens=int(rng.integers(5, 35)))
        came_back: dict[str, int] = {}
        gave_way = dict.fromkeys(rig.requests, 0)
        while (plan := rig.scheduler.schedule()) is not None:
            for name, request in rig.requests.items():
                (sequence,) = request.sequences
                if request.num_preemptions > gave_way[name]:
                    gave_way[name] += 1
                    if name in came_back:
                        assert sequence.num_tokens - came_back.pop(name) >= rig.cache.block_size
                elif gave_way[name] and sequence.status is SequenceStatus.RUNNING:
                    came_back.setdefault(name, sequence.num_tokens)
            rig.scheduler.update(plan, rig.model.run(plan))
        assert sum(gave_way.values()) > 0, "this seed shows nothing"


def test_the_watermark_stays_free_but_never_locks_out() -> None:
    rig = Rig(num_blocks=10, watermark=0.5)
    rig.add("a", 30, max_tokens=1)
    rig.add("b", 2, max_tokens=1)
    assert counts(rig.step()) == {"a": 30}
    assert counts(rig.step()) == {"b": 2}


def test_prompts_under_way_keep_their_claim() -> None:
    """Two prompts that do not fit together are not both admitted on the strength of the same free blocks."""
    rig = Rig(num_blocks=10, long_prefill_token_threshold=8)
    rig.add("a", 24, max_tokens=2)
    rig.step()
    rig.add("b", 24, max_tokens=2)
    assert counts(rig.step()) == {"a": 8}
    rig.run()
    assert rig.scheduler.stats().preemptions_total == 0


# Ends


def test_finish_reasons() -> None:
    rig = Rig()
    eos = rig.add("a", 3, ignore_eos=False, stop_token_ids=(7,), max_tokens=1)
    ignored = rig.add("b", 3, max_tokens=1)
    stop = rig.add("c", 3, stop_token_ids=(7,), max_tokens=9)
    plan = rig.schedule()
    assert rig.scheduler.update(plan, StepResult(np.array([7, 7, 7], np.int32))) == [0, 1, 2]
    ends = [(r.sequences[0].finish_reason, r.sequences[0].stop_reason) for r in (eos, ignored, stop)]
    assert ends == [(FinishReason.STOP, None), (FinishReason.LENGTH, None), (FinishReason.STOP, 7)]
    assert not rig.scheduler.has_unfinished()
    rig.scheduler.check_invariants()


def test_abort_wherever_a_request_is() -> None:
    rig = Rig(num_blocks=6, host=10, preemption_mode="swap")
    assert not rig.scheduler.abort("nobody")
    rig.add("a", 8, max_tokens=10)
    rig.add("b", 8, max_tokens=10)
    rig.add("c", 16)
    rig.step(6)
    assert rig.requests["b"].sequences[0].status is SequenceStatus.SWAPPED
    assert rig.scheduler.abort("b") and rig.scheduler.abort("c")
    assert not rig.scheduler.abort("b")
    plan = rig.schedule()
    assert rig.scheduler.abort("a")
    assert rig.scheduler.update(plan, rig.model.run(plan)) == []
    assert rig.scheduler.schedule() is None
    assert {r.sequences[0].finish_reason for r in rig.requests.values()} == {FinishReason.ABORT}
    stats = rig.scheduler.stats()
    assert stats.num_free_blocks == 6 and stats.num_free_host_blocks == 10


def test_the_next_sibling_takes_over_when_the_leader_ends_in_its_prompt() -> None:
    rig = Rig(max_num_batched_tokens=8)
    request = rig.add("a", 20, n=2)
    rig.step()
    plan = rig.schedule()
    rig.scheduler.finish(request.sequences[0], FinishReason.ABORT)
    rig.scheduler.update(plan, rig.model.run(plan))
    assert request.sequences[1].num_computed == 16
    while rig.scheduler.has_unfinished():
        rig.step()
    assert request.sequences[0].output_token_ids == []
    assert request.sequences[1].output_token_ids == tokens_alone(request, 64)[1]


def test_a_failed_step_ends_its_requests_and_leaves_nothing_to_be_found() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.add("a", list(range(20)))
    rig.step()
    failed = rig.scheduler.fail(rig.schedule())
    assert failed == [rig.requests["a"]]
    assert failed[0].sequences[0].finish_reason is FinishReason.ERROR
    rig.scheduler.check_invariants()
    again = rig.add("b", list(range(20)))
    rig.step()
    assert again.num_cached_tokens == 8  # the first step's, which had gone well
    del rig.requests["a"]
    rig.run()


def test_a_group_swapped_out_by_a_failed_step_computes_its_tokens_again() -> None:
    rig = Rig(num_blocks=6, host=10, preemption_mode="swap")
    rig.add("a", 8, max_tokens=10)
    late = rig.add("b", 8, max_tokens=10)
    rig.step(5)
    plan = rig.schedule()
    assert len(plan.swap_out) == 3 and late.sequences[0].status is SequenceStatus.SWAPPED
    assert rig.scheduler.fail(plan) == [rig.requests.pop("a")]
    assert late.sequences[0].status is SequenceStatus.WAITING
    assert rig.scheduler.stats().num_free_host_blocks == 10
    rig.run()


def test_all_kv_can_be_dropped_at_any_time() -> None:
    rig = Rig(num_blocks=6, host=10, preemption_mode="swap")
    rig.add("a", 8, max_tokens=10)
    rig.add("b", 8, max_tokens=10)
    rig.step(6)
    rig.schedule()
    rig.model.device[:] = rig.model.host[:] = -1
    rig.scheduler.drop_kv()
    rig.scheduler.check_invariants()
    stats = rig.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped, stats.num_cached_blocks) == (0, 2, 0, 0)
    assert stats.num_free_blocks == 6 and stats.num_free_host_blocks == 10
    rig.run()
