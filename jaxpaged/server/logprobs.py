"""Log-probabilities in the shapes of the two completion APIs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from jaxpaged.engine.detokenizer import Detokenizer
from jaxpaged.outputs import Logprob, TokenLogprobs
from jaxpaged.request import SamplingParams
from jaxpaged.server.responses import ChatLogprob, ChatLogprobs, CompletionLogprobs, PromptLogprob, TopLogprob

# JSON has no -inf.
LOWEST_LOGPROB = -9999.0


def chat_logprobs(
    steps: list[TokenLogprobs] | None, num_top: int, *, asked_ids: Sequence[int] = (), as_token_ids: bool = False
) -> ChatLogprobs | None:
    """One entry a token, each with the `num_top` most probable tokens (-1 = all that are there), best first, then those
    of `asked_ids`.
    """
    if steps is None:
        return None
    content = []
    for step in steps:
        entries = {t: _top_logprob(t, p, as_token_ids) for t, p in step.items()}
        best = sorted(step, key=lambda token_id: step[token_id].rank)[: None if num_top == -1 else num_top]
        drawn = entries[next(iter(step))]
        content.append(
            ChatLogprob(
                token=drawn.token,
                logprob=drawn.logprob,
                bytes=drawn.bytes,
                top_logprobs=[entries[token_id] for token_id in dict.fromkeys([*best, *asked_ids])],
            )
        )
    return ChatLogprobs(content=content)


class TextOffsets:
    """Where the tokens of a text begin in it, in characters; one that ends a character begins where that does.

    Args:
        tokenizer: None = there is no text.
        params: how the text is made.
        context: token ids that the text follows, and that are no part of it.
    """

    def __init__(self, tokenizer: Any | None, params: SamplingParams, context: Sequence[int] = ()) -> None:
        self._length = 0
        params = replace(params, stop=())
        self._text = None if tokenizer is None else Detokenizer(tokenizer, params, list(context))

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """Offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._length)
            if self._text is not None:
                self._text.append([token_id], False)
                self._length += len(self._text.take())
        return offsets


def completion_logprobs(
    steps: Sequence[TokenLogprobs | None] | None, offsets: list[int], *, first: str = "", as_token_ids: bool = False
) -> CompletionLogprobs | None:
    """Parallel lists over tokens.

    `top_logprobs` has the drawn token beside the most probable ones, keyed by text: of tokens with the same text, the
    first (the drawn one, else the more probable one) stays.

    Args:
        offsets: of the tokens, in the text.
        first: name of a token that has no log-probability, the first of a prompt.
    """
    if steps is None:
        return None
    tops: list[dict[str, float] | None] = []
    for step in steps:
        top: dict[str, float] = {}
        for token_id, entry in (step or {}).items():
            top.setdefault(token_name(token_id, entry.decoded_token, as_token_ids), _finite(entry.logprob))
        tops.append(top or None)
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[next(iter(top.values())) if top else None for top in tops],
        tokens=[next(iter(top)) if top else first for top in tops],
        top_logprobs=tops,
    )


def prompt_logprobs(steps: list[TokenLogprobs | None] | None) -> list[dict[int, PromptLogprob] | None] | None:
    """By token id: the prompt's own token first, then the most probable ones; None for the first position."""
    if steps is None:
        return None
    return [
        None
        if step is None
        else {
            token_id: PromptLogprob(logprob=_finite(p.logprob), rank=p.rank, decoded_token=p.decoded_token)
            for token_id, p in step.items()
        }
        for step in steps
    ]


def _top_logprob(token_id: int, entry: Logprob, as_token_ids: bool) -> TopLogprob:
    token = token_name(token_id, entry.decoded_token, as_token_ids)
    return TopLogprob(token=token, logprob=_finite(entry.logprob), bytes=list(token.encode("utf-8", errors="replace")))


def token_name(token_id: int, text: str, as_token_ids: bool) -> str:
    return f"token_id:{token_id}" if as_token_ids else text


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
