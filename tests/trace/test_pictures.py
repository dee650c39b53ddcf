"""docs/paged-attention.md: its pictures are there, and its numbers are those of the traces they are drawn from."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from jaxpaged.trace import Replay

DOCS = Path(__file__).parents[2] / "docs"
TEXT = " ".join((DOCS / "paged-attention.md").read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def scenarios() -> Iterator[ModuleType]:
    sys.path.insert(0, str(DOCS / "pictures"))
    try:
        import scenarios

        yield scenarios
    finally:
        sys.path.pop(0)


def replay(trace: object, step: int | None = None) -> Replay:
    state = Replay(trace.header)  # type: ignore[attr-defined]
    for record in trace.records:  # type: ignore[attr-defined]
        state.apply(record)
        if record.step == step:
            break
    return state


def test_its_pictures_are_there_and_small() -> None:
    names = re.findall(r"\]\((pictures/[^)]*\.png)\)", TEXT)
    assert len(names) == 5
    for name in names:
        content = (DOCS / name).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) < 200_000


def test_forty_requests(scenarios: ModuleType) -> None:
    # Reserved, by brute force: in each step every slot that is free takes the next request.
    waiting = scenarios.forty_lengths()
    held, never, step, running = 0, 0, 0, [0] * 8
    slots: list[list[int]] = [[] for _ in range(8)]  # [tokens in the pool, steps left, tokens at the end]
    while waiting or any(slots):
        for i, slot in enumerate(slots):
            if not slot and waiting:
                prompt, output = waiting.pop(0)
                slots[i] = [prompt, output, prompt + output]
        if step == 40:
            held, running = sum(s[0] for s in slots), [s[2] for s in slots]
            never = 8 * 1024 - sum(running)
        for i, slot in enumerate(slots):
            if slot:
                slots[i] = [slot[0] + 1, slot[1] - 1, slot[2]] if slot[1] > 1 else []
        step += 1
    assert (len(running), step, round(100 * held / 8192), round(100 * never / 8192)) == (8, 1122, 20, 69)
    trace = scenarios.forty_paged()
    now = replay(trace, 40)
    assert sum(status == "running" for status in now.status.values()) == 38
    assert round(100 * sum(now.kv_lens.values()) / (16 * len(now.references)), 1) == 95.8
    assert len(trace.records) - 1 == 516
    for said in ("fill the pool, and 32 wait", "one slot in five", "69 % never will", "holds 38 requests", "95.8 %"):
        assert said in TEXT
    assert "after 516 steps instead of 1,122" in TEXT


def test_one_prefix(scenarios: ModuleType) -> None:
    now = replay(scenarios.prefix_sharing(), 14)
    assert (sum(now.references.values()), len(now.references)) == (68, 26)
    assert "68 entries, in 26 blocks" in TEXT


@pytest.mark.parametrize(
    ("name", "used", "unshared", "said"),
    [
        ("parallel_sampling", 309, 495, "309 block-steps instead of 495, 38 % less, at the price of three copied"),
        ("beam_search", 287, 655, "287 block-steps instead of 655: 56 % less"),
    ],
)
def test_siblings(scenarios: ModuleType, name: str, used: int, unshared: int, said: str) -> None:
    trace = getattr(scenarios, name)()
    state = Replay(trace.header)
    found = [0, 0]
    for record in trace.records:
        state.apply(record)
        found[0] += len(state.references)
        found[1] += sum(state.references.values())
    assert found == [used, unshared] and said in TEXT


def test_twelve_blocks(scenarios: ModuleType) -> None:
    records = scenarios.preemption().records
    assert [(r.step, p.request) for r in records for p in r.preempted] == [(5, 3), (19, 2)]
    assert [(r.step, a.request, a.tokens) for r in records for a in r.admitted if r.step] == [(24, 2, 79), (35, 3, 25)]
    assert "At step 5 " in TEXT and "At step 19 " in TEXT and "as one prompt of 79 tokens" in TEXT
    assert "returns at step 35" in TEXT
