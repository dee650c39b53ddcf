"""Turns a request's new tokens into the `RequestOutput` that its caller asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxpaged.core.beam import BeamSearch
from jaxpaged.core.plan import FloatArray, IntArray, PositionLogprobs, StepResult
from jaxpaged.engine.detokenizer import Detokenizer, token_text
from jaxpaged.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from jaxpaged.request import FinishReason, OutputKind, Request, Sequence


@dataclass
class _SequenceOutput:
    """What one sequence has produced: all of it, or under DELTA what its caller has not been told yet."""

    detokenizer: Detokenizer | None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_tokens: int = 0
    reported: bool = False
    is_hypothesis: bool = False


class OutputBuilder:
    """Collects one request's tokens, text and log-probabilities.

    Attributes:
        request: whose output this is.
        metrics: its times.
        broken: why it takes no more, once it has failed.
    """

    def __init__(self, request: Request, tokenizer: Any | None) -> None:
        self.request = request
        self.metrics = RequestMetrics(request.arrival_time)
        self.broken: str | None = None
        self._tokenizer = tokenizer
        self._wants_logprobs = request.params.wants_logprobs
        self._is_delta = request.params.output_kind is OutputKind.DELTA
        self._prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if request.params.prompt_logprobs is None else [None]
        )
        self._sequences = [
            _SequenceOutput(
                Detokenizer(tokenizer, request.params, request.prompt_token_ids) if tokenizer is not None else None
            )
            for _ in request.sequences
        ]

    @property
    def lacks_tokens(self) -> bool:
        """Whether its sequences have tokens that it was not given; those of beams it is given in the end only."""
        pairs = zip(self.request.sequences, self._sequences, strict=True)
        return self.request.beams is None and any(len(s.output_token_ids) != o.num_tokens for s, o in pairs)

    def break_off(self, reason: str) -> None:
        """It has failed: it tells the text up to its last output and the tokens, and takes no more."""
        self.broken = reason
        for out in self._sequences:
            out.detokenizer = None
            if self._wants_logprobs:
                del out.token_ids[len(out.logprobs) :]

    def append(self, sequence: Sequence, result: StepResult, draw: int) -> str | None:
        """Takes draw `draw` of `result` for `sequence`; returns the stop string that it completes, or None."""
        out, token_id = self._sequences[sequence.index], int(result.token_ids[draw])
        out.token_ids.append(token_id)
        out.num_tokens += 1
        if self._wants_logprobs:
            self._append_logprobs(out, token_id, result, draw)
        if out.detokenizer is None:
            return None
        ended_by_token = sequence.finish_reason is FinishReason.STOP and self._ended_by(sequence, token_id)
        # The token that ends a sequence is no part of its text.
        shown = [token_id] if not ended_by_token or self.request.params.include_stop_str_in_output else []
        return out.detokenizer.append(shown, sequence.is_finished)

    def _ended_by(self, sequence: Sequence, token_id: int) -> bool:
        """Whether it is the last token that ended a sequence; what completes a grammar is text."""
        request = self.request
        is_stop = token_id in request.eos_token_ids or token_id in request.params.stop_token_ids
        return sequence.matcher is None or is_stop

    def append_prompt(self, token_ids: list[int], logprobs: PositionLogprobs, start: int) -> None:
        """Takes the log-probabilities of the next tokens of the prompt, which begin at index `start` of `logprobs`."""
        num_top = self.request.params.prompt_logprobs
        assert self._prompt_logprobs is not None and num_top is not None
        for i, token_id in enumerate(token_ids, start):
            entry = {token_id: Logprob(float(logprobs.logprobs[i]), int(logprobs.ranks[i]), self._text(token_id))}
            self._add_top(entry, logprobs.top_token_ids[i, :num_top], logprobs.top_logprobs[i, :num_top])
            self._prompt_logprobs.append(entry)

    def build(self, error: str | None = None) -> RequestOutput | None:
        """What the caller is to be told now; None when there is nothing to tell."""
        request, params = self.request, self.request.params
        finished = request.is_finished
        if finished and request.beams is not None:
            self._take_beams(request.beams)
        if params.output_kind is OutputKind.FINAL_ONLY and not finished:
            return None
        outputs = [
            self._completion(sequence, out)
            for sequence, out in zip(request.sequences, self._sequences, strict=True)
            if not out.reported and (out.token_ids or sequence.is_finished or not self._is_delta)
        ]
        if not outputs and not finished:
            return None
        self.metrics.num_preemptions = request.num_preemptions
        prompt_logprobs = self._prompt_logprobs
        if self._is_delta:
            self._prompt_logprobs = None
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            metrics=self.metrics,
            num_cached_tokens=request.num_cached_tokens,
            error=error,
            prompt_logprobs=prompt_logprobs,
        )

    def _completion(self, sequence: Sequence, out: _SequenceOutput) -> CompletionOutput:
        delta = ""
        if out.detokenizer is not None:
            if sequence.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                out.detokenizer.append([], True)
            delta = out.detokenizer.take()
        if self._is_delta:
            text, token_ids, logprobs = delta, out.token_ids, out.logprobs
            out.token_ids, out.logprobs = [], []
            out.reported = sequence.is_finished
        else:
            out.text += delta
            text, token_ids, logprobs = out.text, list(out.token_ids), list(out.logprobs)
        wants_logprobs, reason = self._wants_logprobs, sequence.finish_reason
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=out.cumulative_logprob if wants_logprobs or out.is_hypothesis else None,
            logprobs=logprobs if wants_logprobs else None,
            finish_reason=None if reason is None else reason.value,
            stop_reason=sequence.stop_reason,
        )

    def _take_beams(self, beams: BeamSearch) -> None:
        """Takes what a beam search found, or what its beams had come to when it was aborted."""
        for sequence, out in zip(self.request.sequences, self._sequences, strict=True):
            out.token_ids = list(sequence.output_token_ids)
            if out.detokenizer is not None:
                ended_by_token = sequence.finish_reason is FinishReason.STOP
                is_cut = ended_by_token and not self.request.params.include_stop_str_in_output
                out.detokenizer.append(out.token_ids[:-1] if is_cut else out.token_ids, True)
        if beams.is_done:
            for out, hypothesis in zip(self._sequences, beams.hypotheses, strict=False):
                out.is_hypothesis, out.cumulative_logprob = True, hypothesis.logprob

    def _append_logprobs(self, out: _SequenceOutput, token_id: int, result: StepResult, draw: int) -> None:
        assert result.logprobs is not None and result.ranks is not None
        assert result.top_token_ids is not None and result.top_logprobs is not None
        params = self.request.params
        drawn = float(result.logprobs[draw])
        out.cumulative_logprob += drawn
        entry = {token_id: Logprob(drawn, int(result.ranks[draw]), self._text(token_id))}
        num_top = params.logprobs or 0
        self._add_top(entry, result.top_token_ids[draw, :num_top], result.top_logprobs[draw, :num_top])
        if params.logprob_token_ids:
            assert result.id_logprobs is not None and result.id_ranks is not None
            asked = zip(params.logprob_token_ids, result.id_logprobs[draw], result.id_ranks[draw], strict=False)
            for asked_id, logprob, rank in asked:
                entry.setdefault(asked_id, Logprob(float(logprob), int(rank), self._text(asked_id)))
        out.logprobs.append(entry)

    def _add_top(self, entry: TokenLogprobs, token_ids: IntArray, logprobs: FloatArray) -> None:
        for rank, (top_id, logprob) in enumerate(zip(token_ids.tolist(), logprobs.tolist(), strict=True), start=1):
            entry.setdefault(top_id, Logprob(logprob, rank, self._text(top_id)))

    def _text(self, token_id: int) -> str:
        return token_text(self._tokenizer, token_id) if self._tokenizer is not None else ""
