"""The blob holds exactly the plan, and padding that can do no harm."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxpaged.core.plan import SampleBatch, StepPlan
from jaxpaged.request import Request, SamplingParams
from jaxpaged.runner.buckets import Buckets, Program
from jaxpaged.runner.pack import NO_ROW, Layout, Packer

I32, F32 = np.int32, np.float32
NO_PAIRS = np.empty((0, 2), np.int32)


def make_plan(query_lens: list[int], kv_lens: list[int], tables: list[list[int]], draws: list[int]) -> StepPlan:
    """A plan whose tokens are numbered 100, 101, ...; `draws` are token indices."""
    T, N = sum(query_lens), len(draws)
    sequence = Request("r", [1], SamplingParams(), 1, 0).sequences[0]
    return StepPlan(
        num_decodes=next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens)),
        token_ids=np.arange(100, 100 + T, dtype=I32),
        positions=np.concatenate([np.arange(kv - q, kv) for q, kv in zip(query_lens, kv_lens, strict=True)]).astype(
            I32
        ),
        query_starts=np.cumsum([0, *query_lens]).astype(I32),
        kv_lens=np.array(kv_lens, I32),
        block_tables=np.array([t + [0] * (4 - len(t)) for t in tables], I32),
        sample=SampleBatch(
            token_index=np.array(draws, I32),
            temperature=np.linspace(0.5, 1.5, N).astype(F32),
            top_k=np.arange(N, dtype=I32),
            top_p=np.full(N, 0.9, F32),
            min_p=np.full(N, 0.1, F32),
            seed=np.stack([np.arange(N), np.full(N, 0xFFFFFFFF)], 1).astype(np.uint32),
            position=np.array(draws, I32) + 7,
            row=np.arange(N, dtype=I32)[::-1] + 5,
            num_logprobs=3,
        ),
        sampled=(sequence,) * N,
        scheduled=(sequence,) * len(query_lens),
        copies=NO_PAIRS,
        swap_out=NO_PAIRS,
        swap_in=NO_PAIRS,
    )


def test_the_device_reads_back_the_plan() -> None:
    plan = make_plan([1, 5], kv_lens=[6, 7], tables=[[3, 2], [5, 4]], draws=[0, 5])
    layout = Layout(Program("mixed", 8, 3), max_blocks=4, block_size=4, num_blocks=6)
    on_device = jax.device_get(jax.jit(layout.unpack)(Packer(layout).pack(plan).blob))
    expected = {
        "token_ids": [100, 101, 102, 103, 104, 105, 0, 0],
        "positions": [5, 2, 3, 4, 5, 6, 0, 0],
        # Row 0 writes position 5 = offset 1 of block 2; row 1 positions 2 to 6 = the end of block 5, then block 4.
        "slots": [9, 22, 23, 16, 17, 18, 24, 24],
        "query_starts": [0, 1, 6, 6],
        "kv_lens": [6, 7, 0],
        "block_tables": [[3, 2, 0, 0], [5, 4, 0, 0], [0, 0, 0, 0]],
        "num_decodes": [1],
        "num_logprobs": [3],
        "token_index": [0, 5, 0],
        "temperature": F32([0.5, 1.5, 0.0]),
        "top_k": [0, 1, 0],
        "top_p": F32([0.9, 0.9, 1.0]),
        "min_p": F32([0.1, 0.1, 0.0]),
        "seed": [[0, 0xFFFFFFFF], [1, 0xFFFFFFFF], [0, 0]],
        "draw_position": [7, 12, 0],
        "draw_rows": [6, 5, NO_ROW],
    }
    assert on_device.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(on_device[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("tables", "message"),
    [([[6, 2]], "block 6.*0 to 5"), ([[-1, 2]], "block -1"), ([[3, 0]], "null block")],
    ids=["too large", "negative", "null"],
)
def test_a_bad_block_id_never_reaches_the_device(tables: list[list[int]], message: str) -> None:
    plan = make_plan([1], kv_lens=[6], tables=tables, draws=[0])
    with pytest.raises(IndexError, match=message):
        Packer(Layout(Program("decode", 2, 2), max_blocks=4, block_size=4, num_blocks=6)).pack(plan)


def test_a_blob_that_was_used_before_holds_nothing_of_it() -> None:
    layout = Layout(Program("mixed", 8, 3), max_blocks=4, block_size=4, num_blocks=6)
    large = make_plan([1, 1, 6], kv_lens=[6, 9, 7], tables=[[3, 2, 1], [5, 4, 1, 2], [1, 2, 3]], draws=[0, 1, 7])
    small = make_plan([1, 2], kv_lens=[2, 4], tables=[[2], [4]], draws=[0])
    wide = make_plan([1], kv_lens=[13], tables=[[2, 3, 4, 5]], draws=[0])
    packer = Packer(layout)
    for plan in (large, small, wide, large, wide, small, large):
        packed = packer.pack(plan)
        np.testing.assert_array_equal(packed.blob, Packer(layout).pack(plan).blob)
        packer.give_back(packed)
    assert packer.pack(large) is packed
    assert packer.pack(large) is not packed


def test_buckets_are_a_sum_and_each_plan_gets_the_smallest_that_holds_it() -> None:
    buckets = Buckets(max_num_seqs=24, max_num_batched_tokens=100)
    assert [str(p) for p in buckets.programs] == [
        "decode[2]", "decode[8]", "decode[16]", "decode[24]", "mixed[32]", "mixed[64]", "mixed[100]",
    ]  # fmt: skip
    assert {p.num_rows for p in buckets.mixed} == {24}

    def pick(query_lens: list[int], draws: int) -> str:
        n = len(query_lens)
        return str(buckets.pick(make_plan(query_lens, [q + 1 for q in query_lens], [[1, 1]] * n, [0] * draws)))

    assert pick([1], 1) == "decode[2]"
    assert pick([1] * 3, 3) == "decode[8]"
    assert pick([1] * 9, 9) == "decode[16]"
    assert pick([1] * 17, 17) == "decode[24]"
    assert pick([1, 2], 2) == "mixed[32]"
    assert pick([1] * 20 + [13], 21) == "mixed[64]"
    assert pick([7], 12) == "mixed[32]"  # siblings draw their first tokens from one row


def test_buckets_of_one_sequence() -> None:
    assert [str(p) for p in Buckets(1, 1).programs] == ["decode[2]", "mixed[32]"]
    assert [str(p) for p in Buckets(4, 33).programs] == ["decode[2]", "decode[4]", "mixed[32]", "mixed[33]"]


def test_few_buckets_where_padding_costs_nothing() -> None:
    assert [str(p) for p in Buckets(32, 512, skips_padding=True).programs] == [
        "decode[2]", "decode[16]", "decode[32]", "mixed[64]", "mixed[512]",
    ]  # fmt: skip
    assert [str(p) for p in Buckets(1, 1, skips_padding=True).programs] == ["decode[2]", "mixed[32]"]
