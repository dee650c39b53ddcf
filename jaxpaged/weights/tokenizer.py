"""Tokenizers of every model format, through transformers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from jaxpaged.errors import ModelLoadError
from jaxpaged.weights.files import ModelFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# One of these is in every folder that transformers loads a tokenizer from.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def has_tokenizer(files: ModelFiles) -> bool:
    """Whether `files` bring a tokenizer, be it a damaged one."""
    return files.kind == "gguf" or any((files.folder / name).is_file() for name in _TOKENIZER_FILES)


def read_tokenizer(files: ModelFiles, *, trust_remote_code: bool) -> PreTrainedTokenizerFast:
    """The tokenizer of `files`, chat template attached.

    Raises:
        ModelLoadError: there is none, it is damaged, or it needs code that is not trusted.
    """
    # Only tokenizers are wanted of transformers, which says at import that without torch there is no more than these.
    logging.getLogger("transformers").addFilter(_not_about_torch)
    from transformers import AutoTokenizer

    if files.kind == "gguf":
        from jaxpaged.weights.gguf_file import GGUFFile
        from jaxpaged.weights.gguf_tokenizer import build_tokenizer

        return build_tokenizer(GGUFFile.open(files.path))
    try:
        return AutoTokenizer.from_pretrained(str(files.folder), trust_remote_code=trust_remote_code)
    except Exception as error:  # damaged files surface as KeyError, JSON errors, bare Exception and more
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(f"cannot load the tokenizer in {files.folder}: {reason}") from error


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, vocab_size: int, source: object) -> None:
    """Check that the model has an embedding for every id that the tokenizer can give.

    Raises:
        ModelLoadError: it has not.
    """
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest < 0:
        raise ModelLoadError(f"the tokenizer of {source} is empty: its files are missing; add tokenizer.json")
    if largest >= vocab_size:
        raise ModelLoadError(
            f"the tokenizer of {source} gives ids up to {largest}, but the model has a vocabulary of {vocab_size}; "
            "they do not belong together"
        )


def _not_about_torch(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()
