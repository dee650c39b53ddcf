"""Counters and gauges of an engine at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxpaged.core.scheduler import SchedulerStats


@dataclass(frozen=True)
class EngineStats:
    """Totals count from the engine's start.

    Attributes:
        prompt_tokens_total: prompt tokens of requests that got their first token.
        cached_prompt_tokens_total: those of them that came from the prefix cache.
        compiles_after_warmup: programs that XLA compiled since warm-up; 0 in a healthy server.
        finished: ended sequences by finish reason.
    """

    scheduler: SchedulerStats
    prompt_tokens_total: int = 0
    cached_prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    compiles_after_warmup: int = 0
    steps_total: int = 0
    finished: dict[str, int] = field(default_factory=dict)
