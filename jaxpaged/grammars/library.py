"""Grammars and masks of llguidance, for one tokenizer."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jaxpaged.core.grammar import Grammar
from jaxpaged.errors import InvalidRequestError
from jaxpaged.grammars.lark import to_lark
from jaxpaged.grammars.matcher import LLGrammar, ParallelFiller, reason_of
from jaxpaged.structured_outputs import StructuredOutputs, grammar_error
from jaxpaged.tokenizer import backend_tokenizer

# Mostly below llguidance's own limits, to keep what a token costs in the milliseconds. But a row of the parser is as
# long as there are choices: with the default of its length many of them would fail on the way.
LIMITS = LLParserLimits(
    max_items_in_row=10_500,
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
# Of all tokens that fit one of these a single test tells whether they may come next; the others are tried one by one.
# Those of words make the masks of a regex such as [^,]{1,80} some 20 times as fast. Narrow ones come first.
_WORDS = (r"[a-zA-Z]{1,30}", r"[ a-zA-Z]{1,30}")
# Of a line in what this package has written.
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")


class Library:
    """
    Args:
        tokenizer, eos_token_ids, vocab_size: as of `GrammarCompiler`.

    Attributes:
        fill_masks: as `MaskFiller`, for matchers of its grammars.

    Raises:
        InvalidRequestError: llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Collection[int], vocab_size: int) -> None:
        backend = copy.copy(backend_tokenizer(tokenizer))
        backend.no_padding()
        backend.no_truncation()
        num_tokens = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        eos: list[int] | None = sorted(token for token in eos_token_ids if token < num_tokens) or None
        try:
            blank, *others = LLTokenizer.general_slices()
            self._tokenizer = LLTokenizer(backend.to_str(), eos_token=eos, slices=[blank, *_WORDS, *others])
        except ValueError as error:
            raise InvalidRequestError(
                f"structured outputs cannot be had with this model's tokenizer: {' '.join(str(error).split())[:200]}",
                param="structured_outputs",
            ) from error
        # Those that llguidance takes for special: also others that look like <this>.
        added = backend.get_added_tokens_decoder()
        self._special_tokens = frozenset(t.content for i, t in added.items() if self._tokenizer.is_special_token(i))
        self.fill_masks = ParallelFiller(self._tokenizer.vocab_size, -(-vocab_size // 32))

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """
        Raises:
            InvalidRequestError: it is no grammar, too large a one, or one that no text satisfies.
        """
        lark = to_lark(wanted, self._special_tokens)
        try:
            matcher = LLMatcher(self._tokenizer, lark, log_level=0, limits=LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()  # what can take long is now, and copies have it
        except BaseException as error:  # a panic inside of the library is no Exception
            raise grammar_error(f"llguidance failed: {type(error).__name__}: {error}") from error
        if matcher.is_error():
            reason = reason_of(matcher.get_error())
            raise grammar_error(reason if wanted.kind == "grammar" else _PLACE.sub("", reason))
        if matcher.is_stopped() and not matcher.is_accepting():
            raise grammar_error("there is no text that satisfies it")
        return LLGrammar(matcher)
