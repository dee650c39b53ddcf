"""Log-probabilities in the shapes of the two completion APIs."""

from __future__ import annotations

from jaxpaged.outputs import Logprob, TokenLogprobs
from jaxpaged.server.responses import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob

# JSON has no -inf.
LOWEST_LOGPROB = -9999.0


def chat_logprobs(
    steps: list[TokenLogprobs] | None, num_top: int, *, as_token_ids: bool = False
) -> ChatLogprobs | None:
    """One entry a token, each with the `num_top` most probable tokens, best first."""
    if steps is None:
        return None
    content = []
    for step in steps:
        entries = {t: _top_logprob(t, p, as_token_ids) for t, p in step.items()}
        best = sorted(step, key=lambda token_id: step[token_id].rank)[:num_top]
        drawn = entries[next(iter(step))]
        content.append(
            ChatLogprob(
                token=drawn.token,
                logprob=drawn.logprob,
                bytes=drawn.bytes,
                top_logprobs=[entries[token_id] for token_id in best],
            )
        )
    return ChatLogprobs(content=content)


def completion_logprobs(
    steps: list[TokenLogprobs] | None, text_offset: int, *, as_token_ids: bool = False
) -> tuple[CompletionLogprobs | None, int]:
    """Parallel lists over tokens, and the text offset of the token that follows.

    `top_logprobs` has the drawn token beside the most probable ones, keyed by text: of tokens with the same text, the
    first (the drawn one, else the more probable one) stays.

    Args:
        text_offset: characters of the tokens before.
    """
    if steps is None:
        return None, text_offset
    offsets: list[int] = []
    tops: list[dict[str, float]] = []
    for step in steps:
        top: dict[str, float] = {}
        for token_id, entry in step.items():
            top.setdefault(_name(token_id, entry, as_token_ids), _finite(entry.logprob))
        tops.append(top)
        offsets.append(text_offset)
        text_offset += len(next(iter(top)))
    logprobs = CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[next(iter(top.values())) for top in tops],
        tokens=[next(iter(top)) for top in tops],
        top_logprobs=tops,
    )
    return logprobs, text_offset


def _top_logprob(token_id: int, entry: Logprob, as_token_ids: bool) -> TopLogprob:
    token = _name(token_id, entry, as_token_ids)
    return TopLogprob(token=token, logprob=_finite(entry.logprob), bytes=list(token.encode("utf-8", errors="replace")))


def _name(token_id: int, entry: Logprob, as_token_ids: bool) -> str:
    return f"token_id:{token_id}" if as_token_ids else entry.decoded_token


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
