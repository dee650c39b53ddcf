"""Tokenizers rebuilt from GGUF metadata against the tokenizers whose vocabulary was written into it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from weights.tiny_files import write_gguf

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.gguf_file import GGUFFile
from jaxpaged.weights.gguf_tokenizer import build_tokenizer

TEXTS = [
    "Hello, world! It's 2024, we'll pay $1,234.56 for 10 apples.",
    "def f(x):\n    return x**2  # square\n\n\n1. list\n\t2. tab",
    "naïve café e\u0301 — 日本語テスト 🎉🏳️‍🌈 Привет мир ١٢٣",
    "   leading and trailing   ",
    "I'M DON'T we'LL\r\n\r\nend",
    "<s>special</s> in the middle",
    "",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(pattern: str | None, *, digits: bool = False, nfc: bool = False) -> Tokenizer:
    """A byte-level tokenizer with real merges, its pipeline as the models' own tokenizer.json files have it."""
    tokenizer = Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    return tokenizer


def metadata_of(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in ("<s>", "</s>") else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": vocab["<s>"],
        "tokenizer.ggml.eos_token_id": vocab["</s>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}",
    }


def build(tmp_path: Path, metadata: dict[str, Any]) -> Any:
    path = write_gguf(tmp_path / "m.gguf", metadata, {"x.weight": np.zeros(4, np.float32)})
    return build_tokenizer(GGUFFile.open(path))


@pytest.mark.parametrize(
    ("pre", "original"),
    [
        ("gpt-2", byte_level(None)),
        ("smollm", byte_level(None, digits=True)),
        ("llama-bpe", byte_level(LLAMA3)),
        ("qwen2", byte_level(QWEN2, nfc=True)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_byte_level_ids(tmp_path: Path, pre: str, original: Tokenizer) -> None:
    tokenizer = build(tmp_path, metadata_of(original, pre))
    for text in TEXTS:
        ids = original.encode(text).ids
        assert tokenizer(text).input_ids == ids
        assert tokenizer.decode(ids) == original.decode(ids, skip_special_tokens=False)
    assert tokenizer.is_fast
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<s>hi</s>"
    assert tokenizer.decode(tokenizer("a</s>").input_ids, skip_special_tokens=True) == "a"


def test_a_bos_token_is_put_in_front_where_the_file_wants_it(tmp_path: Path) -> None:
    metadata = metadata_of(byte_level(None), "gpt-2") | {"tokenizer.ggml.add_bos_token": True}
    tokenizer = build(tmp_path, metadata)
    assert tokenizer("ab").input_ids == [tokenizer.bos_token_id, *tokenizer("ab", add_special_tokens=False).input_ids]


PIECES = ["▁", "a", "b", "c", "ab", "▁a", "▁ab", "bc", "abc", "▁abc", "▁▁", "é", "▁b", "ca", "cab"]
SCORES = [-9.0, -10.0, -11.0, -12.0, -1.0, -3.0, -2.0, -0.5, -4.0, -5.0, -6.0, -13.0, -7.0, -0.7, -8.0]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *PIECES]


def sentencepiece_ids(text: str) -> list[int]:
    """SentencePiece's BPE, brute force: join the neighbours whose joined piece scores best, leftmost first."""
    scores = dict(zip(PIECES, SCORES, strict=True))
    parts = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not pairs:
            break
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = []
    for part in parts:
        ids += [SPM_TOKENS.index(part)] if part in scores else [3 + byte for byte in part.encode()]
    return ids


def spm_metadata() -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SPM_TOKENS,
        "tokenizer.ggml.scores": [0.0] * 259 + SCORES,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_ids(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, spm_metadata())
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("aabbcc  éx日"), size=rng.integers(1, 20))) for _ in range(200)]
    for text in ["abc", " abc", "a  b", "日本", "\n", *texts]:
        ids = sentencepiece_ids(text)
        assert tokenizer(text).input_ids == [1, *ids], repr(text)
        assert tokenizer.decode(ids) == text, repr(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "made-up"}, "pre-tokenizer 'made-up' is not supported; supported are gpt-2, smollm"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5' is not supported"),
        ({"tokenizer.ggml.eos_token_id": 10_000}, "eos_token_id is 10000, but the tokenizer has"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "holds no tokenizer"),
        ({"tokenizer.ggml.merges": ["no-such token"]}, "its tokenizer is damaged"),
    ],
)
def test_bad_metadata(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        build(tmp_path, metadata_of(byte_level(None), "gpt-2") | change)
