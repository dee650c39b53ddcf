"""Fewer, larger pieces of a streamed answer."""

from __future__ import annotations

from dataclasses import replace

from jaxpaged.outputs import CompletionOutput, RequestOutput


class Intervals:
    """Holds new parts of sequences back until there are enough tokens; the first and the last part go at once.

    Args:
        num_tokens: of each part, at least.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._held: dict[tuple[str, int], CompletionOutput] = {}
        self._begun: set[tuple[str, int]] = set()

    def take(self, output: RequestOutput) -> RequestOutput | None:
        """What is to be sent now of `output` and of what was held; None = nothing."""
        if self._num_tokens == 1:
            return output
        ready = []
        for new in output.outputs:
            key = output.request_id, new.index
            held = self._held.pop(key, None)
            part = new if held is None else _joined(held, new)
            if part.finished or key not in self._begun or len(part.token_ids) >= self._num_tokens:
                self._begun.add(key)
                ready.append(part)
            else:
                self._held[key] = part
        return replace(output, outputs=ready) if ready or output.finished else None


def _joined(held: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    logprobs = None if new.logprobs is None else [*(held.logprobs or []), *new.logprobs]
    return replace(new, text=held.text + new.text, token_ids=held.token_ids + new.token_ids, logprobs=logprobs)
