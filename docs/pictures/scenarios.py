"""Small workloads that show one thing each, run by the engine's own scheduler and block manager with no model.

What a model would draw is drawn at random here; what is shown, the memory, depends on it only through beam search.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from jaxpaged.config import CacheConfig, SchedulerConfig
from jaxpaged.core.beam import BeamSettings
from jaxpaged.core.plan import StepPlan, StepResult
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.request import Request, SamplingParams
from jaxpaged.trace import Header, Record, Recorder

VOCAB = 32_000
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Trace:
    header: Header
    records: list[Record]


def make_request(
    name: str,
    prompt: list[int] | int,
    output_len: int,
    *,
    n: int = 1,
    beams: bool = False,
) -> Request:
    """
    Args:
        prompt: token ids, or how many; then they are its own.
    """
    token_ids = prompt
    if isinstance(token_ids, int):
        token_ids = np.random.default_rng(list(name.encode())).integers(0, VOCAB, token_ids).tolist()
    params = SamplingParams(
        n=n, max_tokens=output_len, ignore_eos=True, beam_search=BeamSettings(early_stopping="never") if beams else None
    )
    return Request(name, token_ids, params, output_len, seed=0)


def run(
    arrivals: Seq[tuple[int, Request]],
    *,
    num_blocks: int,
    max_model_len: int = 512,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    prefix_caching: bool = True,
    title: str = "",
    seed: int = 0,
) -> Trace:
    """Serves requests, each from its step on, in a pool of `num_blocks` blocks that hold tokens."""
    cache = CacheConfig(num_blocks + 1, BLOCK_SIZE, enable_prefix_caching=prefix_caching)
    config = SchedulerConfig(max_model_len, max_num_seqs, max_num_batched_tokens)
    scheduler = Scheduler(config, cache)
    records: list[Record] = []
    recorder = Recorder(records.append, clock=None)
    rng = np.random.default_rng(seed)
    waiting, step = sorted(arrivals, key=lambda a: a[0]), 0
    while waiting or scheduler.has_unfinished():
        while waiting and waiting[0][0] <= step:
            scheduler.add(waiting.pop(0)[1])
        plan = scheduler.schedule()
        recorder(scheduler, plan)
        if plan is not None:
            scheduler.update(plan, draw(plan, rng))
        step += 1
    recorder(scheduler, None)
    return Trace(Header.of(cache, model=title, unit="step"), records)


def draw(plan: StepPlan, rng: np.random.Generator) -> StepResult:
    """Random tokens; where beams ask for them, the most probable ones of a peaked distribution."""
    count = len(plan.sampled)
    tokens = rng.integers(0, VOCAB, count).astype(np.int32)
    width = plan.sample.num_logprobs
    if width < 0:
        return StepResult(tokens)
    top_ids = np.stack([rng.choice(VOCAB, width, replace=False) for _ in range(count)]).astype(np.int32)
    top_logprobs = -np.cumsum(rng.exponential(0.55, (count, width)), axis=1).astype(np.float32)
    return StepResult(tokens, top_token_ids=top_ids, top_logprobs=top_logprobs)


def preemption() -> Trace:
    """Four requests that fit at first, in twelve blocks that are too few for all of them to end."""
    lengths = {"A": (40, 40), "B": (30, 24), "C": (60, 30), "D": (20, 16)}
    arrivals = [(0, make_request(name, *pair)) for name, pair in lengths.items()]
    return run(arrivals, num_blocks=12, max_model_len=128, prefix_caching=False, title="preemption in 12 blocks")


def prefix_sharing() -> Trace:
    """Eight requests with one system prompt of 96 tokens: the first computes it, the others find it."""
    rng = np.random.default_rng(7)
    system = rng.integers(0, VOCAB, 96).tolist()
    arrivals = []
    for i, name in enumerate("ABCDEFGH"):
        question = rng.integers(0, VOCAB, 14 + 7 * (i % 4)).tolist()
        arrivals.append((0 if i == 0 else 2 + 2 * (i - 1), make_request(name, system + question, 30 + 6 * (i % 3))))
    return run(arrivals, num_blocks=48, title="one system prompt, eight requests")


def parallel_sampling() -> Trace:
    """One prompt of 40 tokens, four outputs."""
    return run([(0, make_request("A", 40, 32, n=4))], num_blocks=18, title="parallel sampling, n = 4")


def beam_search() -> Trace:
    """One prompt of 40 tokens, four beams."""
    request = make_request("A", 40, 40, n=4, beams=True)
    return run([(0, request)], num_blocks=18, title="beam search, 4 beams", seed=4)


def forty_lengths() -> list[tuple[int, int]]:
    """(prompt, output) tokens of 40 requests: lognormal, as chat is, with means of about 160 and 180."""
    rng = np.random.default_rng(11)
    prompts = np.clip(rng.lognormal(4.75, 0.8, 40), 8, 700).astype(int)
    outputs = np.clip(rng.lognormal(4.9, 0.75, 40), 8, 700).astype(int)
    return [(int(p), int(o)) for p, o in zip(prompts, outputs, strict=True)]


FORTY_MAX_LEN = 1024
FORTY_BLOCKS = 512


def forty_paged() -> Trace:
    """The 40 requests at once, in a pool of 512 blocks, which is 8 times the longest request."""
    arrivals = [(0, make_request(f"r{i}", *pair)) for i, pair in enumerate(forty_lengths())]
    return run(
        arrivals,
        num_blocks=FORTY_BLOCKS,
        max_model_len=FORTY_MAX_LEN,
        max_num_batched_tokens=2048,
        prefix_caching=False,
        title="40 requests, paged",
    )
