"""How many blocks the pool gets, and the refusal to start when one request would not fit."""

from __future__ import annotations

import logging
import math

import jax

from jaxpaged.config import GIB, EngineConfig, format_size
from jaxpaged.errors import ConfigError
from jaxpaged.runner.host_memory import available_bytes

logger = logging.getLogger(__name__)

DEFAULT_CPU_POOL = 1 * GIB
# Of a turn of a chat, prompt and output together: what each row is granted before untouched memory is left alone.
USUAL_TOKENS = 384
# Slots are int32, and the number behind the last one marks padding.
MAX_SLOTS = 2**31 - 1


def pool_blocks(
    config: EngineConfig,
    device: jax.Device,
    *,
    bytes_per_block: int,
    max_blocks: int | None,
    max_model_len: int,
    weights_bytes: int,
    temporaries_bytes: int,
) -> int:
    """Blocks of the device pool, the null block included.

    In order: `num_blocks`, `kv_cache_memory`, else what a GPU has left under `gpu_memory_utilization`, else 1 GiB.

    Args:
        max_blocks: most that the kernels can address, None = no limit. A pool sized by what there is stops there.
        weights_bytes: what the weights take on the device; they are there already.
        temporaries_bytes: measured peak of a step's temporaries.

    Raises:
        ConfigError: a request of `max_model_len` tokens would not fit, the pool was asked to be larger than can be
            addressed or, on a CPU, than there is memory, or the device does not say how much memory it has; names the
            numbers and the remedies.
    """
    if config.num_blocks is not None:
        available, remedy = config.num_blocks * bytes_per_block, "raise num_blocks"
    elif config.kv_cache_memory is not None:
        available, remedy = config.kv_cache_memory, "raise kv_cache_memory"
    elif device.platform == "cpu":
        available, remedy = DEFAULT_CPU_POOL, "raise kv_cache_memory (on a CPU the default is 1 GiB)"
    else:
        available, remedy = _left_on_gpu(config, device, weights_bytes, temporaries_bytes)
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
    if max_blocks is not None and num_blocks > max_blocks:
        most = format_size(max_blocks * bytes_per_block)
        limit = (
            f"{num_blocks} blocks are more than the {max_blocks} ({most}) with which the arrays of a "
            f"{config.kv_cache_dtype} pool reach 2 GiB each, as far as 32-bit offsets go"
        )
        if config.num_blocks is not None or config.kv_cache_memory is not None:
            raise ConfigError(f"{limit}; lower num_blocks or kv_cache_memory, or set kv_cache_dtype='auto'")
        logger.warning("%s; the pool gets %d", limit, max_blocks)
        num_blocks = max_blocks
    if num_blocks * config.block_size > MAX_SLOTS:
        raise ConfigError(
            f"{num_blocks} blocks of {config.block_size} tokens are more than the {MAX_SLOTS} tokens that a pool can "
            "number; lower num_blocks or kv_cache_memory"
        )
    if device.platform == "cpu" and (left := available_bytes()) is not None and num_blocks * bytes_per_block > left:
        # It would be found out under load, when the pool fills: memory is only taken where it is written.
        raise ConfigError(
            f"the pool of {format_size(num_blocks * bytes_per_block)} is larger than the {format_size(left)} of memory "
            "that are left here; lower kv_cache_memory or num_blocks"
        )
    return num_blocks


def eager_blocks(config: EngineConfig, device: jax.Device, *, max_num_seqs: int) -> int | None:
    """Blocks of the pool to be in use before a cached one is evicted, None = all.

    On a CPU the pool takes memory where it is first written. Where nobody has said how much it may be, cached prefixes
    alone should not fill it: the prefix cache gets what all rows take at a usual length, requests that run all of it.
    """
    if device.platform != "cpu" or config.num_blocks is not None or config.kv_cache_memory is not None:
        return None
    return max_num_seqs * math.ceil(USUAL_TOKENS / config.block_size)


def _left_on_gpu(
    config: EngineConfig, device: jax.Device, weights_bytes: int, temporaries_bytes: int
) -> tuple[int, str]:
    """Bytes that the pool may take of what JAX manages on `device`, and what to do if they are too few."""
    stats = device.memory_stats()
    if stats is None or "bytes_limit" not in stats:
        raise ConfigError(f"{device} does not say how much memory it has; set kv_cache_memory")
    # Beside the weights that are served the process may hold others, such as those of a model in training.
    in_use = max(stats.get("bytes_in_use", 0), weights_bytes)
    limit = int(stats["bytes_limit"] * config.gpu_memory_utilization)
    remedy = (
        f"raise gpu_memory_utilization (now {config.gpu_memory_utilization:g}: {format_size(limit)} less "
        f"{format_size(in_use)} in use and {format_size(temporaries_bytes)} of temporaries), let JAX take more of the "
        "device (XLA_PYTHON_CLIENT_MEM_FRACTION)"
    )
    return limit - in_use - temporaries_bytes, remedy
