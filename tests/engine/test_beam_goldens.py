"""Beam search token for token as transformers has it (tests/goldens/beam_search.json), in float32."""

from __future__ import annotations

import json
from typing import Any

import pytest
from models.test_families import build
from support import GOLDENS

from jaxpaged.beam_search import BeamSearchParams
from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.llm import LLM
from jaxpaged.request import SamplingParams

CASES: list[dict[str, Any]] = json.loads((GOLDENS / "beam_search.json").read_text(encoding="utf-8"))["cases"]
TINY = sorted({case["model"] for case in CASES} - {"smollm2"})


def cases_of(model: str) -> list[dict[str, Any]]:
    return [case for case in CASES if case["model"] == model]


def params_of(case: dict[str, Any]) -> BeamSearchParams:
    return BeamSearchParams(
        case["width"],
        case["max_tokens"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        include_stop_str_in_output=True,
    )


def test_goldens_try_everything() -> None:
    assert len(CASES) > 40 and len(TINY) >= 3
    settings = {(case["length_penalty"], case["early_stopping"]) for case in CASES if case["model"] != "smollm2"}
    assert settings == {(p, e) for p in (1.0, 0.0, 2.0, -1.0, 0.5) for e in (False, True, "never")}
    lengths = [{len(tokens) for tokens, _ in case["outputs"]} for case in CASES]
    assert sum(len(of) > 1 for of in lengths) >= 5, "outputs of one search that have unlike lengths"
    ended_early = [max(of) < case["max_tokens"] for of, case in zip(lengths, CASES, strict=True)]
    assert {case["early_stopping"] for case, early in zip(CASES, ended_early, strict=True) if early} >= {True, False}


@pytest.mark.parametrize("model", TINY)
def test_tiny_models(model: str) -> None:
    """All searches at once, in a pool that they do not all fit into. End-of-sequence tokens differ from one to the
    next, so here they are stop tokens of the request.
    """
    config = EngineConfig(
        block_size=4,
        num_blocks=120,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        max_logprobs=20,
        compilation_cache="",
        warmup=False,
        debug_checks=True,
    )
    engine = Engine(build(model), None, config)
    cases = cases_of(model)
    for i, case in enumerate(cases):
        params = params_of(case).sampling_params()
        fields = {**vars(params), "stop_token_ids": case["eos_token_ids"]}
        engine.add_request(str(i), case["prompt_token_ids"], SamplingParams(**fields))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update({int(output.request_id): output for output in engine.step()})
    for i, case in enumerate(cases):
        found = outputs[i].outputs
        assert [o.token_ids for o in found] == [tokens for tokens, _ in case["outputs"]], case
        scores = [(o.cumulative_logprob or 0) / len(o.token_ids) ** case["length_penalty"] for o in found]
        assert scores == pytest.approx([score for _, score in case["outputs"]], rel=1e-4, abs=1e-4)


@pytest.mark.real_model
def test_smollm2() -> None:
    options = {"max_model_len": 1024, "max_num_seqs": 16, "kv_cache_memory": "256MiB", "warmup": False}
    with LLM("smollm2-135m-instruct", dtype="float32", **options) as llm:
        for case in cases_of("smollm2"):
            prompt = {"prompt_token_ids": case["prompt_token_ids"]}
            [output] = llm.beam_search([prompt], params_of(case))
            found = [s.tokens[len(case["prompt_token_ids"]) :] for s in output.sequences]
            assert found == [tokens for tokens, _ in case["outputs"]], case
            assert [s.score for s in output.sequences] == pytest.approx([s for _, s in case["outputs"]], abs=1e-3)
