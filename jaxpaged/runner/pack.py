"""A plan as one int32 array: one host-to-device transfer a step.

    blob: | token_ids T | positions T | slots T | query_starts S+1 | kv_lens S | block_tables S*P | draws ... |

Floats and unsigned integers travel as their bits. Padding is harmless by construction: a padding token's slot is out of
bounds (its KV write is dropped), a padding row has length 0, a padding draw is greedy and its result is cut off.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxpaged.core.plan import IntArray, StepPlan
from jaxpaged.runner.buckets import Program

Field = tuple[tuple[int, ...], npt.DTypeLike]


class Blob:
    """Named fields in one int32 array; a subclass says which."""

    @property
    def fields(self) -> dict[str, Field]:
        """Name -> (shape, dtype), in the order of the blob."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """int32 elements of the blob."""
        return sum(prod(shape) for shape, _ in self.fields.values())

    def views(self, blob: IntArray) -> dict[str, npt.NDArray]:
        """Each field of `blob` as a writable array of its own shape and dtype."""
        views, start = {}, 0
        for name, (shape, dtype) in self.fields.items():
            stop = start + prod(shape)
            views[name] = blob[start:stop].view(dtype).reshape(shape)
            start = stop
        return views

    def unpack(self, blob: jax.Array) -> dict[str, jax.Array]:
        """Each field of `blob` [size] int32, inside a traced function."""
        fields, start = {}, 0
        for name, (shape, dtype) in self.fields.items():
            stop = start + prod(shape)
            part = blob[start:stop].reshape(shape)
            fields[name] = part if dtype is np.int32 else jax.lax.bitcast_convert_type(part, jnp.dtype(dtype))
            start = stop
        return fields


@dataclass(frozen=True)
class Layout(Blob):
    """Where each field of a program's blob lies.

    Attributes:
        max_blocks: P, width of a block table.
        block_size: tokens a block.
        num_blocks: blocks of the pool.
    """

    program: Program
    max_blocks: int
    block_size: int
    num_blocks: int

    @cached_property
    def fields(self) -> dict[str, Field]:
        """Name -> (shape, dtype), in the order of the blob."""
        T, S = self.program.num_tokens, self.program.num_rows
        return {
            "token_ids": ((T,), np.int32),
            "positions": ((T,), np.int32),
            "slots": ((T,), np.int32),
            "query_starts": ((S + 1,), np.int32),
            "kv_lens": ((S,), np.int32),
            "block_tables": ((S, self.max_blocks), np.int32),
            "num_decodes": ((1,), np.int32),
            "num_logprobs": ((1,), np.int32),
            "token_index": ((S,), np.int32),
            "temperature": ((S,), np.float32),
            "top_k": ((S,), np.int32),
            "top_p": ((S,), np.float32),
            "min_p": ((S,), np.float32),
            "seed": ((S, 2), np.uint32),
            "draw_position": ((S,), np.int32),
        }

    @property
    def num_slots(self) -> int:
        """Slots of the pool; the first slot number that is out of bounds."""
        return self.num_blocks * self.block_size

    def empty(self) -> IntArray:
        """The blob of a step that does nothing. [size] int32."""
        blob = np.zeros(self.size, np.int32)
        views = self.views(blob)
        views["slots"][:] = self.num_slots
        views["num_logprobs"][:] = -1
        views["top_p"][:] = 1.0
        return blob


def pack(plan: StepPlan, layout: Layout) -> IntArray:
    """`plan` padded to `layout`, as one array. [layout.size] int32.

    Raises:
        IndexError: a block id outside the pool, or a write into the null block. XLA would clip such an id silently into
            another request's memory.
    """
    T, S, N = plan.num_tokens, len(plan.kv_lens), len(plan.sampled)
    query_lens = np.diff(plan.query_starts)
    rows = np.repeat(np.arange(S, dtype=np.int32), query_lens)
    blocks = plan.block_tables[rows, plan.positions // layout.block_size]
    _check_ids(plan, blocks, layout.num_blocks)

    blob = layout.empty()
    v = layout.views(blob)
    v["token_ids"][:T] = plan.token_ids
    v["positions"][:T] = plan.positions
    v["slots"][:T] = blocks * layout.block_size + plan.positions % layout.block_size
    v["query_starts"][: S + 1] = plan.query_starts
    v["query_starts"][S + 1 :] = T
    v["kv_lens"][:S] = plan.kv_lens
    v["block_tables"][:S, : plan.block_tables.shape[1]] = plan.block_tables
    v["num_decodes"][0] = plan.num_decodes
    sample = plan.sample
    v["num_logprobs"][0] = sample.num_logprobs
    v["token_index"][:N] = sample.token_index
    v["temperature"][:N] = sample.temperature
    v["top_k"][:N] = sample.top_k
    v["top_p"][:N] = sample.top_p
    v["min_p"][:N] = sample.min_p
    v["seed"][:N] = sample.seed
    v["draw_position"][:N] = sample.position
    return blob


def _check_ids(plan: StepPlan, written: IntArray, num_blocks: int) -> None:
    tables = plan.block_tables
    if tables.size and not 0 <= int(tables.min()) <= int(tables.max()) < num_blocks:
        bad = int(tables.min()) if tables.min() < 0 else int(tables.max())
        raise IndexError(f"a block table holds block {bad}, but the pool has blocks 0 to {num_blocks - 1}")
    if written.size and int(written.min()) == 0:
        raise IndexError("a step would write into the null block (id 0)")
