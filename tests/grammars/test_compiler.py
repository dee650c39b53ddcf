"""Masks against brute force, and what compilation refuses or survives."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from threading import Event
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxpaged.core.grammar import Grammar
from jaxpaged.errors import InvalidRequestError
from jaxpaged.grammars import GrammarCompiler, compiler, library
from jaxpaged.structured_outputs import MAX_CHARS, MAX_CHOICES, MAX_NESTING, StructuredOutputs

EOS, OTHER_EOS = 260, 262


def make_tokenizer() -> PreTrainedTokenizerFast:
    """All bytes, "ab", "abc", "</" and "</s>" of text, and special tokens."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("a", "b"), ("ab", "c"), ("<", "/"), ("s", ">")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in ("</s>", "<x>", "<|end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


TOKENIZER = make_tokenizer()


def token_bytes() -> dict[int, bytes]:
    """Bytes of each token that is text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as GPT-2's byte-level alphabet has it
    others = [b for b in range(256) if b not in printable]
    char_of = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    byte_of = {c: b for b, c in char_of.items()}
    return {i: bytes(byte_of[c] for c in text) for text, i in TOKENIZER.get_vocab().items() if i < EOS}


TEXTS = token_bytes()


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCompiler]:
    grammars = GrammarCompiler(TOKENIZER, (EOS, OTHER_EOS, 999), 263)
    yield grammars
    grammars.close()


def allowed(grammars: GrammarCompiler, *matchers: Any) -> list[set[int]]:
    masks = grammars.fill_masks(matchers)
    assert masks.dtype == np.uint32 and masks.shape == (len(matchers), 9)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


TEXT = st.text(st.sampled_from('abcs</x>"\\é😀\n'), max_size=6)


@settings(max_examples=60, deadline=None)
@given(choices=st.lists(TEXT, min_size=1, max_size=5), data=st.data())
def test_choices_allow_exactly_what_leads_to_one_of_them(
    grammars: GrammarCompiler, choices: list[str], data: st.DataObject
) -> None:
    matcher = grammars.compile(StructuredOutputs(choice=choices)).result().new_matcher()
    wanted = [choice.encode() for choice in choices]
    written = b""
    while True:
        can_end = written in wanted
        expected = {t for t, text in TEXTS.items() if any(w.startswith(written + text) for w in wanted)}
        assert matcher.is_finished == (can_end and not expected and bool(written))
        if matcher.is_finished:
            break
        assert allowed(grammars, matcher) == [expected | ({EOS, OTHER_EOS} if can_end else set())]
        token = data.draw(st.sampled_from(sorted(expected | ({EOS} if can_end else set()))))
        matcher.accept(token)
        assert matcher.error is None
        if token == EOS:
            assert matcher.is_finished
            break
        written += TEXTS[token]


def test_many_choices_and_properties(grammars: GrammarCompiler) -> None:
    choices = [f"{i:04d}" for i in range(MAX_CHOICES)]
    matcher = grammars.compile(StructuredOutputs(choice=choices)).result().new_matcher()
    digits = {token for token, text in TEXTS.items() if text.isdigit()}
    for digit in b"0123":
        assert allowed(grammars, matcher) == [digits]
        matcher.accept(next(token for token, text in TEXTS.items() if text == bytes([digit])))
    assert matcher.error is None and matcher.is_finished
    names = [f"p{i}" for i in range(2500)]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}, "additionalProperties": False}
    text = json.dumps({names[7]: None, names[-1]: None})
    matcher = grammars.compile(StructuredOutputs(json=schema)).result().new_matcher()
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        assert token in allowed(grammars, matcher)[0]
        matcher.accept(token)
    assert matcher.error is None and matcher.is_finished


def test_a_mask_that_cannot_be_made_allows_nothing(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance would allow an end of the text there, whether it is one or not."""
    monkeypatch.setattr(library, "LIMITS", LLParserLimits(step_max_items=100, verbose_errors=False))
    small = GrammarCompiler(TOKENIZER, (EOS,), 263)
    growing = small.compile(StructuredOutputs(grammar='start: e\ne: e e | "a" | "b" | "c"')).result()
    other = grammars.compile(StructuredOutputs(choice=["{"])).result().new_matcher()
    a, brace = (TOKENIZER.encode(char, add_special_tokens=False)[0] for char in "a{")
    for company in ([], [other]):
        matcher = growing.new_matcher()
        while matcher.error is None:
            matcher.accept(a)
            *beside, found = allowed(small, *company, matcher)
            assert (found == set()) == (matcher.error is not None)
            assert beside == [{brace}] * len(company)
        assert "Too many items" in matcher.error
    assert other.error is None
    small.close()


def test_matchers_are_independent(grammars: GrammarCompiler) -> None:
    grammar = grammars.compile(StructuredOutputs(choice=["ab", "cd"])).result()
    first, second = grammar.new_matcher(), grammar.new_matcher()
    first.accept(TOKENIZER.get_vocab()["a"])
    b, ab, a, c = (TOKENIZER.get_vocab()[t] for t in ("b", "ab", "a", "c"))
    assert allowed(grammars, first, second) == [{b}, {a, ab, c}]
    second.accept(b)
    assert second.error is not None and second.is_finished
    assert first.error is None and not first.is_finished


def test_special_tokens_stand_in_a_grammar_by_their_names(grammars: GrammarCompiler) -> None:
    matcher = grammars.compile(StructuredOutputs(grammar='start: "a" <x> "b"')).result().new_matcher()
    a, b, x = (TOKENIZER.get_vocab()[t] for t in ("a", "b", "<x>"))
    for token in (a, x, b):
        assert allowed(grammars, matcher) == [{token}]
        matcher.accept(token)
    assert matcher.is_finished and matcher.error is None


@pytest.mark.parametrize("thinking", ["open", "optional"])
def test_reasoning_may_come_before(grammars: GrammarCompiler, thinking: str) -> None:
    matcher = grammars.compile(StructuredOutputs(choice=["ab"], thinking=thinking)).result().new_matcher()
    text = "<think>hm</think>\n\nab" if thinking == "optional" else "hm < /think></think>ab"
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        assert not matcher.is_finished and token in allowed(grammars, matcher)[0]
        matcher.accept(token)
    assert matcher.is_finished and matcher.error is None
    if thinking == "optional":
        straight = grammars.compile(StructuredOutputs(choice=["ab"], thinking=thinking)).result().new_matcher()
        straight.accept(TOKENIZER.get_vocab()["ab"])
        assert straight.is_finished and straight.error is None


# -- keeping


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"regex": r"[^<]{1,9}<"}, ["ab", "abc", "a</"]),
        ({"regex": r"(\w+ )*\w+"}, ["ab", " ab", "abc ab"]),
        ({"regex": r"[a-c]{1,4}|</+"}, ["ab", "</"]),
        ({"json": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}}, ['{"a": "ab', "{"]),
        ({"json": {"type": "string", "pattern": "^[ a-b]{1,9}$"}}, ['"', '"ab', '"a b']),
    ],
)
def test_masks_are_those_of_testing_each_token(
    grammars: GrammarCompiler, fields: dict[str, Any], texts: list[str]
) -> None:
    """What may come next is known for many tokens at a time; the reference tries them one by one."""
    grammar = grammars.compile(StructuredOutputs(**fields)).result()
    for text in ["", *texts]:
        matcher = grammar.new_matcher()
        for token in TOKENIZER.encode(text, add_special_tokens=False):
            matcher.accept(token)
        if matcher.error is not None:  # the text does not fit
            continue
        [found] = allowed(grammars, matcher)
        for token in range(EOS):
            follower = grammar.new_matcher()
            for before in TOKENIZER.encode(text, add_special_tokens=False):
                follower.accept(before)
            follower.accept(token)
            assert (token in found) == (follower.error is None), (text, TOKENIZER.decode([token]))


def test_each_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarCompiler(TOKENIZER, (EOS,), 263)
    compiled: list[StructuredOutputs] = []
    compile_it = grammars._compile

    def count(wanted: StructuredOutputs) -> Grammar:
        compiled.append(wanted)
        return compile_it(wanted)

    monkeypatch.setattr(grammars, "_compile", count)
    monkeypatch.setattr(compiler, "MAX_CACHED", 2)
    one, same = StructuredOutputs(json={"type": "null"}), StructuredOutputs(json='{ "type": "null" }')
    assert grammars.compile(one).result() is grammars.compile(same).result()
    two, three = StructuredOutputs(regex="a"), StructuredOutputs(regex="b")
    for form in (two, one, three, one):  # two, the oldest, has to go
        grammars.compile(form).result()
    assert compiled == [one, two, three]
    grammars.compile(two).result()
    assert compiled == [one, two, three, two]
    for _ in range(2):  # what failed is not kept
        with pytest.raises(InvalidRequestError):
            grammars.compile(StructuredOutputs(regex="(")).result()
    assert len(compiled) == 6


def test_compiling_does_not_block_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarCompiler(TOKENIZER, (EOS,), 263)
    go_on = Event()
    compile_it = grammars._compile

    def slow(wanted: StructuredOutputs) -> Grammar:
        if wanted.regex == "slow":
            assert go_on.wait(10)
        return compile_it(wanted)

    monkeypatch.setattr(grammars, "_compile", slow)
    waiting: Future[Grammar] = grammars.compile(StructuredOutputs(regex="slow"))
    assert grammars.compile(StructuredOutputs(regex="quick")).result(10) is not None
    assert not waiting.done()
    go_on.set()
    assert waiting.result(10) is not None


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarCompiler(TOKENIZER, (EOS,), 263)
    monkeypatch.setitem(sys.modules, "jaxpaged.grammars.library", None)
    with pytest.raises(InvalidRequestError, match="pip install llguidance"):
        grammars.compile(StructuredOutputs(regex="a")).result()


def test_it_can_be_used_again_when_it_was_closed() -> None:
    grammars = GrammarCompiler(TOKENIZER, (EOS,), 263)
    before = grammars.compile(StructuredOutputs(regex="a")).result()
    grammars.close()
    assert grammars.compile(StructuredOutputs(regex="a")).result() is before
    assert grammars.compile(StructuredOutputs(regex="b")).result(10) is not None


# -- what is refused

REASONS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "a("}, "unclosed group"),
    ({"regex": "(?=a)"}, "look-around"),
    ({"regex": "a[^\\x00-\\x{10FFFF}]"}, "no text"),
    ({"grammar": "start: b"}, 'unknown name: "b"'),
    ({"grammar": 'root ::= "a" b'}, "Rule 'b' not found"),
    ({"grammar": ""}, "root"),
    ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "nested too deeply"),
    ({"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}, "nested"),
    ({"grammar": "start: <nosuch>"}, "special token"),
    ({"json": {"type": "thing"}}, "Invalid type"),
    ({"json": {"$ref": "#"}}, "no text"),
    ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, ""),
    ({"json": {"uniqueItems": True}}, "uniqueItems"),
    ({"json": {"type": "string", "format": "thing"}}, "Unknown format"),
    ({"json": {"$ref": "http://example.com/x.json"}}, ""),
    ({"structural_tag": {"structures": []}}, "triggers"),
    ({"structural_tag": {"structures": [{"begin": "a"}], "triggers": ["b"]}}, "none of the triggers"),
    ({"structural_tag": {"structures": [{"begin": 3}], "triggers": ["b"]}}, "begin"),
    ({"structural_tag": {"structures": [{"begin": "b", "schema": {"type": 3}}], "triggers": ["b"]}}, ""),
]


@pytest.mark.parametrize(("fields", "reason"), REASONS)
def test_what_cannot_be_compiled(grammars: GrammarCompiler, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        grammars.compile(StructuredOutputs(**fields)).result(20)
    message = str(refusal.value)
    assert message.startswith("Grammar error: ") and reason in message and "\n" not in message
    assert refusal.value.param == "structured_outputs" and "x-guidance" not in message and len(message) < 330


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "none of them"),
        ({"json_object": False}, "none of them"),
        ({"regex": "a", "choice": ["b"]}, "has regex and choice"),
        ({"regex": 3}, "must be a string"),
        ({"choice": "abc"}, "must be a list of strings"),
        ({"choice": []}, "must be a list of strings"),
        ({"choice": ["a", 1]}, "must be a list of strings"),
        ({"choice": [str(i) for i in range(10_001)]}, "at most 10000"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "must be a JSON object"),
        ({"json": {"const": float("nan")}}, "not valid JSON"),
        ({"json": {"const": object()}}, "not valid JSON"),
        ({"json": "[" * 100_000}, "not valid JSON"),
        ({"json": nested(MAX_NESTING)}, "nested deeper than 64"),
        ({"regex": "a" * (MAX_CHARS + 1)}, "at most 131072"),
        ({"json": {"const": "a" * MAX_CHARS}}, "at most 131072"),
        ({"regex": "\ud800"}, "not valid Unicode"),
        ({"choice": ["\udfff"]}, "not valid Unicode"),
        ({"regex": "a", "lenient": 1}, "True or False"),
        ({"regex": "a", "thinking": "yes"}, "thinking"),
    ],
)
def test_what_is_refused_at_once(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        StructuredOutputs(**fields)
    assert reason in str(refusal.value) and refusal.value.param == "structured_outputs"


def test_a_schema_may_be_nested_to_the_limit(grammars: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="Unimplemented keys"):
        grammars.compile(StructuredOutputs(json=nested(MAX_NESTING - 1))).result()
    assert grammars.compile(StructuredOutputs(json=nested(MAX_NESTING - 1), lenient=True)).result() is not None


def chain(count: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{count}": {"type": "null"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(9000)) + 'a9000: "x"'},
        {"grammar": "start: A0\n" + "".join(f"A{i}: A{i + 1}\n" for i in range(9000)) + 'A9000: "x"'},
        {"json": chain(3500)},
        {"regex": "(a|b)" * 20_000},
        {"regex": "x((((a{100}){100}){100}){100})"},
        {"choice": [f"value {i}" for i in range(9_000)]},
        {"json": {"type": "array", "items": {"type": "string", "maxLength": 10**9}, "maxItems": 10**9}},
        {"json": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(900)}}},
        {"json": {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(40)]}},
    ],
)
def test_large_ones_do_no_harm(grammars: GrammarCompiler, fields: dict[str, Any]) -> None:
    """Compiled and matched, or refused with a reason: neither a crash nor an endless run."""
    try:
        matcher = grammars.compile(StructuredOutputs(**fields)).result(60).new_matcher()
    except InvalidRequestError as error:
        assert str(error).startswith("Grammar error: ")
        return
    for _ in range(5):
        if not matcher.is_finished:
            [tokens] = allowed(grammars, matcher)
            assert tokens
            matcher.accept(min(tokens))
    assert matcher.error is None or len(json.dumps(matcher.error)) < 1000
