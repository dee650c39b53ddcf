"""Turns the sums of a prompt's hidden states into its embedding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jaxpaged.core.plan import FloatArray, PoolSpan
from jaxpaged.engine.output_builder import OutputBuilder
from jaxpaged.outputs import RequestOutput
from jaxpaged.pooling import PoolingParams
from jaxpaged.request import FinishReason, Request


class EmbeddingBuilder(OutputBuilder):
    """Collects the embedding of one request."""

    def __init__(self, request: Request, pooling: PoolingParams) -> None:
        super().__init__(request, tokenizer=None)
        self._pooling = pooling
        self._sum: npt.NDArray[np.float64] = np.zeros(0)
        self._count = 0

    def add(self, span: PoolSpan, total: FloatArray) -> None:
        """Takes the sum [E] of a span's hidden states."""
        if span.is_first:  # also when a prompt is computed once more after its request gave way
            self._sum, self._count = np.zeros(len(total)), 0
        self._sum += total  # the steps' sums are float32, but that of a long prompt has many of them
        self._count += span.count

    def build(self, error: str | None = None) -> RequestOutput | None:
        request = self.request
        if not request.is_finished:
            return None
        self.metrics.num_preemptions = request.num_preemptions
        is_complete = request.sequences[0].finish_reason is FinishReason.STOP
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[],
            finished=True,
            metrics=self.metrics,
            num_cached_tokens=request.num_cached_tokens,
            error=error,
            embedding=self._embedding() if is_complete else None,
        )

    def _embedding(self) -> FloatArray:
        mean = self._sum / self._count
        if self._pooling.normalize:
            mean /= np.linalg.norm(mean) or 1.0  # a hidden state of zeros has no direction
        return mean.astype(np.float32)
