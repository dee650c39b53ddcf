"""Tokens do not depend on the schedule: random arrivals, aborts and failures in a few blocks, one expected answer."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_model import VOCAB, PagedModel, tokens_alone

from jaxpaged.config import CacheConfig, SchedulerConfig
from jaxpaged.core.beam import BeamSettings
from jaxpaged.core.block_keys import root_key
from jaxpaged.core.plan import StepPlan, StepResult
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import FinishReason, Request, SamplingParams

MAX_MODEL_LEN = 40
MAX_DISTURBANCES = 5
BEAM_SEARCHES = [BeamSettings(), BeamSettings(0.0, True), BeamSettings(1.5, "never"), BeamSettings(-1.0)]
# Prompts are heads of these, so that they share prefixes of any length.
STREAMS = np.random.default_rng(5).integers(0, VOCAB, (2, 30)).tolist()


@dataclass
class Arrival:
    step: int
    request: Request


@dataclass
class Disturbance:
    """At `step`: abort the request, finish its sequence `which`, fail the step, drop all KV or reset the cache."""

    step: int
    kind: str
    target: int
    which: int
    in_flight: bool


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    made = []
    for i in range(draw(st.integers(1, 7))):
        stream = draw(st.sampled_from(STREAMS))
        max_tokens = draw(st.integers(1, 20))
        ignore_eos = draw(st.booleans())
        params = SamplingParams(
            n=draw(st.sampled_from([1, 1, 2, 3])),
            beam_search=draw(st.sampled_from([None, None, *BEAM_SEARCHES])),
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=(3,) if draw(st.booleans()) else (),
        )
        request = Request(
            request_id=f"r{i}",
            prompt_token_ids=stream[: draw(st.integers(1, 30))],
            params=params,
            max_tokens=max_tokens,
            # Negative user seeds arrive as their low 64 bits; a wrap in the middle of a group included.
            seed=draw(st.sampled_from([0, 1, 2**32 - 1, 2**64 - 2])),
            eos_token_ids=frozenset({7}),
            arrival_time=float(draw(st.integers(0, 3))),
            priority=draw(st.integers(0, 2)),
            cache_salt=draw(st.sampled_from([None, None, "", "salt"])),
        )
        made.append(Arrival(draw(st.integers(0, 15)), request))
    return made


disturbances = st.lists(
    st.builds(
        Disturbance,
        step=st.integers(0, 40),
        kind=st.sampled_from(["abort", "abort", "finish", "finish", "fail", "drop_kv", "reset"]),
        target=st.integers(0, 6),
        which=st.integers(0, 2),
        in_flight=st.booleans(),
    ),
    max_size=MAX_DISTURBANCES,
)


@st.composite
def configs(draw: st.DrawFn) -> tuple[SchedulerConfig, CacheConfig]:
    chunked = draw(st.booleans())
    block_size = draw(st.sampled_from([1, 3, 4]))
    swap = draw(st.booleans())
    cache = CacheConfig(
        num_blocks=draw(st.integers(30, 60)) // block_size + 2,
        block_size=block_size,
        num_host_blocks=draw(st.integers(0, 30)) if swap else 0,
        enable_prefix_caching=draw(st.booleans()),
    )
    max_num_seqs = draw(st.integers(3, 8))
    config = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 24)) if chunked else draw(st.integers(40, 60)),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        preemption_mode="swap" if swap else "recompute",
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 5])),
        watermark=draw(st.sampled_from([0.0, 0.2])),
        reserve_full_prompt=draw(st.booleans()),
        debug_checks=True,
    )
    return config, cache


class Drive:
    """A scheduler and a model in a loop, with what should come of it."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, *, ahead: bool) -> None:
        """
        Args:
            ahead: each step is planned, and run, before the results of the last are known.
        """
        self.scheduler = Scheduler(config, cache)
        self.model = PagedModel(cache)
        self.requests: list[Request] = []
        self.ahead = ahead
        self.under_way: deque[tuple[StepPlan, StepResult]] = deque()

    def add(self, request: Request) -> bool:
        try:
            self.scheduler.add(request)
        except InvalidRequestError as error:
            assert "blocks" in str(error) or "room" in str(error)
            return False
        self.requests.append(request)
        return True

    def disturb(self, what: Disturbance) -> None:
        """One that leaves the step under way alone."""
        if what.kind == "reset":
            self.scheduler.reset_prefix_cache()
        elif what.target < len(self.requests):
            request = self.requests[what.target]
            sequence = request.sequences[what.which % len(request.sequences)]
            if what.kind == "abort" or request.beams is not None:  # a beam does not end alone
                was_finished = request.is_finished
                assert self.scheduler.abort(request.request_id) is not was_finished
                assert request.is_finished
            else:
                self.scheduler.finish(sequence, FinishReason.STOP, "text")
                assert sequence.is_finished

    def step(self, now: list[Disturbance]) -> bool:
        quiet = [d for d in now if d.kind in ("abort", "finish", "reset")]
        loud = {d.kind for d in now} - {d.kind for d in quiet}
        for what in quiet:
            if not what.in_flight:
                self.disturb(what)
        plan = self.scheduler.schedule()
        if plan is not None:
            self.under_way.append((plan, self.model.run(plan)))
        if not self.under_way:
            assert not self.scheduler.has_unfinished(), "unfinished requests, but nothing to compute"
            return False
        for what in quiet:
            if what.in_flight:
                self.disturb(what)
        if len(self.under_way) == 1 and plan is not None and self.ahead:
            return True
        plan, result = self.under_way.popleft()
        if "fail" in loud:
            alive = {s.request.request_id for s in plan.scheduled if not s.request.is_finished}
            failed = self.scheduler.fail(plan)
            assert {r.request_id for r in failed} == alive
            assert all(s.is_finished for r in failed for s in r.sequences)
            for lost in (plan, *(behind for behind, _ in self.under_way)):
                self.model.spoil(lost)
            self.under_way.clear()
            self.scheduler.check_invariants()
        elif "drop_kv" in loud:
            self.model.device[:] = self.model.host[:] = -1
            self.under_way.clear()
            self.scheduler.drop_kv()
            self.scheduler.check_invariants()
        else:
            alive = [i for i, s in enumerate(plan.sampled) if not s.is_finished and s.request.beams is None]
            assert self.scheduler.update(plan, result) == alive
        return True

    def check_keys(self) -> None:
        """Keys are those of a sequence's own tokens, in the cache's present or a past epoch."""
        size = self.model.cache.block_size
        for sequence in (s for r in self.requests for s in r.sequences if s.block_keys):
            chains = []
            for epoch in range(MAX_DISTURBANCES + 1):
                key, chain = root_key(sequence.request.cache_salt, epoch), []
                for start in range(0, len(sequence.block_keys) * size, size):
                    tokens = np.array(sequence.tokens(start, start + size), "<i4")
                    key = hashlib.sha256(key + tokens.tobytes()).digest()
                    chain.append(key)
                chains.append(chain)
            assert sequence.block_keys in chains


def check_outputs(drive: Drive, max_model_len: int) -> None:
    for request in drive.requests:
        for sequence, expected in zip(request.sequences, tokens_alone(request, max_model_len), strict=True):
            got, reason = sequence.output_token_ids, sequence.finish_reason
            assert sequence.block_table == sequence.host_blocks == [] and sequence.row == -1
            if reason in (FinishReason.ABORT, FinishReason.ERROR) or sequence.stop_reason == "text":
                assert got == expected[: len(got)] or request.beams is not None
                continue
            assert got == expected
            if got[-1] in request.eos_token_ids and not request.params.ignore_eos:
                assert (reason, sequence.stop_reason) == (FinishReason.STOP, None)
            elif got[-1] in request.params.stop_token_ids:
                assert (reason, sequence.stop_reason) == (FinishReason.STOP, got[-1])
            else:
                assert (reason, sequence.stop_reason) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "one ahead"])
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(configs(), arrivals(), disturbances)
def test_tokens_do_not_depend_on_the_schedule(
    ahead: bool,
    configured: tuple[SchedulerConfig, CacheConfig],
    coming: list[Arrival],
    troubles: list[Disturbance],
) -> None:
    drive = Drive(*configured, ahead=ahead)
    step, last = 0, max(a.step for a in coming)
    while True:
        for arrival in coming:
            if arrival.step == step:
                drive.add(arrival.request)
        if not drive.step([t for t in troubles if t.step == step]) and step > last:
            break
        step += 1
        assert step < 3000, "no end"
    check_outputs(drive, MAX_MODEL_LEN)
    drive.check_keys()
    stats = drive.scheduler.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    assert stats.num_free_host_blocks == stats.num_total_host_blocks
    assert stats.num_running == stats.num_waiting == stats.num_swapped == 0
