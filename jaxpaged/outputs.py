"""What the engine gives back. Field names are vLLM's where the thing is the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token under the model's raw distribution (before temperature and filters).

    Attributes:
        rank: 1 for the most probable token of the vocabulary.
        decoded_token: the token's own text; may hold U+FFFD for a part of a character.
    """

    logprob: float
    rank: int
    decoded_token: str


# At each position: the drawn (or given) token first, then the most probable ones in order, then those asked for by id.
TokenLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of a request: new text and tokens, or all of them, by the request's `output_kind`.

    Attributes:
        text: never ends inside a character; text that may become a stop string is held back until it is known.
        cumulative_logprob: sum over all tokens so far; None unless logprobs were asked for.
        finish_reason: None while running, else "stop", "length", "abort" or "error".
        stop_reason: the stop string or stop token id that ended it; None for end-of-sequence or length.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds of the monotonic clock; None where it has not happened yet.

    Attributes:
        first_scheduled_time: start of the first step that computed a token of it.
        last_token_time: when the newest token came.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    def copy(self) -> RequestMetrics:
        """As `copy.copy` makes one, in a tenth of the time."""
        return RequestMetrics(
            self.arrival_time,
            self.first_scheduled_time,
            self.first_token_time,
            self.last_token_time,
            self.finished_time,
            self.num_preemptions,
        )


@dataclass(slots=True)
class RequestOutput:
    """News of one request.

    Attributes:
        outputs: the sequences that have news (all of them when finished under FINAL_ONLY), by index.
        finished: every sequence has ended; nothing more will come.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        error: what went wrong, where finish_reason is "error".
        prompt_logprobs: of each token of the prompt, None for the first; None unless they were asked for. Under DELTA
            only the first output has them.
        embedding: [E] float32, of the prompt, where that was asked for; there are no `outputs` then.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True)
class EmbeddingOutput:
    """
    Attributes:
        embedding: as many numbers as the model's hidden states have.
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt.

    Attributes:
        outputs: None where the request failed.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        error: what went wrong, else None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput | None
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    error: str | None = None
    finished: bool = True

    @classmethod
    def of(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        embedding = None if output.embedding is None else EmbeddingOutput(output.embedding.tolist())
        return cls(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            embedding,
            output.metrics,
            output.num_cached_tokens,
            output.error,
        )
