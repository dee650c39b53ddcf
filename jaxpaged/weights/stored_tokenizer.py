"""A model's tokenizer for an engine: its backend from a file, transformers' own around it only where that is needed.

Importing transformers and loading a tokenizer with it takes a second. Most of the time an engine only encodes and
decodes, which the backend (`tokenizers`) does; so the backend that transformers made of a model's files is kept, and
used as it is for as long as neither they nor the versions change.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from jaxpaged.private_folder import PrivateFolder
from jaxpaged.weights.files import ModelFiles
from jaxpaged.weights.loader import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

# Files of a model's folder that are larger are weights.
_MAX_FILE_BYTES = 64 << 20
_WEIGHTS = (".safetensors", ".bin", ".gguf")
# What StoredTokenizer does instead of transformers, by the names of what a class may do otherwise.
_REPLACED = ("encode", "_encode_plus", "decode", "_decode", "convert_ids_to_tokens", "get_vocab", "backend_tokenizer")


class StoredTokenizer:
    """A fast tokenizer of transformers that is loaded when more is asked of it than its backend can tell.

    Attributes:
        backend_tokenizer: as of transformers.
    """

    def __init__(self, backend: Tokenizer, load: Callable[[], PreTrainedTokenizerFast]) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend_tokenizer = backend
        self._load = load
        self._lock = threading.Lock()
        self._loaded: PreTrainedTokenizerFast | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        return [self.backend_tokenizer.id_to_token(int(i)) for i in ids]

    def get_vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocab

    @property
    def is_loaded(self) -> bool:
        """Whether transformers' own is there; what needs it takes long before."""
        return self._loaded is not None

    def load(self) -> PreTrainedTokenizerFast:
        """Transformers' own, loaded at the first call. Any thread may call it."""
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.load()(*args, **kwargs)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of protocols, such as copying, which ask objects that are not yet whole
            raise AttributeError(name)
        return getattr(self.load(), name)


def open_tokenizer(
    files: ModelFiles, folder: Path | None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerFast | StoredTokenizer:
    """The tokenizer of `files`, as `load_tokenizer` gives it or one that does the same.

    Args:
        folder: of stored backends; None: there is none.

    Raises:
        ModelLoadError: as `load_tokenizer`.
    """
    load = partial(load_tokenizer, files, trust_remote_code=trust_remote_code)
    if folder is None or trust_remote_code:  # the code of others may do anything
        return load()
    store, name = PrivateFolder(folder), f"{_key(files)}.json"
    content = store.read(name)
    if content is not None:
        try:
            return StoredTokenizer(Tokenizer.from_buffer(content), load)
        except Exception as error:  # tokenizers raises bare Exception
            logger.warning("%s is damaged (%s); the tokenizer is loaded anew", folder / name, error)
    tokenizer = load()
    if _is_plain(tokenizer):
        try:
            content = tokenizer.backend_tokenizer.to_str().encode()
        except Exception as error:  # again: a part of it is written in Python
            logger.info("the tokenizer cannot be stored for faster starts: %s", error)
        else:
            store.write(name, content)
    return tokenizer


def _is_plain(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether it leaves encoding and decoding to its backend."""
    from transformers import PreTrainedTokenizerFast

    return (
        all(getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in _REPLACED)
        and not tokenizer.clean_up_tokenization_spaces
        and not tokenizer.split_special_tokens
    )


def _key(files: ModelFiles) -> str:
    """Of all that decides what `load_tokenizer` makes of `files`."""
    digest = hashlib.sha256(repr([version(name) for name in ("tokenizers", "transformers")]).encode())
    if files.kind == "gguf":  # its tokenizer lies between its weights
        status = files.path.stat()
        digest.update(repr((str(files.path.resolve()), status.st_size, status.st_mtime_ns)).encode())
    paths = [*Path(__file__).parent.glob("*.py"), *(files.folder.iterdir() if files.kind != "gguf" else ())]
    for path in sorted(paths):
        if path.is_file() and path.suffix not in _WEIGHTS and path.stat().st_size <= _MAX_FILE_BYTES:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()
