"""SmolLM2-135M-Instruct in float32, token for token what transformers computes (tests/goldens/smollm2_135m.json)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import GOLDENS

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.outputs import CompletionOutput, RequestOutput
from jaxpaged.request import SamplingParams

pytestmark = pytest.mark.real_model

GOLDEN = json.loads((GOLDENS / "smollm2_135m.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = GOLDEN["cases"]
NAMES = [case["name"] for case in CASES]


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = EngineConfig(
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        kv_cache_memory=256 << 20,
        warmup=False,
    )
    return Engine.from_pretrained("smollm2-135m-instruct", config)


def generate(engine: Engine, cases: list[dict[str, Any]], **params: Any) -> dict[str, RequestOutput]:
    for case in cases:
        prompt = case["prompt"]
        if prompt is None:
            prompt = engine.tokenizer.apply_chat_template(
                case["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        settings = SamplingParams(**{"temperature": 0.0, "max_tokens": GOLDEN["num_tokens"], **params})
        engine.add_request(case["name"], prompt, settings)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update({o.request_id: o for o in engine.step()})
    return outputs


def check(case: dict[str, Any], output: RequestOutput) -> CompletionOutput:
    assert output.prompt_token_ids == case["prompt_token_ids"]
    (completion,) = output.outputs
    assert completion.token_ids == case["token_ids"]
    return completion


@pytest.mark.parametrize("name", NAMES)
def test_alone(engine: Engine, name: str) -> None:
    """Long prompts go through several prefill chunks of 128 tokens."""
    case = CASES[NAMES.index(name)]
    engine.reset_prefix_cache()
    completion = check(case, generate(engine, [case], ignore_eos=True, logprobs=5, skip_special_tokens=False)[name])
    assert completion.text == case["text"]
    assert completion.logprobs is not None
    for entry, expected in zip(completion.logprobs, case["top_logprobs"], strict=True):
        assert {token: entry[token].logprob for token, _ in expected} == pytest.approx(dict(expected), abs=1e-3)


def test_all_at_once_and_again_from_the_prefix_cache(engine: Engine) -> None:
    engine.reset_prefix_cache()
    for warm in (False, True):
        outputs = generate(engine, CASES, ignore_eos=True)
        for case in CASES:
            check(case, outputs[case["name"]])
            full_blocks = (len(case["prompt_token_ids"]) - 1) // 16
            if warm:
                assert outputs[case["name"]].num_cached_tokens == 16 * full_blocks


def test_the_end_of_sequence_ends_it(engine: Engine) -> None:
    outputs = generate(engine, CASES)
    assert any(case["eos_index"] is not None for case in CASES)
    for case in CASES:
        (completion,) = outputs[case["name"]].outputs
        stop = case["eos_index"]
        assert completion.token_ids == (case["token_ids"] if stop is None else case["token_ids"][: stop + 1])
        assert completion.finish_reason == ("length" if stop is None else "stop")
