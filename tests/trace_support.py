"""Small traces made by a bare scheduler."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from jaxpaged.config import CacheConfig, SchedulerConfig
from jaxpaged.core.plan import StepResult
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.request import Request, SamplingParams
from jaxpaged.trace import Header, Record, Recorder

HOSTILE_IDS = (
    "</script><img src=x onerror=\"document.title='owned'\">",
    "<b>bold</b>&amp;",
    "'\"><svg/onload=document.title='owned'>",
    "line\nbreak\u2028\u202e$x^2$\x00",
    "lone \ud800 surrogate",
    "x" * 5000,
)


def request(name: str, prompt_len: int, output_len: int, n: int = 1) -> Request:
    params = SamplingParams(n=n, max_tokens=output_len, ignore_eos=True)
    return Request(name, list(range(prompt_len)), params, output_len, seed=0)


def record_all(
    requests: Seq[Request], *, num_blocks: int = 13, block_size: int = 4, prefix_caching: bool = True
) -> tuple[Header, list[Record]]:
    """Serves `requests`, all there from the start, to their ends."""
    cache = CacheConfig(num_blocks, block_size, enable_prefix_caching=prefix_caching)
    scheduler = Scheduler(SchedulerConfig(max_model_len=40, max_num_seqs=8, max_num_batched_tokens=64), cache)
    records: list[Record] = []
    recorder = Recorder(records.append, clock=None)
    for each in requests:
        scheduler.add(each)
    while (plan := scheduler.schedule()) is not None:
        recorder(scheduler, plan)
        scheduler.update(plan, StepResult(np.ones(len(plan.sampled), np.int32)))
    recorder(scheduler, None)
    return Header.of(cache, model="bare", unit="step"), records
