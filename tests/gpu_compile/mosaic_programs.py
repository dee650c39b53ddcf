"""Run by test_mosaic_compile.py: compiles the Mosaic GPU prototype for an H200. Prints temporary bytes as JSON."""

from __future__ import annotations

import functools
import json
import sys

import jax
import jax.numpy as jnp

from gpu_targets import TARGETS
from jaxpaged_kernels import paged_attention

ROWS, TABLE_WIDTH = 32, 256


def compile_case(
    sharding: jax.sharding.Sharding,
    *,
    dtype: str,
    head_dim: int,
    group: int,
    kv_heads: int,
    block_size: int,
    blocks: int,
) -> int:
    """Bytes of temporaries."""

    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    attend = functools.partial(paged_attention, scale=head_dim**-0.5, decode_only=True, implementation="mosaic")
    pool = array(dtype, blocks, block_size, kv_heads, head_dim)
    rows = [array("int32", *shape) for shape in ((ROWS, TABLE_WIDTH), (ROWS,), (ROWS + 1,), ())]
    queries = array(dtype, ROWS, kv_heads * group, head_dim)
    memory = jax.jit(attend).lower(queries, pool, pool, *rows).compile().memory_analysis()
    assert memory is not None
    return int(memory.temp_size_in_bytes)


def main() -> None:
    mesh = TARGETS["h200"].mesh()
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        print(json.dumps([compile_case(sharding, **case) for case in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
