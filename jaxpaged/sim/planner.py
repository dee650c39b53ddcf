"""What a model, a device and a kind of request come to: memory, concurrent requests, and settings to start with."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxpaged.capacity import Capacity, plan_capacity
from jaxpaged.config import GIB, ModelConfig, format_size
from jaxpaged.errors import ConfigError
from jaxpaged.sim.shapes import DTYPE_BYTES, ModelShape

# Left to the driver and the runtime: at least this much, or this share of the device.
_RUNTIME_BYTES, _RUNTIME_SHARE = GIB, 0.05
_MOST_SEQS = 1024
# What is alive at once while tokens are drawn, as XLA lays the step out on a CPU: arrays of the logits' size, and bytes
# for each draw beside them (candidates, their ranks and log-probabilities).
_LOGIT_COPIES, _DRAW_BYTES = 5, 28_000


@dataclass(frozen=True)
class Load:
    """The requests that are expected.

    Attributes:
        prompt, output: tokens of each; the prompt counts the prefix.
        shared_prefix: leading tokens of the prompt that all have in common.
    """

    prompt: int
    output: int
    shared_prefix: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True)
class Memory:
    """Bytes of a device, or of several together.

    Attributes:
        device: all of it.
        usable: what JAX may take, times the engine's share of that.
        weights: of the model.
        temporaries: of the largest step (estimated).
        pool: what is left, for KV.
    """

    device: int
    usable: int
    weights: int
    temporaries: int
    pool: int


@dataclass(frozen=True)
class Recommendation:
    """Settings to start with.

    Attributes:
        jax_memory_fraction: XLA_PYTHON_CLIENT_MEM_FRACTION, 0 to 1.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    jax_memory_fraction: float
    gpu_memory_utilization: float


@dataclass(frozen=True)
class DeploymentPlan:
    """The arithmetic of a deployment.

    Attributes:
        shared: requests of full length that the pool holds when the prefix is stored once.
        unshared: the same when every request has its own.
        average_requests: that run at once when each is, as on average over time, half through its output.
    """

    load: Load
    memory: Memory
    shared: Capacity
    unshared: Capacity
    average_requests: int
    recommended: Recommendation


def temporaries_bytes(config: ModelConfig, *, num_tokens: int, num_seqs: int, dtype: str) -> int:
    """About what the largest step takes beside weights and pool: activations of its tokens, or logits of its draws.

    The layers are over when the logits come, which get their memory.

    Args:
        num_tokens: most tokens of a step.
        num_seqs: most draws of a step.
    """
    size = DTYPE_BYTES[dtype]
    query = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    activations = num_tokens * (2 * config.intermediate_size + query + 3 * config.hidden_size) * size
    logits = num_seqs * (_LOGIT_COPIES * config.vocab_size * 4 + _DRAW_BYTES)
    return max(activations, logits)


def plan_deployment(
    config: ModelConfig,
    shape: ModelShape,
    load: Load,
    *,
    device_memory: int,
    jax_memory_fraction: float = 0.75,
    gpu_memory_utilization: float = 0.92,
    block_size: int = 16,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    pool_bytes: int | None = None,
) -> DeploymentPlan:
    """The plan of a model on a device.

    Args:
        pool_bytes: of the pool; None = what is left.

    Raises:
        ConfigError: the weights, or one request, do not fit; names the shortfall.
    """
    if load.prompt < 1 or load.output < 1:
        raise ConfigError(f"prompt is {load.prompt} and output {load.output} tokens, but both must be at least 1")
    if load.tokens > config.max_position_embeddings:
        raise ConfigError(
            f"prompt and output are {load.tokens} tokens, but the model was made for {config.max_position_embeddings} "
            "(max_position_embeddings); lower one of them"
        )
    if not 0 <= load.shared_prefix <= load.prompt:
        raise ConfigError(
            f"shared_prefix is {load.shared_prefix}, but must be between 0 and the {load.prompt} tokens of the prompt"
        )
    for limit, value in (
        ("block_size", block_size),
        ("max_num_seqs", max_num_seqs),
        ("max_num_batched_tokens", max_num_batched_tokens),
    ):
        if value < 1:
            raise ConfigError(f"{limit} is {value}, but must be at least 1")
    for name, share in (("the share of JAX", jax_memory_fraction), ("gpu_memory_utilization", gpu_memory_utilization)):
        if not 0 < share <= 1:
            raise ConfigError(f"{name} is {share:g}, but must be above 0 and at most 1")
    usable = int(int(device_memory * jax_memory_fraction) * gpu_memory_utilization)
    dtype = next(name for name, size in DTYPE_BYTES.items() if size == shape.dtype_bytes)
    temporaries = temporaries_bytes(config, num_tokens=max_num_batched_tokens, num_seqs=max_num_seqs, dtype=dtype)
    left = usable - shape.weights_bytes - temporaries
    needed = shape.kv_token_bytes * block_size * (1 + math.ceil(load.tokens / block_size))
    pool = left if pool_bytes is None else pool_bytes
    if min(left, pool) < needed:
        short = format_size(needed - min(left, pool))
        raise ConfigError(
            f"the model does not fit: of {format_size(device_memory)}, {format_size(usable)} are usable; weights take "
            f"{format_size(shape.weights_bytes)}, temporaries {format_size(temporaries)}, and one request of "
            f"{load.tokens} tokens {format_size(needed)}: {short} short; take a larger device, or quantize "
            "(--quantization, --kv-cache-dtype)"
        )

    def capacity(tokens: int, prefix: int) -> Capacity:
        return plan_capacity(
            bytes_per_token=shape.kv_token_bytes,
            pool_bytes=pool,
            block_size=block_size,
            tokens=tokens,
            shared_prefix=prefix,
            reserve=config.max_position_embeddings,
        )

    average = capacity(load.prompt + -(-load.output // 2), load.shared_prefix).requests
    headroom = max(_RUNTIME_BYTES / device_memory, _RUNTIME_SHARE)
    return DeploymentPlan(
        load,
        Memory(device_memory, usable, shape.weights_bytes, temporaries, pool),
        capacity(load.tokens, load.shared_prefix),
        capacity(load.tokens, 0),
        average,
        Recommendation(
            max_model_len=min(_round_up(load.tokens, 256), config.max_position_embeddings),
            max_num_seqs=max(1, min(average, _MOST_SEQS)),
            max_num_batched_tokens=max_num_batched_tokens,
            jax_memory_fraction=math.floor((1 - headroom) * 100) / 100,
            gpu_memory_utilization=gpu_memory_utilization,
        ),
    )


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
