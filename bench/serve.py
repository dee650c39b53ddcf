"""Load generator for any OpenAI-compatible server: throughput, latency to the first token and between tokens.

    python bench/serve.py --base-url http://127.0.0.1:8000 --num-prompts 64 --max-concurrency 16 \\
        --input-len lognormal:160,0.7,16,1024 --output-len lognormal:100,0.7,8,256 --ignore-eos --warmup 4

`--max-concurrency` alone is a closed loop (as many requests at once as it says); `--request-rate` alone an open one
(arrivals are a gamma process, with `--burstiness 1` a Poisson process, whatever the server makes of them).
Times are taken at the client: a request starts when it is sent, not while it waits for `--max-concurrency`.
Key names of the JSON result are those of vLLM's `bench serve`, so that results compare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from http_client import HTTPClient, Piece, read_answer

# Each one token (with its leading space) in the vocabularies of GPT-2, Llama, Qwen, Mistral and SmolLM.
_COMMON = (
    "the of and to in is that it for was on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over"
)
WORDS = _COMMON.split()
# Ids that are plain text in any usual vocabulary: above the special tokens and bytes, below its end.
TOKEN_IDS = (1000, 10_000)
PERCENTILES = (90, 99)
METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (without the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
    "norm": "Normalized latency (end-to-end / output tokens)",
}


@dataclass(frozen=True)
class Workload:
    """One request to send: `body` holds its prompt or messages.

    Attributes:
        input_len: prompt tokens as far as known here; the server's own count replaces it.
    """

    body: dict[str, Any]
    input_len: int
    output_len: int


@dataclass
class Result:
    """What came of one request. Times in seconds; `start` counts from the start of the run."""

    start: float
    input_len: int
    output_len: int = 0
    ttft: float = 0.0
    latency: float = 0.0
    itls: list[float] = field(default_factory=list)
    text: str = ""
    finished: bool = False
    error: str = ""

    @property
    def success(self) -> bool:
        return self.finished and not self.error


class StreamReader:
    """Takes the events of one response, each with the time at which it came."""

    def __init__(self, result: Result, sent: float) -> None:
        self._result = result
        self._sent = sent
        self._newest = 0.0
        self._chunks = 0
        self._counted = False

    def event(self, data: str | bytes, now: float) -> None:
        """`data` is what follows "data: ", but not [DONE]."""
        result = self._result
        event = json.loads(data)
        if "error" in event:
            result.error = json.dumps(event["error"])
            return
        if usage := event.get("usage"):
            result.input_len = usage["prompt_tokens"]
            result.output_len = usage["completion_tokens"]
            self._counted = True
        for choice in event.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if choice.get("finish_reason"):
                result.finished = True
                result.latency = now - self._sent
            if not text:  # a role, an end, or text that the server holds back
                continue
            self._chunks += 1
            result.text += text
            result.latency = now - self._sent
            if self._chunks == 1:
                result.ttft = now - self._sent
            else:
                result.itls.append(now - self._newest)
            self._newest = now

    def end(self) -> None:
        result = self._result
        if not self._counted:
            result.output_len = self._chunks
        if not self._chunks:  # only tokens without text, such as special ones
            result.ttft = result.latency
        if not result.finished and not result.error:
            result.error = "the stream ended before a finish_reason"


@dataclass
class Recording:
    """One request's answer as it came: read only when all are over, as that takes time from a server beside it.

    Attributes:
        start: seconds from the start of the run.
        sent: when it was sent, by the clock of `pieces`.
        pieces: what was received.
        error: why there is no whole answer.
    """

    start: float
    sent: float
    input_len: int
    pieces: list[Piece] = field(default_factory=list)
    error: str = ""

    def result(self) -> Result:
        result = Result(start=self.start, input_len=self.input_len, error=self.error)
        if self.error:
            return result
        try:
            answer = read_answer(self.pieces)
            if answer.status != 200:
                result.error = f"HTTP {answer.status}: {answer.text[:500]}"
                return result
            reader = StreamReader(result, self.sent)
            for data, moment in server_sent_events(answer.body):
                reader.event(data, moment)
            reader.end()
            if not answer.is_complete and not result.error:
                result.error = "the connection ended before the answer did"
        except (ValueError, LookupError, TypeError, AttributeError) as error:  # what a server sent may be anything
            result.error = f"{type(error).__name__}: {error}"
        return result


def server_sent_events(body: Iterable[Piece]) -> Iterator[tuple[bytes, float]]:
    """The data of each event, without the final [DONE], and when its line was whole."""
    rest = b""
    for moment, piece in body:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                yield data, moment


async def send(client: HTTPClient, url: str, workload: Workload, run_start: float) -> Recording:
    """Sends one request and takes its whole answer; a failure of any kind is in the recording's `error`."""
    sent = time.perf_counter()
    recording = Recording(sent - run_start, sent, workload.input_len)
    try:
        recording.pieces = await client.request("POST", url, json.dumps(workload.body).encode())
    except (OSError, TimeoutError) as error:
        recording.error = f"{type(error).__name__}: {error}"
    return recording


async def send_all(
    client: HTTPClient,
    url: str,
    workloads: Sequence[Workload],
    arrivals: Sequence[float],
    max_concurrency: int | None,
    progress: Callable[[int], None],
) -> tuple[list[Result], float, int]:
    """Sends each at its arrival time. Returns results in order, seconds that it all took, and the most at once."""
    gate = asyncio.Semaphore(max_concurrency or len(workloads))
    running = most = done = 0
    start = time.perf_counter()

    async def one(workload: Workload, arrival: float) -> Recording:
        nonlocal running, most, done
        await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
        async with gate:
            running += 1
            most = max(most, running)
            recording = await send(client, url, workload, start)
            running -= 1
        done += 1
        progress(done)
        return recording

    recordings = await asyncio.gather(*(one(*pair) for pair in zip(workloads, arrivals, strict=True)))
    duration = time.perf_counter() - start
    return [recording.result() for recording in recordings], duration, most


def arrival_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds at which requests arrive: gaps are gamma-distributed with mean 1 / rate, and shape `burstiness`."""
    if rate == math.inf:
        return [0.0] * count
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), size=count)
    return [0.0, *np.cumsum(gaps[:-1]).tolist()][:count]


def draw_lengths(spec: str, count: int, rng: np.random.Generator) -> list[int]:
    """Lengths by "128", "uniform:LOW,HIGH" (both included) or "lognormal:MEAN,SIGMA,LOW,HIGH" (clipped)."""
    kind, _, rest = spec.rpartition(":")
    numbers = [float(number) for number in rest.split(",")]
    if min(numbers[2:] if kind == "lognormal" else numbers, default=1) < 1:
        raise ValueError(f"{spec!r} allows lengths below 1")
    if kind == "" and len(numbers) == 1:
        lengths = np.full(count, numbers[0])
    elif kind == "uniform" and len(numbers) == 2:
        lengths = rng.integers(int(numbers[0]), int(numbers[1]) + 1, size=count)
    elif kind == "lognormal" and len(numbers) == 4:
        mean, sigma, low, high = numbers
        lengths = np.clip(rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, size=count), low, high)
    else:
        raise ValueError(f"{spec!r} is none of 128, uniform:LOW,HIGH and lognormal:MEAN,SIGMA,LOW,HIGH")
    return [round(float(length)) for length in lengths]


def random_workloads(
    args: argparse.Namespace, count: int, rng: np.random.Generator, prefix: list[int]
) -> list[Workload]:
    """Prompts of random tokens after the shared prefix."""
    inputs = draw_lengths(args.input_len, count, rng)
    outputs = draw_lengths(args.output_len, count, rng)
    as_text = args.endpoint == "chat" or args.prompt_format == "text"
    workloads = []
    for input_len, output_len in zip(inputs, outputs, strict=True):
        ids = prefix + rng.integers(*TOKEN_IDS, size=input_len).tolist()
        prompt = " ".join(WORDS[i % len(WORDS)] for i in ids) if as_text else ids
        content = {"messages": [{"role": "user", "content": prompt}]} if args.endpoint == "chat" else {"prompt": prompt}
        workloads.append(Workload(request_body(args, content, output_len), len(ids), output_len))
    return workloads


def file_workloads(args: argparse.Namespace, count: int, rng: np.random.Generator) -> list[Workload]:
    """Lines of a file, each {"prompt": ...} or {"messages": ...} and perhaps {"output_len": n}; reused if too few."""
    lines = [json.loads(line) for line in Path(args.dataset).read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{args.dataset} is empty")
    lengths = draw_lengths(args.output_len, count, rng)
    workloads = []
    for i, length in enumerate(lengths):
        line = lines[i % len(lines)]
        output_len = line.get("output_len", length)
        content = {key: line[key] for key in ("prompt", "messages") if key in line}
        if args.endpoint == "chat" and "prompt" in content:
            content = {"messages": [{"role": "user", "content": content["prompt"]}]}
        workloads.append(Workload(request_body(args, content, output_len), 0, output_len))
    return workloads


def request_body(args: argparse.Namespace, content: dict[str, Any], output_len: int) -> dict[str, Any]:
    body = {
        "model": args.model,
        **content,
        "max_tokens": output_len,
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if args.ignore_eos:
        body["ignore_eos"] = True
    return {**body, **args.extra_body}


def summarize(values: Sequence[float], name: str) -> dict[str, float]:
    """Mean, median, deviation and percentiles of `values` (seconds), in milliseconds, under vLLM's key names."""
    ms = np.asarray(values if len(values) else [0.0]) * 1000
    summary = {
        f"mean_{name}_ms": float(ms.mean()),
        f"median_{name}_ms": float(np.median(ms)),
        f"std_{name}_ms": float(ms.std()),
    }
    return summary | {f"p{p}_{name}_ms": float(np.percentile(ms, p)) for p in PERCENTILES}


def report(results: Sequence[Result], duration: float, max_concurrent: int) -> dict[str, Any]:
    """Totals and distributions over the requests that succeeded."""
    good = [result for result in results if result.success]
    inputs, outputs = sum(r.input_len for r in good), sum(r.output_len for r in good)
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration,
        "input_throughput": inputs / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_concurrent_requests": max_concurrent,
    }
    summary |= summarize([r.ttft for r in good], "ttft")
    summary |= summarize([(r.latency - r.ttft) / (r.output_len - 1) for r in good if r.output_len > 1], "tpot")
    summary |= summarize([gap for r in good for gap in r.itls], "itl")
    summary |= summarize([r.latency for r in good], "e2el")
    return summary | summarize([r.latency / r.output_len for r in good if r.output_len], "norm")


def details(results: Sequence[Result]) -> dict[str, Any]:
    """Each request's own figures, in order."""
    return {
        "input_lens": [r.input_len for r in results],
        "output_lens": [r.output_len for r in results],
        "start_times": [r.start for r in results],
        "ttfts": [r.ttft for r in results],
        "latencies": [r.latency for r in results],
        "itls": [r.itls for r in results],
        "generated_texts": [r.text for r in results],
        "errors": [r.error for r in results],
    }


def print_report(summary: dict[str, Any]) -> None:
    """What `report` made, for people."""
    rows = [
        ("Requests", f"{summary['completed']} succeeded, {summary['failed']} failed"),
        ("Duration", f"{summary['duration']:.2f} s"),
        ("Most at once", f"{summary['max_concurrent_requests']}"),
        ("Request throughput", f"{summary['request_throughput']:.2f} requests/s"),
        ("Input throughput", f"{summary['input_throughput']:.1f} tokens/s"),
        ("Output throughput", f"{summary['output_throughput']:.1f} tokens/s"),
    ]
    for label, value in rows:
        print(f"{label:<50}{value}")
    print(f"\n{'Milliseconds':<50}" + "".join(f"{c:>10}" for c in ("mean", "median", *(f"p{p}" for p in PERCENTILES))))
    for name, label in METRICS.items():
        keys = (f"mean_{name}_ms", f"median_{name}_ms", *(f"p{p}_{name}_ms" for p in PERCENTILES))
        print(f"{label:<50}" + "".join(f"{summary[key]:>10.1f}" for key in keys))


async def first_model(client: HTTPClient, base_url: str) -> str:
    answer = read_answer(await client.request("GET", f"{base_url}/models"))
    if answer.status != 200:
        raise SystemExit(f"{base_url}/models answers with HTTP {answer.status}: {answer.text[:500]}")
    name: str = json.loads(answer.text)["data"][0]["id"]
    return name


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark: warm-up, load, summary."""
    base_url = args.base_url.rstrip("/").removesuffix("/v1") + "/v1"
    url = base_url + ("/chat/completions" if args.endpoint == "chat" else "/completions")
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    rng, warmup_rng, prefix_rng, arrival_rng = np.random.default_rng(args.seed).spawn(4)
    prefix = prefix_rng.integers(*TOKEN_IDS, size=args.shared_prefix_len).tolist()

    def workloads(count: int, rng: np.random.Generator) -> list[Workload]:
        if args.dataset == "random":
            return random_workloads(args, count, rng, prefix)
        return file_workloads(args, count, rng)

    client = HTTPClient(args.timeout, headers)
    args.model = args.model or await first_model(client, base_url)
    if args.warmup:
        loads = workloads(args.warmup, warmup_rng)
        warm, _, _ = await send_all(client, url, loads, [0.0] * args.warmup, args.max_concurrency, lambda _: None)
        if not any(result.success for result in warm):
            raise SystemExit(f"every warm-up request failed, the first with: {warm[0].error}")
    arrivals = arrival_times(args.num_prompts, args.request_rate, args.burstiness, arrival_rng)
    show = sys.stderr.isatty()

    def progress(done: int) -> None:
        if show:
            print(f"\r{done}/{args.num_prompts}", end="", file=sys.stderr, flush=True)

    loads = workloads(args.num_prompts, rng)
    results, duration, most = await send_all(client, url, loads, arrivals, args.max_concurrency, progress)
    if show:
        print(file=sys.stderr)
    settings = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if args.endpoint == "chat" else "openai",
        "model_id": args.model,
        "num_prompts": args.num_prompts,
        "request_rate": args.request_rate if args.request_rate < math.inf else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "shared_prefix_len": args.shared_prefix_len,
        "seed": args.seed,
    }
    return settings | report(results, duration, most) | details(results)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Exits where options do not fit each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="with or without /v1 (default: %(default)s)")
    add("--model", help="default: the first that the server names")
    add("--api-key")
    add("--endpoint", choices=("completions", "chat"), default="completions")
    add("--dataset", default="random", help='"random", or a file of JSON lines with prompt or messages, output_len')
    add("--prompt-format", choices=("ids", "text"), default="ids", help="of random prompts for completions")
    add("--num-prompts", type=int, default=100)
    add("--request-rate", type=float, default=math.inf, help="requests per second (default: inf, all at once)")
    add("--burstiness", type=float, default=1.0, help="1: Poisson; below: burstier; above: more even")
    add("--max-concurrency", type=int, help="most requests in progress (default: no limit)")
    add("--input-len", default="128", help="128, uniform:LOW,HIGH or lognormal:MEAN,SIGMA,LOW,HIGH (default: 128)")
    add("--output-len", default="64", help="as --input-len (default: 64)")
    add("--shared-prefix-len", type=int, default=0, help="tokens that all random prompts begin with, on top")
    add("--ignore-eos", action="store_true", help="go on after end-of-sequence tokens, where the server can")
    add("--temperature", type=float, default=0.0)
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help="further fields of every request")
    add("--seed", type=int, default=0)
    add("--warmup", type=int, default=0, metavar="N", help="requests sent before and not counted")
    add("--timeout", type=float, default=3600.0, help="seconds for one request")
    add("--save-result", type=Path, metavar="FILE", help="write everything, each request's figures too, as JSON")
    add("--json", action="store_true", help="print the summary as JSON instead of a table")
    args = parser.parse_args(argv)
    if args.num_prompts < 1 or args.request_rate <= 0 or args.burstiness <= 0:
        parser.error("--num-prompts, --request-rate and --burstiness must be above 0")
    try:
        for spec in (args.input_len, args.output_len):
            draw_lengths(spec, 1, np.random.default_rng(0))
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    result = asyncio.run(run(args))
    summary = {key: value for key, value in result.items() if not isinstance(value, list)}
    if args.save_result:
        args.save_result.write_text(json.dumps(result), encoding="utf-8")
    if args.json:
        print(json.dumps(summary, indent=2))
    else:
        print_report(summary)
    for error in sorted({error for error in result["errors"] if error})[:3]:
        print(f"failed: {error}", file=sys.stderr)
    return 0 if summary["failed"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
