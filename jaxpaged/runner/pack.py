"""A plan as one int32 array, the blob: one host-to-device transfer a step.

    blob: | token_ids T | positions T | slots T | query_starts S+1 | kv_lens S | block_tables S*P | draws ... |

Floats and unsigned integers travel as their bits. Padding is harmless by construction: a padding token's slot is out of
bounds (its KV write is dropped), a padding row has length 0, a padding draw is greedy and its result is cut off and
kept for no row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxpaged.core.plan import IntArray, SampleBatch, StepPlan
from jaxpaged.runner.buckets import Program

# Outside every batch.
NO_ROW = np.iinfo(np.int32).max

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
            "draw_rows": ((S,), np.int32),
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
        views["draw_rows"][:] = NO_ROW
        return blob


class Packed:
    """A blob, and how much of it is in use."""

    def __init__(self, layout: Layout) -> None:
        self.blob = layout.empty()
        self._layout = layout
        self._views = layout.views(self.blob)
        self._table_shape = (0, 0)
        self._sample: SampleBatch | None = None

    def fill(self, plan: StepPlan) -> None:
        """As `Packer.pack`; whatever the blob held before is gone."""
        layout, v = self._layout, self._views
        T, S, N = plan.num_tokens, len(plan.kv_lens), len(plan.sampled)
        rows = np.arange(S) if T == S else np.repeat(np.arange(S), np.diff(plan.query_starts))
        index, offset = np.divmod(plan.positions, np.int32(layout.block_size))
        blocks = plan.block_tables[rows, index]
        _check_ids(plan, blocks, layout.num_blocks)
        v["token_ids"][:T] = plan.token_ids
        v["token_ids"][T:] = 0
        v["positions"][:T] = plan.positions
        v["positions"][T:] = 0
        v["slots"][:T] = blocks * np.int32(layout.block_size) + offset
        v["slots"][T:] = layout.num_slots
        v["query_starts"][: S + 1] = plan.query_starts
        v["query_starts"][S + 1 :] = T
        v["kv_lens"][:S] = plan.kv_lens
        v["kv_lens"][S:] = 0
        v["num_decodes"][0] = plan.num_decodes
        self._fill_tables(plan.block_tables)
        sample = plan.sample
        v["draw_position"][:N] = sample.position
        v["draw_position"][N:] = 0
        if self._sample is None or not sample.draws_as(self._sample):
            self._fill_sample(sample)
        self._sample = sample

    def _fill_tables(self, tables: IntArray) -> None:
        (S, W), (old_S, old_W) = tables.shape, self._table_shape
        view = self._views["block_tables"]
        view[:S, :W] = tables
        view[:old_S, W:old_W] = 0
        view[S:old_S, :W] = 0
        self._table_shape = S, W

    def _fill_sample(self, sample: SampleBatch) -> None:
        v, N = self._views, len(sample.position)
        v["num_logprobs"][0] = sample.num_logprobs
        for name, values, padding in (
            ("token_index", sample.token_index, 0),
            ("temperature", sample.temperature, 0),
            ("top_k", sample.top_k, 0),
            ("top_p", sample.top_p, 1),
            ("min_p", sample.min_p, 0),
            ("seed", sample.seed, 0),
            ("draw_rows", sample.row, NO_ROW),
        ):
            v[name][:N] = values
            v[name][N:] = padding


class Packer:
    """Packs plans for one program.

    A blob is used again once it has been given back: until then the device may still read it, since a transfer need not
    copy. From step to step most of it stays as it is.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._free: list[Packed] = []

    def pack(self, plan: StepPlan) -> Packed:
        """`plan` padded to the layout.

        Raises:
            IndexError: a block id outside the pool, or a write into the null block. XLA would clip such an id silently
                into another request's memory.
        """
        packed = self._free.pop() if self._free else Packed(self.layout)
        packed.fill(plan)
        return packed

    def give_back(self, packed: Packed) -> None:
        """The step that it was for has been computed."""
        self._free.append(packed)


def _check_ids(plan: StepPlan, written: IntArray, num_blocks: int) -> None:
    tables = plan.block_tables
    if tables.size and not 0 <= int(tables.min()) <= int(tables.max()) < num_blocks:
        bad = int(tables.min()) if tables.min() < 0 else int(tables.max())
        raise IndexError(f"a block table holds block {bad}, but the pool has blocks 0 to {num_blocks - 1}")
    if written.size and int(written.min()) == 0:
        raise IndexError("a step would write into the null block (id 0)")
