"""How many requests fit a given KV memory: arithmetic only, no pool is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpaged.errors import ConfigError


@dataclass(frozen=True)
class Capacity:
    """What a pool holds when every request has the same length.

    Attributes:
        bytes_per_token: K and V of one token over all layers.
        bytes_per_block: the same of a block.
        pool_bytes: memory asked for.
        block_size: tokens a block.
        blocks: blocks of the pool, the null block included.
        usable_blocks: without the null block.
        tokens: of each request, prompt and output.
        blocks_per_request: of a request that shares nothing.
        shared_prefix: leading tokens that all requests have in common.
        shared_blocks: full blocks of that prefix, stored once for all.
        requests: that fit at the same time.
        reserve: tokens that an allocator without paging reserves for each request.
        requests_reserved: requests that fit when that much is reserved, contiguously and without a null block.
        waste: share of the used blocks' slots that hold no token.
        waste_reserved: share of the reserved slots that hold no token.
    """

    bytes_per_token: int
    bytes_per_block: int
    pool_bytes: int
    block_size: int
    blocks: int
    usable_blocks: int
    tokens: int
    blocks_per_request: int
    shared_prefix: int
    shared_blocks: int
    requests: int
    reserve: int
    requests_reserved: int
    waste: float
    waste_reserved: float


@dataclass(frozen=True)
class MemoryUse:
    """Memory that requests of given lengths take.

    Attributes:
        num_bytes: taken.
        waste: share of it that holds no token, 0 to 1.
    """

    num_bytes: int
    waste: float


def kv_bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, dtype_bytes: int, scale_bytes: int = 0) -> int:
    """Bytes of K and V that one token takes over all layers.

    Args:
        dtype_bytes: of a value.
        scale_bytes: of the scale that each head's K and V have in a quantized pool.
    """
    _check_positive(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype_bytes=dtype_bytes)
    return 2 * layers * kv_heads * (head_dim * dtype_bytes + scale_bytes)


def plan_capacity(
    *, bytes_per_token: int, pool_bytes: int, block_size: int, tokens: int, shared_prefix: int = 0, reserve: int
) -> Capacity:
    """Requests of `tokens` tokens that a pool of `pool_bytes` bytes holds, paged and reserved.

    Only full blocks of a shared prefix are shared, and at least one token of a request is its own.

    Raises:
        ConfigError: a number that is not positive, a prefix longer than the request, a reservation shorter than it, or
            a pool of less than two blocks.
    """
    _check_positive(
        bytes_per_token=bytes_per_token, pool_bytes=pool_bytes, block_size=block_size, tokens=tokens, reserve=reserve
    )
    if not 0 <= shared_prefix <= tokens:
        raise ConfigError(
            f"shared_prefix is {shared_prefix}, but must be between 0 and the {tokens} tokens of a request"
        )
    if reserve < tokens:
        raise ConfigError(f"reserve is {reserve}, less than the {tokens} tokens of a request; raise it")
    bytes_per_block = bytes_per_token * block_size
    blocks = pool_bytes // bytes_per_block
    if blocks < 2:
        raise ConfigError(
            f"a pool of {pool_bytes} bytes holds {blocks} blocks of {bytes_per_block} bytes, but needs at least 2, "
            "since one is the null block; enlarge the pool or lower block_size"
        )
    usable = blocks - 1
    each = -(-tokens // block_size)
    shared = min(shared_prefix, tokens - 1) // block_size
    requests = max(usable - shared, 0) // (each - shared)
    used_slots = (shared + requests * (each - shared)) * block_size
    used_tokens = shared * block_size + requests * (tokens - shared * block_size)
    return Capacity(
        bytes_per_token=bytes_per_token,
        bytes_per_block=bytes_per_block,
        pool_bytes=pool_bytes,
        block_size=block_size,
        blocks=blocks,
        usable_blocks=usable,
        tokens=tokens,
        blocks_per_request=each,
        shared_prefix=shared_prefix,
        shared_blocks=shared,
        requests=requests,
        reserve=reserve,
        requests_reserved=pool_bytes // (reserve * bytes_per_token),
        waste=1 - used_tokens / used_slots if requests else 0.0,
        waste_reserved=1 - tokens / reserve,
    )


def paged_use(lengths: Sequence[int], *, bytes_per_token: int, block_size: int) -> MemoryUse:
    """Memory of requests with `lengths` tokens in blocks of their own."""
    return _use(lengths, [-(-length // block_size) * block_size for length in lengths], bytes_per_token)


def reserved_use(lengths: Sequence[int], *, bytes_per_token: int, reserve: int) -> MemoryUse:
    """Memory of requests with `lengths` tokens when `reserve` tokens are set aside for each."""
    return _use(lengths, [reserve] * len(lengths), bytes_per_token)


def _use(lengths: Sequence[int], slots: list[int], bytes_per_token: int) -> MemoryUse:
    taken = sum(slots)
    return MemoryUse(taken * bytes_per_token, 1 - sum(lengths) / taken)


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}, but must be at least 1")
