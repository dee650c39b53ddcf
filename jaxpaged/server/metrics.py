"""Prometheus metrics: the engine's counters, read when scraped, and histograms over requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from jaxpaged.outputs import RequestMetrics, RequestOutput
from jaxpaged.request import FinishReason, OutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxpaged.config import CacheConfig
    from jaxpaged.engine.stats import EngineStats

PREFIX, ALIAS = "jaxpaged:", "vllm:"
LABELS = ("model_name", "engine")

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40)
_REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = tuple(2**i for i in range(18))
_N = (1, 2, 5, 10, 20)

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between the tokens of streamed requests.", _TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Mean time of a request's tokens after the first.", _TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _REQUEST_SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step.", _REQUEST_SECONDS),
    "request_inference_time_seconds": ("From the first step to the last token.", _REQUEST_SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token.", _REQUEST_SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", _REQUEST_SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Output tokens of a request, over its n choices.", _TOKENS),
    "request_params_n": ("n of a request.", _N),
    "request_params_max_tokens": ("max_tokens of a request, where it set one.", _TOKENS),
    "iteration_tokens_total": ("Tokens of a step: those drawn, and prompts that got their first token.", _TOKENS),
}


class ServerMetrics:
    """All series of one server, each under `jaxpaged:` and, if wanted, under `vllm:` too.

    Attributes:
        on_observe: called with whatever goes into a histogram, by its name; None = nobody listens.
    """

    def __init__(
        self, model_name: str, stats: Callable[[], EngineStats], cache: CacheConfig, *, vllm_aliases: bool
    ) -> None:
        self._labels = (model_name, "0")
        own = CollectorRegistry()
        self._histograms = {
            name: Histogram(PREFIX + name, text, LABELS, registry=own, buckets=buckets).labels(*self._labels)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._rejections = Counter(
            f"{PREFIX}admission_rejections", "Requests answered with 503.", (*LABELS, "reason"), registry=own
        )
        own.register(_EngineCollector(stats, cache, self._labels))
        self._registry = CollectorRegistry()
        self._registry.register(_Aliased(own) if vllm_aliases else own)
        ProcessCollector(registry=self._registry)
        self._iteration_tokens = 0
        self.on_observe: Callable[[str, float], None] | None = None

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def reject(self, reason: str) -> None:
        self._rejections.labels(*self._labels, reason).inc()

    def observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histograms[name].observe(value)
            if self.on_observe is not None:
                self.on_observe(name, value)

    def observe_embedding(self, output: RequestOutput) -> None:
        """Called when a request's embedding has come. That is no token, and counts as none."""
        durations = _durations(output.metrics)
        for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"):
            self.observe(name, durations[name])
        self.observe("request_prompt_tokens", len(output.prompt_token_ids))

    def observe_step(self, stats: EngineStats) -> None:
        """Called after each step of the engine."""
        total = stats.prompt_tokens_total + stats.generation_tokens_total
        if total > self._iteration_tokens:
            self.observe("iteration_tokens_total", total - self._iteration_tokens)
        self._iteration_tokens = total


class RequestObserver:
    """Feeds the histograms from the outputs of the requests that one call to the API makes."""

    def __init__(self, metrics: ServerMetrics, params: SamplingParams) -> None:
        self._metrics = metrics
        self._params = params
        self._last_token_time: dict[str, float] = {}
        self._num_tokens: dict[str, int] = {}

    def update(self, output: RequestOutput) -> None:
        request_id, times = output.request_id, output.metrics
        num_new = sum(len(o.token_ids) for o in output.outputs)
        self._num_tokens[request_id] = self._num_tokens.get(request_id, 0) + num_new
        if self._params.output_kind is OutputKind.DELTA and num_new and times.last_token_time is not None:
            previous = self._last_token_time.get(request_id)
            if previous is not None:
                self._metrics.observe("inter_token_latency_seconds", times.last_token_time - previous)
            self._last_token_time[request_id] = times.last_token_time
        if output.finished:
            self._finish(output, self._num_tokens.pop(request_id))

    def _finish(self, output: RequestOutput, num_tokens: int) -> None:
        times, observe = output.metrics, self._metrics.observe
        for name, value in _durations(times).items():
            observe(name, value)
        decode = _between(times.first_token_time, times.last_token_time)
        steps = num_tokens / self._params.n - 1
        if decode is not None and steps > 0:
            observe("request_time_per_output_token_seconds", decode / steps)
        observe("request_prompt_tokens", len(output.prompt_token_ids))
        observe("request_generation_tokens", num_tokens)
        observe("request_params_n", self._params.n)
        observe("request_params_max_tokens", self._params.max_tokens)


class _EngineCollector(Collector):
    """Reads the engine's counters at each scrape."""

    def __init__(self, stats: Callable[[], EngineStats], cache: CacheConfig, labels: tuple[str, str]) -> None:
        self._stats = stats
        self._cache = cache
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        stats, scheduler = self._stats(), self._stats().scheduler
        used = 1 - scheduler.num_free_blocks / max(scheduler.num_total_blocks, 1)
        yield self._gauge("num_requests_running", "Requests in the running batch.", scheduler.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for their turn.", scheduler.num_waiting)
        yield self._gauge("num_requests_swapped", "Preempted, with their KV in the host pool.", scheduler.num_swapped)
        yield self._gauge("kv_cache_usage_perc", "Share of the pool's blocks in use, 0 to 1.", used)
        yield self._gauge("num_cached_blocks", "Blocks findable by prefix.", scheduler.num_cached_blocks)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", scheduler.prefix_queries_total)
        yield self._counter("prefix_cache_hits", "Prompt tokens found.", scheduler.prefix_hits_total)
        yield self._counter("num_preemptions", "Preempted groups.", scheduler.preemptions_total)
        yield self._counter("swapped_out_blocks", "Blocks sent to the host.", scheduler.swapped_out_blocks_total)
        yield self._counter("prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens_total)
        yield self._counter("prompt_tokens_cached", "Those from the prefix cache.", stats.cached_prompt_tokens_total)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generation_tokens_total)
        yield self._counter("steps", "Steps of the engine.", stats.steps_total)
        yield self._counter("compiles_after_warmup", "Programs compiled since warm-up.", stats.compiles_after_warmup)
        yield self._finished(stats)
        yield self._cache_info()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _finished(self, stats: EngineStats) -> Metric:
        family = CounterMetricFamily(
            f"{PREFIX}request_success", "Ended sequences, by reason.", labels=(*LABELS, "finished_reason")
        )
        for reason in FinishReason:
            family.add_metric((*self._labels, reason.value), stats.finished.get(reason.value, 0))
        return family

    def _cache_info(self) -> Metric:
        info = {
            "block_size": self._cache.block_size,
            "cache_dtype": self._cache.cache_dtype,
            "num_gpu_blocks": self._cache.num_blocks,
            "num_cpu_blocks": self._cache.num_host_blocks,
            "enable_prefix_caching": self._cache.enable_prefix_caching,
        }
        family = GaugeMetricFamily(f"{PREFIX}cache_config_info", "How the pool is cut.", labels=(*LABELS, *info))
        family.add_metric((*self._labels, *(str(v) for v in info.values())), 1)
        return family


class _Aliased(Collector):
    """Each of our series, and once more under the other prefix."""

    def __init__(self, source: CollectorRegistry) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        for family in self._source.collect():
            yield family
            alias = Metric(_alias(family.name), family.documentation, family.type)
            alias.samples = [Sample(_alias(s.name), *s[1:]) for s in family.samples]
            yield alias


def _alias(name: str) -> str:
    return ALIAS + name.removeprefix(PREFIX)


def _durations(times: RequestMetrics) -> dict[str, float | None]:
    first_step, first, last = times.first_scheduled_time, times.first_token_time, times.last_token_time
    return {
        "time_to_first_token_seconds": _between(times.arrival_time, first),
        "e2e_request_latency_seconds": _between(times.arrival_time, last),
        "request_queue_time_seconds": _between(times.arrival_time, first_step),
        "request_inference_time_seconds": _between(first_step, last),
        "request_prefill_time_seconds": _between(first_step, first),
        "request_decode_time_seconds": _between(first, last),
    }


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
