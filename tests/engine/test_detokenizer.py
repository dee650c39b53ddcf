"""Detokenizer against whole-text decoding, for byte-level and byte-fallback tokenizers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jaxpaged.engine.detokenizer import Detokenizer, token_text
from jaxpaged.errors import ConfigError
from jaxpaged.request import SamplingParams

CORPUS = [
    "the quick brown fox jumps over the lazy dog, then the fox sleeps",
    "naïve café, Zürich; привет мир; こんにちは世界; 👍🏽 👩‍👩‍👧 🎉🎉",
    "def f(x):\n    return x + 1\n",
]
BOS = 0


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def sentencepiece(kind: str) -> Tokenizer:
    """As Llama 2 ("bpe") and T5-like models ("unigram") have it: words begin with U+2581, bytes as a last resort."""
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    pieces = [
        "▁",
        "▁the",
        "▁fox",
        "▁▁",
        "s",
        "t",
        "h",
        "e",
        "f",
        "o",
        "x",
        ",",
        "th",
        "the",
        "fo",
        "fox",
        "é",
        "\ufffd",
    ]
    words = ["<s>", "</s>", *byte_tokens, *pieces]
    if kind == "bpe":
        vocab = {w: i for i, w in enumerate(words)}
        model = models.BPE(vocab, [("t", "h"), ("th", "e"), ("f", "o"), ("fo", "x"), ("▁", "the"), ("▁", "fox")])
        model.byte_fallback = True
    else:
        model = models.Unigram([(w, -float(i)) for i, w in enumerate(words)], unk_id=0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


BYTE_LEVEL = byte_level()
SENTENCEPIECE = [sentencepiece("bpe"), sentencepiece("unigram")]
TOKENIZERS = [BYTE_LEVEL, *SENTENCEPIECE]
TEXTS = st.text(st.sampled_from("the fox,é\n 🎉世ß\u200d▁"), max_size=24)


def token_lists(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any tokens at all, or those of a text; with ids that the vocabulary lacks."""
    any_tokens = st.lists(st.integers(0, tokenizer.get_vocab_size() + 1), max_size=24)
    return st.one_of(any_tokens, TEXTS.map(lambda text: tokenizer.encode(text).ids))


def deltas(tokenizer: Tokenizer, prompt: list[int], output: list[int], chunk: int = 1, **params: object) -> list[str]:
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params), prompt)
    texts = []
    for start in range(0, len(output), chunk):
        detokenizer.append(output[start : start + chunk], finished=start + chunk >= len(output))
        texts.append(detokenizer.take())
    return texts


def expected_sentencepiece(tokenizer: Tokenizer, output: list[int], skip: bool) -> str:
    """Text after a prompt, from the pieces themselves; runs of byte tokens as one byte string."""
    text, run = "", b""
    for token_id in output:
        piece = tokenizer.id_to_token(token_id)
        if piece is None or (skip and piece in ("<s>", "</s>")):
            continue
        if piece.startswith("<0x"):
            run += bytes([int(piece[3:5], 16)])
        else:
            text += run.decode("utf-8", "replace") + piece.replace("▁", " ")
            run = b""
    return text + run.decode("utf-8", "replace")


@given(st.data(), st.booleans(), st.integers(1, 3))
def test_byte_level_deltas_join_to_decode_of_the_output(data: st.DataObject, skip: bool, chunk: int) -> None:
    prompt, output = data.draw(token_lists(BYTE_LEVEL)), data.draw(token_lists(BYTE_LEVEL))
    texts = deltas(BYTE_LEVEL, prompt, output, chunk, skip_special_tokens=skip)
    assert "".join(texts) == BYTE_LEVEL.decode(output, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", SENTENCEPIECE, ids=["bpe", "unigram"])
@given(st.data(), st.booleans(), st.integers(1, 3))
def test_byte_fallback_deltas_join_to_the_pieces(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool, chunk: int
) -> None:
    prompt = [BOS, *tokenizer.encode(data.draw(TEXTS) + "x").ids]
    output = data.draw(token_lists(tokenizer))
    text = "".join(deltas(tokenizer, prompt, output, chunk, skip_special_tokens=skip))
    assert text == expected_sentencepiece(tokenizer, output, skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    if "\ufffd" not in whole:
        assert text == whole[len(tokenizer.decode(prompt, skip_special_tokens=skip)) :]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte-level", "bpe", "unigram"])
@given(TEXTS)
def test_characters_are_never_split(tokenizer: Tokenizer, text: str) -> None:
    prompt, output = tokenizer.encode("the").ids, tokenizer.encode(text).ids
    texts = deltas(tokenizer, prompt, output)
    assert "\ufffd" not in "".join(texts)
    assert "".join(texts).strip() == text.replace("▁", " " if tokenizer is not BYTE_LEVEL else "▁").strip()


@pytest.mark.parametrize("tokenizer", SENTENCEPIECE, ids=["bpe", "unigram"])
def test_leading_space_is_kept_after_a_prompt_and_dropped_at_the_front(tokenizer: Tokenizer) -> None:
    fox = tokenizer.token_to_id("▁fox")
    newline = tokenizer.token_to_id("<0x0A>")
    the = tokenizer.encode("the").ids
    assert "".join(deltas(tokenizer, the, [fox, fox])) == " fox fox"
    assert "".join(deltas(tokenizer, [BOS], [fox, fox])) == "fox fox"
    assert "".join(deltas(tokenizer, [BOS], [newline, fox])) == "\n fox"
    assert "".join(deltas(tokenizer, [*the, BOS], [fox, fox])) == " fox fox"


def test_a_character_cut_off_at_the_end_becomes_one_replacement_character() -> None:
    ids = BYTE_LEVEL.encode("aß").ids
    first_byte = [BYTE_LEVEL.token_to_id("a"), BYTE_LEVEL.token_to_id("Ã")]
    assert BYTE_LEVEL.decode(ids) == "aß"
    assert deltas(BYTE_LEVEL, [], first_byte) == ["a", "\ufffd"]


def test_text_comes_out_as_soon_as_a_character_is_whole() -> None:
    tokenizer = SENTENCEPIECE[0]
    output = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in "\n🎉".encode()]
    assert deltas(tokenizer, tokenizer.encode("x").ids, output) == ["\n", "", "", "", "🎉"]


def test_invalid_bytes_do_not_hold_the_text_back() -> None:
    continuation = BYTE_LEVEL.token_to_id("Ģ")  # byte 0x80
    assert BYTE_LEVEL.decode([continuation]) == "\ufffd"
    texts = deltas(BYTE_LEVEL, [], [continuation] * 200)
    assert "".join(texts) == "\ufffd" * 200
    assert all(len(text) == 1 for text in texts[1:-1])


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Start and stop string of the first to be complete, reading one character after another."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return end - len(longest), longest
    return None


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte-level", "bpe", "unigram"])
@settings(max_examples=200)
@given(st.data())
def test_stop_strings_equal_a_search_of_the_whole_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    prompt = tokenizer.encode("the").ids
    output = data.draw(token_lists(tokenizer))
    text = "".join(deltas(tokenizer, prompt, output))
    pieces = st.integers(0, max(len(text) - 1, 0)).flatmap(
        lambda start: st.integers(1, 6).map(lambda size: text[start : start + size] or "x")
    )
    stops = tuple(data.draw(st.lists(pieces | st.text("thefox ,", min_size=1, max_size=4), min_size=1, max_size=3)))
    include, chunk = data.draw(st.booleans()), data.draw(st.integers(1, 4))

    match = first_stop(text, stops)
    expected = text if match is None else text[: match[0]] + (match[1] if include else "")
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stops, include_stop_str_in_output=include), prompt)
    got = ""
    for start in range(0, len(output), chunk):
        stop = detokenizer.append(output[start : start + chunk], finished=start + chunk >= len(output))
        got += detokenizer.take()
        assert expected.startswith(got)
        assert stop == detokenizer.stop
    assert got == expected
    assert detokenizer.stop == (match[1] if match else None)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str], data: st.DataObject) -> None:
    """At every split of the text into two: the rest held is the longest end that some stop string starts with."""
    letters = {letter: BYTE_LEVEL.token_to_id(letter) for letter in "ab"}
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop=tuple(stops)), [])
    for end in range(1, len(text) + 1):
        if detokenizer.append([letters[text[end - 1]]], finished=False) is not None:
            break
    match = first_stop(text, tuple(stops))
    if match is not None:
        assert detokenizer.take() == text[: match[0]]
        return
    held = max((k for stop in stops for k in range(len(stop)) if k and text.endswith(stop[:k])), default=0)
    assert detokenizer.take() == text[: len(text) - held]
    detokenizer.append([], finished=True)
    assert detokenizer.take() == text[len(text) - held :]


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 6),
    st.integers(1, 4),
)
def test_a_stop_string_that_ends_before_min_tokens_does_not_count(
    text: str, stops: list[str], min_tokens: int, chunk: int
) -> None:
    """A token is a letter here, so one counts if it ends behind the first `min_tokens` letters."""
    output = [BYTE_LEVEL.token_to_id(letter) for letter in text]
    ends = [end for end in range(min_tokens + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=12), [])
    got = ""
    for start in range(0, len(output), chunk):
        detokenizer.append(output[start : start + chunk], finished=start + chunk >= len(output))
        got += detokenizer.take()
    if not ends:
        assert (got, detokenizer.stop) == (text, None)
        return
    stop = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
    assert (got, detokenizer.stop) == (text[: ends[0] - len(stop)], stop)


def test_a_stop_string_inside_a_token_truncates_and_ends_the_text() -> None:
    the = BYTE_LEVEL.token_to_id("Ġthe")
    assert BYTE_LEVEL.decode([the]) == " the"
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop="h"), [])
    assert detokenizer.append([the], finished=False) == "h"
    assert detokenizer.append([the], finished=True) == "h"
    assert detokenizer.take() == " t"


def test_work_for_a_token_does_not_grow_with_the_output() -> None:
    """Counts the token ids handed to the tokenizer, for plain text, invalid bytes and skipped special tokens."""

    class Counting:
        def __init__(self) -> None:
            self.decoded = 0

        def token_to_id(self, token: str) -> int | None:
            return BYTE_LEVEL.token_to_id(token)

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            self.decoded += len(ids)
            return BYTE_LEVEL.decode(ids, skip_special_tokens=skip_special_tokens)

    for token_id in (BYTE_LEVEL.token_to_id("Ġthe"), BYTE_LEVEL.token_to_id("Ģ"), BOS):
        counts = []
        for length in (100, 200, 400):
            tokenizer = Counting()
            deltas(tokenizer, [], [token_id] * length, stop=("xyz",))
            counts.append(tokenizer.decoded)
        (small, middle), (_, large) = pairwise(counts)
        assert large - middle == 2 * (middle - small)


class CountingDecodes:
    """A tokenizer that counts its calls of `decode`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoder = tokenizer.decoder
        self.calls = 0

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.calls += 1
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte-level", "bpe", "unigram"])
def test_tokens_seen_before_are_not_decoded_again(tokenizer: Tokenizer) -> None:
    counting = CountingDecodes(tokenizer)
    prompt, output = tokenizer.encode("the").ids, tokenizer.encode("the fox, fox the fox").ids
    first = "".join(deltas(counting, prompt, output))
    before = counting.calls
    text = "".join(deltas(counting, prompt, output * 20))
    assert first in text and text == tokenizer.decode(prompt + output * 20)[len(tokenizer.decode(prompt)) :]
    assert counting.calls - before <= 4  # for the prompt's last token, however long the output is


def test_a_decoder_that_joins_its_tokens_is_not_taken_apart() -> None:
    """In WordPiece a token's text depends on the one before it and on punctuation."""
    words = ["[UNK]", "the", "fox", "##es", ",", "."]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    output = [2, 3, 4, 1, 2, 5, 1]
    assert tokenizer.decode([1, *output]) == "the foxes, the fox. the"
    assert "".join(deltas(tokenizer, [1], output)) == " foxes, the fox. the"


def test_a_decoder_without_steps_is_not_taken_apart() -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.Sequence([])
    assert "".join(deltas(tokenizer, [1], [2, 1])) == tokenizer.decode([1, 2, 1])[1:]


def test_token_text_keeps_the_space_and_shows_special_tokens() -> None:
    for tokenizer in SENTENCEPIECE:
        assert token_text(tokenizer, tokenizer.token_to_id("▁fox")) == " fox"
        assert token_text(tokenizer, tokenizer.token_to_id("fox")) == "fox"
        assert token_text(tokenizer, BOS) == "<s>"
        assert token_text(tokenizer, tokenizer.token_to_id("<0xE2>")) == "\ufffd"
        assert token_text(tokenizer, tokenizer.token_to_id("<0x0A>")) == "\n"
    assert token_text(BYTE_LEVEL, BYTE_LEVEL.token_to_id("Ġthe")) == " the"
    assert token_text(BYTE_LEVEL, BYTE_LEVEL.token_to_id("Ã")) == "\ufffd"


def test_a_tokenizer_of_transformers_is_taken_as_it_is() -> None:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    output = [*tokenizer("the fox").input_ids, end]
    assert "".join(deltas(tokenizer, [], output)) == "the fox"
    assert "".join(deltas(tokenizer, [], output, skip_special_tokens=False)) == "the fox<|end|>"


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="object is not a fast tokenizer"):
        Detokenizer(object(), SamplingParams(), [])
