"""Tile sizes of the Triton kernels by architecture, and how far a decode is split.

What bounds a tile: registers (255 a thread; above that values spill to memory), shared memory (K and V tiles times
pipeline stages; 227 KiB a block on sm_90, 163 on sm_80, 99 on sm_86 and sm_89), and the matrix unit, which wants 16
rows on sm_80 (mma) and 64 on sm_90 (wgmma). `tools/gpu_compile.py` prints what every choice takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpaged_kernels.target import Target

# K and V are found through the block table, so a step's loads come in two stages, one behind the other. With 5 stages
# the loads of the next step are in flight while one is computed; with 3 or 4 they start when it is done.
_STAGES = 5

# What a tile is chosen for where kernels run in interpret mode: any choice gives the same numbers.
INTERPRETED = (9, 0)


@dataclass(frozen=True)
class Tile:
    """Work of one block of threads.

    Attributes:
        rows: query rows of the score matrix, tokens times the query heads of one KV head.
        keys: keys a step.
        warps: of 32 threads.
        stages: of the software pipeline.
    """

    rows: int
    keys: int
    warps: int
    stages: int


def decode_tile(target: Target, head_dim: int, itemsize: int, kv_itemsize: int) -> Tile:
    """For one query token a row.

    Args:
        head_dim: padded to a power of two.
        itemsize: bytes of an element of q.
        kv_itemsize: bytes of an element of the pools.
    """
    # 16 rows are the fewest that a matrix instruction takes, and more than most models have query heads of a KV head.
    if itemsize == 4:
        # A float32 product in full precision runs without the matrix unit, with its operands in registers. Conversion
        # takes more of these, and leaves none for a pipeline.
        if kv_itemsize == 1:
            return Tile(rows=16, keys=16, warps=4 if head_dim <= 64 else 8, stages=1)
        keys = 32 if head_dim <= 64 else 16
        return Tile(rows=16, keys=keys, warps=4 if head_dim <= 128 else 8, stages=_STAGES)
    # Two steps of 16 KiB of K and as much of V, from two or three blocks a core, are more than DRAM's latency hides.
    keys = 64 if head_dim <= 128 else 32
    if kv_itemsize == 1 and head_dim > 64:  # conversion takes registers
        keys = 32 if head_dim <= 128 else 16
        return Tile(rows=16, keys=keys, warps=4, stages=_STAGES)
    return Tile(rows=16, keys=keys // 2 if _has_small_shared_memory(target) else keys, warps=4, stages=_STAGES)


def prefill_tile(target: Target, head_dim: int, itemsize: int, kv_itemsize: int) -> Tile:
    """For many query tokens a row; arguments as of `decode_tile`."""
    if itemsize == 4:
        return Tile(rows=32 if head_dim <= 128 else 16, keys=16, warps=8, stages=1 if kv_itemsize == 1 else 3)
    if _capability(target) >= (9, 0) and not _has_small_shared_memory(target):
        # Two warp groups of 64 rows: each step of K and V that is read serves twice the products. Conversion of the
        # widest heads leaves no registers for it.
        rows = 64 if kv_itemsize == 1 and head_dim > 128 else 128
        return Tile(rows=rows, keys=64 if head_dim <= 128 else 32, warps=8, stages=_STAGES)
    # No wgmma: operands pass through registers, so a wide head leaves room for fewer keys and needs more threads.
    if _has_small_shared_memory(target) and head_dim > 64:
        return Tile(rows=64, keys=16, warps=4 if head_dim <= 128 else 8, stages=_STAGES)
    return Tile(rows=64, keys=64 if head_dim <= 64 else 32, warps=4 if head_dim <= 64 else 8, stages=_STAGES)


def combine_tile(splits: int, head_dim: int) -> Tile:
    """For adding up the `splits` parts of one row and head."""
    return Tile(rows=splits, keys=0, warps=1 if splits * head_dim <= 1024 else 4, stages=1)


@dataclass(frozen=True)
class Splits:
    """How the keys of a decode are shared out.

    Attributes:
        most: parts a row may be cut into.
        blocks: thread blocks that a step should have at least, so that all of the device works.
        min_keys: keys of the smallest part worth its own block.
    """

    most: int
    blocks: int
    min_keys: int


# Thread blocks of a decode that fit on a core at once, by shared memory and registers of its tile.
_BLOCKS_PER_CORE = 4
_MOST_SPLITS = 64
# Even where rows alone fill the device, one row may be far longer than the others.
_LEAST_SPLITS = 4


def decode_splits(target: Target, num_programs: int, max_keys: int) -> Splits:
    """Splits for `num_programs` pairs of row and group of heads, and at most `max_keys` keys a row."""
    min_keys = 128
    blocks = target.num_cores * _BLOCKS_PER_CORE
    wanted = _power_of_2(-(-blocks // num_programs))
    most = min(max(wanted, _LEAST_SPLITS), _MOST_SPLITS, _power_of_2(-(-max_keys // min_keys)))
    return Splits(most, blocks, min_keys)


def _power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def _capability(target: Target) -> tuple[int, int]:
    return target.compute_capability or INTERPRETED


def _has_small_shared_memory(target: Target) -> bool:
    return _capability(target) in ((8, 6), (8, 9), (12, 0))
