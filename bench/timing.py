"""Times on a device: chains of calls that never leave it, and the speed of a plain copy to compare them with."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# step(carry, i, operands) -> carry: call number i of a chain.
Step = Callable[[jax.Array, jax.Array, Any], jax.Array]

METHOD = (
    "calls are chained on the device, each taking the result of the one before as its queries, in a lax.fori_loop of "
    "static length, dispatched several times with one block_until_ready at the end; median of the repeats after warm-up"
)


@dataclass(frozen=True)
class Timing:
    """Microseconds a call.

    Attributes:
        us: median of the repeats; `low_us` and `high_us` are the extremes.
        calls: in each repeat.
    """

    us: float
    low_us: float
    high_us: float
    calls: int

    @classmethod
    def of(cls, seconds: list[float], calls: int) -> Timing:
        """From the seconds that each repeat took."""
        each = [s / calls * 1e6 for s in seconds]
        return cls(statistics.median(each), min(each), max(each), calls)


def time_chain(step: Step, carry: jax.Array, operands: Any, *, length: int, min_seconds: float, repeats: int) -> Timing:
    """Times `step` as METHOD says.

    Args:
        operands: arrays that every call reads; passed in, because captured ones would be compiled into the program.
        length: calls of one dispatched loop.
        min_seconds: that a repeat takes at least, in as many dispatches as are needed.
    """

    def chain(carry: jax.Array, operands: Any) -> jax.Array:
        return lax.fori_loop(0, length, lambda i, c: step(c, i, operands), carry)

    run = jax.jit(chain).lower(carry, operands).compile()
    jax.block_until_ready(run(carry, operands))
    start = time.perf_counter()
    jax.block_until_ready(run(carry, operands))
    dispatches = min(max(math.ceil(min_seconds / (time.perf_counter() - start)), 1), 1000)
    seconds = []
    for _ in range(repeats):
        start, state = time.perf_counter(), carry
        for _ in range(dispatches):
            state = run(state, operands)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - start)
    return Timing.of(seconds, dispatches * length)


def copy_bandwidth() -> float:
    """Bytes/s of a plain copy on the default device, of arrays far beyond its caches; read and written both counted."""
    if jax.default_backend() == "cpu":
        return _host_copy_bandwidth(1 << 27, repeats=5)
    return _device_copy_bandwidth(1 << 31, copies=10, repeats=5)


def _device_copy_bandwidth(num_bytes: int, *, copies: int, repeats: int) -> float:
    source = jax.random.bits(jax.random.key(0), (num_bytes // 4,), jnp.uint32)
    copy = jax.jit(jnp.copy)
    jax.block_until_ready(copy(source))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(copies):
            result = copy(source)
        jax.block_until_ready(result)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes * copies / statistics.median(seconds)


def _host_copy_bandwidth(num_bytes: int, *, repeats: int) -> float:
    """By numpy, into memory that has been touched: a result of XLA's is fresh memory, whose page faults take longer."""
    source, target = np.ones(num_bytes // 4, np.uint32), np.zeros(num_bytes // 4, np.uint32)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(seconds)
