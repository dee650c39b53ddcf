"""Matchers of llguidance."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

import numpy as np
from llguidance import LLExecutor, LLMatcher

from jaxpaged.core.grammar import Masks, Matcher

_DETAILS = re.compile(r"\s*\n\s*(?:<|\d+ \|)")


class LLGrammar:
    """A compiled grammar.

    Args:
        start: at its start, without error.
    """

    def __init__(self, start: LLMatcher) -> None:
        self._start = start

    def new_matcher(self) -> LLSequenceMatcher:
        return LLSequenceMatcher(self._start.deep_copy())


class LLSequenceMatcher:
    """Where one sequence is in its grammar."""

    __slots__ = ("error", "is_finished", "matcher")

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.error: str | None = None
        self.is_finished = False

    def accept(self, token_id: int) -> None:
        matcher = self.matcher
        if not matcher.consume_token(token_id):
            self.error = reason_of(matcher.get_error()) or f"token {token_id} does not go on with the grammar"
        self.is_finished = matcher.is_stopped()

    def check(self, mask: Masks) -> None:
        """Clears a mask that could not be made: it would allow an end of the text, which may be none."""
        if self.matcher.is_error():
            self.error = reason_of(self.matcher.get_error())
            mask[:] = 0


class ParallelFiller:
    """Fills masks, on all cores.

    Args:
        vocab_size: of llguidance's tokenizer.
        num_words: W of the masks.
    """

    def __init__(self, vocab_size: int, num_words: int) -> None:
        self._own_words = -(-vocab_size // 32)
        self._num_words = num_words
        self._executor = LLExecutor()

    def __call__(self, matchers: Sequence[Matcher], /) -> Masks:
        masks = np.zeros((len(matchers), self._own_words), np.uint32)
        rows = [(cast(LLSequenceMatcher, matcher).matcher, i) for i, matcher in enumerate(matchers)]
        if len(rows) == 1:
            rows[0][0].unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        else:
            self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, self._own_words * 4, len(rows))
        for wrapper, mask in zip(matchers, masks, strict=True):
            cast(LLSequenceMatcher, wrapper).check(mask)
        return masks[:, : self._num_words]


def reason_of(text: str) -> str:
    """The reason in an error of llguidance, which may go on with an excerpt of the grammar or the parser's state."""
    reason = _DETAILS.split(text, maxsplit=1)[0].strip()
    return "there is no text that satisfies it" if reason.startswith("NoExtension") else reason
