"""Holds an engine and puts loads on it; runs in the Python of the engine's own environment.

    python driver.py ENGINE '{"model": ..., ...}'

ENGINE is the module beside this file whose `start(options)` makes the engine. Standard input has one load a line,
standard output one line when the engine is ready and one for each load; what libraries print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any, Protocol

# An engine that ends a request early would otherwise be waited for without end.
STALL_S = 300.0


class Engine(Protocol):
    """What the modules beside this one give."""

    def add(self, index: int, prompt: list[int], output_len: int) -> None:
        """Queues a request, greedy, of exactly `output_len` tokens."""

    def step(self) -> list[tuple[int, float]]:
        """Does some work. Returns (request, reading of `time.perf_counter`) for each token that came of it."""


def run_load(engine: Engine, load: dict[str, Any]) -> dict[str, Any]:
    """Adds requests as they arrive, at most `max_concurrency` at once, until all have their tokens.

    After `time_limit_s` no further request begins; those have the start None.
    """
    requests = load["requests"]
    limit = load["max_concurrency"] or len(requests)
    order = sorted(range(len(requests)), key=lambda i: requests[i][2])
    starts: list[float | None] = [None] * len(requests)
    times: list[list[float]] = [[] for _ in requests]
    running = most = 0
    begin = newest = time.perf_counter()
    while order or running:
        now = time.perf_counter() - begin
        if now > load["time_limit_s"]:
            order.clear()
        while order and running < limit and requests[order[0]][2] <= now:
            index = order.pop(0)
            starts[index] = time.perf_counter() - begin
            engine.add(index, requests[index][0], requests[index][1])
            running += 1
        most = max(most, running)
        if not running:
            time.sleep(max(0.0, requests[order[0]][2] - now) if order else 0.0)
            newest = time.perf_counter()
            continue
        for index, when in engine.step():
            times[index].append(when - begin)
            running -= len(times[index]) == requests[index][1]
            newest = time.perf_counter()
        if time.perf_counter() - newest > STALL_S:
            raise TimeoutError(f"{running} requests are running, but no token came for {STALL_S:.0f} s")
    duration = time.perf_counter() - begin
    return {"results": list(zip(starts, times, strict=True)), "duration": duration, "max_concurrent": most}


def main() -> None:
    # Libraries print to standard output; the protocol keeps it for itself.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine: Engine = importlib.import_module(sys.argv[1]).start(json.loads(sys.argv[2]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_load(engine, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
