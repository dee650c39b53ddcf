"""Compiles grammars in threads, and keeps the last ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from jaxpaged.core.grammar import Grammar, Masks, Matcher
from jaxpaged.errors import InvalidRequestError
from jaxpaged.structured_outputs import MAX_CHARS, StructuredOutputs

if TYPE_CHECKING:
    from jaxpaged.grammars.library import Library

NUM_THREADS = 2
MAX_CACHED = 128
# llguidance recurses along chains of rules: this is enough for the longest that MAX_CHARS allows (address space only).
STACK_BYTES = 4096 * MAX_CHARS

_stack_size_lock = threading.Lock()


def _new_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="jaxpaged-grammar")


class GrammarCompiler:
    """Grammars for one tokenizer. Any thread may call it.

    Args:
        tokenizer: a fast tokenizer of transformers.
        eos_token_ids: tokens that end a complete text; if empty, the one that llguidance finds.
        vocab_size: ids that may be drawn.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Collection[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._library: Library | None = None  # guarded by _library_lock
        self._library_lock = threading.Lock()
        self._pool = _new_pool()  # guarded by _lock
        self._lock = threading.Lock()
        self._cache: OrderedDict[StructuredOutputs, Future[Grammar]] = OrderedDict()  # guarded by _lock

    def compile(self, wanted: StructuredOutputs) -> Future[Grammar]:
        """The grammar, of which what `wanted` asks for is compiled at most once while it is kept.

        The future raises InvalidRequestError ("Grammar error: ...") for what is no grammar, or too large a one.
        """
        with self._lock:
            future = self._cache.get(wanted)
            if future is not None:
                self._cache.move_to_end(wanted)
                return future
            future = self._cache[wanted] = self._submit(wanted)
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        future.add_done_callback(lambda done: self._drop_failed(wanted, done))
        return future

    def fill_masks(self, matchers: Sequence[Matcher], /) -> Masks:
        """As `MaskFiller`, for matchers of this compiler's grammars."""
        return self._loaded().fill_masks(matchers)

    def close(self) -> None:
        """Gives up what is not compiled yet, and its threads; new ones start when needed."""
        with self._lock:
            old, self._pool = self._pool, _new_pool()
        old.shutdown(wait=False, cancel_futures=True)

    def _submit(self, wanted: StructuredOutputs) -> Future[Grammar]:
        with _stack_size_lock:  # a thread gets the size that is set when it starts
            before = threading.stack_size(STACK_BYTES)
            try:
                return self._pool.submit(self._compile, wanted)
            finally:
                threading.stack_size(before)

    def _drop_failed(self, wanted: StructuredOutputs, future: Future[Grammar]) -> None:
        if future.cancelled() or future.exception() is not None:
            with self._lock:
                if self._cache.get(wanted) is future:
                    del self._cache[wanted]

    def _compile(self, wanted: StructuredOutputs) -> Grammar:
        return self._loaded().compile(wanted)

    def _loaded(self) -> Library:
        """Loaded when first needed: it takes up to a second."""
        with self._library_lock:
            if self._library is None:
                try:
                    from jaxpaged.grammars.library import Library
                except ImportError as error:
                    raise InvalidRequestError(
                        f"structured outputs need the package llguidance ({error}); pip install llguidance",
                        param="structured_outputs",
                    ) from error
                self._library = Library(self._tokenizer, self._eos_token_ids, self._vocab_size)
            return self._library
