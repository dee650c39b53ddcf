"""Beam search with nothing shared and nothing cached: every continuation of every beam is made, sorted and cut."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

NextLogprobs = Callable[[list[int]], np.ndarray]


@dataclass(frozen=True)
class Found:
    """An output, its log-probability, and its score."""

    token_ids: list[int]
    logprob: float
    score: float


def beam_search(
    next_logprobs: NextLogprobs,
    *,
    width: int,
    max_tokens: int,
    stop_ids: Collection[int],
    length_penalty: float,
    early_stopping: bool | str,
) -> list[Found]:
    """The `width` best outputs as transformers defines them, best first.

    Args:
        next_logprobs: of an output so far, log-probabilities [V] of its next token.
    """
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    found: list[Found] = []
    for length in range(1, max_tokens + 1):
        everything = [
            (logprob + float(new), [*tokens, token])
            for logprob, tokens in beams
            for token, new in enumerate(next_logprobs(tokens))
        ]
        everything.sort(key=lambda pair: pair[0], reverse=True)
        for logprob, tokens in everything[:width]:
            if tokens[-1] in stop_ids or length == max_tokens:
                found.append(Found(tokens, logprob, logprob / length**length_penalty))
        found = sorted(found, key=lambda f: f.score, reverse=True)[:width]
        beams = [(logprob, tokens) for logprob, tokens in everything if tokens[-1] not in stop_ids][:width]
        if len(found) == width:
            if early_stopping is True:
                break
            hopeful = max_tokens if early_stopping == "never" and length_penalty > 0 else length
            if beams[0][0] / hopeful**length_penalty <= found[-1].score:
                break
    return found
