"""How many blocks the pool gets, and the refusal to start when one request would not fit."""

from __future__ import annotations

import math

import jax

from jaxpaged.config import GIB, EngineConfig, format_size
from jaxpaged.errors import ConfigError

DEFAULT_CPU_POOL = 1 * GIB


def pool_blocks(
    config: EngineConfig,
    device: jax.Device,
    *,
    bytes_per_block: int,
    max_model_len: int,
    weights_bytes: int,
    temporaries_bytes: int,
) -> int:
    """Blocks of the device pool, the null block included.

    In order: `num_blocks`, `kv_cache_memory`, else what a GPU has left under `gpu_memory_utilization`, else 1 GiB.

    Args:
        weights_bytes: what the weights take on the device; they are there already.
        temporaries_bytes: measured peak of a step's temporaries.

    Raises:
        ConfigError: a request of `max_model_len` tokens would not fit; names the numbers and the remedies.
    """
    if config.num_blocks is not None:
        available, remedy = config.num_blocks * bytes_per_block, "raise num_blocks"
    elif config.kv_cache_memory is not None:
        available, remedy = config.kv_cache_memory, "raise kv_cache_memory"
    elif device.platform == "cpu":
        available, remedy = DEFAULT_CPU_POOL, "raise kv_cache_memory (on a CPU the default is 1 GiB)"
    else:
        limit = device.memory_stats()["bytes_limit"] * config.gpu_memory_utilization
        available = int(limit) - weights_bytes - temporaries_bytes
        remedy = (
            f"raise gpu_memory_utilization (now {config.gpu_memory_utilization:g}: {format_size(limit)} less "
            f"{format_size(weights_bytes)} of weights and {format_size(temporaries_bytes)} of temporaries)"
        )
    num_blocks = max(available, 0) // bytes_per_block
    # One block more than the tokens take: the null block.
    needed = math.ceil(max_model_len / config.block_size) + 1
    if num_blocks < needed:
        longest = max(num_blocks - 1, 0) * config.block_size
        raise ConfigError(
            f"one request of max_model_len={max_model_len} tokens needs {format_size(needed * bytes_per_block)} of KV "
            f"memory, but the pool has {format_size(max(available, 0))}, enough for {longest} tokens; {remedy}, "
            "or lower max_model_len"
        )
    return int(num_blocks)
