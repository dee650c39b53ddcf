"""The dashboard's figures: rates and percentiles over sliding windows, by hand."""

from __future__ import annotations

import pytest

from jaxpaged.core.stats import SchedulerStats
from jaxpaged.engine.stats import EngineStats
from jaxpaged.server.dashboard_feed import FigureSource


def test_figures_by_hand() -> None:
    now = 0.0
    stats = _stats()

    def clock() -> float:
        return now

    source = FigureSource(lambda: stats, clock)
    assert source.figures().output_tokens_per_s == 0 and source.figures().ttft_ms is None
    for second, ms in enumerate(range(1, 101)):
        now = float(second)
        stats = _stats(output=3 * second, prompt=10 * second, queries=100 * second, hits=25 * second, free=30)
        source.observe("time_to_first_token_seconds", ms / 1000)
        source.observe("request_prompt_tokens", 5)
        figures = source.figures(skipped=7)
    assert figures.output_tokens_per_s == pytest.approx(3) and figures.prompt_tokens_per_s == pytest.approx(10)
    assert figures.hit_rate == pytest.approx(0.25) and figures.pool_use == pytest.approx(0.25)
    assert figures.ttft_ms == (50, 95) and figures.itl_ms is None
    assert (figures.running, figures.waiting, figures.skipped) == (2, 4, 7)
    now = 99 + 299.0  # of the last five minutes are the last two values only
    assert source.figures().ttft_ms == (99, 100)
    now = 1000.0
    assert source.figures().ttft_ms is None and source.figures().output_tokens_per_s == 0


def test_who_comes_to_look_sees_the_last_seconds() -> None:
    now = 0.0
    stats = _stats()
    source = FigureSource(lambda: stats, lambda: now)
    for second in range(20):
        now = float(second)
        stats = _stats(output=4 * second, prompt=7 * second)
        source.observe("inter_token_latency_seconds", 0.02)
    figures = source.figures()
    assert figures.output_tokens_per_s == pytest.approx(4) and figures.prompt_tokens_per_s == pytest.approx(7)
    assert (figures.prompt_tokens_total, figures.output_tokens_total, figures.finished_total) == (133, 76, 5)


def _stats(*, output: int = 0, prompt: int = 0, queries: int = 0, hits: int = 0, free: int = 40) -> EngineStats:
    scheduler = SchedulerStats(
        num_running=2, num_running_sequences=2, num_waiting=3, num_swapped=1, num_free_blocks=free, num_total_blocks=40,
        num_cached_blocks=0, num_free_host_blocks=0, num_total_host_blocks=0, prefix_queries_total=queries,
        prefix_hits_total=hits, preemptions_total=0, swapped_out_blocks_total=0, swapped_in_blocks_total=0,
        copied_blocks_total=0,
    )  # fmt: skip
    return EngineStats(
        scheduler, prompt_tokens_total=prompt, generation_tokens_total=output, finished={"stop": 2, "length": 3}
    )
