"""Paged attention and KV-cache kernels for JAX. Needs only jax."""

from jaxpaged_kernels.api import paged_attention
from jaxpaged_kernels.cache import (
    copy_blocks,
    gather_blocks,
    new_pool,
    pool_dtype,
    scatter_blocks,
    write_kv,
    write_quantized_kv,
)
from jaxpaged_kernels.checks import check_block_tables
from jaxpaged_kernels.linear import best_linear, linear, rms_norm
from jaxpaged_kernels.quantize import dequantize, quantize
from jaxpaged_kernels.quantized import QuantizedWeight, dequantize_weight, pack_blocks, quantize_weight, take_rows
from jaxpaged_kernels.rope import apply_rope, rotate_and_write_kv

__all__ = [
    "QuantizedWeight",
    "apply_rope",
    "best_linear",
    "check_block_tables",
    "copy_blocks",
    "dequantize",
    "dequantize_weight",
    "gather_blocks",
    "linear",
    "new_pool",
    "pack_blocks",
    "paged_attention",
    "pool_dtype",
    "quantize",
    "quantize_weight",
    "rms_norm",
    "rotate_and_write_kv",
    "scatter_blocks",
    "take_rows",
    "write_kv",
    "write_quantized_kv",
]
