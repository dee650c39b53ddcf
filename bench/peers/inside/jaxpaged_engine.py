"""jaxpaged's engine, without a server."""

from __future__ import annotations

import itertools
import time
from typing import Any

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.request import OutputKind, SamplingParams


class JaxpagedEngine:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count()
        self._indices: dict[str, int] = {}

    def add(self, index: int, prompt: list[int], output_len: int) -> None:
        request_id = str(next(self._ids))
        self._indices[request_id] = index
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, output_kind=OutputKind.DELTA)
        self._engine.add_request(request_id, prompt, params)

    def step(self) -> list[tuple[int, float]]:
        outputs = self._engine.step()
        now = time.perf_counter()
        tokens = []
        for output in outputs:
            if output.error:
                raise RuntimeError(output.error)
            tokens += [(self._indices[output.request_id], now)] * sum(len(o.token_ids) for o in output.outputs)
        return tokens


def start(options: dict[str, Any]) -> JaxpagedEngine:
    return JaxpagedEngine(Engine.from_pretrained(options.pop("model"), EngineConfig.from_options(options)))
