"""Worked examples of the PagedAttention paper, and what keys of the prefix cache stand for."""

from __future__ import annotations

import hashlib

import numpy as np

from jaxpaged.config import CacheConfig
from jaxpaged.core.block_keys import extend_keys, root_key
from jaxpaged.core.kv_manager import KVManager, group_blocks
from jaxpaged.request import Request, SamplingParams, Sequence

PROMPT = list(range(7))  # "Four score and seven years ago our"


def paper_manager() -> KVManager:
    """Blocks of 4; the free ones come in the order 7, 1, 3 of the paper's figures."""
    kv = KVManager(CacheConfig(num_blocks=9, block_size=4))
    assert kv.pool.allocate(8) == [1, 2, 3, 4, 5, 6, 7, 8]
    kv.pool.free([3, 1, 7])
    return kv


def start(kv: KVManager, prompt: list[int]) -> Sequence:
    (sequence,) = Request("r", prompt, SamplingParams(), 16, seed=0).sequences
    assert kv.grow(sequence, len(prompt)) is None
    sequence.num_computed = len(prompt)
    return sequence


def append(kv: KVManager, sequence: Sequence) -> tuple[int, int] | None:
    sequence.output_token_ids.append(99)
    copy = kv.grow(sequence, sequence.num_tokens)
    sequence.num_computed += 1
    return copy


def test_figure_6_blocks_are_taken_as_tokens_come() -> None:
    kv = paper_manager()
    sequence = start(kv, PROMPT)
    assert sequence.block_table == [7, 1]
    append(kv, sequence)  # "fathers" fills block 1
    assert sequence.block_table == [7, 1]
    append(kv, sequence)  # "brought" opens block 3
    assert sequence.block_table == [7, 1, 3]


def test_figure_8_the_first_writer_copies_and_the_last_one_does_not() -> None:
    kv = paper_manager()
    first = start(kv, PROMPT)
    second = Sequence(first.request, 1, 1)
    kv.fork(first, second)
    assert [kv.pool.ref_counts[b] for b in (7, 1)] == [2, 2]
    assert kv.blocks_to_write([(first, 8), (second, 8)]) == 1
    assert append(kv, first) == (1, 3)
    assert first.block_table == [7, 3]
    assert [kv.pool.ref_counts[b] for b in (7, 1, 3)] == [2, 1, 1]
    assert append(kv, second) is None
    assert second.block_table == [7, 1]


def test_blocks_of_a_group() -> None:
    assert group_blocks(7, [7, 7, 7], 4) == 2  # nobody has written: all share
    assert group_blocks(7, [8, 8, 8], 4) == 1 + 3  # each has its own second block
    assert group_blocks(8, [9, 13], 4) == 2 + 1 + 2
    assert group_blocks(7, [30], 4) == 8


def test_a_prefix_outlives_its_tail() -> None:
    kv = KVManager(CacheConfig(num_blocks=5, block_size=4))
    sequence = start(kv, list(range(16)))
    kv.cache_blocks(sequence, 0)
    blocks = list(sequence.block_table)
    kv.free(sequence)
    assert kv.pool.allocate(2) == [blocks[3], blocks[2]]
    (again,) = Request("s", list(range(16)), SamplingParams(), 16, seed=0).sequences
    assert kv.match_prefix(again, 16) == blocks[:2]


def test_blocks_not_computed_are_not_found() -> None:
    kv = KVManager(CacheConfig(num_blocks=9, block_size=4))
    (first,) = Request("r", list(range(12)), SamplingParams(), 16, seed=0).sequences
    kv.grow(first, 12)
    first.num_computed = 7
    kv.cache_blocks(first, 0)
    (second,) = Request("s", list(range(12)), SamplingParams(), 16, seed=0).sequences
    assert kv.match_prefix(second, 12) == first.block_table[:1]


def test_keys_are_a_chain_of_digests_over_little_endian_tokens() -> None:
    tokens = [1, 2, 3, 2**31 - 1, 5]
    (sequence,) = Request("r", tokens, SamplingParams(), 16, seed=0, cache_salt="s").sequences
    extend_keys(sequence, 1, 2, epoch=0)
    extend_keys(sequence, 2, 2, epoch=0)
    expected = [root_key("s", 0)]
    for block in (tokens[:2], tokens[2:4]):
        expected.append(hashlib.sha256(expected[-1] + np.array(block, "<i4").tobytes()).digest())
    assert sequence.block_keys == expected[1:]


def test_roots_never_collide() -> None:
    roots = [root_key(salt, epoch) for salt in (None, "", "none", "salt", "a", "ab") for epoch in (0, 1)]
    assert len(set(roots)) == len(roots)
