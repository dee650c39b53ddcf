"""An engine that runs in the thread of its caller, for as long as that waits for outputs."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from jaxpaged.errors import EngineDeadError, InvalidRequestError
from jaxpaged.interrupts import interrupts_deferred
from jaxpaged.outputs import RequestOutput
from jaxpaged.pooling import PoolingParams
from jaxpaged.progress import GenerationProgress
from jaxpaged.request import SamplingParams

if TYPE_CHECKING:
    from jaxpaged.engine.engine import Engine

Prompt = str | list[int]


class BlockingEngine:
    """Runs requests to their ends, or streams them; a stream may be open while others run.

    Args:
        engine: nothing else may step it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count()
        # Where the outputs of each unfinished request go.
        self._inboxes: dict[str, deque[RequestOutput]] = {}

    def run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | PoolingParams],
        *,
        show_progress: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The finished output of each prompt, in order.

        Args:
            params: one for each prompt, with outputs at the end only.
            show_progress: draw a progress bar where there are several prompts.
            priority: for each prompt, lower first.

        Raises:
            InvalidRequestError: a prompt cannot be served; then nothing has run.
        """
        if priority is not None and len(priority) != len(prompts):
            raise InvalidRequestError(f"{len(priority)} priorities for {len(prompts)} prompts", param="priority")
        inbox: deque[RequestOutput] = deque()
        order: dict[str, int] = {}
        results: list[RequestOutput | None] = [None] * len(prompts)
        try:
            for i, prompt in enumerate(prompts):
                request_id = self._new_id()
                order[request_id] = i
                self._add(request_id, prompt, params[i], inbox, priority[i] if priority is not None else 0)
            with GenerationProgress(len(prompts), shown=show_progress and len(prompts) > 1) as progress:
                while order:
                    self._step()
                    while inbox:
                        output = inbox.popleft()
                        results[order.pop(output.request_id)] = output
                    if progress.shown:
                        progress.update(len(prompts) - len(order), self._num_tokens(params[0]))
        finally:  # a bad prompt among good ones, or Ctrl-C
            for request_id in order:
                self._drop(request_id)
        return cast(list[RequestOutput], results)

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[RequestOutput]:
        """The outputs of one prompt as they come; closing the iterator aborts the request."""
        inbox: deque[RequestOutput] = deque()
        request_id = self._new_id()
        try:
            self._add(request_id, prompt, params, inbox)
            while True:
                while not inbox:
                    if request_id not in self._inboxes:
                        raise EngineDeadError("the LLM was shut down while this stream was open")
                    self._step()
                output = inbox.popleft()
                yield output
                if output.finished:
                    return
        finally:
            self._drop(request_id)

    def shutdown(self) -> None:
        """Aborts what is running and gives back what the engine holds."""
        with interrupts_deferred():
            self._engine.shutdown()
            self._inboxes.clear()

    def _num_tokens(self, params: SamplingParams | PoolingParams) -> int:
        """Tokens so far, of the kind that requests like this one consist of."""
        stats = self._engine.stats()
        return stats.prompt_tokens_total if isinstance(params, PoolingParams) else stats.generation_tokens_total

    def _new_id(self) -> str:
        return f"llm-{next(self._ids)}"

    def _add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        inbox: deque[RequestOutput],
        priority: int = 0,
    ) -> None:
        with interrupts_deferred():
            self._engine.add_request(request_id, prompt, params, priority=priority)
            self._inboxes[request_id] = inbox

    def _drop(self, request_id: str) -> None:
        with interrupts_deferred():
            self._inboxes.pop(request_id, None)
            self._engine.abort_request(request_id)

    def _step(self) -> None:
        with interrupts_deferred():
            for output in self._engine.step():
                inbox = self._inboxes.pop(output.request_id) if output.finished else self._inboxes[output.request_id]
                inbox.append(output)
