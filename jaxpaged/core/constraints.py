"""What a request changes in its logits before a token is drawn, or has reported of them besides."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from jaxpaged.core.plan import FloatArray, IntArray
    from jaxpaged.request import Request, Sequence

# Most changes of single logits that a draw can bring: the limits of logit_bias, of bad_words (each in two spellings),
# of stop_token_ids, and room for end-of-sequence tokens.
MAX_EDITS = 1024 + 2 * 128 + 128 + 128

NOT_ALLOWED = -np.inf


@dataclass(frozen=True, eq=False)
class Edits:
    """Additions to single logits of one draw; `NOT_ALLOWED` keeps a token from being drawn.

    Attributes:
        token_ids: [E] int32.
        values: [E] float32.
    """

    token_ids: IntArray
    values: FloatArray

    @classmethod
    def of(cls, biases: dict[int, float]) -> Edits:
        return cls(np.array(list(biases), np.int32), np.array(list(biases.values()), np.float32))

    def but_not(self, token_ids: Seq[int]) -> Edits:
        """These, with `token_ids` forbidden."""
        more = Edits.of(dict.fromkeys(token_ids, NOT_ALLOWED))
        return Edits(np.concatenate([self.token_ids, more.token_ids]), np.concatenate([self.values, more.values]))

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class Constraints:
    """Of all sequences of a request; penalties, which need its whole history, are not among them.

    Attributes:
        min_tokens: output tokens before which `early` holds in place of `always`.
        always: logit_bias and bad words of one token.
        early: `always`, and no stop token.
        phrases: bad words of several tokens, (all but the last, the last), by the last but one.
        allowed: [W] uint32, bit b of word w stands for token 32 * w + b; None = all tokens.
        logprob_token_ids: [L] int32, tokens to report at each position.
    """

    min_tokens: int
    always: Edits
    early: Edits
    phrases: dict[int, list[tuple[list[int], int]]]
    allowed: npt.NDArray[np.uint32] | None
    logprob_token_ids: IntArray

    @classmethod
    def of(cls, request: Request) -> Constraints | None:
        """None for a request that changes nothing, as most do."""
        params = request.params
        if not (
            params.min_tokens
            or params.logit_bias
            or request.bad_words
            or params.allowed_token_ids is not None
            or params.logprob_token_ids
        ):
            return None
        size = request.vocab_size
        always = Edits.of({t: bias for t, bias in (params.logit_bias or {}).items() if t < size})
        always = always.but_not([w[0] for w in dict.fromkeys(request.bad_words) if len(w) == 1])
        stops = set(params.stop_token_ids) | request.eos_token_ids if params.min_tokens else set()
        phrases: dict[int, list[tuple[list[int], int]]] = {}
        for word in dict.fromkeys(request.bad_words):
            if len(word) > 1:
                phrases.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        allowed = params.allowed_token_ids
        return cls(
            params.min_tokens,
            always,
            always.but_not(sorted(t for t in stops if t < size)),
            phrases,
            None if allowed is None else bitmask([t for t in allowed if t < size]),
            np.array(params.logprob_token_ids, np.int32),
        )

    def edits(self, sequence: Sequence, num_output: int) -> Edits:
        """The changes of single logits for the next token of `sequence`.

        Args:
            num_output: output tokens before it; without `phrases` the newest may still be on the device.
        """
        output = sequence.output_token_ids
        edits = self.early if num_output < self.min_tokens else self.always
        if self.phrases and output:
            ends = [last for head, last in self.phrases.get(output[-1], ()) if output[-len(head) :] == head]
            if ends:
                edits = edits.but_not(ends)
        return edits


def bitmask(token_ids: Seq[int]) -> npt.NDArray[np.uint32]:
    """[W] uint32 with the bits of `token_ids` set, as long as the largest needs."""
    ids = np.array(token_ids, np.uint32)
    words = np.zeros(int(ids.max(initial=0)) // 32 + 1, np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32))
    return words
