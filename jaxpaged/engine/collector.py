"""From results of steps to outputs of requests."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpaged.core.plan import NONE_ALLOWED, StepPlan, StepResult
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine.embedding_builder import EmbeddingBuilder
from jaxpaged.engine.output_builder import OutputBuilder
from jaxpaged.outputs import RequestOutput
from jaxpaged.request import FinishReason, Request, Sequence
from jaxpaged.structured_outputs import GRAMMAR_ERROR

logger = logging.getLogger(__name__)

# Of the cause of a failed step, as its requests are told.
MAX_ERROR_CHARS = 500


@dataclass(frozen=True)
class Accepted:
    """A step whose results the scheduler has taken in.

    Attributes:
        draws: indices into `plan.sampled`, as from `Scheduler.update`.
        failed: outputs of the requests that its results have ended with an error.
    """

    plan: StepPlan
    result: StepResult
    draws: list[int]
    failed: list[RequestOutput]


class Collector:
    """Holds the output builder of each unfinished request, and feeds them.

    Attributes:
        finished: ended sequences by finish reason.
        prompt_tokens, cached_tokens, generated_tokens: totals.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Any | None) -> None:
        self.finished: Counter[str] = Counter()
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._builders: dict[str, OutputBuilder] = {}
        self._last_scheduled: object = None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._builders

    @property
    def request_ids(self) -> list[str]:
        """Of all unfinished requests."""
        return list(self._builders)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            InvalidRequestError, QueueFullError: as `Scheduler.add`.
        """
        # Before it is queued: it must not be there without one.
        if request.pooling is not None:
            builder: OutputBuilder = EmbeddingBuilder(request, request.pooling)
        else:
            builder = OutputBuilder(request, self._tokenizer)
        self._scheduler.add(request)
        self._builders[request.request_id] = builder

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request; its last output, None if it is not there."""
        builder = self._builders.get(request_id)
        if builder is None:
            return None
        self._scheduler.abort(request_id)
        return self._build([builder], time.monotonic())[0]

    def note_scheduled(self, plan: StepPlan) -> None:
        """Takes the time at which requests are scheduled first."""
        if plan.scheduled is self._last_scheduled:  # the very same sequences as in the last step
            return
        self._last_scheduled = plan.scheduled
        now = time.monotonic()
        for sequence in plan.scheduled:
            metrics = self._builders[sequence.request.request_id].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now

    def accept(self, plan: StepPlan, result: StepResult) -> Accepted:
        """Has the scheduler take in what came of a step; all that it needs to plan further, and no more."""
        failed = self._end_without_token(plan, result) + self._end_without_embedding(plan, result)
        draws = self._scheduler.update(plan, result)
        failed += self._end_without_grammar(plan, draws)
        return Accepted(plan, result, draws, failed)

    def collect(self, step: Accepted) -> list[RequestOutput]:
        """Appends the accepted draws to their requests, ends those with a stop string, and builds the outputs."""
        plan, result, now = step.plan, step.result, time.monotonic()
        touched = dict.fromkeys(self._collect_prompts(plan, result))
        for draw in step.draws:
            sequence = plan.sampled[draw]
            builder = self._builder(sequence.request)
            if builder is None or builder.broken is not None:
                continue
            touched[builder] = None
            self.generated_tokens += 1
            self._note_tokens(builder, now)
            try:
                stop = builder.append(sequence, result, draw)
            except Exception as error:
                self._break_off(builder, error)
                continue
            if stop is not None:
                self._scheduler.finish(sequence, FinishReason.STOP, stop)
        embedded = self._collect_embeddings(plan, result, now)
        touched |= dict.fromkeys([*self._finished_beams(plan, now), *embedded])
        return step.failed + self._build(touched, now)

    def fail(self, plan: StepPlan, error: Exception) -> list[RequestOutput]:
        """Ends the requests of a step that raised."""
        logger.error(
            "a step of %d tokens failed; its %d sequences end with an error",
            plan.num_tokens,
            len(plan.scheduled),
            exc_info=error,
        )
        failed = self._scheduler.fail(plan)
        builders = [self._builders[request.request_id] for request in failed]
        return self._build(builders, time.monotonic(), error=_reason(error))

    def end_lost(self) -> list[RequestOutput]:
        """After a step that broke off: ends the requests that cannot be told all their tokens, or have not been told
        that they have ended."""
        lost = [b.request for b in self._builders.values() if b.request.is_finished or b.lacks_tokens]
        return self._end_with_error(lost, "the engine failed while it took in a step; its log has the cause")

    def rest(self) -> None:
        """Lets go of the sequences of the last plan."""
        self._last_scheduled = None

    def _break_off(self, builder: OutputBuilder, error: Exception) -> None:
        """Ends a request whose own output cannot be made."""
        request = builder.request
        logger.error(
            "the output of request %s cannot be made; it ends with an error", request.request_id, exc_info=error
        )
        builder.break_off(_reason(error))
        for sequence in request.sequences:
            self._scheduler.finish(sequence, FinishReason.ERROR)

    def _builder(self, request: Request) -> OutputBuilder | None:
        """None for a request that has ended since its step was planned; its id may be another's by now."""
        builder = self._builders.get(request.request_id)
        return builder if builder is not None and builder.request is request else None

    def _note_tokens(self, builder: OutputBuilder, now: float) -> None:
        if builder.metrics.first_token_time is None:
            builder.metrics.first_token_time = now
            self.prompt_tokens += len(builder.request.prompt_token_ids)
            self.cached_tokens += builder.request.num_cached_tokens
        builder.metrics.last_token_time = now

    def _finished_beams(self, plan: StepPlan, now: float) -> list[OutputBuilder]:
        """Of the beam searches in `plan`, those that are over: before that nothing is known of their outputs."""
        if plan.sample.num_logprobs < 0:
            return []
        searches = dict.fromkeys(s.request for s in plan.sampled if s.request.beams is not None)
        over = []
        for request in searches:
            builder = self._builder(request)
            if builder is None:
                continue
            self._note_tokens(builder, now)
            if request.is_finished:
                self.generated_tokens += sum(len(s.output_token_ids) for s in request.sequences)
                over.append(builder)
        return over

    def _collect_embeddings(self, plan: StepPlan, result: StepResult, now: float) -> list[OutputBuilder]:
        """Adds the sums of hidden states to their requests; returns the builders of those that are over."""
        complete: list[OutputBuilder] = []
        for i, span in enumerate(plan.pool_spans):
            assert result.pooled is not None, "the plan asks for hidden states, the result has none"
            builder = self._builder(span.request)
            if builder is None:
                continue
            assert isinstance(builder, EmbeddingBuilder)
            try:
                builder.add(span, result.pooled[i])
            except Exception as error:
                self._break_off(builder, error)
            if span.is_last or builder.broken is not None:
                self._note_tokens(builder, now)
                complete.append(builder)
        return complete

    def _collect_prompts(self, plan: StepPlan, result: StepResult) -> list[OutputBuilder]:
        """Returns the builders that have failed at it."""
        start, broken = 0, []
        for span in plan.prompt_spans:
            assert result.prompt is not None, "the plan asks for log-probabilities of prompts, the result has none"
            builder = self._builder(span.request)
            if builder is not None:
                try:
                    builder.append_prompt(span.target_ids.tolist(), result.prompt, start)
                except Exception as error:
                    self._break_off(builder, error)
                    broken.append(builder)
            start += len(span.target_ids)
        return broken

    def _end_without_token(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Ends the requests whose logits are NaN, as the model overflowed or its weights are broken, or all -inf."""
        if result.token_ids.min(initial=0) >= 0:
            return []
        # A sequence that has ended since went on from a token that ended it.
        bad = [d for d in np.flatnonzero(result.token_ids < 0).tolist() if not plan.sampled[d].is_finished]
        message = "the model's logits are NaN: it overflowed, or its weights are broken; try dtype float32"
        if (result.token_ids[bad] == NONE_ALLOWED).any():
            message = _why_none(next(plan.sampled[d] for d in bad if result.token_ids[d] == NONE_ALLOWED))
        return self._end_with_error([plan.sampled[draw].request for draw in bad], message)

    def _end_without_grammar(self, plan: StepPlan, accepted: list[int]) -> list[RequestOutput]:
        """Ends the requests whose grammars could not be followed further, as they are too complex at this point."""
        if plan.adjustments is None or not plan.adjustments.masks:
            return []
        failed = [
            (sequence.request, matcher.error)
            for draw in accepted
            if (matcher := (sequence := plan.sampled[draw]).matcher) is not None and matcher.error is not None
        ]
        if not failed:
            return []
        return self._end_with_error([request for request, _ in failed], f"{GRAMMAR_ERROR}{failed[0][1]}")

    def _end_without_embedding(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Ends the requests whose hidden states are not finite."""
        if result.pooled is None:
            return []
        bad = np.flatnonzero(~np.isfinite(result.pooled).all(axis=1)).tolist()
        requests = [plan.pool_spans[i].request for i in bad]
        message = "the model's hidden states are NaN: it overflowed, or its weights are broken; try dtype float32"
        return self._end_with_error(requests, message)

    def _end_with_error(self, requests: Iterable[Request], message: str) -> list[RequestOutput]:
        builders: dict[str, OutputBuilder] = {}
        for request in requests:
            builder = self._builder(request)
            if builder is None:
                continue
            builders[request.request_id] = builder
            for sequence in request.sequences:
                self._scheduler.finish(sequence, FinishReason.ERROR)
        if builders:
            logger.error("%d requests end with an error: %s", len(builders), message)
        return self._build(builders.values(), time.monotonic(), error=message)

    def _build(self, builders: Iterable[OutputBuilder], now: float, error: str | None = None) -> list[RequestOutput]:
        outputs = []
        for builder in builders:
            request = builder.request
            try:
                output = builder.build(error or builder.broken)
            except Exception as failure:
                self._break_off(builder, failure)
                output = builder.build(error or builder.broken)
            if request.is_finished:
                builder.metrics.finished_time = now
                self.finished.update(s.finish_reason.value for s in request.sequences if s.finish_reason)
                del self._builders[request.request_id]
            if output is not None:
                outputs.append(output)
        return outputs


def _reason(error: Exception) -> str:
    """As its request is told."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR_CHARS]  # XLA writes pages; the log has all


def _why_none(sequence: Sequence) -> str:
    """Why there was no token to draw for `sequence`."""
    if sequence.matcher is None:
        return "no token may be drawn: its own logits or what the request allows leave none"
    reason = sequence.matcher.error or "of what may follow, the request's other parameters leave nothing"
    return f"{GRAMMAR_ERROR}{reason}"
