"""Every sampling parameter through the engine, against dense logits and the definitions in numpy."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import numpy.typing as npt
import pytest
from flax import nnx
from support import EOS, NUM_TOKENS, Alone, tiny_config

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.errors import InvalidRequestError
from jaxpaged.outputs import RequestOutput
from jaxpaged.request import OutputKind, SamplingParams
from jaxpaged.weights import GenerationConfig

VOCAB = tiny_config().vocab_size
SMALL = EngineConfig(
    block_size=4,
    num_blocks=60,
    max_num_seqs=6,
    max_num_batched_tokens=16,
    max_logprobs=300,
    compilation_cache="",
    warmup=False,
    debug_checks=True,
)
PROMPT = list(b"The cat sat on the mat")
LONG = [int(x) for x in np.random.default_rng(0).integers(0, 200, 50)]
Dense = Callable[[list[int]], npt.NDArray[np.float64]]


def with_changes(config: EngineConfig, **changes: object) -> EngineConfig:
    return EngineConfig(**{**vars(config), **changes})


@pytest.fixture(scope="module")
def engine(tiny_model: nnx.Module, tiny_tokenizer: object) -> Engine:
    return Engine(tiny_model, tiny_tokenizer, SMALL, generation=GenerationConfig(eos_token_ids=(EOS, 300, 7)))


@pytest.fixture(scope="module")
def dense(tiny_model: nnx.Module) -> Dense:
    """Raw logits [L, V] of a whole sequence, without paging."""
    graphdef, state = nnx.split(tiny_model)
    forward = jax.jit(lambda ids: nnx.merge(graphdef, state)(ids[None])[0])

    def logits(ids: list[int]) -> npt.NDArray[np.float64]:
        padded = np.zeros(128, np.int32)
        padded[: len(ids)] = ids
        return np.asarray(forward(padded), np.float64)[: len(ids)]

    return logits


def run(engine: Engine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def generate(engine: Engine, prompt: list[int], **params: object) -> RequestOutput:
    engine.add_request("only", prompt, SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params}))
    return run(engine)[-1]


def greedy(dense: Dense, prompt: list[int], count: int, change: Callable[..., None]) -> list[int]:
    """Greedy tokens; `change(logits, output)` alters the logits of each position in place."""
    output: list[int] = []
    for _ in range(count):
        logits = dense(prompt + output)[-1]
        logits[NUM_TOKENS:] = -np.inf
        change(logits, output)
        output.append(int(logits.argmax()))
    return output


def penalizer(prompt: list[int], r: float = 1, f: float = 0, p: float = 0) -> Callable[..., None]:
    def change(logits: npt.NDArray[np.float64], output: list[int]) -> None:
        for token in set(prompt + output):
            logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
        for token in set(output):
            logits[token] -= f * output.count(token) + p

    return change


PENALTIES = [
    {"frequency_penalty": 2.0},
    {"presence_penalty": 2.0},
    {"presence_penalty": -2.0, "frequency_penalty": -1.0},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 1.0},
]


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties(engine: Engine, dense: Dense, penalties: dict[str, float]) -> None:
    change = penalizer(
        PROMPT, *(penalties.get(f"{k}_penalty", d) for k, d in (("repetition", 1), ("frequency", 0), ("presence", 0)))
    )
    expected = greedy(dense, PROMPT, 12, change)
    assert expected != greedy(dense, PROMPT, 12, lambda *_: None), "the penalties change nothing here"
    assert generate(engine, PROMPT, max_tokens=12, **penalties).outputs[0].token_ids == expected
    # Again, with the prompt from the prefix cache.
    again = generate(engine, PROMPT, max_tokens=12, **penalties)
    assert again.num_cached_tokens == 20 and again.outputs[0].token_ids == expected


def test_penalties_of_a_batch_whose_blocks_are_swapped_recomputed_and_copied(
    tiny_model: nnx.Module, tiny_tokenizer: object, dense: Dense, engine: Engine
) -> None:
    """Few blocks: histories follow their sequences through preemption, and siblings have their own."""
    params = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "max_tokens": 30, "ignore_eos": True}
    prompts = [LONG[i : i + 14] for i in range(6)]
    alone = [generate(engine, p, **params).outputs[0].token_ids for p in prompts]
    assert alone[0] == greedy(dense, prompts[0], 30, penalizer(prompts[0], 1.5, 0.5))
    many = generate(engine, PROMPT, n=3, seed=4, **{**params, "temperature": 1.0})
    for swap_space in (0, 1 << 20):
        small = with_changes(SMALL, num_blocks=34, swap_space=swap_space)
        crowded = Engine(tiny_model, tiny_tokenizer, small)
        for i, prompt in enumerate(prompts):
            crowded.add_request(str(i), prompt, SamplingParams(temperature=0.0, **params))
        outputs = {o.request_id: o.outputs[0].token_ids for o in run(crowded)}
        assert [outputs[str(i)] for i in range(6)] == alone
        siblings = SamplingParams(n=3, seed=4, temperature=1.0, **params)
        crowded.add_request("many", PROMPT, siblings)
        crowded.add_request("late", prompts[0], SamplingParams(temperature=0.0, **params))
        outputs = {o.request_id: [c.token_ids for c in o.outputs] for o in run(crowded)}
        assert outputs == {"many": [c.token_ids for c in many.outputs], "late": [alone[0]]}
        stats = crowded.stats().scheduler
        assert stats.preemptions_total > 0 and (stats.swapped_in_blocks_total > 0) == bool(swap_space)


def test_logit_bias_and_allowed_tokens(engine: Engine, dense: Dense) -> None:
    plain = greedy(dense, PROMPT, 8, lambda *_: None)
    for bias in ({plain[0]: -1000.0}, {str(plain[1]): -3.5, 65: 6.0}, dict.fromkeys(range(1000, 1), 1.0) | {9: 100}):
        clamped = {int(k): min(max(v, -100), 100) for k, v in bias.items()}

        def change(logits: npt.NDArray[np.float64], _: list[int], clamped: dict[int, float] = clamped) -> None:
            for token, value in clamped.items():
                logits[token] += value

        completion = generate(engine, PROMPT, max_tokens=8, logit_bias=bias).outputs[0]
        assert completion.token_ids == greedy(dense, PROMPT, 8, change)
    allowed = [3, 32, 64, 255, EOS]

    def only(logits: npt.NDArray[np.float64], _: list[int]) -> None:
        logits[[i for i in range(VOCAB) if i not in allowed]] = -np.inf

    assert generate(engine, PROMPT, max_tokens=8, allowed_token_ids=allowed).outputs[0].token_ids == greedy(
        dense, PROMPT, 8, only
    )
    drawn = generate(engine, PROMPT, max_tokens=40, allowed_token_ids=allowed, temperature=2.0, n=4).outputs
    assert {t for c in drawn for t in c.token_ids} <= set(allowed)


def test_many_edits_at_once(engine: Engine, dense: Dense) -> None:
    """More changes than the small input holds, in several rows beside one that has none."""
    bias = {i: -50.0 for i in range(NUM_TOKENS) if i % 7}
    for i in range(5):
        engine.add_request(
            f"b{i}", PROMPT, SamplingParams(temperature=0.0, max_tokens=4, logit_bias=bias, ignore_eos=True)
        )
    engine.add_request("plain", PROMPT, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    outputs = {o.request_id: o.outputs[0].token_ids for o in run(engine)}

    def change(logits: npt.NDArray[np.float64], _: list[int]) -> None:
        logits[list(bias)] -= 50

    assert outputs.pop("plain") == greedy(dense, PROMPT, 4, lambda *_: None)
    assert len(bias) * 5 > 1024
    assert all(tokens == greedy(dense, PROMPT, 4, change) for tokens in outputs.values())


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def among(allowed: list[int]) -> Callable[..., None]:
    def change(logits: npt.NDArray[np.float64], _: list[int]) -> None:
        logits[[i for i in range(VOCAB) if i not in allowed]] = -np.inf

    return change


def test_bad_words(engine: Engine, dense: Dense) -> None:
    """Of one token and of several (a letter is a token here); a phrase is cut only where it would be completed."""
    letters = engine.tokenizer.encode(LETTERS)
    plain = greedy(dense, PROMPT, 10, among(letters))
    for word in (plain[3:4], plain[2:4], plain[1:5]):

        def change(logits: npt.NDArray[np.float64], output: list[int], word: list[int] = word) -> None:
            among(letters)(logits, output)
            if output[len(output) - len(word) + 1 :] == word[:-1]:
                logits[word[-1]] = -np.inf

        expected = greedy(dense, PROMPT, 10, change)
        assert expected != plain
        bad_words = [engine.tokenizer.decode(word)]
        output = generate(engine, PROMPT, max_tokens=10, bad_words=bad_words, allowed_token_ids=letters).outputs[0]
        assert output.token_ids == expected


def ends(engine: Engine, **params: object) -> tuple[list[int], str | None, int | str | None]:
    completion = generate(engine, PROMPT, **{"ignore_eos": False, **params}).outputs[0]
    return completion.token_ids, completion.finish_reason, completion.stop_reason


@pytest.mark.parametrize("min_tokens", [0, 1, 3, 6])
def test_min_tokens_with_several_ends(engine: Engine, dense: Dense, min_tokens: int) -> None:
    """EOS ids 257, 7 and one beyond the vocabulary, and a stop id; all are likely everywhere."""
    bias = {EOS: 100.0, 7: 99.0, 11: 98.0}
    tokens, reason, stop = ends(engine, min_tokens=min_tokens, max_tokens=10, logit_bias=bias, stop_token_ids=[11])
    assert (len(tokens), tokens[-1], reason, stop) == (min_tokens + 1, EOS, "stop", None)
    assert not {EOS, 7, 11} & set(tokens[:-1])
    tokens, reason, stop = ends(
        engine, min_tokens=min_tokens, max_tokens=10, logit_bias={11: 100}, stop_token_ids=[11], ignore_eos=True
    )
    assert (len(tokens), reason, stop) == (min_tokens + 1, "stop", 11)


def test_eos_at_max_tokens_is_a_stop(engine: Engine) -> None:
    assert ends(engine, max_tokens=4, min_tokens=3, logit_bias={EOS: 100})[1:] == ("stop", None)
    assert ends(engine, max_tokens=3, min_tokens=3, logit_bias={EOS: 100})[1:] == ("length", None)


def test_stop_strings_are_not_looked_for_before_min_tokens(engine: Engine, dense: Dense) -> None:
    letters = engine.tokenizer.encode(LETTERS)
    text = engine.tokenizer.decode(greedy(dense, PROMPT, 12, among(letters)))
    stop = text[3:5]
    for min_tokens in range(7):
        first = next((i for i in range(min_tokens, 12) if text[: i + 1].endswith(stop)), None)
        tokens, reason, found = ends(
            engine, max_tokens=12, min_tokens=min_tokens, stop=[stop], ignore_eos=True, allowed_token_ids=letters
        )
        assert (len(tokens), reason, found) == ((12, "length", None) if first is None else (first + 1, "stop", stop))


def test_bans_give_way_where_nothing_is_left(engine: Engine) -> None:
    """The only allowed token would complete a bad word."""
    word = engine.tokenizer.decode([65, 65])
    tokens = generate(engine, PROMPT, max_tokens=4, allowed_token_ids=[65], bad_words=[word]).outputs[0].token_ids
    assert tokens == [65] * 4


def test_siblings_draw_with_seeds_of_their_own(engine: Engine, alone: Alone) -> None:
    outputs = generate(engine, PROMPT, n=4, temperature=1.0, seed=-4, max_tokens=8).outputs
    assert len({tuple(c.token_ids) for c in outputs}) == 4
    for i, completion in enumerate(outputs):
        assert completion.token_ids == alone(PROMPT, 8, temperature=1.0, seed=(i - 4) % 2**64)


@pytest.mark.parametrize("top_k", [0, -1])
@pytest.mark.parametrize("top_p", [1.0, 1e-9])
def test_ends_of_the_filters(engine: Engine, alone: Alone, top_k: int, top_p: float) -> None:
    """top_k off is no greedy decoding; top_p next to nothing is."""
    tokens = (
        generate(engine, PROMPT, top_k=top_k, top_p=top_p, temperature=1.5, seed=3, max_tokens=8).outputs[0].token_ids
    )
    is_greedy = tokens == alone(PROMPT, 8)
    assert is_greedy == (top_p < 1)


def test_seeds_and_everything_else_in_any_company(
    tiny_model: nnx.Module, tiny_tokenizer: object, engine: Engine
) -> None:
    """The same tokens alone, in a full batch, after preemption, for another block size."""
    word = engine.tokenizer.decode([40, 41])
    everything = [
        {"repetition_penalty": 1.2, "top_k": 40},
        {"frequency_penalty": 0.8, "presence_penalty": 0.3, "min_p": 0.02},
        {"logit_bias": {5: 3, 9: 3}, "min_tokens": 9, "stop_token_ids": [5, 9], "ignore_eos": False},
        {"allowed_token_ids": list(range(30, 90)), "bad_words": [word], "top_p": 0.9},
        {"logprobs": 2, "logprob_token_ids": [4, 250], "temperature": 0.4},
        {},
    ]
    params = [
        SamplingParams(**{"seed": i, "max_tokens": 24, "ignore_eos": True, **e}) for i, e in enumerate(everything)
    ]
    alone = []
    for i, p in enumerate(params):
        engine.add_request("r", LONG[i : i + 13], p)
        alone.append(run(engine)[-1].outputs[0])
    other = with_changes(SMALL, block_size=3, num_blocks=45, max_num_batched_tokens=11)
    crowded = Engine(tiny_model, tiny_tokenizer, other, generation=GenerationConfig(eos_token_ids=(EOS, 300, 7)))
    for i, p in enumerate(params):
        crowded.add_request(str(i), LONG[i : i + 13], p)
    outputs = {o.request_id: o.outputs[0] for o in run(crowded)}
    assert crowded.stats().scheduler.preemptions_total > 0
    for i, expected in enumerate(alone):
        assert outputs[str(i)].token_ids == expected.token_ids, everything[i]
        assert outputs[str(i)].finish_reason == expected.finish_reason


def log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def check_prompt_logprobs(output: RequestOutput, dense: Dense, num_top: int, drawable: int = NUM_TOKENS) -> None:
    prompt, found = output.prompt_token_ids, output.prompt_logprobs
    reference = log_softmax(dense(prompt))
    assert found is not None and len(found) == len(prompt) and found[0] is None
    for i, entry in enumerate(found[1:], start=1):
        row = reference[i - 1]
        assert entry is not None and next(iter(entry)) == prompt[i]
        ranked = row[:drawable]  # ids of the padded embedding are neither named nor ranked
        assert set(entry) == {prompt[i], *np.argsort(-ranked)[:num_top].tolist()}
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[token], abs=1e-4)
            assert logprob.rank == 1 + (ranked > row[token]).sum()


def test_prompt_logprobs_in_chunks_and_with_a_warm_cache(engine: Engine, dense: Dense) -> None:
    """50 tokens are four chunks of 16; the second request does not read the cache that the first has filled."""
    cold = generate(engine, LONG, max_tokens=2, prompt_logprobs=3)
    check_prompt_logprobs(cold, dense, 3)
    generate(engine, LONG, max_tokens=2)
    warm = generate(engine, LONG, max_tokens=2, prompt_logprobs=0)
    check_prompt_logprobs(warm, dense, 0)
    assert warm.num_cached_tokens == 0
    assert generate(engine, LONG, max_tokens=2).num_cached_tokens == 48
    check_prompt_logprobs(generate(engine, LONG[:5], n=2, max_tokens=1, prompt_logprobs=1), dense, 1)
    single = generate(engine, [5], max_tokens=1, prompt_logprobs=1)
    assert single.prompt_logprobs == [None]
    everything = generate(engine, PROMPT[:3], max_tokens=1, prompt_logprobs=-1, logprobs=-1)
    check_prompt_logprobs(everything, dense, NUM_TOKENS)
    assert len(everything.outputs[0].logprobs[0]) == NUM_TOKENS


@pytest.mark.parametrize("swap_space", [0, 1 << 20])
def test_prompt_logprobs_after_preemption(tiny_model: nnx.Module, dense: Dense, swap_space: int) -> None:
    """Short outputs grow until long prompts, behind them in the order, have to give way."""
    small = Engine(tiny_model, None, with_changes(SMALL, num_blocks=34, swap_space=swap_space))
    prompts = {str(i): LONG[i : i + 30] for i in range(4)}
    for name, prompt in prompts.items():
        params = SamplingParams(temperature=0.0, max_tokens=30, prompt_logprobs=2, ignore_eos=True)
        small.add_request(name, prompt, params)
    outputs = run(small)
    assert small.stats().scheduler.preemptions_total > 0
    assert len(outputs) == 4
    for output in outputs:
        assert output.prompt_token_ids == prompts[output.request_id]
        check_prompt_logprobs(output, dense, 2, drawable=VOCAB)


def test_prompt_logprobs_come_once_in_deltas(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=0, output_kind=OutputKind.DELTA)
    engine.add_request("only", LONG, params)
    assert [o.prompt_logprobs is None for o in run(engine)] == [False, True, True]


def test_logprobs_are_raw_and_of_any_token(engine: Engine, dense: Dense) -> None:
    asked = [250, 3, 0]
    output = generate(
        engine,
        PROMPT,
        max_tokens=6,
        logprobs=1,
        logprob_token_ids=asked,
        frequency_penalty=2.0,
        allowed_token_ids=list(range(60, 90)),
        min_tokens=2,
    ).outputs[0]
    reference = log_softmax(dense(PROMPT + output.token_ids))[len(PROMPT) - 1 :]
    assert output.logprobs is not None
    for row, token, entry in zip(reference, output.token_ids, output.logprobs, strict=False):
        assert list(entry) == list(dict.fromkeys([token, int(row.argmax()), *asked]))
        for key, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[key], abs=1e-4)
            assert logprob.rank == 1 + (row[:NUM_TOKENS] > row[key]).sum()
    alone = generate(engine, PROMPT, max_tokens=1, logprob_token_ids=[7]).outputs[0]
    assert list(alone.logprobs[0]) == list(dict.fromkeys([alone.token_ids[0], 7]))


@pytest.mark.parametrize(
    ("params", "param", "message"),
    [
        ({"logit_bias": {VOCAB: 1}}, "logit_bias", "out of vocabulary"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids", "out of vocabulary"),
        ({"allowed_token_ids": [NUM_TOKENS]}, "allowed_token_ids", "no id of the tokenizer"),
        ({"allowed_token_ids": [EOS, 7], "min_tokens": 1}, "min_tokens", "forbids every id"),
        ({"allowed_token_ids": [65], "bad_words": ["b"]}, "bad_words", "forbids every id"),
        ({"logprob_token_ids": [VOCAB]}, "logprob_token_ids", "out of vocabulary"),
        ({"prompt_logprobs": 301}, "prompt_logprobs", "301.*at most 300"),
    ],
)
def test_what_cannot_be_is_refused(engine: Engine, params: dict[str, object], param: str, message: str) -> None:
    if param == "bad_words":
        params = {**params, "allowed_token_ids": engine.tokenizer.encode("b")}
    with pytest.raises(InvalidRequestError, match=message) as caught:
        engine.add_request("bad", PROMPT, SamplingParams(**params))
    assert caught.value.param == param
    assert not engine.has_unfinished_requests()


def test_bad_words_need_a_tokenizer(tiny_model: nnx.Module) -> None:
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        Engine(tiny_model, None, SMALL).add_request("r", PROMPT, SamplingParams(bad_words=["x"]))
