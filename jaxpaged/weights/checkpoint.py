"""Orbax checkpoints: written while the tensors are read, restored straight into dtype and sharding.

The tree is a nested dict that follows the Hugging Face names ({"model": {"layers": {"0": ...}}}), in orbax's own
layout: any orbax PyTree restore can read it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.names import flattened, nested

# Reads in flight at once while restoring: what host memory holds beside the finished arrays.
_RESTORE_BYTES = 512 << 20
# Arrays are stored in pieces, so that writing one needs no second copy of a large array.
_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read when it is written.

    Attributes:
        read: gives the array, of `shape` and `dtype`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


class _LazyTensorHandler(type_handlers.NumpyHandler):
    """Writes each `LazyTensor` as a numpy array, and the next one only once it is on disk."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(
        self, values: Sequence[LazyTensor], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> list[Any]:
        for value, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
            for future in await super().serialize([value.read()], [info], [arg]):
                await asyncio.to_thread(future.result)
        return []


def save(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Write `tensors` (by Hugging Face name) as an orbax checkpoint at `path`; memory holds one of them at a time.

    Raises:
        Whatever reading a tensor raises, and the errors of orbax and tensorstore when writing fails.
    """
    registry = type_handlers.create_type_handler_registry((LazyTensor, _LazyTensorHandler()))
    tree = nested(tensors)
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    with _quiet():
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(tree, save_args=save_args))


def restore(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    sharding_of: Callable[[str], jax.sharding.Sharding],
) -> dict[str, jax.Array]:
    """Arrays of the orbax checkpoint at `path`, by Hugging Face name, in `dtype`.

    Args:
        shapes: of all arrays that it should hold.

    Raises:
        ModelLoadError: the checkpoint is damaged or does not hold the arrays of `shapes`.
    """
    restore_args = {
        name: ocp.ArrayRestoreArgs(restore_type=jax.Array, dtype=dtype, sharding=sharding_of(name), global_shape=shape)
        for name, shape in shapes.items()
    }
    # In whole gigabytes, and above the largest array in any dtype, which orbax would else refuse.
    concurrent_gb = -(-max(_RESTORE_BYTES, 8 * max(map(prod, shapes.values()))) // 10**9)
    # Of `item` only the tree counts: orbax compares it with the stored one.
    args = ocp.args.PyTreeRestore(item=nested(dict.fromkeys(shapes, 0)), restore_args=nested(restore_args))
    try:
        with _quiet():
            handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=concurrent_gb)
            with ocp.Checkpointer(handler) as checkpointer:
                tree = checkpointer.restore(path.absolute(), args=args)
    except Exception as error:  # orbax and tensorstore raise ValueError, KeyError, FileNotFoundError and more
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelLoadError(f"the checkpoint {path} is damaged: {reason[:300]}; convert the model again") from error
    return flattened(tree)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep orbax's progress notes and hints out of the user's terminal."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
