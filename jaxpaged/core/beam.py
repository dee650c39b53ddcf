"""Beam search: which continuations of a request's beams go on, which are complete, and when the search is over.

Lengths, scores and the end of the search are those of transformers' `generate(num_beams=...)`. A beam is known by its
index, which is that of the sequence that holds its KV; a beam that goes on keeps its index wherever it can, so that as
little as possible has to be forked.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from jaxpaged.errors import InvalidRequestError

Scores = npt.NDArray[np.float64]
EarlyStopping = bool | Literal["never"]

# Any length to this power is still a float.
MAX_LENGTH_PENALTY = 20.0


@dataclass(frozen=True)
class BeamSettings:
    """What makes a request a beam search of `SamplingParams.n` beams.

    Attributes:
        length_penalty: a hypothesis of L output tokens has the score logprob / L ** length_penalty.
        early_stopping: True ends the search with the n-th hypothesis; False when the best beam, at its present length,
            no longer beats the worst of n hypotheses; "never" when it could not at any length either.

    Raises:
        InvalidRequestError: a value out of its range.
    """

    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        penalty, stopping = self.length_penalty, self.early_stopping
        is_number = isinstance(penalty, (int, float)) and not isinstance(penalty, bool)
        if not is_number or not abs(penalty) <= MAX_LENGTH_PENALTY:
            raise InvalidRequestError(
                f"length_penalty is {penalty!r}, but must be between {-MAX_LENGTH_PENALTY} and {MAX_LENGTH_PENALTY}",
                param="length_penalty",
            )
        if not isinstance(stopping, bool) and stopping != "never":
            raise InvalidRequestError(
                f'early_stopping is {stopping!r}, but must be True, False or "never"', param="early_stopping"
            )


@dataclass(frozen=True)
class Hypothesis:
    """A complete output.

    Attributes:
        token_ids: output tokens, a stop token included.
        logprob: sum over them.
        score: by which hypotheses are compared.
    """

    token_ids: list[int]
    logprob: float
    score: float


@dataclass(frozen=True)
class Survivor:
    """A continuation that goes on.

    Attributes:
        parent: the beam that it continues.
        token_id: its newest token.
        logprob: sum over its output tokens.
    """

    parent: int
    token_id: int
    logprob: float


@dataclass(frozen=True)
class Ranking:
    """What becomes of the continuations of W beams, each list best first.

    Attributes:
        survivors: the W best that no stop token ends; fewer only where there are no more.
        ended: those among the W best of all that a stop token ends.
        best: the W best of all, which are complete if this was the last token there is room for.
    """

    survivors: list[Survivor]
    ended: list[Survivor]
    best: list[Survivor]


def num_candidates(width: int, stop_ids: Collection[int]) -> int:
    """Most probable next tokens of each of `width` beams among which the best continuations of all are certain to be:
    no beam has more survivors than there are beams, nor more that end than there are stop tokens.
    """
    return width + len(stop_ids)


def rank(
    logprobs: Scores,
    top_token_ids: npt.NDArray[np.int32],
    top_logprobs: npt.NDArray[np.float32],
    stop_ids: Collection[int],
    vocab_size: int,
) -> Ranking:
    """Ranks the continuations of W beams. Equals are ranked by beam, then by their order in `top_token_ids`.

    Args:
        logprobs: [W] float64, sum over each beam's tokens so far; -inf for a beam that is not to go on.
        top_token_ids: [W, K] int32, most probable next tokens of each, best first; K >= `num_candidates`.
        top_logprobs: [W, K] float32.
        vocab_size: ids from here on are no tokens.
    """
    width, num_top = top_logprobs.shape
    scores = np.where(top_token_ids < vocab_size, logprobs[:, None] + top_logprobs, -np.inf).reshape(-1)
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] > -np.inf]
    candidates = [Survivor(i // num_top, int(top_token_ids.reshape(-1)[i]), float(scores[i])) for i in order.tolist()]
    best = candidates[:width]
    survivors = [c for c in candidates if c.token_id not in stop_ids][:width]
    return Ranking(survivors, [c for c in best if c.token_id in stop_ids], best)


def place(parents: Seq[int], num_beams: int) -> list[int]:
    """New index of each survivor: its parent's for the first of a parent, one that nobody keeps for others."""
    free = iter([i for i in range(num_beams) if i not in set(parents)])
    kept: set[int] = set()
    places = []
    for parent in parents:
        places.append(next(free) if parent in kept else parent)
        kept.add(parent)
    return places


@dataclass(eq=False)
class BeamSearch:
    """The search of one request: scores of its beams, and the best hypotheses so far.

    Attributes:
        logprobs: [W] float64, sum over each beam's output tokens; before the first token only beam 0 counts.
        hypotheses: at most W, best first.
        is_done: the search is over, and `hypotheses` is its result.
    """

    settings: BeamSettings
    width: int
    logprobs: Scores = field(init=False)
    hypotheses: list[Hypothesis] = field(default_factory=list)
    is_done: bool = False

    def __post_init__(self) -> None:
        self.logprobs = np.full(self.width, -np.inf)
        self.logprobs[0] = 0

    def advance(
        self,
        outputs: Seq[list[int]],
        top_token_ids: npt.NDArray[np.int32],
        top_logprobs: npt.NDArray[np.float32],
        *,
        stop_ids: Collection[int],
        vocab_size: int,
        max_tokens: int,
    ) -> dict[int, Survivor]:
        """Takes in what the model makes of the beams.

        Args:
            outputs: output tokens of each beam, all equally many.
            top_token_ids, top_logprobs, stop_ids, vocab_size: as in `rank`.
            max_tokens: most output tokens.

        Returns:
            New index -> who goes on there, for all W; empty when the search is over.
        """
        ranking = rank(self.logprobs, top_token_ids, top_logprobs, stop_ids, vocab_size)
        survivors = ranking.survivors
        length = len(outputs[0]) + 1
        is_last = length >= max_tokens or not survivors
        for ended in ranking.best if is_last else ranking.ended:
            self._complete([*outputs[ended.parent], ended.token_id], ended.logprob)
        self.is_done = is_last or not self._may_improve(survivors[0].logprob, length, max_tokens)
        if self.is_done:
            return {}
        # Where the model leaves too few, the best one goes on in the other places too, but does not count there.
        survivors += [replace(survivors[0], logprob=-np.inf)] * (self.width - len(survivors))
        places = place([s.parent for s in survivors], self.width)
        self.logprobs[places] = [s.logprob for s in survivors]
        return dict(zip(places, survivors, strict=True))

    def score(self, logprob: float, length: int) -> float:
        """Of a hypothesis of `length` output tokens."""
        return float(logprob / length**self.settings.length_penalty)

    def _complete(self, token_ids: list[int], logprob: float) -> None:
        new = Hypothesis(token_ids, logprob, self.score(logprob, len(token_ids)))
        # A stable merge: of equals the older goes first.
        self.hypotheses = list(heapq.merge(self.hypotheses, [new], key=lambda h: -h.score))[: self.width]

    def _may_improve(self, best_logprob: float, length: int, max_tokens: int) -> bool:
        """Whether the best beam, of `length` tokens, may still lead to one of the W best hypotheses."""
        if len(self.hypotheses) < self.width:
            return True
        if self.settings.early_stopping is True:
            return False
        # With a penalty on short outputs a score grows with the length, if the log-probability stays what it is.
        at_the_end = self.settings.early_stopping == "never" and self.settings.length_penalty > 0
        return self.score(best_logprob, max_tokens if at_the_end else length) > self.hypotheses[-1].score
