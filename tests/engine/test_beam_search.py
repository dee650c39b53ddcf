"""Beam search through the engine, against a search over dense logits that makes every continuation there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from beam_reference import Found, beam_search
from flax import nnx
from support import EOS, NUM_TOKENS, Alone, dense_logprobs

from jaxpaged.beam_search import BeamSearchParams
from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.errors import InvalidRequestError
from jaxpaged.outputs import RequestOutput
from jaxpaged.request import OutputKind, SamplingParams
from jaxpaged.weights import GenerationConfig

# End-of-sequence tokens enough that beams end at every length.
STOPS = (EOS, *range(30, 200, 17))
# Bytes of a block of 4 tokens of the tiny model: 2 layers, K and V, 2 heads of 8, float32.
BLOCK_BYTES = 4 * 2 * 2 * 2 * 8 * 4
SMALL = EngineConfig(
    block_size=4,
    num_blocks=200,
    max_model_len=64,
    max_num_seqs=12,
    max_num_batched_tokens=16,
    max_logprobs=20,
    compilation_cache="",
    warmup=False,
    debug_checks=True,
)
STREAM = np.random.default_rng(3).integers(0, NUM_TOKENS - 4, 40).tolist()


@dataclass(frozen=True)
class Search:
    """A prompt of `prompt_len` tokens and how it is searched."""

    prompt_len: int
    width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ignore_eos: bool = False

    @property
    def prompt(self) -> list[int]:
        return STREAM[: self.prompt_len]

    @property
    def params(self) -> SamplingParams:
        return BeamSearchParams(
            self.width,
            self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        ).sampling_params()


SEARCHES = [
    Search(9, 3, 12),
    Search(8, 4, 12, 0.0, True),  # whole blocks of 4: the fork has no partial block
    Search(1, 2, 20, 2.0, "never"),
    Search(16, 3, 1),
    Search(7, 5, 9, -1.0, "never"),
    Search(5, 2, 40, ignore_eos=True),
    Search(12, 1, 10),
    Search(30, 6, 8, 0.5, True),
]

Expected = Callable[[Search], list[Found]]


@pytest.fixture(scope="module")
def expected(tiny_model: nnx.Module) -> Expected:
    next_logprobs = dense_logprobs(tiny_model)
    known: dict[Search, list[Found]] = {}

    def search(case: Search) -> list[Found]:
        if case not in known:
            known[case] = beam_search(
                lambda output: next_logprobs(case.prompt + output),
                width=case.width,
                max_tokens=case.max_tokens,
                stop_ids=() if case.ignore_eos else STOPS,
                length_penalty=case.length_penalty,
                early_stopping=case.early_stopping,
            )
        return known[case]

    return search


@pytest.fixture(scope="module")
def start(tiny_model: nnx.Module, tiny_tokenizer: object) -> Callable[..., Engine]:
    def make(**changes: object) -> Engine:
        config = EngineConfig(**{**vars(SMALL), **changes})
        return Engine(tiny_model, tiny_tokenizer, config, generation=GenerationConfig(eos_token_ids=STOPS))

    return make


@pytest.fixture(scope="module")
def engine(start: Callable[..., Engine]) -> Engine:
    return start()


def run(engine: Engine, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, RequestOutput]:
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id not in outputs, "a search has one output"
            outputs[output.request_id] = output
    stats = engine.stats().scheduler
    assert stats.num_free_blocks == stats.num_total_blocks
    return outputs


def check(output: RequestOutput, found: list[Found]) -> None:
    assert output.finished and output.error is None
    assert [o.token_ids for o in output.outputs] == [f.token_ids for f in found]
    assert [o.cumulative_logprob for o in output.outputs] == pytest.approx([f.logprob for f in found], abs=1e-3)
    assert [o.index for o in output.outputs] == list(range(len(found)))


def test_cases_end_in_every_way(expected: Expected) -> None:
    """Guards the tests below: they would prove little on outputs that all end at max_tokens."""
    lengths = [[len(f.token_ids) for f in expected(s)] for s in SEARCHES]
    assert any(len(set(of)) > 1 for of in lengths), "beams of one search that end at different lengths"
    assert any(max(of) < s.max_tokens for of, s in zip(lengths, SEARCHES, strict=True)), "a search that ends early"
    assert any(min(of) == s.max_tokens > 1 for of, s in zip(lengths, SEARCHES, strict=True)), "one that does not"


@pytest.mark.parametrize("case", SEARCHES, ids=str)
def test_alone(engine: Engine, expected: Expected, case: Search) -> None:
    found = expected(case)
    output = run(engine, {"a": (case.prompt, case.params)})["a"]
    check(output, found)
    for completion in output.outputs:
        ended = completion.token_ids[-1] in STOPS and not case.ignore_eos
        assert completion.finish_reason == ("stop" if ended else "length") and completion.stop_reason is None
        shown = completion.token_ids[:-1] if ended else completion.token_ids
        assert completion.text == engine.tokenizer.decode(shown, skip_special_tokens=True)


CIRCUMSTANCES: dict[str, dict[str, object]] = {
    "warm": {},
    "recompute, blocks of 1": {"block_size": 1, "num_blocks": 95, "enable_prefix_caching": False},
    "swap, whole prompts": {
        "block_size": 3,
        "num_blocks": 36,
        "swap_space": 80 * BLOCK_BYTES,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 64,
    },
}


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_among_others(
    engine: Engine, start: Callable[..., Engine], expected: Expected, alone: Alone, name: str
) -> None:
    """With other searches, and with requests that draw, in the batch and in need of the same blocks."""
    if CIRCUMSTANCES[name]:
        engine = start(**CIRCUMSTANCES[name])
    draws = SamplingParams(n=2, temperature=1.0, top_k=5, seed=11, max_tokens=14, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=2)
    searches = [s for s in SEARCHES if s.prompt_len < 30]
    for _ in range(2):
        requests = {str(s): (s.prompt, s.params) for s in searches}
        requests |= {"draws": (STREAM[:6], draws), "greedy": (STREAM[:13], greedy)}
        outputs = run(engine, dict(sorted(requests.items(), key=lambda item: len(item[1][0]))))
        for case in searches:
            check(outputs[str(case)], expected(case))
        for index in (0, 1):
            drawn = alone(STREAM[:6], 14, temperature=1.0, top_k=5, seed=11 + index)
            assert outputs["draws"].outputs[index].token_ids == drawn
        assert outputs["greedy"].outputs[0].token_ids == alone(STREAM[:13], 14)
    stats = engine.stats().scheduler
    assert (stats.preemptions_total > 0) == (name != "warm")
    assert (stats.swapped_out_blocks_total > 0) == bool(engine.config.swap_space)
    assert (stats.prefix_hits_total > 0) == engine.config.enable_prefix_caching


def test_one_beam_is_greedy(engine: Engine, alone: Alone) -> None:
    params = BeamSearchParams(1, 20).sampling_params()
    output = run(engine, {"a": (STREAM[:11], params)})["a"]
    assert output.outputs[0].token_ids == alone(STREAM[:11], 20, stop=frozenset(STOPS))


def test_seed_and_temperature_change_nothing(engine: Engine) -> None:
    plain = SEARCHES[0].params
    requests = {
        str(seed): (STREAM[:9], replace(plain, seed=seed, temperature=temperature))
        for seed, temperature in [(None, 0.0), (1, 0.0), (2, 1.5)]
    }
    outputs = run(engine, requests)
    first, *others = [[o.token_ids for o in output.outputs] for output in outputs.values()]
    assert others == [first, first] and len({tuple(ids) for ids in first}) == len(first)


def test_a_stop_token_of_the_request_ends_a_beam(engine: Engine, expected: Expected) -> None:
    case = Search(5, 2, 40, ignore_eos=True)
    params = replace(case.params, stop_token_ids=STOPS[1:], ignore_eos=True)
    eos_only = [s for s in STOPS if s != EOS]
    found = expected(replace(case, ignore_eos=False))
    assert all(EOS not in f.token_ids for f in found), "the comparison needs outputs without EOS"
    output = run(engine, {"a": (case.prompt, params)})["a"]
    check(output, found)
    for completion in output.outputs:
        last = completion.token_ids[-1]
        if completion.finish_reason == "stop":
            assert completion.stop_reason == last and last in eos_only


def test_aborting_frees_everything(engine: Engine) -> None:
    for steps in range(6):
        engine.add_request("a", STREAM[:30], Search(30, 5, 30, ignore_eos=True).params)
        for _ in range(steps):
            assert engine.step() == []
        output = engine.abort_request("a")
        assert output is not None and output.finished
        assert {o.finish_reason for o in output.outputs} == {"abort"} and len(output.outputs) == 5
        stats = engine.stats().scheduler
        assert stats.num_free_blocks == stats.num_total_blocks and stats.num_running_sequences == 0
        assert not engine.has_unfinished_requests()


def test_nothing_is_compiled_after_warm_up(tiny_model: nnx.Module, tiny_tokenizer: object, expected: Expected) -> None:
    config = EngineConfig(**{**vars(SMALL), "warmup": True, "max_num_seqs": 4, "debug_checks": False})
    engine = Engine(tiny_model, tiny_tokenizer, config, generation=GenerationConfig(eos_token_ids=STOPS))
    for case in SEARCHES[:3]:
        check(run(engine, {"a": (case.prompt, case.params)})["a"], expected(case))
    assert engine.stats().compiles_after_warmup == 0
    assert engine.stats().generation_tokens_total == sum(len(f.token_ids) for s in SEARCHES[:3] for f in expected(s))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"top_k": 3}, "top_k"),
        ({"top_p": 0.5}, "top_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"stop": "x"}, "stop"),
        ({"logprobs": 1}, "logprobs"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"output_kind": OutputKind.DELTA}, "output_kind"),
        ({"n": 13}, "n"),
    ],
)
def test_what_a_search_would_ignore_is_refused(engine: Engine, changes: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        engine.add_request("a", STREAM[:5], replace(SEARCHES[0].params, **changes))
    assert error.value.param == param
    assert not engine.has_unfinished_requests()


def test_a_width_that_cannot_be_ranked_is_refused(start: Callable[..., Engine]) -> None:
    engine = start(max_logprobs=14)
    with pytest.raises(InvalidRequestError, match=r"width of 4 needs 15 log-probabilities.*11 stop tokens.*has 14"):
        engine.add_request("a", STREAM[:5], Search(5, 4, 4).params)
    engine.validate(STREAM[:5], Search(5, 3, 4).params)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 21}, "length_penalty"),
        ({"length_penalty": "x"}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"temperature": -1}, "temperature"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_values_out_of_range(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **fields})
    assert error.value.param == param
