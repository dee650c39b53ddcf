"""Run by test_gpu_compile.py: programs with faults that gpu_compile must find. Prints what it says of each as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from gpu_cases import Case, Lowered
from gpu_compile import run_case
from gpu_targets import TARGETS, find_ptxas

POOL = (1 << 16, 256)  # 16 Mi values


def hungry(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
    """Two tiles of 64 x 128 float32 in 32 threads: 512 registers each, twice what there are."""
    product = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)
    out_ref[...] = jnp.exp(product) * jnp.sum(product, axis=1, keepdims=True) + product


def spill(x: jax.Array) -> jax.Array:
    out = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    params = plgpu.CompilerParams(num_warps=1, num_stages=1)
    tiles = x[:64, :32], x[64:96, :128]
    return pl.pallas_call(hungry, out_shape=out, name="hungry", compiler_params=params)(*tiles)


def write(pool: jax.Array) -> jax.Array:
    return pool.at[jnp.array([3, 5])].set(1)


def copied(pool: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sorted pool is as large as the pool, and lives beside it."""
    return write(pool), jnp.sort(pool, axis=0)[0, 0]


def shrunk(pool: jax.Array) -> jax.Array:
    """No result is as large as the pool, so that none can take its place."""
    return write(pool)[:8]


def case(name: str, function: Callable[..., Any], *, donate: bool = True, needs: tuple[int, int] = (8, 0)) -> Case:
    def lower(target: object, sharding: jax.sharding.Sharding) -> Lowered:
        pool = jax.ShapeDtypeStruct(POOL, jnp.bfloat16, sharding=sharding)
        program = jax.jit(function, donate_argnums=(0,) if donate else ()).lower(pool)
        return Lowered(program, POOL[0] * POOL[1] * 2)

    return Case(name, lower, needs)


def main() -> None:
    target = TARGETS["a100"]
    mesh, ptxas = target.mesh(), find_ptxas()
    assert ptxas is not None
    cases = [
        case("fine", write),
        case("spill", spill, donate=False),
        case("copied", copied),
        case("not aliased", shrunk),
        case("not refused", write, needs=(8, 9)),
    ]
    results = (run_case(each, "a100", target, mesh, ptxas) for each in cases)
    print(json.dumps({result.variant: {"status": result.status, "reason": result.reason} for result in results}))


if __name__ == "__main__":
    main()
