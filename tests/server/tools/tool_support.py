"""Answers that are fed to the parsers whole and in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from jaxpaged.server.responses import Delta
from jaxpaged.server.tools.registry import TOOL_PARSERS
from jaxpaged.server.tools.reply import Reply
from jaxpaged.server.tools.thinking import Start, ThinkParser

TOOLS: dict[str, dict[str, Any]] = {
    "f": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "sure": {"type": "boolean"},
        "extra": {"type": "object"},
        "tags": {"type": "array"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "g": {},
}
Answer = tuple[str, str, list[tuple[str, str]]]  # content, reasoning, calls with their arguments


def new_reply(parser: str | None, thinking: Start | None = None, **options: bool) -> Reply:
    calls = TOOL_PARSERS[parser].make(TOOLS) if parser else None
    return Reply(ThinkParser(thinking) if thinking else None, calls, **options)


def read(pieces: Sequence[str], make: Callable[[], Reply]) -> Answer:
    """The answer that a client puts together from the deltas of `pieces`, whose form is checked."""
    reply, content, reasoning, calls = make(), "", "", []
    for i, piece in enumerate(pieces):
        delta = reply.take(piece, finished=i == len(pieces) - 1)
        content += delta.content or ""
        reasoning += delta.reasoning or ""
        _collect(delta, calls)
    assert reply.num_calls == len(calls)
    return content, reasoning, [(name, arguments) for name, arguments in calls]


def _collect(delta: Delta, calls: list[list[str]]) -> None:
    indices = [call.index for call in delta.tool_calls or ()]
    assert len(set(indices)) == len(indices)
    for call in delta.tool_calls or ():
        if call.index == len(calls):  # the first entry of a call tells all but the arguments
            assert call.id and call.id.startswith("call_") and call.type == "function" and call.function.name
            calls.append([call.function.name, call.function.arguments])
        else:
            assert call.index == len(calls) - 1 and call.function.arguments
            assert call.model_dump(exclude_unset=True).keys() == {"index", "function"}
            assert call.function.model_dump(exclude_unset=True).keys() == {"arguments"}
            calls[-1][1] += call.function.arguments


def in_two(text: str) -> Iterable[list[str]]:
    return ([text[:i], text[i:]] for i in range(len(text) + 1))


def cut(text: str, places: Iterable[int]) -> list[str]:
    ends = [*sorted({p % (len(text) + 1) for p in places}), len(text)]
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


PLACES = st.lists(st.integers(0, 10_000), max_size=12)
