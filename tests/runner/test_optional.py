"""Optional inputs hold what a plan has for them, and are sent only then; the token pool moves like KV."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
from runner.test_pack import make_plan

from jaxpaged.core.plan import Adjustments, Penalties, PromptSpan
from jaxpaged.request import Request, SamplingParams
from jaxpaged.runner.buckets import Program
from jaxpaged.runner.optional import FEW_EDITS, OptionalInputs, optional_inputs, pack_optional

I32, F32 = np.int32, np.float32
MIXED, DECODE = Program("mixed", 8, 4), Program("decode", 4, 4)
VOCAB = 70
NOTHING = Adjustments(I32([]), I32([]), F32([]), {}, None, {})
PLAN = make_plan([1, 5], kv_lens=[6, 7], tables=[[3, 2], [5, 4]], draws=[0, 5])


def read_back(program: Program, packed: dict[str, np.ndarray]) -> dict[str, dict[str, list]]:
    inputs = optional_inputs(program, VOCAB)
    return {
        name: {k: v.tolist() for k, v in jax.device_get(jax.jit(inputs[name].unpack)(blob)).items()}
        for name, blob in packed.items()
    }


def test_a_plain_plan_sends_nothing_and_takes_the_zeros_that_are_there() -> None:
    assert pack_optional(PLAN, optional_inputs(MIXED, VOCAB)) == {}
    inputs = OptionalInputs([MIXED, DECODE], VOCAB, jax.devices()[0])
    first, second = inputs.of(MIXED, PLAN), inputs.of(MIXED, None)
    assert first.keys() == optional_inputs(MIXED, VOCAB).keys()
    assert all(first[name] is second[name] for name in first)
    assert not any(array.any() for array in first.values())
    assert first.keys() - inputs.of(DECODE, None).keys() == {"prompt"}


def test_the_device_reads_back_the_adjustments() -> None:
    penalties = Penalties(F32([1.2, 1]), F32([0, 0.5]), F32([-1, 0]), I32([3, 4]))
    adjustments = Adjustments(
        I32([0, 1]), I32([5, 69]), F32([-np.inf, 2]), {1: np.uint32([0, 0xF])}, penalties, {0: I32([7, 8])}
    )
    packed = pack_optional(replace(PLAN, adjustments=adjustments), optional_inputs(MIXED, VOCAB))
    found = read_back(MIXED, packed)
    assert found.keys() == {"penalties", "edits", "masks", "logprob_ids"}
    assert found["penalties"] == {
        "count": [2],
        "repetition": F32([1.2, 1, 1, 1]).tolist(),
        "frequency": [0, 0.5, 0, 0],
        "presence": [-1, 0, 0, 0],
        "prompt_len": [3, 4, 0, 0],
    }
    edits = found["edits"]
    assert edits["count"] == [2] and edits["draws"][:2] == [0, 1] and edits["token_ids"][:2] == [5, 69]
    assert edits["values"][:2] == [-np.inf, 2] and min(edits["draws"][2:]) >= 4
    full = [0xFFFFFFFF] * 3
    assert found["masks"] == {"count": [1], "words": [full, [0, 0xF, 0], full, full]}
    ids = found["logprob_ids"]["token_ids"]
    assert ids[0][:3] == [7, 8, -1] and set(ids[1]) == {-1}


def test_many_edits_take_the_larger_input() -> None:
    count = FEW_EDITS + 1
    adjustments = replace(
        NOTHING, edit_draws=I32([3] * count), edit_token_ids=np.arange(count, dtype=I32), edit_values=F32([1] * count)
    )
    packed = pack_optional(replace(PLAN, adjustments=adjustments), optional_inputs(MIXED, VOCAB))
    found = read_back(MIXED, packed)
    assert found.keys() == {"many_edits"}
    assert found["many_edits"]["count"] == [count]
    assert found["many_edits"]["token_ids"][:count] == list(range(count))


def test_prompt_spans_lie_behind_each_other() -> None:
    request = Request("r", [1, 2], SamplingParams(), 1, 0)
    spans = (PromptSpan(request, 1, I32([40, 41])), PromptSpan(request, 5, I32([42])))
    found = read_back(MIXED, pack_optional(replace(PLAN, prompt_spans=spans), optional_inputs(MIXED, VOCAB)))
    assert found["prompt"]["count"] == [3]
    assert found["prompt"]["token_index"][:3] == [1, 2, 5] and found["prompt"]["target_ids"][:3] == [40, 41, 42]
