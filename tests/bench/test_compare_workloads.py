"""The request lists of bench/compare.py, and the figures read off answers whose times are known."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest
from bench.bench_scripts import load_script

load_script("compare")
workloads = importlib.import_module("peers.workloads")
serve = importlib.import_module("serve")
Settings = workloads.Settings


class FakeContestant:
    """Answers at once: the first token after `ttft`, the others `gap` apart, each request as if it ran alone.

    Attributes:
        loads: all that it was given.
    """

    def __init__(self, ttft: float = 0.1, gap: float = 0.01) -> None:
        self.ttft, self.gap = ttft, gap
        self.loads: list[Any] = []

    def __call__(self, load: Any) -> Any:
        self.loads.append(load)
        results = [self.answer(request) for request in load.requests]
        return workloads.Outcome(results, max(r.start + r.latency for r in results), len(results))

    def answer(self, request: Any) -> Any:
        gaps = [self.gap] * (request.output_len - 1)
        return serve.Result(
            start=request.arrival, input_len=len(request.prompt), output_len=request.output_len, ttft=self.ttft,
            latency=self.ttft + sum(gaps), itls=gaps, finished=True,
        )  # fmt: skip


def result(start: float, ttft: float, gaps: list[float], tokens: int | None = None) -> Any:
    return serve.Result(
        start=start, input_len=1, output_len=tokens or len(gaps) + 1, ttft=ttft, latency=ttft + sum(gaps), itls=gaps,
        finished=True,
    )  # fmt: skip


def measured(name: str, contestant: FakeContestant, **settings: Any) -> dict[str, Any]:
    figures: dict[str, Any] = workloads.WORKLOADS[name].measure(
        contestant, Settings(**{"rate_seconds": 5.0} | settings)
    )
    return figures


@pytest.mark.parametrize("name", list(workloads.WORKLOADS))
def test_every_contestant_gets_the_same_requests_whatever_else_runs(name: str) -> None:
    first, second = FakeContestant(), FakeContestant(ttft=0.2, gap=0.02)
    measured(name, first)
    measured("W1", second)
    del second.loads[:]
    measured(name, second)
    assert [load.requests for load in first.loads] == [load.requests for load in second.loads]
    other = FakeContestant()
    measured(name, other, seed=1)
    assert [load.requests for load in first.loads] != [load.requests for load in other.loads]
    assert all(len(r.prompt) + r.output_len <= 2048 for load in first.loads for r in load.requests)
    assert all(1000 <= token < 10_000 for load in first.loads for r in load.requests for token in r.prompt)


@pytest.mark.parametrize("name", list(workloads.WORKLOADS))
def test_a_repeat_has_new_prompts_of_the_same_lengths(name: str) -> None:
    repeats = [FakeContestant(), FakeContestant()]
    for repeat, contestant in enumerate(repeats):
        measured(name, contestant, repeat=repeat)
    first, second = ([r for load in contestant.loads for r in load.requests] for contestant in repeats)
    assert [(len(r.prompt), r.output_len, r.arrival) for r in first] == [
        (len(r.prompt), r.output_len, r.arrival) for r in second
    ]
    # Not even a first block of 16 is in any cache.
    assert not {tuple(r.prompt[:16]) for r in first} & {tuple(r.prompt[:16]) for r in second}


def test_one_stream() -> None:
    contestant = FakeContestant(ttft=0.1, gap=0.01)
    figures = measured("W1", contestant)
    load = contestant.loads[-1]
    assert load.max_concurrency == 1
    assert [(len(r.prompt), r.output_len) for r in load.requests] == [(128, 64)] * 8
    assert figures["median_ttft_ms"] == pytest.approx(100)
    assert figures["p99_itl_ms"] == pytest.approx(10)
    assert figures["mean_norm_ms"] == pytest.approx((100 + 63 * 10) / 64)


def test_mixed_lengths_are_lognormal_with_the_means_asked_for() -> None:
    contestant = FakeContestant()
    measured("W2", contestant)
    load = contestant.loads[-1]
    inputs, outputs = [len(r.prompt) for r in load.requests], [r.output_len for r in load.requests]
    assert (len(load.requests), load.max_concurrency) == (64, 16)
    assert all(16 <= n <= 1024 for n in inputs) and all(8 <= n <= 256 for n in outputs)
    # Within four standard errors of 64 draws. The mean of exp(N(m, s)) is exp(m + s * s / 2).
    assert abs(np.log(inputs).mean() - (math.log(160) - 0.245)) < 4 * 0.7 / 8
    assert abs(np.log(outputs).mean() - (math.log(100) - 0.245)) < 4 * 0.7 / 8


def test_the_shared_prefix_is_in_every_prompt_and_warm() -> None:
    contestant = FakeContestant()
    measured("W3", contestant)
    warm_up, load = contestant.loads
    assert (len(load.requests), load.max_concurrency) == (48, 16)
    assert len({tuple(r.prompt[:512]) for r in (*warm_up.requests, *load.requests)}) == 1
    assert len({tuple(r.prompt[512:]) for r in (*warm_up.requests, *load.requests)}) == 52
    assert {(len(r.prompt), r.output_len) for r in load.requests} == {(544, 32)}


class Saturating(FakeContestant):
    """Slower the more requests arrive a second."""

    def __call__(self, load: Any) -> Any:
        span = load.requests[-1].arrival
        self.gap = 0.2 * (len(load.requests) - 1) / span if span else 0.01
        self.ttft = self.gap
        return super().__call__(load)


def test_rates_rise_until_the_latency_passes_the_limit() -> None:
    contestant = Saturating()
    figures = measured("W4", contestant, rate_seconds=200.0)
    rates = [point["rate"] for point in figures["points"]]
    assert rates == pytest.approx([0.5 * math.sqrt(2) ** i for i in range(len(rates))])
    latencies = [point["mean_norm_ms"] / 1000 for point in figures["points"]]
    assert all(latency <= 0.5 for latency in latencies[:-1]) and latencies[-1] > 0.5
    # 0.2 s a token at one request a second: 0.5 s at 2.5, as far as the arrivals drawn keep to their rate.
    assert figures["rate_at_500ms"] == pytest.approx(2.5, rel=0.25)
    assert figures["rate_at_200ms"] == pytest.approx(1.0, rel=0.25)
    assert figures["rate_at_100ms"] == pytest.approx(0.5, rel=0.25)
    assert figures["completed"] == sum(len(load.requests) for load in contestant.loads[1:])
    # The same gaps between them, only closer, and prompts that no prefix cache has seen.
    slow, fast = contestant.loads[1].requests, contestant.loads[3].requests
    assert [r.arrival for r in slow] == pytest.approx([2 * r.arrival for r in fast[: len(slow)]])
    prompts = [tuple(r.prompt[:16]) for load in contestant.loads for r in load.requests]
    assert len(set(prompts)) == len(prompts)


def test_rates_and_limit_can_be_chosen() -> None:
    figures = measured("W4", Saturating(), rates=(0.5, 0.7, 1.4, 2.8), rate_seconds=200.0, latency_limit_s=0.2)
    assert [point["rate"] for point in figures["points"]] == [0.5, 0.7, 1.4]
    assert figures["rate_at_200ms"] == pytest.approx(1.0, rel=0.25)
    assert "rate_at_500ms" not in figures


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1, 0.1), (2, 0.3), (4, 0.7)], 3.0),
        ([(1, 0.6)], 0.0),
        ([(1, 0.1), (2, 0.2)], 2.0),
        ([(1, 0.5), (2, 1.5)], 1.0),
        ([], 0.0),
    ],
)
def test_the_rate_at_the_limit_lies_on_the_line_between_two_points(
    points: list[tuple[float, float]], expected: float
) -> None:
    assert workloads.sustained_rate(points, 0.5) == pytest.approx(expected)


def test_decoding_counts_from_the_last_first_token_to_the_first_end() -> None:
    # Tokens at 1, 2, 3, 4, 5 and at 2.5, 3.5, 4.5, 5.5: from 2.5 to 5 the first has three and the second two.
    rows = [result(0.0, 1.0, [1.0] * 4), result(0.5, 2.0, [1.0] * 3)]
    assert workloads.decode_throughput(rows) == pytest.approx(5 / 2.5)
    # The same events with two tokens in each.
    rows = [result(0.0, 1.0, [1.0] * 4, tokens=10), result(0.5, 2.0, [1.0] * 3, tokens=8)]
    assert workloads.decode_throughput(rows) == pytest.approx(10 / 2.5)
    # One ends before the other begins.
    assert workloads.decode_throughput([result(0.0, 1.0, [0.5]), result(3.0, 1.0, [0.5])]) == 0.0
    assert workloads.decode_throughput([]) == 0.0


def test_long_decode_leaves_prefill_out() -> None:
    contestant = FakeContestant(ttft=30.0, gap=0.05)
    figures = measured("W5", contestant)
    load = contestant.loads[-1]
    assert load.max_concurrency == len(load.requests) == 8
    assert {len(r.prompt) + r.output_len for r in load.requests} == {2032}
    assert figures["decode_throughput"] == pytest.approx(8 / 0.05)


def test_gaps_before_all_rows_have_begun_do_not_count() -> None:
    rows = [result(0.0, 1.0, [5.0, 0.1, 0.3]), result(0.0, 6.0, [0.2, 0.2])]
    assert workloads.gap_percentile(rows, 100) == pytest.approx(300)
    assert workloads.gap_percentile(rows, 50) == pytest.approx(200)
    assert workloads.gap_percentile([], 99) == 0.0


def test_a_long_prompt_arrives_among_rows_that_decode() -> None:
    contestant = FakeContestant()
    figures = measured("pace", contestant, max_model_len=8192)
    alone, beside = contestant.loads[-2:]
    assert [r.arrival for r in alone.requests] == [0.0] * 8
    assert [(len(r.prompt), r.arrival) for r in beside.requests] == [(128, 0.0)] * 8 + [(4096, 1.5)]
    assert figures["intruder_tokens"] == 4096
    assert figures["beside_p99_itl_ms"] == pytest.approx(10)
    assert not {tuple(r.prompt) for r in alone.requests} & {tuple(r.prompt) for r in beside.requests}
    assert measured("pace", FakeContestant(), max_model_len=2048)["intruder_tokens"] == 2032


def test_failures_are_counted_with_their_reasons() -> None:
    class Refusing(FakeContestant):
        def answer(self, request: Any) -> Any:
            answer = super().answer(request)
            if request.output_len > 200:
                answer.error = "HTTP 503: busy"
            return answer

    for name in ("W2", "W4"):
        contestant = Refusing()
        figures = measured(name, contestant)
        asked = [r.output_len for load in contestant.loads[1:] for r in load.requests]
        refused = sum(length > 200 for length in asked)
        assert refused and (figures["failed"], figures["completed"]) == (refused, len(asked) - refused)
        assert figures["errors"] == ["HTTP 503: busy"]
    assert "errors" not in measured("W2", FakeContestant())


def test_hits_share_with_the_misses_before_them() -> None:
    class Cached(FakeContestant):
        def answer(self, request: Any) -> Any:
            prefix = tuple(request.prompt[:512])
            self.ttft = 0.1 if prefix in seen else 0.5
            seen.add(prefix)
            return super().answer(request)

    seen: set[tuple[int, ...]] = set()
    contestant = Cached()
    figures = measured("prefix", contestant)
    assert (figures["miss_ttft_ms"], figures["hit_ttft_ms"]) == pytest.approx((500, 100))
    assert figures["hit_share"] == pytest.approx(0.2)
    assert all(load.max_concurrency == 1 and len(load.requests) == 8 for load in contestant.loads[1:])
