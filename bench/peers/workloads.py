"""What is asked of each contestant, and what is read off its answers. The same lists of token ids for all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import serve

# Prompts and outputs of W2 and W4: mean, sigma, least, most.
MIXED_INPUTS = "lognormal:160,0.7,16,1024"
MIXED_OUTPUTS = "lognormal:100,0.7,8,256"
CONCURRENCY = 16
# Mean normalized latencies, in ms a token, at which W4 tells the rate.
LATENCIES_MS = (100, 200, 500)
RATES = tuple(0.5 * math.sqrt(2) ** step for step in range(16))
# What is kept of each rate of W4.
POINT_KEYS = (
    "duration", "completed", "failed", "output_throughput", "max_concurrent_requests",
    "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "mean_norm_ms", "median_norm_ms", "p90_norm_ms",
)  # fmt: skip
DECODE_ROWS = 8
DECODE_CONTEXT = 2048
LONGEST_INTRUDER = 4096


@dataclass(frozen=True)
class Request:
    """Greedy, and exactly `output_len` tokens whatever they are.

    Attributes:
        arrival: seconds after the start of the load; it is sent then, or later if `Load.max_concurrency` are running.
    """

    prompt: list[int]
    output_len: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Load:
    """Attributes:
    max_concurrency: most requests in progress; None: all that have arrived.
    """

    requests: Sequence[Request]
    max_concurrency: int | None = None


@dataclass
class Outcome:
    """What a contestant made of a load: results in the order of the requests, and seconds that it all took."""

    results: list[serve.Result]
    duration: float
    max_concurrent: int = 0

    def summary(self) -> dict[str, Any]:
        return serve.report(self.results, self.duration, self.max_concurrent) | counts(self.results)


# Runs a load to its end.
RunLoad = Callable[[Load], Outcome]


@dataclass(frozen=True)
class Settings:
    """The same for all contestants.

    Attributes:
        repeat: has its own prompts, which no prefix cache has seen, of the same lengths.
        max_model_len: most tokens of a prompt and its output, in every contestant.
        rates: of W4, requests a second, rising.
        rate_seconds: of arrivals at each of them.
        latency_limit_s: W4 ends at the first rate with a mean normalized latency above this, in seconds a token.
        small: an eighth of the requests, to try a set-up.
    """

    seed: int = 0
    repeat: int = 0
    max_model_len: int = 2048
    rates: Sequence[float] = RATES
    rate_seconds: float = 60.0
    latency_limit_s: float = 0.5
    small: bool = False

    def count(self, full: int) -> int:
        return max(2, full // 8) if self.small else full

    def rng(self, name: str) -> np.random.Generator:
        """A generator of its own for each purpose, so that no workload depends on which others run."""
        return np.random.default_rng([self.seed, *name.encode()])

    def prompt_rng(self, name: str) -> np.random.Generator:
        """The same for the tokens of prompts, another one in each repeat."""
        return self.rng(f"{name} prompts {self.repeat}")


def token_ids(rng: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in rng.integers(*serve.TOKEN_IDS, size=count)]


def random_requests(
    settings: Settings, name: str, count: int, inputs: str, outputs: str, prefix: Sequence[int] = ()
) -> list[Request]:
    """Prompts of random tokens after `prefix`; lengths as `serve.draw_lengths` reads them."""
    lengths, prompts = settings.rng(name), settings.prompt_rng(name)
    input_lens = serve.draw_lengths(inputs, count, lengths)
    output_lens = serve.draw_lengths(outputs, count, lengths)
    return [
        Request([*prefix, *token_ids(prompts, input_len)], output_len)
        for input_len, output_len in zip(input_lens, output_lens, strict=True)
    ]


def _warm_up(
    run: RunLoad, settings: Settings, name: str, inputs: str, outputs: str, prefix: Sequence[int] = ()
) -> None:
    run(Load(random_requests(settings, f"{name} warm-up", 4, inputs, outputs, prefix), CONCURRENCY))


def one_stream(run: RunLoad, settings: Settings) -> dict[str, Any]:
    """W1: one request at a time, prompt 128, output 64."""
    _warm_up(run, settings, "W1", "128", "16")
    requests = random_requests(settings, "W1", settings.count(8), "128", "64")
    return run(Load(requests, 1)).summary()


def mixed(run: RunLoad, settings: Settings) -> dict[str, Any]:
    """W2: 16 at a time, lognormal prompts (mean 160) and outputs (mean 100, at most 256)."""
    _warm_up(run, settings, "W2", MIXED_INPUTS, "16")
    requests = random_requests(settings, "W2", settings.count(64), MIXED_INPUTS, MIXED_OUTPUTS)
    return run(Load(requests, CONCURRENCY)).summary()


def shared_prefix(run: RunLoad, settings: Settings) -> dict[str, Any]:
    """W3: 16 at a time, prompts with 512 tokens in common and 32 of their own, output 32."""
    prefix = token_ids(settings.prompt_rng("W3 prefix"), 512)
    _warm_up(run, settings, "W3", "32", "16", prefix)
    requests = random_requests(settings, "W3", settings.count(48), "32", "32", prefix)
    return run(Load(requests, CONCURRENCY)).summary()


def rising_rate(run: RunLoad, settings: Settings) -> dict[str, Any]:
    """W4: lengths of W2, Poisson arrivals at rising rates until the mean of time / output tokens is too long."""
    _warm_up(run, settings, "W4", MIXED_INPUTS, "16")
    points: list[dict[str, Any]] = []
    results: list[serve.Result] = []
    for rate in settings.rates[:2] if settings.small else settings.rates:
        # Other prompts at each rate, which no prefix cache has seen; the same gaps, only closer.
        count = settings.count(max(8, round(rate * settings.rate_seconds)))
        requests = random_requests(settings, f"W4 {rate:.2f}", count, MIXED_INPUTS, MIXED_OUTPUTS)
        arrivals = serve.arrival_times(count, rate, 1.0, settings.rng("W4 arrivals"))
        outcome = run(Load([Request(r.prompt, r.output_len, at) for r, at in zip(requests, arrivals, strict=True)]))
        results += outcome.results
        summary = outcome.summary()
        points.append({"rate": rate} | {key: summary[key] for key in POINT_KEYS})
        if summary["failed"] or summary["mean_norm_ms"] > settings.latency_limit_s * 1000:
            break
    rates = {
        f"rate_at_{ms}ms": sustained_rate([(p["rate"], p["mean_norm_ms"]) for p in points], ms)
        for ms in LATENCIES_MS
        if ms <= settings.latency_limit_s * 1000
    }
    return {"points": points, **counts(results), **rates}


def sustained_rate(points: Sequence[tuple[float, float]], limit: float) -> float:
    """Requests a second at which normalized latency reaches `limit`, by a straight line between the points around it.

    Args:
        points: (rate, latency in the unit of `limit`), rates rising.

    Returns:
        The last rate where none passes the limit; 0 where the first does.
    """
    previous: tuple[float, float] | None = None
    for rate, latency in points:
        if latency > limit:
            if previous is None:
                return 0.0
            return previous[0] + (limit - previous[1]) / (latency - previous[1]) * (rate - previous[0])
        previous = (rate, latency)
    return previous[0] if previous else 0.0


def long_decode(run: RunLoad, settings: Settings) -> dict[str, Any]:
    """W5: 8 rows decode at 2k tokens of context; the rate while all 8 do, prefill left out."""
    output_len = 128
    _warm_up(run, settings, "W5", "128", "16")
    input_len = min(DECODE_CONTEXT, settings.max_model_len) - output_len - 16
    requests = random_requests(settings, "W5", DECODE_ROWS, str(input_len), str(output_len))
    outcome = run(Load(requests, DECODE_ROWS))
    return outcome.summary() | {"decode_throughput": decode_throughput(outcome.results)}


def decode_throughput(results: Sequence[serve.Result]) -> float:
    """Tokens a second from the moment when every request has its first token until the first of them ends; 0 if none.

    A server may put several tokens into one event: each event counts the request's tokens over its events.
    """
    good = [result for result in results if result.success]
    if not good:
        return 0.0
    start = max(r.start + r.ttft for r in good)
    end = min(r.start + r.latency for r in good)
    if end <= start:
        return 0.0
    tokens = 0.0
    for result in good:
        times = result.start + result.ttft + np.cumsum([0.0, *result.itls])
        inside = int(((times > start) & (times <= end)).sum())
        tokens += inside * result.output_len / len(times)
    return tokens / (end - start)


def long_prompt_arrives(run: RunLoad, settings: Settings) -> dict[str, Any]:
    """pace: gaps between the tokens of 8 decoding rows, without and with a long prompt (4k or what fits) arriving."""
    _warm_up(run, settings, "pace", "128", "16")
    rows = random_requests(settings, "pace", DECODE_ROWS, "128", "224")
    intruder_len = min(LONGEST_INTRUDER, settings.max_model_len - 16)
    intruder = Request(token_ids(settings.prompt_rng("pace intruder"), intruder_len), 8, arrival=1.5)
    alone = run(Load(rows))
    # Other tokens, so that no prefix cache changes the second run.
    others = random_requests(settings, "pace again", DECODE_ROWS, "128", "224")
    beside = run(Load([*others, intruder]))
    return {
        **counts([*alone.results, *beside.results]),
        "intruder_tokens": intruder_len,
        "intruder_ttft_ms": beside.results[-1].ttft * 1000,
        "alone_p99_itl_ms": gap_percentile(alone.results, 99),
        "beside_p99_itl_ms": gap_percentile(beside.results[:-1], 99),
        "alone_max_itl_ms": gap_percentile(alone.results, 100),
        "beside_max_itl_ms": gap_percentile(beside.results[:-1], 100),
    }


def gap_percentile(results: Sequence[serve.Result], percent: float) -> float:
    """Of the times between tokens after all have begun, in ms: prefill of the rows themselves does not count."""
    good = [result for result in results if result.success]
    begun = max((r.start + r.ttft for r in good), default=0.0)
    gaps = []
    for result in good:
        ends = result.start + result.ttft + np.cumsum(result.itls)
        gaps += [gap for gap, end in zip(result.itls, ends, strict=True) if end - gap >= begun]
    return float(np.percentile(gaps, percent)) * 1000 if gaps else 0.0


def prefix_hit(run: RunLoad, settings: Settings) -> dict[str, Any]:
    """prefix: time to the first token of 512 + 32 tokens, one at a time, the 512 new (miss) or seen before (hit)."""
    _warm_up(run, settings, "prefix", "544", "8")
    rng = settings.prompt_rng("prefix")
    prefixes = [token_ids(rng, 512) for _ in range(settings.count(16) // 2)]
    misses = run(Load([Request([*prefix, *token_ids(rng, 32)], 8) for prefix in prefixes], 1))
    hits = run(Load([Request([*prefix, *token_ids(rng, 32)], 8) for prefix in prefixes], 1))
    miss, hit = (statistics.median(r.ttft for r in outcome.results) * 1000 for outcome in (misses, hits))
    return {
        **counts([*misses.results, *hits.results]),
        "miss_ttft_ms": miss,
        "hit_ttft_ms": hit,
        "hit_share": hit / miss if miss else 0.0,
    }


def counts(results: Sequence[serve.Result]) -> dict[str, Any]:
    """How many succeeded and failed, and a few of the reasons."""
    errors = sorted({result.error for result in results if not result.success})
    return {"completed": sum(r.success for r in results), "failed": sum(not r.success for r in results)} | (
        {"errors": errors[:3]} if errors else {}
    )


@dataclass(frozen=True)
class Column:
    """Of a workload's table: one figure, or several with slashes between.

    Attributes:
        of_repeats: what is shown of the repeats' figures.
    """

    heading: str
    keys: Sequence[str]
    digits: int = 0
    of_repeats: Callable[[Sequence[float]], float] = statistics.median


LATENCIES = (
    Column("first token, ms, p50 / p99", ("median_ttft_ms", "p99_ttft_ms")),
    Column("per output token, ms, p50 / p99", ("median_tpot_ms", "p99_tpot_ms"), 1),
    Column("between tokens, ms, p50 / p99", ("median_itl_ms", "p99_itl_ms"), 1),
    Column("normalized, ms/token", ("mean_norm_ms",), 1),
)
TRUST = (
    Column("requests done / failed", ("completed", "failed"), of_repeats=sum),
    Column("other load, CPUs, most", ("other_cpus",), 2, of_repeats=max),
)


@dataclass(frozen=True)
class Workload:
    """Attributes:
    figure: the key of the result that ratios are made of; more is better, unless `less_is_better`.
    """

    measure: Callable[[RunLoad, Settings], dict[str, Any]]
    figure: str
    heading: str
    columns: Sequence[Column]
    digits: int = 0
    less_is_better: bool = False

    @property
    def title(self) -> str:
        return (self.measure.__doc__ or "").partition(": ")[2].strip().rstrip(".")


WORKLOADS = {
    "W1": Workload(one_stream, "output_throughput", "output tokens/s", (*LATENCIES, *TRUST), 1),
    "W2": Workload(mixed, "output_throughput", "output tokens/s", (*LATENCIES, *TRUST)),
    "W3": Workload(shared_prefix, "output_throughput", "output tokens/s", (*LATENCIES, *TRUST)),
    "W4": Workload(
        rising_rate,
        "rate_at_200ms",
        "requests/s at 0.2 s/token",
        (Column("at 0.1 / 0.5 s/token", ("rate_at_100ms", "rate_at_500ms"), 2), *TRUST),
        2,
    ),
    "W5": Workload(long_decode, "decode_throughput", "decoded tokens/s", (*LATENCIES, *TRUST)),
    "pace": Workload(
        long_prompt_arrives,
        # Not the 99th percentile: one stall of all rows for the whole prompt is less than a hundredth of the gaps.
        "beside_max_itl_ms",
        "longest gap between tokens beside a long prompt, ms",
        (
            Column("without it, ms", ("alone_max_itl_ms",)),
            Column("p99 without / with, ms", ("alone_p99_itl_ms", "beside_p99_itl_ms")),
            Column("its tokens", ("intruder_tokens",)),
            Column("its first token, ms", ("intruder_ttft_ms",)),
            *TRUST,
        ),
        less_is_better=True,
    ),
    "prefix": Workload(
        prefix_hit,
        "hit_ttft_ms",
        "first token on a hit, ms",
        (Column("on a miss, ms", ("miss_ttft_ms",)), Column("hit / miss", ("hit_share",), 2), *TRUST),
        less_is_better=True,
    ),
}
