"""Token ids to text, a few tokens at a time, and the stop strings found in that text.

The text of a sequence is what its tokens add to the text of its prompt: for byte-level tokenizers (GPT-2, Llama 3,
Qwen) exactly `decode(output)`; for sentencepiece ones (Llama 2, Mistral) with the space that `decode` drops
from the front of a text kept, since the output is not the front.
"""

from __future__ import annotations

import codecs
import json
from functools import lru_cache
from typing import Any

from tokenizers import decoders

from jaxpaged.request import SamplingParams
from jaxpaged.tokenizer import backend_tokenizer

REPLACEMENT = "\ufffd"

# The missing part of a UTF-8 character is at most 3 bytes long, so it began at most 3 tokens ago; one more is context.
_WINDOW = 4


class Detokenizer:
    """Text of one sequence; work for a token does not grow with the length of the output.

    Bytes that are not UTF-8 become U+FFFD once it is certain that no later token completes them. (In tokenizers with
    byte tokens, such as "<0xE2>", the sound characters beside them are kept; `decode` turns the whole run to U+FFFD.)

    Args:
        tokenizer: a fast tokenizer of transformers, or a `tokenizers.Tokenizer`.
        params: stop, include_stop_str_in_output, min_tokens and skip_special_tokens are used.
        prompt_token_ids: what the output follows.

    Attributes:
        stop: the stop string that was found, or None. Of several the first to be complete wins, and of those that end
            together the longest, so that the result does not depend on how the text is split into tokens.
    """

    __slots__ = ("_include_stop", "_num_untested", "_pieces", "_ready", "_searcher", "stop")

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt_token_ids: list[int]) -> None:
        self.stop: str | None = None
        self._include_stop = params.include_stop_str_in_output
        self._pieces = _Pieces(backend_tokenizer(tokenizer), params.skip_special_tokens, prompt_token_ids)
        self._searcher = _StopSearcher(tuple(params.stop)) if params.stop else None
        self._ready: list[str] = []
        self._num_untested = params.min_tokens

    def append(self, token_ids: list[int], finished: bool) -> str | None:
        """Feed the next tokens.

        Args:
            token_ids: a token that ended the output as a stop token is left out by the caller where its text is not
                wanted.
            finished: no token will follow: nothing is held back any longer.

        Returns:
            The stop string that was found, or None. Text after it is dropped, and later calls change nothing.
        """
        for token_id in token_ids:
            if self.stop is not None:
                break
            is_tested, self._num_untested = self._num_untested == 0, max(self._num_untested - 1, 0)
            self._add(self._pieces.feed(token_id), is_tested)
        if finished and self.stop is None:
            self._add(self._pieces.flush(), self._num_untested == 0)
            if self._searcher is not None and self.stop is None:
                self._ready.append(self._searcher.flush())
        return self.stop

    def take(self) -> str:
        """Text that is certain and was not taken before."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _add(self, text: str, is_tested: bool) -> None:
        if not text:
            return
        if self._searcher is None:
            self._ready.append(text)
            return
        certain, self.stop = self._searcher.feed(text, is_tested)
        self._ready.append(certain)
        if self.stop is not None and self._include_stop:
            self._ready.append(self.stop)


class _Pieces:
    """Text that each further token adds, in whole characters.

    Decoding a short window of the newest tokens and cutting off what it showed before gives what the newest
    adds: how a token decodes depends on whether it is the first and, in byte-level tokenizers, on the token before.
    Most tokens have a text of their own wherever they stand; that is remembered for each.
    """

    __slots__ = ("_byte_ids", "_bytes", "_known", "_shown", "_skip_special", "_text", "_tokenizer", "_window")

    def __init__(self, tokenizer: Any, skip_special: bool, prompt_token_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._byte_ids = _byte_token_ids(tokenizer)
        self._known = _known_texts(tokenizer, skip_special)
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._text: str | None = ""  # of the window; None: not looked up
        self._shown = 0  # characters of it that were returned already
        for token_id in reversed(prompt_token_ids):
            text = self._decode([token_id])
            if text and not text.endswith(REPLACEMENT):
                self._set_window([token_id], held=0)
                break

    def feed(self, token_id: int) -> str:
        if self._known is None or not self._window or (self._text is not None and self._shown < len(self._text)):
            return self._feed(token_id)
        text = self._known[token_id]
        if text is None:
            return self._feed(token_id)
        if not text:
            return ""
        self._window, self._text = [token_id], None
        return self._bytes.decode(b"", final=True) + text if self._byte_ids else text

    def _feed(self, token_id: int) -> str:
        byte = self._byte_ids.get(token_id)
        if byte is not None:
            if not self._window:  # what comes next is not the front of the text
                self._set_window([token_id], held=0)
            return self._bytes.decode(bytes([byte]))
        if self._text is None:
            self._set_window(self._window, held=0)
        window = [*self._window, token_id]
        text = self._decode(window)
        if text == self._text and not self._decode([token_id]):
            return ""  # a skipped special token, or an id outside the tokenizer's vocabulary
        # The next token may complete the character, unless bytes have tokens of their own.
        held = int(text.endswith(REPLACEMENT) and not self._byte_ids)
        new = text[self._shown : len(text) - held]
        self._set_window(window[-_WINDOW:] if held else [token_id], held)
        return self._bytes.decode(b"", final=True) + new

    def flush(self) -> str:
        """What was held back for a completion that did not come."""
        text = self._text or ""  # nothing is held of one that was not looked up
        held, self._shown = text[self._shown :], len(text)
        return self._bytes.decode(b"", final=True) + held

    def _set_window(self, token_ids: list[int], held: int) -> None:
        self._window = token_ids
        self._text = self._decode(token_ids)
        self._shown = len(self._text) - held

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)
        return text


class _StopSearcher:
    """Finds stop strings in a text that comes in pieces.

    It holds back the longest end of the text that a stop string starts with: less than the longest stop string.
    """

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, text: str, is_tested: bool = True) -> tuple[str, str | None]:
        """(text that is certain now and lies before any stop string, the stop string found).

        Args:
            is_tested: whether a stop string that ends in this text counts.
        """
        num_held = len(self._held)
        text = self._held + text
        # One that ends in what was held is one that did not count.
        starts = {stop: text.find(stop, max(num_held - len(stop) + 1, 0)) for stop in self._stops}
        found = [(start + len(stop), start, stop) for stop, start in starts.items() if start >= 0]
        if found and is_tested:
            _, start, stop = min(found)
            self._held = ""
            return text[:start], stop
        split = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held = text[split:]
        return text[:split], None

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` starts with, short of all of `stop`."""
    for start in range(max(0, len(text) - len(stop) + 1), len(text)):
        if stop.startswith(text[start:]):
            return len(text) - start
    return 0


def token_text(tokenizer: Any, token_id: int) -> str:
    """Text of a token amid others: with its leading space, special tokens shown, U+FFFD for a part of a character."""
    return _token_text(backend_tokenizer(tokenizer), token_id)


# Log-probabilities name the same likely tokens again and again: up to 20 for each position of each request.
@lru_cache(maxsize=65_536)
def _token_text(backend: Any, token_id: int) -> str:
    text: str = backend.decode([token_id], skip_special_tokens=False)
    if REPLACEMENT in text:
        return text
    # The second of two is not at the front, where sentencepiece tokenizers drop a space.
    twice: str = backend.decode([token_id, token_id], skip_special_tokens=False)
    return twice[len(text) :]


@lru_cache(maxsize=8)
def _byte_token_ids(tokenizer: Any) -> dict[int, int]:
    """Byte of each byte token ("<0x00>" to "<0xFF>"), by token id; empty where the tokenizer has none."""
    ids = {tokenizer.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    if None in ids:
        return {}
    euro = [token_id for value in "€".encode() for token_id, byte in ids.items() if byte == value]
    return ids if tokenizer.decode(euro) == "€" else {}


class _KnownTexts(dict[int, str | None]):
    """Text of each token behind others; None of a token whose text depends on them. Filled when it is asked for."""

    def __init__(self, tokenizer: Any, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special

    def __missing__(self, token_id: int) -> str | None:
        once: str = self._tokenizer.decode([token_id], skip_special_tokens=self._skip_special)
        twice: str = self._tokenizer.decode([token_id, token_id], skip_special_tokens=self._skip_special)
        # A part of a character, or a byte token, which may be one.
        depends = REPLACEMENT in twice or token_id in _byte_token_ids(self._tokenizer)
        # The second of two is not at the front, where sentencepiece tokenizers drop a space.
        text = self[token_id] = None if depends else twice[len(once) :]
        return text


@lru_cache(maxsize=16)
def _known_texts(tokenizer: Any, skip_special: bool) -> _KnownTexts | None:
    """None where the text of any token may depend on those beside it."""
    return _KnownTexts(tokenizer, skip_special) if _decodes_one_by_one(tokenizer) else None


def _decodes_one_by_one(tokenizer: Any) -> bool:
    """Whether a token's text depends on others only in parts of characters, and at the front of the text by a space."""
    decoder = getattr(tokenizer, "decoder", None)
    if isinstance(decoder, decoders.ByteLevel):
        return True
    if not isinstance(decoder, decoders.Sequence):
        return False
    steps = json.loads(decoder.__getstate__())["decoders"]
    kinds = [step["type"] for step in steps]
    if kinds[-1:] == ["Strip"]:
        if (steps[-1]["content"], steps[-1]["start"], steps[-1]["stop"]) != (" ", 1, 0):
            return False
        kinds.pop()
    return kinds == ["Replace", "ByteFallback", "Fuse"]
