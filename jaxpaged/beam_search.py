"""Beam search for users of the Python interface; names and meanings are vLLM's where the thing is the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpaged.core.beam import BeamSettings, EarlyStopping
from jaxpaged.errors import InvalidRequestError
from jaxpaged.request import SamplingParams

if TYPE_CHECKING:
    from jaxpaged.outputs import RequestOutput


@dataclass(frozen=True)
class BeamSearchParams:
    """How to search for the most probable outputs of a prompt.

    Lengths, scores and the end of the search are those of transformers' `generate(num_beams=beam_width)`.

    Attributes:
        beam_width: beams, and outputs. With W beams and E end-of-sequence tokens it needs W + E <= max_logprobs.
        max_tokens: most output tokens.
        ignore_eos: go on after an end-of-sequence token.
        temperature: accepted, without effect: beams are ranked by the log-probabilities of the model.
        length_penalty: an output of L tokens has the score logprob / L ** length_penalty; between -20 and 20.
        include_stop_str_in_output: keep the end-of-sequence token of an output.
        early_stopping: True ends the search as soon as there are beam_width outputs; False when the best beam, if it
            ended now, would be no better than the worst of them; "never" when it could not become better either.

    Raises:
        InvalidRequestError: a value out of its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        if not isinstance(self.beam_width, int) or isinstance(self.beam_width, bool) or self.beam_width < 1:
            raise InvalidRequestError(
                f"beam_width is {self.beam_width!r}, but must be a positive integer", param="beam_width"
            )
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for."""
        SamplingParams(temperature=self.temperature)  # checks it
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            temperature=0.0,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            beam_search=BeamSettings(self.length_penalty, self.early_stopping),
        )


@dataclass
class BeamSearchSequence:
    """One output of a search.

    Attributes:
        tokens: prompt and output; an end-of-sequence token only with include_stop_str_in_output.
        text: of `tokens`, special tokens included; None without a tokenizer.
        cum_logprob: sum over the output tokens, an end-of-sequence token included.
        score: cum_logprob / L ** length_penalty, for the L tokens that it is summed over.
        finish_reason: "stop" or "length"; "error" where the request failed.
        stop_reason: the token that ended it, where that is another one than end-of-sequence.
    """

    tokens: list[int]
    text: str | None
    cum_logprob: float
    score: float
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass
class BeamSearchOutput:
    """The outputs for one prompt, best first."""

    sequences: list[BeamSearchSequence]

    @classmethod
    def of(cls, output: RequestOutput, params: BeamSearchParams, tokenizer: Any | None) -> BeamSearchOutput:
        sequences = []
        for completion in output.outputs:
            ids, logprob = completion.token_ids, completion.cumulative_logprob or 0.0
            cut = int(completion.finish_reason == "stop" and not params.include_stop_str_in_output)
            tokens = output.prompt_token_ids + ids[: len(ids) - cut]
            sequences.append(
                BeamSearchSequence(
                    tokens=tokens,
                    text=None if tokenizer is None else tokenizer.decode(tokens),
                    cum_logprob=logprob,
                    score=logprob / max(len(ids), 1) ** params.length_penalty,
                    finish_reason=completion.finish_reason,
                    stop_reason=completion.stop_reason,
                )
            )
        return cls(sequences)
