"""What few steps bring beside their blob: each input is sent only when the plan has it, and else is one of zeros that
lies on the device.

Every input begins with the count of what is in it; the program skips an input whose count is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import numpy as np

from jaxpaged.core.constraints import MAX_EDITS
from jaxpaged.core.plan import Adjustments, IntArray, Penalties, StepPlan
from jaxpaged.request import MAX_LOGPROB_TOKEN_IDS
from jaxpaged.runner.buckets import Program
from jaxpaged.runner.pack import Blob, Field

# Changes of single logits in a whole step; a step with more, up to `MAX_EDITS` for each draw, sends a larger input.
FEW_EDITS = 1024


@dataclass(frozen=True)
class OptionalInput(Blob):
    """One optional input: an int32 array of the fields and, before them, their count."""

    layout: tuple[tuple[str, Field], ...]

    @property
    def fields(self) -> dict[str, Field]:
        return {"count": ((1,), np.int32), **dict(self.layout)}

    @classmethod
    def of(cls, **fields: Field) -> OptionalInput:
        return cls(tuple(fields.items()))

    def pack(self, count: int, fill: Callable[[dict[str, np.ndarray]], None]) -> IntArray:
        """[size] int32; `fill` writes the fields."""
        blob = np.zeros(self.size, np.int32)
        views = self.views(blob)
        views["count"][0] = count
        fill(views)
        return blob


def optional_inputs(program: Program, vocab_size: int) -> dict[str, OptionalInput]:
    """The optional inputs of `program`.

    Args:
        vocab_size: width of the logits.
    """
    T, S = program.num_tokens, program.num_rows
    inputs = {
        "penalties": OptionalInput.of(
            repetition=((S,), np.float32),
            frequency=((S,), np.float32),
            presence=((S,), np.float32),
            prompt_len=((S,), np.int32),
        ),
        "edits": _edits(FEW_EDITS),
        "many_edits": _edits(S * MAX_EDITS),
        "masks": OptionalInput.of(words=((S, -(-vocab_size // 32)), np.uint32)),
        "logprob_ids": OptionalInput.of(token_ids=((S, MAX_LOGPROB_TOKEN_IDS), np.int32)),
    }
    if program.kind == "mixed":  # a prompt's last token, which may be alone in its step, has no next one in the prompt
        inputs["prompt"] = OptionalInput.of(token_index=((T,), np.int32), target_ids=((T,), np.int32))
    return inputs


def pack_optional(plan: StepPlan, inputs: dict[str, OptionalInput]) -> dict[str, IntArray]:
    """Those of `inputs` that `plan` has something for."""
    packed: dict[str, IntArray] = {}
    if plan.prompt_spans:
        packed["prompt"] = _pack_prompt(plan, inputs["prompt"])
    adjustments = plan.adjustments
    if adjustments is None:
        return packed
    if adjustments.penalties is not None:
        packed["penalties"] = _pack_penalties(adjustments.penalties, inputs["penalties"])
    num_edits = len(adjustments.edit_draws)
    if num_edits:
        name = "edits" if num_edits <= FEW_EDITS else "many_edits"
        packed[name] = _pack_edits(adjustments, inputs[name])
    if adjustments.masks:
        packed["masks"] = _pack_masks(adjustments, inputs["masks"])
    if adjustments.logprob_token_ids:
        packed["logprob_ids"] = _pack_logprob_ids(adjustments, inputs["logprob_ids"])
    return packed


class OptionalInputs:
    """The optional inputs of all programs, and zeros on the device for those that a step does not send.

    Args:
        vocab_size: width of the logits.
    """

    def __init__(self, programs: Iterable[Program], vocab_size: int, device: jax.Device) -> None:
        self._device = device
        self._inputs = {program: optional_inputs(program, vocab_size) for program in programs}
        sizes = {layout.size for inputs in self._inputs.values() for layout in inputs.values()}
        self._zeros = {size: jax.device_put(np.zeros(size, np.int32), device) for size in sizes}

    def of(self, program: Program, plan: StepPlan | None) -> dict[str, jax.Array]:
        """Every input of `program` on the device; None is a plan that needs nothing."""
        inputs = self._inputs[program]
        arrays = {name: self._zeros[layout.size] for name, layout in inputs.items()}
        if plan is not None and (plan.adjustments is not None or plan.prompt_spans):
            arrays |= jax.device_put(pack_optional(plan, inputs), self._device)
        return arrays


def _edits(size: int) -> OptionalInput:
    return OptionalInput.of(draws=((size,), np.int32), token_ids=((size,), np.int32), values=((size,), np.float32))


def _pack_penalties(penalties: Penalties, layout: OptionalInput) -> IntArray:
    N = len(penalties.prompt_len)

    def fill(views: dict[str, np.ndarray]) -> None:
        views["repetition"][:] = 1
        for name in ("repetition", "frequency", "presence", "prompt_len"):
            views[name][:N] = getattr(penalties, name)

    return layout.pack(N, fill)


def _pack_edits(adjustments: Adjustments, layout: OptionalInput) -> IntArray:
    E = len(adjustments.edit_draws)

    def fill(views: dict[str, np.ndarray]) -> None:
        views["draws"][:E] = adjustments.edit_draws
        views["draws"][E:] = np.iinfo(np.int32).max  # outside every batch: dropped
        views["token_ids"][:E] = adjustments.edit_token_ids
        views["values"][:E] = adjustments.edit_values

    return layout.pack(E, fill)


def _pack_masks(adjustments: Adjustments, layout: OptionalInput) -> IntArray:
    def fill(views: dict[str, np.ndarray]) -> None:
        words = views["words"]
        words[:] = 0xFFFFFFFF
        for draw, mask in adjustments.masks.items():
            words[draw] = 0
            words[draw, : len(mask)] = mask

    return layout.pack(len(adjustments.masks), fill)


def _pack_logprob_ids(adjustments: Adjustments, layout: OptionalInput) -> IntArray:
    def fill(views: dict[str, np.ndarray]) -> None:
        views["token_ids"][:] = -1
        for draw, ids in adjustments.logprob_token_ids.items():
            views["token_ids"][draw, : len(ids)] = ids

    return layout.pack(len(adjustments.logprob_token_ids), fill)


def _pack_prompt(plan: StepPlan, layout: OptionalInput) -> IntArray:
    index = np.concatenate([span.start + np.arange(len(span.target_ids)) for span in plan.prompt_spans])
    M = len(index)

    def fill(views: dict[str, np.ndarray]) -> None:
        views["token_index"][:M] = index
        views["target_ids"][:M] = np.concatenate([span.target_ids for span in plan.prompt_spans])

    return layout.pack(M, fill)
