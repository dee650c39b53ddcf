"""A stored backend does what transformers' tokenizer of the same files does, and is not used for other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import random_model, tiny_config
from tokenizers import NormalizedString
from tokenizers.normalizers import Normalizer
from transformers import PreTrainedTokenizerFast
from weights.tiny_files import byte_level_tokenizer

from jaxpaged import LLM
from jaxpaged.errors import ModelLoadError
from jaxpaged.tokenizer import encode, render_chat
from jaxpaged.weights import load_tokenizer, resolve, stored_tokenizer
from jaxpaged.weights.stored_tokenizer import StoredTokenizer, open_tokenizer

TEXTS = ["", "the quick brown fox, héllo 🎉", "  two  spaces\n\n", "<s>the dog</s> sleeps<pad>", "a\u0301b"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tokenizers"


@pytest.fixture
def stored(hf_folder: Path, folder: Path) -> StoredTokenizer:
    """The second to be opened, without transformers' own being loaded."""
    first = open_tokenizer(resolve(hf_folder), folder)
    assert not isinstance(first, StoredTokenizer)
    second = open_tokenizer(resolve(hf_folder), folder)
    assert isinstance(second, StoredTokenizer)
    return second


def test_it_encodes_and_decodes_as_transformers_does(stored: StoredTokenizer, hf_folder: Path) -> None:
    own = load_tokenizer(hf_folder)
    for text in TEXTS:
        for special in (True, False):
            ids = own(text, add_special_tokens=special)["input_ids"]
            assert encode(stored, text, add_special_tokens=special) == ids
            assert stored.decode(ids, skip_special_tokens=special) == own.decode(ids, skip_special_tokens=special)
        assert stored.convert_ids_to_tokens(ids) == own.convert_ids_to_tokens(ids)
    assert stored.get_vocab() == own.get_vocab()
    assert len(stored) == len(own)
    assert stored.backend_tokenizer.to_str() == own.backend_tokenizer.to_str()


def test_what_the_backend_cannot_tell_is_asked_of_transformers(stored: StoredTokenizer) -> None:
    assert not stored.is_loaded
    assert render_chat(stored, [{"role": "user", "content": "hi"}]) == "hi</s>"
    assert (stored.bos_token_id, stored.eos_token_id) == (0, 1)
    assert stored("hi").input_ids == byte_level_tokenizer().encode("hi").ids
    assert isinstance(stored.load(), PreTrainedTokenizerFast)
    assert stored.load() is stored.load() and stored.is_loaded


def test_padding_and_truncation_of_the_file_play_no_part(hf_folder: Path, folder: Path) -> None:
    backend = byte_level_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    backend.save(str(hf_folder / "tokenizer.json"))
    for _ in range(2):
        tokenizer = open_tokenizer(resolve(hf_folder), folder)
        assert encode(tokenizer, TEXTS[1]) == byte_level_tokenizer().encode(TEXTS[1]).ids
    assert isinstance(tokenizer, StoredTokenizer)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_changed_files_are_read_again(stored: StoredTokenizer, hf_folder: Path, folder: Path, name: str) -> None:
    path = hf_folder / name
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1) + "\n")
    assert not isinstance(open_tokenizer(resolve(hf_folder), folder), StoredTokenizer)


def test_a_tokenizer_that_no_longer_fits_its_model_is_refused(
    stored: StoredTokenizer, hf_folder: Path, folder: Path
) -> None:
    config = json.loads((hf_folder / "config.json").read_text())
    (hf_folder / "config.json").write_text(json.dumps(config | {"vocab_size": 5}))
    with pytest.raises(ModelLoadError, match="vocabulary of 5"):
        open_tokenizer(resolve(hf_folder), folder)


def test_a_damaged_file_is_not_used(stored: StoredTokenizer, hf_folder: Path, folder: Path) -> None:
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    tokenizer = open_tokenizer(resolve(hf_folder), folder)
    assert not isinstance(tokenizer, StoredTokenizer)
    assert isinstance(open_tokenizer(resolve(hf_folder), folder), StoredTokenizer), "it was not stored again"


def test_no_folder_or_code_of_others_means_nothing_is_stored(hf_folder: Path, folder: Path) -> None:
    open_tokenizer(resolve(hf_folder), None)
    open_tokenizer(resolve(hf_folder), folder, trust_remote_code=True)
    assert not folder.exists()


def test_a_tokenizer_that_cleans_up_what_it_decodes_is_not_stored(hf_folder: Path, folder: Path) -> None:
    path = hf_folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"clean_up_tokenization_spaces": True}))
    open_tokenizer(resolve(hf_folder), folder)
    assert not folder.exists()


def test_a_tokenizer_that_cannot_be_stored_is_used_all_the_same(
    hf_folder: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lower:
        def normalize(self, text: NormalizedString) -> None:
            text.lowercase()

    own = load_tokenizer(hf_folder)
    own.backend_tokenizer.normalizer = Normalizer.custom(Lower())
    monkeypatch.setattr(stored_tokenizer, "load_tokenizer", lambda *_, **__: own)
    for _ in range(2):
        tokenizer = open_tokenizer(resolve(hf_folder), folder)
        assert encode(tokenizer, "The DOG") == byte_level_tokenizer().encode("the dog").ids
    assert not folder.exists()


def test_a_user_gets_transformers_own(stored: StoredTokenizer) -> None:
    """Whether the engine found a stored one or not: code that works at the first start works at the second."""
    options: Any = {"num_blocks": 40, "block_size": 4, "warmup": False, "compilation_cache": "", "max_num_seqs": 2}
    with LLM.from_module(random_model(tiny_config()), stored, **options) as llm:
        tokenizer = llm.get_tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer.encode(TEXTS[1], truncation=True, max_length=2) == byte_level_tokenizer().encode(TEXTS[1]).ids[:2]


def test_a_lone_surrogate_is_refused(stored: StoredTokenizer) -> None:
    with pytest.raises(Exception, match="valid Unicode"):
        encode(stored, "a\ud800")
