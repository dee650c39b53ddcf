"""A trace of the engine itself, which works no differently while it is recorded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from flax import nnx
from support import EOS

from jaxpaged.config import EngineConfig
from jaxpaged.engine.engine import Engine
from jaxpaged.outputs import RequestOutput
from jaxpaged.request import SamplingParams
from jaxpaged.trace import Record, Replay, TraceFile, open_trace, recording
from jaxpaged.weights import GenerationConfig

PREFIX = list(b"the same beginning of all")


@pytest.fixture(scope="module")
def engine(tiny_model: nnx.Module, tiny_tokenizer: object) -> Engine:
    config = EngineConfig(
        max_model_len=64,
        block_size=4,
        num_blocks=24,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        compilation_cache="",
        warmup=False,
        debug_checks=True,
    )
    return Engine(tiny_model, tiny_tokenizer, config, generation=GenerationConfig(eos_token_ids=(EOS,)))


def serve(engine: Engine) -> dict[str, RequestOutput]:
    """Twelve requests of one or two outputs, half of which come when the first of them are done; one is aborted."""
    last: dict[str, RequestOutput] = {}
    for wave in range(2):
        for i in range(6):
            params = SamplingParams(temperature=0.7, seed=i, max_tokens=8 + 2 * i, n=1 + i % 2, ignore_eos=i < 4)
            engine.add_request(f"w{wave}-{i}", PREFIX + [65 + i] * (1 + 3 * i), params)
        steps = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    last[output.request_id] = output
            steps += 1
            if wave == 1 and steps == 6:
                aborted = engine.abort_request("w1-5")
                assert aborted is not None
                last["w1-5"] = aborted
    return last


def test_a_trace_tells_what_the_engine_did(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    before = engine.stats()
    engine.reset_prefix_cache()
    with TraceFile(path) as file, recording(engine, file):
        outputs = serve(engine)
    assert engine.observers == []
    after, records = engine.stats(), []
    with open_trace(path) as (header, lines):
        assert header.num_blocks == 24 and header.unit == "s"
        replay = Replay(header)
        for record in lines:
            replay.apply(record)
            records.append(record)
    assert len(outputs) == 12 and replay.num_free == 23 and not replay.requests
    names = {new.request: new.id for record in records for new in record.new}
    ends = Counter((names[f.request], f.reason) for record in records for f in record.finished)
    assert ends == Counter(
        (o.request_id, c.finish_reason) for o in outputs.values() for c in o.outputs if c.finish_reason is not None
    )
    told, counted = replay.totals, after.scheduler
    assert told.preemptions == counted.preemptions_total - before.scheduler.preemptions_total > 0
    assert told.copies == counted.copied_blocks_total - before.scheduler.copied_blocks_total > 0
    assert sum(not record.idle for record in records) == after.steps_total - before.steps_total
    assert [record.step for record in records if record.idle] == [_steps_of_first_wave(records), replay.step]
    assert [r.t for r in records] == sorted(r.t for r in records)


def _steps_of_first_wave(records: list[Record]) -> int:
    """Steps before the first request of the second wave came."""
    names = {new.id: record.step for record in records for new in record.new}
    return names["w1-0"]


def test_what_an_engine_draws_does_not_depend_on_being_recorded(engine: Engine, tmp_path: Path) -> None:
    def tokens() -> dict[str, list[list[int]]]:
        engine.reset_prefix_cache()
        outputs = serve(engine)
        return {name: [c.token_ids for c in o.outputs] for name, o in outputs.items() if name != "w1-5"}

    alone = tokens()
    with TraceFile(tmp_path / "t") as file, recording(engine, file):
        assert tokens() == alone
