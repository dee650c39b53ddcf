"""Known numbers of KV arithmetic, and the real block manager filled to the brim."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpaged.capacity import Capacity, kv_bytes_per_token, paged_use, plan_capacity, reserved_use
from jaxpaged.config import GIB, KIB, MIB, CacheConfig
from jaxpaged.core.kv_manager import KVManager
from jaxpaged.errors import ConfigError
from jaxpaged.request import Request, SamplingParams, Sequence

PER_TOKEN = 128 * KIB


def capacity(tokens: int, shared_prefix: int = 0) -> Capacity:
    return plan_capacity(
        bytes_per_token=PER_TOKEN,
        pool_bytes=60 * GIB,
        block_size=16,
        tokens=tokens,
        shared_prefix=shared_prefix,
        reserve=2048,
    )


def test_bytes_of_a_token_and_of_a_block() -> None:
    assert kv_bytes_per_token(layers=32, kv_heads=8, head_dim=128, dtype_bytes=2) == PER_TOKEN
    assert capacity(350).bytes_per_block == 2 * MIB
    # OPT-13B of the PagedAttention paper: 12 GB hold 15.7K tokens.
    opt = kv_bytes_per_token(layers=40, kv_heads=40, head_dim=128, dtype_bytes=2)
    assert opt == 819_200


def test_bytes_of_a_quantized_token() -> None:
    """128 bytes and a scale of 4 for each of K and V, 32 layers and 8 heads: 1.94 times the tokens of 16 bits."""
    token = kv_bytes_per_token(layers=32, kv_heads=8, head_dim=128, dtype_bytes=1, scale_bytes=4)
    assert token == 66 * KIB


def test_memory_of_forty_requests() -> None:
    lengths = np.random.default_rng(7).integers(50, 600, 40).tolist()
    reserved = reserved_use(lengths, bytes_per_token=PER_TOKEN, reserve=2048)
    assert f"{reserved.num_bytes / GIB:.2f} {reserved.waste:.1%}" == "10.00 82.2%"
    paged = paged_use(lengths, bytes_per_token=PER_TOKEN, block_size=16)
    assert f"{paged.num_bytes / GIB:.2f} {paged.waste:.1%}" == "1.81 2.1%"


def test_requests_in_sixty_gib() -> None:
    short = capacity(350)
    assert (short.blocks, short.requests, short.requests_reserved) == (30_720, 1396, 240)
    assert capacity(2000).requests == 245
    shared = capacity(2000, shared_prefix=1500)
    assert (shared.shared_blocks, shared.requests) == (93, 957)


def fill(blocks: int, block_size: int, tokens: int, shared_prefix: int) -> int:
    """Requests that the real manager takes before it runs out, each computed before the next one comes."""
    kv = KVManager(CacheConfig(num_blocks=blocks, block_size=block_size))
    prefix = list(range(shared_prefix))
    admitted: list[Sequence] = []
    while True:
        own = [100_000 + len(admitted)] * (tokens - shared_prefix)
        params = SamplingParams(max_tokens=1)
        request = Request(f"r{len(admitted)}", prefix + own, params, 1, seed=0)
        (sequence,) = request.sequences
        hits = kv.match_prefix(sequence, tokens)
        cached_and_free = sum(kv.pool.ref_counts[block] == 0 for block in hits)
        if -(-tokens // block_size) - len(hits) + cached_and_free > kv.pool.num_free:
            break
        kv.attach(sequence, hits)
        assert kv.grow(sequence, tokens) is None
        sequence.num_computed = tokens
        kv.cache_blocks(sequence, len(hits))
        admitted.append(sequence)
    kv.check_invariants(admitted)
    return len(admitted)


@pytest.mark.parametrize(("tokens", "shared_prefix", "requests"), [(350, 0, 1396), (2000, 0, 245), (2000, 1500, 957)])
def test_the_block_manager_holds_as_many(tokens: int, shared_prefix: int, requests: int) -> None:
    assert fill(30_720, 16, tokens, shared_prefix) == requests


@pytest.mark.parametrize("shared_prefix", [0, 3, 4, 16, 20, 21])
@pytest.mark.parametrize("blocks", [2, 6, 7, 40])
def test_small_pools_agree_with_the_block_manager(blocks: int, shared_prefix: int) -> None:
    plan = plan_capacity(
        bytes_per_token=10,
        pool_bytes=blocks * 40 + 39,
        block_size=4,
        tokens=21,
        shared_prefix=shared_prefix,
        reserve=32,
    )
    # Requests that are equal to the last token still compute that one each.
    assert fill(blocks, 4, 21, shared_prefix) == plan.requests


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "tokens is 0"),
        ({"shared_prefix": 11}, "shared_prefix is 11"),
        ({"reserve": 9}, "reserve is 9"),
        ({"pool_bytes": 7}, "null block"),
    ],
)
def test_impossible_questions_are_refused(changes: dict[str, int], message: str) -> None:
    question = {"bytes_per_token": 1, "pool_bytes": 100, "block_size": 4, "tokens": 10, "reserve": 10, **changes}
    with pytest.raises(ConfigError, match=message):
        plan_capacity(**question)
