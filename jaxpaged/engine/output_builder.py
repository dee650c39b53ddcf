"""Turns a request's new tokens into the `RequestOutput` that its caller asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxpaged.core.plan import StepResult
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
    reported: bool = False


class OutputBuilder:
    """Collects one request's tokens, text and log-probabilities.

    Attributes:
        request: whose output this is.
        metrics: its times.
    """

    def __init__(self, request: Request, tokenizer: Any | None) -> None:
        self.request = request
        self.metrics = RequestMetrics(request.arrival_time)
        self._tokenizer = tokenizer
        self._sequences = [
            _SequenceOutput(
                Detokenizer(tokenizer, request.params, request.prompt_token_ids) if tokenizer is not None else None
            )
            for _ in request.sequences
        ]

    def append(self, sequence: Sequence, result: StepResult, draw: int) -> str | None:
        """Takes draw `draw` of `result` for `sequence`; returns the stop string that it completes, or None."""
        out = self._sequences[sequence.index]
        token_id = int(result.token_ids[draw])
        out.token_ids.append(token_id)
        if self.request.params.logprobs is not None:
            self._append_logprobs(out, result, draw, self.request.params.logprobs)
        if out.detokenizer is None:
            return None
        ended_by_token = sequence.finish_reason is FinishReason.STOP
        # The token that ends a sequence is no part of its text.
        shown = [token_id] if not ended_by_token or self.request.params.include_stop_str_in_output else []
        return out.detokenizer.append(shown, sequence.is_finished)

    def build(self, error: str | None = None) -> RequestOutput | None:
        """What the caller is to be told now; None when there is nothing to tell."""
        request, params = self.request, self.request.params
        finished = request.is_finished
        if params.output_kind is OutputKind.FINAL_ONLY and not finished:
            return None
        outputs = [
            self._completion(sequence, out)
            for sequence, out in zip(request.sequences, self._sequences, strict=True)
            if not out.reported and self._has_news(sequence, out)
        ]
        if not outputs and not finished:
            return None
        self.metrics.num_preemptions = request.num_preemptions
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            metrics=self.metrics,
            num_cached_tokens=request.num_cached_tokens,
            error=error,
        )

    def _has_news(self, sequence: Sequence, out: _SequenceOutput) -> bool:
        if self.request.params.output_kind is OutputKind.DELTA:
            return bool(out.token_ids) or sequence.is_finished
        return True

    def _completion(self, sequence: Sequence, out: _SequenceOutput) -> CompletionOutput:
        params = self.request.params
        delta = ""
        if out.detokenizer is not None:
            if sequence.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                out.detokenizer.append([], True)
            delta = out.detokenizer.take()
        if params.output_kind is OutputKind.DELTA:
            text, token_ids, logprobs = delta, out.token_ids, out.logprobs
            out.token_ids, out.logprobs = [], []
            out.reported = sequence.is_finished
        else:
            out.text += delta
            text, token_ids, logprobs = out.text, list(out.token_ids), list(out.logprobs)
        wants_logprobs = params.logprobs is not None
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=out.cumulative_logprob if wants_logprobs else None,
            logprobs=logprobs if wants_logprobs else None,
            finish_reason=sequence.finish_reason.value if sequence.finish_reason is not None else None,
            stop_reason=sequence.stop_reason,
        )

    def _append_logprobs(self, out: _SequenceOutput, result: StepResult, draw: int, num_top: int) -> None:
        assert result.logprobs is not None and result.ranks is not None
        assert result.top_token_ids is not None and result.top_logprobs is not None
        drawn = float(result.logprobs[draw])
        out.cumulative_logprob += drawn
        token_id = int(result.token_ids[draw])
        entry = {token_id: Logprob(drawn, int(result.ranks[draw]), self._text(token_id))}
        top = zip(result.top_token_ids[draw, :num_top], result.top_logprobs[draw, :num_top], strict=True)
        for rank, (top_id, logprob) in enumerate(top, start=1):
            entry.setdefault(int(top_id), Logprob(float(logprob), rank, self._text(int(top_id))))
        out.logprobs.append(entry)

    def _text(self, token_id: int) -> str:
        return token_text(self._tokenizer, token_id) if self._tokenizer is not None else ""
