"""What is counted while a simulation runs, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

PERCENTS = (50, 90, 99)


@dataclass(frozen=True)
class MemoryUse:
    """Slots of the KV memory by what they are for; together they are all of it.

    Attributes:
        tokens: hold the KV of a token.
        reserved: will, before their sequence ends.
        internal: belong to a sequence that will never use them.
        external: belong to nobody, or to the rounding of the allocator.
    """

    tokens: float
    reserved: float
    internal: float
    external: float


@dataclass(frozen=True)
class StepCount:
    """A step, for the averages.

    Attributes:
        batch: requests running.
        waits: somebody waits for admission.
    """

    batch: int
    waits: bool
    memory: MemoryUse


@dataclass
class _Sum:
    weight: float = 0.0
    batch: float = 0.0
    memory: list[float] = field(default_factory=lambda: [0.0] * 4)

    def add(self, step: StepCount, weight: float) -> None:
        self.weight += weight
        self.batch += step.batch * weight
        m = step.memory
        total = self.memory
        total[0] += m.tokens * weight
        total[1] += m.reserved * weight
        total[2] += m.internal * weight
        total[3] += m.external * weight


@dataclass
class Averages:
    """Over time. Memory is averaged over the steps in which somebody waits for it, or over all if nobody ever does.

    Attributes:
        peak_batch: most requests running in a step.
    """

    peak_batch: int = 0
    _all: _Sum = field(default_factory=_Sum)
    _waiting: _Sum = field(default_factory=_Sum)

    def add(self, step: StepCount, seconds: float) -> None:
        self.peak_batch = max(self.peak_batch, step.batch)
        self._all.add(step, seconds)
        if step.waits:
            self._waiting.add(step, seconds)

    @property
    def batch(self) -> float:
        """Requests running, averaged over the steps as memory is."""
        chosen = self._chosen()
        return chosen.batch / chosen.weight if chosen.weight else 0.0

    @property
    def batch_overall(self) -> float:
        """Requests running, averaged over all steps."""
        return self._all.batch / self._all.weight if self._all.weight else 0.0

    def memory(self, slots: int) -> MemoryUse:
        """Shares of `slots` slots, 0 to 1."""
        chosen = self._chosen()
        scale = chosen.weight * slots
        return MemoryUse(*(value / scale if scale else 0.0 for value in chosen.memory))

    def _chosen(self) -> _Sum:
        return self._waiting if self._waiting.weight else self._all


@dataclass(frozen=True)
class SimulationResult:
    """Of a run. Times are seconds; percentiles are by name ("p50").

    Attributes:
        refused: requests that could never fit.
        seconds: from the first arrival to the last result.
        ttft: arrival to first token.
        inter_token: between the tokens of an output, on average over each request.
        latency: arrival to last token.
        normalized_latency: mean over requests of latency / output tokens.
        mean_batch: requests running, averaged over the time in which others waited (over all if none ever did).
        mean_batch_overall: the same, averaged over all steps.
        memory: shares of the KV memory, averaged as `mean_batch`.
        prefix_hit_tokens: tokens that the prefix cache spared.
    """

    requests: int
    finished: int
    refused: int
    steps: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft: dict[str, float]
    inter_token: dict[str, float]
    latency: dict[str, float]
    normalized_latency: float
    preemptions: int
    mean_batch: float
    mean_batch_overall: float
    peak_batch: int
    memory: MemoryUse
    prefix_hit_tokens: int


def percentiles(values: npt.NDArray[np.float64]) -> dict[str, float]:
    """{"mean", "p50", "p90", "p99"} of seconds, all 0 where there are none."""
    if not len(values):
        return dict.fromkeys(("mean", *(f"p{p}" for p in PERCENTS)), 0.0)
    found = np.percentile(values, PERCENTS)
    return {"mean": float(np.mean(values)), **{f"p{p}": float(v) for p, v in zip(PERCENTS, found, strict=True)}}
