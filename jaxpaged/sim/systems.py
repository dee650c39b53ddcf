"""The systems that the paper compares, all as rules of one scheduler (Kwon et al., 2023, section 6.1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

from jaxpaged.config import CacheConfig, PreemptionMode, SchedulerConfig
from jaxpaged.core.rules import Rules, Victim
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.errors import ConfigError
from jaxpaged.request import Sequence
from jaxpaged.sim.buddy import round_up
from jaxpaged.sim.memory import ReservingKV, WatchedKV

System = Literal["paged", "oracle", "pow2", "max", "static"]
SYSTEMS: tuple[System, ...] = get_args(System)

MAX_BLOCK_SIZE = 1024

ABOUT: dict[System, str] = {
    "paged": "blocks on demand, as jaxpaged and vLLM",
    "oracle": "Orca (Oracle): reserves the tokens that a request will have",
    "pow2": "Orca (Pow2): reserves an output rounded up to a power of two",
    "max": "Orca (Max): reserves the longest possible sequence",
    "static": "FasterTransformer: as max, and a batch is closed until all of it has finished",
}


def final_length(sequence: Sequence) -> int:
    """Tokens of a sequence of the simulator when it ends."""
    return len(sequence.request.prompt_token_ids) + sequence.request.max_tokens


def reservation(system: System, max_model_len: int) -> Callable[[Sequence], int]:
    """Slots that each sequence reserves under a system that reserves."""

    def oracle(sequence: Sequence) -> int:
        return final_length(sequence)

    def pow2(sequence: Sequence) -> int:
        request = sequence.request
        return min(len(request.prompt_token_ids) + round_up(request.max_tokens), max_model_len)

    def longest(sequence: Sequence) -> int:
        return max_model_len

    return {"oracle": oracle, "pow2": pow2}.get(system, longest)


def make_scheduler(
    system: System,
    *,
    slots: int,
    block_size: int,
    config: SchedulerConfig,
    prefix_caching: bool = False,
    host_blocks: int = 0,
    victim: Victim = "newest",
) -> tuple[Scheduler, WatchedKV]:
    """A scheduler with memory for `slots` tokens, and the owner of that memory.

    Raises:
        ConfigError: no such system, or the memory holds no block (or, for one that reserves, not the longest sequence).
    """
    if system not in SYSTEMS:
        raise ConfigError(f"the system is {system!r}, but must be one of {', '.join(SYSTEMS)}")
    if block_size < 1:
        raise ConfigError(f"block_size is {block_size}, but must be at least 1")
    owners: list[WatchedKV] = []

    def keep(owner: WatchedKV) -> WatchedKV:
        owners.append(owner)
        return owner

    if system == "paged":
        cache = CacheConfig(1 + slots // block_size, block_size, host_blocks, prefix_caching)
        rules = Rules(lambda cache: keep(WatchedKV(cache)), victim)
    else:
        if slots < config.max_model_len:
            raise ConfigError(
                f"the memory has {slots} slots, but {system!r} reserves up to {config.max_model_len} in one piece; "
                "lower max_model_len or give it more memory"
            )
        # Enough for every row: the pieces, not these blocks, are what there is too little of.
        size = min(config.max_model_len, MAX_BLOCK_SIZE)
        blocks = config.max_num_seqs * -(-config.max_model_len // size)
        cache = CacheConfig(1 + blocks, size, enable_prefix_caching=False)
        make = partial(ReservingKV, slots=slots, reserve=reservation(system, config.max_model_len), final=final_length)
        rules = Rules(lambda cache: keep(make(cache)), victim, static_batches=system == "static")
    scheduler = Scheduler(config, cache, rules=rules)
    return scheduler, owners[0]


def scheduler_config(
    system: System,
    *,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    watermark: float = 0.0,
    preemption_mode: PreemptionMode = "recompute",
    chunked_prefill: bool = True,
) -> SchedulerConfig:
    """Limits of a step. A static batch computes all its prompts at once."""
    if system == "static":
        max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs * max_model_len)
    if not chunked_prefill:
        max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
    return SchedulerConfig(
        max_model_len,
        max_num_seqs,
        max(max_num_batched_tokens, max_num_seqs),
        watermark=watermark if system == "paged" else 0.0,
        preemption_mode=preemption_mode,
        enable_chunked_prefill=chunked_prefill,
    )
