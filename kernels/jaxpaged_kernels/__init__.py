"""Paged attention and KV-cache kernels for JAX. Needs only jax."""

from jaxpaged_kernels.api import paged_attention
from jaxpaged_kernels.cache import copy_blocks, gather_blocks, pool_dtype, scatter_blocks, write_kv

__all__ = ["copy_blocks", "gather_blocks", "paged_attention", "pool_dtype", "scatter_blocks", "write_kv"]
