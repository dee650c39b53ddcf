"""Structured outputs of a tiny random model, checked by jsonschema and re."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import pytest
from flax import nnx
from support import EOS, NUM_TOKENS

from jaxpaged.config import EngineConfig
from jaxpaged.core.grammar import Masks, Matcher
from jaxpaged.engine.engine import Engine
from jaxpaged.errors import InvalidRequestError
from jaxpaged.outputs import CompletionOutput, RequestOutput
from jaxpaged.request import SamplingParams
from jaxpaged.structured_outputs import StructuredOutputs
from jaxpaged.weights import GenerationConfig

CONFIG = EngineConfig(
    block_size=4,
    num_blocks=64,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    compilation_cache="",
    warmup=False,
    debug_checks=True,
)
PROMPT = list(b"The cat")
ROOM = 128 - len(PROMPT)
SEEDS = range(24)
CARD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6, "pattern": "^[a-z]+$"},
        "kind": {"enum": ["a", 1, None, "</s>", "<user>"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 12}, "maxItems": 2},
        "note": {"type": "string", "maxLength": 8},
    },
    "required": ["name", "kind", "sizes", "note"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}, "on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
UNION = {"oneOf": [{"const": {"a": [1.5, "é\n"]}}, {"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]}


@pytest.fixture(scope="module")
def engine(tiny_model: nnx.Module, tiny_tokenizer: object) -> Engine:
    return Engine(tiny_model, tiny_tokenizer, CONFIG, generation=GenerationConfig(eos_token_ids=(EOS, 300)))


def run(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {o.request_id: o for o in engine.step()}
    return outputs


def draw(engine: Engine, form: StructuredOutputs, seeds: range = SEEDS, **params: object) -> list[CompletionOutput]:
    """One output for each seed, all in one run, with a request that asks for nothing special beside them."""
    for seed in seeds:
        fields = {"max_tokens": ROOM, "seed": seed, "structured_outputs": form, **params}
        engine.add_request(str(seed), PROMPT, SamplingParams(**fields))
    engine.add_request("other", PROMPT, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    outputs = run(engine)
    assert len(outputs.pop("other").outputs[0].token_ids) == 9
    assert all(o.error is None for o in outputs.values())
    return [output for seed in seeds for output in outputs[str(seed)].outputs]


def complete(outputs: list[CompletionOutput], at_least: int) -> list[str]:
    """Texts of those that did not run out of tokens."""
    texts = [o.text for o in outputs if o.finish_reason == "stop"]
    assert len(texts) >= at_least
    assert all(o.finish_reason in ("stop", "length") and o.stop_reason is None for o in outputs)
    return texts


@pytest.mark.parametrize(("schema", "at_least"), [(CARD, 20), (TREE, 20), (UNION, 24)])
@pytest.mark.parametrize("shortest", [False, True])
def test_json_schemas(engine: Engine, schema: dict[str, object], at_least: int, shortest: bool) -> None:
    form = StructuredOutputs(json=schema, disable_any_whitespace=shortest)
    vocab = engine.tokenizer.get_vocab()
    space = {vocab[symbol]: -7.0 for symbol in "ĠĉĊč"}  # of which the model would write too much
    texts = complete(draw(engine, form, logit_bias=space), at_least)
    for text in texts:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    assert len(set(texts)) > 1


def test_json_objects(engine: Engine) -> None:
    texts = complete(draw(engine, StructuredOutputs(json_object=True)), 1)
    assert all(isinstance(json.loads(text), dict) for text in texts)


@pytest.mark.parametrize(
    "pattern", [r"[A-Z]{3}-\d{2,4}", r"(ab|cd)*e?", "é+😀", r"</s>|<user>", "x", r"\{.{0,5}\}", r"[^a]", "a\nb#/ ?"]
)
def test_regexes(engine: Engine, pattern: str) -> None:
    for text in complete(draw(engine, StructuredOutputs(regex=pattern)), 2):
        assert re.fullmatch(pattern, text), text


CHOICES = ["yes", "yes!", "", "</s>", 'a "quote" \\ /', "é😀\n\t"]


def test_choices(engine: Engine) -> None:
    texts = complete(draw(engine, StructuredOutputs(choice=CHOICES), range(60), temperature=2.0), 60)
    assert set(texts) <= set(CHOICES) and len(set(texts)) >= 4


SUM_LARK = 'start: number ("+" number)*\nnumber: /[0-9]{1,2}/ | "(" start ")"'
SUM_GBNF = 'root ::= number ("+" number)*\nnumber ::= [0-9] [0-9]? | "(" root ")"'


@pytest.mark.parametrize("grammar", [SUM_LARK, SUM_GBNF])
def test_grammars(engine: Engine, grammar: str) -> None:
    texts = complete(draw(engine, StructuredOutputs(grammar=grammar)), 12)
    for text in texts:
        assert re.fullmatch(r"[0-9+()]+", text)
        assert eval(re.sub(r"\b0+(?=\d)", "", text)) >= 0  # Python's own parser knows what is a sum
    assert len(set(texts)) > 3


TAGS = {
    "structures": [
        {
            "begin": "<f=a>",
            "schema": {
                "type": "object",
                "properties": {"n": {"type": "integer"}},
                "required": ["n"],
                "additionalProperties": False,
            },
            "end": "</f>",
        }
    ],
    "triggers": ["<f="],
}


def test_structural_tags(engine: Engine) -> None:
    """Any text, but behind a trigger only what its structures allow: nudged to it, the model writes a whole one."""
    ids = engine.tokenizer.get_vocab()
    bias = {ids[c]: 100.0 for c in "<f="}
    form = StructuredOutputs(structural_tag=TAGS, disable_any_whitespace=True)
    outputs = draw(engine, form, logit_bias=bias, frequency_penalty=2.0)
    found = [text for o in outputs if "<f=" in (text := o.text)]
    for text in found:
        for piece in text.split("<f=")[1:]:
            whole = re.match(r'a>(\{"n":-?\d+\})</f>', piece)
            assert whole or 'a>{"n":'.startswith(piece[:7]), text
    assert found


def test_siblings_have_matchers_of_their_own(engine: Engine) -> None:
    form = StructuredOutputs(regex=r"[a-p]{4}(-[a-p]+)?[0-9]")
    texts = complete(draw(engine, form, range(0, 12, 4), n=4, max_tokens=12), 9)
    assert all(re.fullmatch(r"[a-p]{4}(-[a-p]+)?[0-9]", text) for text in texts)
    assert len(set(texts)) > 6


def test_preempted_requests_keep_their_place(engine: Engine) -> None:
    form = StructuredOutputs(json=CARD, disable_any_whitespace=True)
    before = engine.stats().scheduler.preemptions_total
    together = [o.token_ids for o in draw(engine, form, range(8))]
    assert engine.stats().scheduler.preemptions_total > before
    before = engine.stats().scheduler.preemptions_total
    alone = [draw(engine, form, range(seed, seed + 1))[0].token_ids for seed in range(8)]
    assert engine.stats().scheduler.preemptions_total == before
    assert together == alone


def test_the_end_of_a_grammar_goes_before_min_tokens_and_length(engine: Engine) -> None:
    [early] = draw(engine, StructuredOutputs(choice=["abc"]), range(1), min_tokens=9)
    assert (early.text, early.finish_reason, early.stop_reason, len(early.token_ids)) == ("abc", "stop", None, 3)
    [exact] = draw(engine, StructuredOutputs(choice=["abc"]), range(1), max_tokens=3)
    assert (exact.text, exact.finish_reason) == ("abc", "stop")
    [cut] = draw(engine, StructuredOutputs(choice=["abc"]), range(1), max_tokens=2)
    assert (cut.text, cut.finish_reason) == ("ab", "length")


def test_min_tokens_holds_where_the_grammar_can_go_on(engine: Engine) -> None:
    for output in draw(engine, StructuredOutputs(regex="a*"), min_tokens=7, max_tokens=30):
        num_text = len(output.text)
        assert output.text == "a" * num_text and num_text >= 7
    for output in draw(engine, StructuredOutputs(regex="a?"), min_tokens=7):  # nothing else may come
        assert output.text in ("a", "") and output.finish_reason == "stop"


def test_ignoring_eos_does_not_go_on_behind_a_complete_text(engine: Engine) -> None:
    texts = complete(draw(engine, StructuredOutputs(regex="[a-c]*"), ignore_eos=True), 10)
    assert all(re.fullmatch("[a-c]*", text) for text in texts)


def test_stops_end_the_output_before_its_grammar(engine: Engine) -> None:
    ids = engine.tokenizer.get_vocab()
    for output in draw(engine, StructuredOutputs(choice=["abcd"]), range(2), stop_token_ids=[ids["c"]]):
        assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", ids["c"])
    for output in draw(engine, StructuredOutputs(choice=["abcd"]), range(2), stop=["bc"]):
        assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "bc")
    for output in draw(engine, StructuredOutputs(choice=["abcd"]), range(2), stop=["cd"]):  # with its last token
        assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", "cd")


def test_with_what_else_changes_logits(engine: Engine) -> None:
    """The drawn tokens are within the grammar and the allowed ids; biases choose among what is left."""
    ids = engine.tokenizer.get_vocab()
    allowed = [ids[c] for c in "bcd"] + [EOS]
    form = StructuredOutputs(regex="[a-f]{6}")
    for output in draw(engine, form, allowed_token_ids=allowed):
        assert re.fullmatch("[b-d]{6}", output.text)
    for output in draw(engine, form, logit_bias={ids["e"]: 100.0, ids["z"]: 100.0}):
        assert output.text == "eeeeee"
    for output in draw(engine, form, bad_words=["a", "b", "c", "d", "e"]):
        assert output.text == "ffffff"
    penalized = draw(engine, form, temperature=0, frequency_penalty=2, repetition_penalty=1000.0)
    assert all(sorted(o.text) == list("abcdef") for o in penalized)


def test_nothing_left_of_grammar_and_allowed_ids(engine: Engine) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(choice=["x"]), allowed_token_ids=[3])
    engine.add_request("none", PROMPT, params)
    engine.add_request("other", PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
    outputs = run(engine)
    assert (outputs["none"].error or "").startswith("Grammar error: of what may follow") and outputs["none"].outputs[
        0
    ].finish_reason == "error"
    assert outputs["other"].outputs[0].finish_reason == "length"


def test_only_whole_tokens_of_the_tokenizer(engine: Engine) -> None:
    """Ids of the padded embedding are never drawn, nor special ones inside of text, at any logits."""
    every = dict.fromkeys(range(256, 272), 100.0)
    outputs = draw(engine, StructuredOutputs(regex=r"(.|\n){5}"), logit_bias=every)
    assert all(len(o.text) == 5 and max(o.token_ids) < 256 for o in outputs)
    assert NUM_TOKENS < 272


class FailingMatcher:
    """Allows all, and fails behind its third token."""

    def __init__(self) -> None:
        self.count = 0
        self.is_finished = False
        self.error: str | None = None

    def accept(self, token_id: int) -> None:
        self.count += 1
        if self.count == 3:
            self.is_finished, self.error = True, "too many items"


class FailingGrammar:
    def new_matcher(self) -> Matcher:
        return FailingMatcher()


def test_a_grammar_that_fails_on_the_way_ends_its_request_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def allow_all(matchers: list[Matcher]) -> Masks:
        return np.full((len(matchers), 9), 0xFFFFFFFF, np.uint32)

    monkeypatch.setattr(engine._scheduler._builder, "_fill_masks", allow_all)
    params = SamplingParams(structured_outputs=StructuredOutputs(choice=["x"]), n=2, ignore_eos=True, max_tokens=9)
    engine.add_request("fails", PROMPT, params, grammar=FailingGrammar())
    engine.add_request("other", PROMPT, SamplingParams(max_tokens=6, ignore_eos=True))
    outputs = run(engine)
    assert outputs["fails"].error == "Grammar error: too many items"
    assert [o.finish_reason for o in outputs["fails"].outputs] == ["error", "error"]
    assert len(outputs["other"].outputs[0].token_ids) == 6


def test_refusals(engine: Engine, tiny_model: nnx.Module) -> None:
    before = engine.stats().steps_total
    for form in (StructuredOutputs(regex="a("), StructuredOutputs(json={"type": "object", "required": 3})):
        with pytest.raises(InvalidRequestError, match="Grammar error: ") as refusal:
            engine.add_request("bad", PROMPT, SamplingParams(structured_outputs=form))
        assert refusal.value.param == "structured_outputs" and "\n" not in str(refusal.value)
        with pytest.raises(InvalidRequestError, match="Grammar error: "):
            engine.validate(PROMPT, SamplingParams(structured_outputs=form))
    with pytest.raises(InvalidRequestError, match="must be StructuredOutputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests() and engine.stats().steps_total == before
    without = Engine(tiny_model, None, EngineConfig(**{**vars(CONFIG)}))
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        without.add_request("a", PROMPT, SamplingParams(structured_outputs=StructuredOutputs(regex="a")))
