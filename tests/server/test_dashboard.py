"""/dashboard: who may see it, what it shows, and that nobody who looks can hold up the engine."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from pydantic import TypeAdapter
from server.fake_engine import FakeEngine
from server.live_server import Client, running_server

from jaxpaged.config import CacheConfig, SchedulerConfig
from jaxpaged.core.plan import StepResult
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.outputs import RequestOutput
from jaxpaged.request import Request, SamplingParams
from jaxpaged.server.config import ServerConfig
from jaxpaged.server.dashboard import MAX_VIEWERS, Dashboard
from jaxpaged.server.dashboard_feed import MAX_BEHIND, StepFeed
from jaxpaged.server.metrics import ServerMetrics
from jaxpaged.trace import Header, Record, Replay


class WatchedEngine(FakeEngine):
    """With a real scheduler, whose requests never end, that plans a step with every step of the fake one."""

    def __init__(self, tokenizer: object = None, **options: Any) -> None:
        super().__init__(tokenizer=tokenizer, **options)
        self.cache_config = CacheConfig(num_blocks=65, block_size=4)
        self.scheduler = Scheduler(SchedulerConfig(256, 8, 256), self.cache_config)
        self.observers: list[Any] = []
        for i in range(6):
            params = SamplingParams(max_tokens=100_000, ignore_eos=True)
            prompt = [i // 2] * (5 + 3 * i)
            self.scheduler.add(Request(f"r{i}", prompt, params, 180, seed=0))

    def plan(self) -> None:
        plan = self.scheduler.schedule()
        for observe in self.observers:
            observe(self.scheduler, plan)
        if plan is not None:
            self.scheduler.update(plan, StepResult(np.ones(len(plan.sampled), np.int32)))

    def note_idle(self) -> None:
        if not self.scheduler.has_unfinished():
            for observe in self.observers:
                observe(self.scheduler, None)

    def step(self) -> list[RequestOutput]:
        self.plan()
        return super().step()

    def tables(self) -> dict[tuple[int, int], list[int]]:
        """By (prompt tokens, sequence): no two prompts are of one length, and ids do not leave the server."""
        sequences = [s for group in self.scheduler.groups.values() for s in group.request.sequences]
        return {(len(s.request.prompt_token_ids), s.index): s.block_table for s in sequences if s.block_table}


@asynccontextmanager
async def dashboard_server(engine: FakeEngine | None = None, **config: Any) -> AsyncIterator[Client]:
    options = {"dashboard": True, **config}
    async with running_server(engine or WatchedEngine(), ServerConfig(**options)) as client:
        yield client


async def read_events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in response.content:
        kind, _, value = line.decode().strip().partition(": ")
        if kind == "event":
            name = value
        elif kind == "data":
            yield name, json.loads(value)


_RECORD = TypeAdapter(Record)


def as_record(values: dict[str, Any]) -> Record:
    return parsed(json.dumps(values))


def parsed(record: str) -> Record:
    return _RECORD.validate_json(record)


def tables_in(replay: Replay) -> dict[tuple[int, int], list[int]]:
    return {(replay.requests[r].prompt_tokens, s): table for (r, s), table in replay.tables.items()}


async def test_there_is_none_unless_asked_for() -> None:
    async with running_server(FakeEngine(), ServerConfig()) as client:
        for path in ("/dashboard", "/dashboard/events"):
            status, _ = await client.get(path)
            assert status == 404


async def test_the_page_is_one_document() -> None:
    async with (
        dashboard_server(served_model_names=("<i>&",)) as client,
        client.session.get(client.url + "/dashboard") as response,
    ):
        page = await response.text()
        assert response.status == 200 and response.content_type == "text/html"
        policy = response.headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert response.headers["Cache-Control"] == "no-store"
    assert "<title>KV memory – &lt;i&gt;&amp;</title>" in page and "<i>&" not in page
    assert "src=" not in page and "http://" not in page and "https://" not in page


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/events"])
async def test_keys(path: str) -> None:
    async with dashboard_server(api_keys=("sésame", "other")) as client:

        async def status(**options: Any) -> int:
            async with client.session.get(client.url + path, **options) as response:
                if response.status == 401:
                    assert response.headers["WWW-Authenticate"].startswith("Basic realm=")
                    assert "give it as the password" in await response.text()
                return response.status

        def basic(user: str, password: str) -> dict[str, str]:
            return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}

        assert await status() == 401
        assert await status(headers=basic("anyone", "wrong")) == 401
        assert await status(headers=basic("sésame", "")) == 401
        assert await status(headers={"Authorization": "Basic !!!"}) == 401
        assert await status(headers={"Authorization": "Bearer wrong"}) == 401
        assert await status(headers={"Authorization": "other"}) == 401
        assert await status(headers=basic("anyone", "sésame")) == 200
        assert await status(headers=basic("", "other")) == 200
        assert await status(headers={"Authorization": "Bearer other"}) == 200
        assert (await client.get("/v1/models", headers=basic("anyone", "other")))[
            0
        ] == 401  # the API takes no passwords
    async with dashboard_server(api_keys=("sésame",), dashboard_public=True) as client:
        async with client.session.get(client.url + path) as response:
            assert response.status == 200
        assert (await client.get("/v1/models"))[0] == 401


async def test_what_is_sent_is_the_state_of_the_block_manager() -> None:
    engine = WatchedEngine(step_s=0.002)
    async with dashboard_server(engine) as client:
        await client.complete(max_tokens=20)
        assert engine.observers == []  # nobody looks
        async with client.session.get(client.url + "/dashboard/events") as response:
            assert response.content_type == "text/event-stream"
            events = read_events(response)
            name, header = await anext(events)
            assert name == "header"
            replay = Replay(Header(**header))
            assert len(engine.observers) == 1
            completion = asyncio.create_task(client.complete(max_tokens=40))
            figures: dict[str, Any] = {}
            async with asyncio.timeout(20):
                while replay.step < 30 or "ttft_ms" not in figures or figures["ttft_ms"] is None:
                    name, data = await anext(events)
                    if name == "figures":
                        figures = data
                    else:
                        for values in data:
                            replay.apply(as_record(values))
            await completion
            await client.settled()
            async with asyncio.timeout(20):
                while tables_in(replay) != engine.tables():
                    name, data = await anext(events)
                    if name == "records":
                        for values in data:
                            replay.apply(as_record(values))
        assert figures.keys() == {
            "running", "waiting", "pool_use", "prompt_tokens_per_s", "output_tokens_per_s", "prompt_tokens_total",
            "output_tokens_total", "finished_total", "hit_rate", "ttft_ms", "itl_ms", "e2e_ms", "skipped",
        }  # fmt: skip
        async with asyncio.timeout(10):
            while engine.observers:  # the browser has gone: nobody looks any more
                await asyncio.sleep(0.01)


async def test_who_joins_an_idle_engine_sees_its_state_at_once() -> None:
    """All requests have ended, and the prefix cache still finds their full blocks."""
    engine = WatchedEngine()
    for _ in range(3):
        engine.plan()
    for group in list(engine.scheduler.groups.values()):
        engine.scheduler.abort(group.request.request_id)
    findable = engine.scheduler.stats().num_cached_blocks
    assert findable > 0
    async with dashboard_server(engine) as client:
        for _ in range(2):  # each the only viewer
            async with client.session.get(client.url + "/dashboard/events") as response:
                events = read_events(response)
                found: dict[str, Any] = {}
                async with asyncio.timeout(10):
                    while found.keys() < {"header", "records", "figures"}:
                        name, found[name] = await anext(events)
            (state,) = found["records"]
            replay = Replay(Header(**found["header"]))
            replay.apply(as_record(state))
            assert replay.is_idle and not replay.tables and len(replay.findable) == findable
            assert found["figures"]["running"] == 0
            async with asyncio.timeout(10):
                while engine.observers:
                    await asyncio.sleep(0.01)


async def test_so_many_may_look_and_no_more() -> None:
    engine = WatchedEngine()
    async with (
        dashboard_server(engine) as client,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as many,
    ):
        open_ones = [await many.get(client.url + "/dashboard/events") for _ in range(MAX_VIEWERS)]
        assert [response.status for response in open_ones] == [200] * MAX_VIEWERS
        assert len(engine.observers) == 1
        status, answer = await client.get("/dashboard/events")
        assert status == 503 and "16 browsers show the dashboard, the limit" in answer["error"]["message"]
        open_ones[0].close()
        async with asyncio.timeout(10):
            while (response := await many.get(client.url + "/dashboard/events")).status != 200:
                await asyncio.sleep(0.02)
        for each in (*open_ones[1:], response):
            each.close()


async def test_the_limit_holds_for_those_who_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = web.StreamResponse.prepare

    async def slow(response: web.StreamResponse, request: web.BaseRequest) -> Any:
        await asyncio.sleep(0.1)
        return await prepare(response, request)

    monkeypatch.setattr(web.StreamResponse, "prepare", slow)
    async with (
        dashboard_server(WatchedEngine()) as client,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as many,
    ):
        answers = await asyncio.gather(*(many.get(client.url + "/dashboard/events") for _ in range(MAX_VIEWERS + 5)))
        assert sorted(answer.status for answer in answers) == [200] * MAX_VIEWERS + [503] * 5
        for answer in answers:
            answer.close()


def test_records_that_nobody_takes_do_not_pile_up() -> None:
    engine = WatchedEngine()
    feed = StepFeed(engine, max_inbox=50)  # type: ignore[arg-type]
    feed.open()
    replay = Replay(feed.header)
    cursor: int | None = None
    most = 0
    for step in range(400):
        engine.plan()
        most = max(most, len(feed._inbox))
        if step % 130 == 129:
            engine.plan()  # the record that tells everything anew may be the next one only
            records, cursor, _ = feed.since(cursor)
            for record in records:
                replay.apply(parsed(record))
            assert tables_in(replay) == engine.tables()
    assert most == 50


def test_who_is_far_behind_gets_the_state_instead() -> None:
    engine = WatchedEngine()
    feed = StepFeed(engine)  # type: ignore[arg-type]
    feed.open()
    quick, slow = Replay(feed.header), Replay(feed.header)
    engine.plan()
    _, quick_cursor, _ = feed.since(None)
    first, slow_cursor, _ = feed.since(None)
    for replay in (quick, slow):
        replay.apply(parsed(first[0]))
    for _ in range(MAX_BEHIND + 44):
        engine.plan()
        records, quick_cursor, missed = feed.since(quick_cursor)
        assert len(records) == 1 and missed == 0
        quick.apply(parsed(records[0]))
    records, _, missed = feed.since(slow_cursor)
    state = parsed(records[0])
    assert len(records) == 1 and state.reset and missed == MAX_BEHIND + 43
    slow.apply(state)
    assert tables_in(slow) == tables_in(quick) == engine.tables()
    feed.close()
    assert engine.observers == []


def test_the_state_is_written_once_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    written = 0
    snapshot = Replay.snapshot

    def counted(replay: Replay) -> Record:
        nonlocal written
        written += 1
        return snapshot(replay)

    monkeypatch.setattr(Replay, "snapshot", counted)
    monkeypatch.setattr("jaxpaged.server.dashboard_feed.MAX_BEHIND", 16)
    engine = WatchedEngine()
    feed = StepFeed(engine)  # type: ignore[arg-type]
    feed.open()
    for step in range(26):
        engine.plan()
        late = Replay(feed.header)
        records, _, missed = feed.since(None)
        for record in records:
            late.apply(parsed(record))
        assert tables_in(late) == engine.tables() and late.step == step and missed == 0
    assert written == 2
    records, _, missed = feed.since(1)  # 2 to 17 are not shown; the second state is that after 18 records
    assert parsed(records[0]).step == 17 and missed == 16 and len(records) == 1 + 8


def test_no_request_id_leaves_the_server() -> None:
    engine = WatchedEngine()
    engine.scheduler.add(Request("resp_5ec4e7-0123abcd-0", [7] * 40, SamplingParams(max_tokens=4), 180, seed=0))
    feed = StepFeed(engine)  # type: ignore[arg-type]
    feed.open()
    engine.plan()
    (state,), cursor, _ = feed.since(None)
    engine.scheduler.add(Request("resp_10c4ed-0123abcd-0", [8] * 41, SamplingParams(max_tokens=4), 180, seed=0))
    engine.plan()
    (record,), _, _ = feed.since(cursor)
    assert [new.id for new in parsed(state).new] == [f"#{i}" for i in range(7)]
    assert [new.id for new in parsed(record).new] == ["#7"]
    assert "5ec4e7" not in state and "10c4ed" not in record


def test_after_a_bad_record_the_state_is_told_anew(caplog: pytest.LogCaptureFixture) -> None:
    engine = WatchedEngine()
    feed = StepFeed(engine)  # type: ignore[arg-type]
    feed.open()
    quick, slow = Replay(feed.header), Replay(feed.header)
    engine.plan()
    (first,), slow_cursor, _ = feed.since(None)
    for replay in (quick, slow):
        replay.apply(parsed(first))
    engine.plan()
    records, cursor, _ = feed.since(slow_cursor)
    quick.apply(parsed(records[0]))
    for _ in range(2):
        bad = Record(step=99, t=99.0, free=1, findable=0)
        feed._inbox.append(bad)
        assert feed.since(cursor) == ([], cursor, 0) and feed.since(None) == ([], None, 0)
        engine.plan()
        records, cursor, missed = feed.since(cursor)
        state = parsed(records[0])
        assert state.reset and missed == 0
        quick.apply(state)
        assert tables_in(quick) == engine.tables() and len(engine.observers) == 1
    records, _, missed = feed.since(slow_cursor)
    slow.apply(parsed(records[0]))
    assert tables_in(slow) == engine.tables() and missed == 2
    assert len(caplog.records) == 1 and "step 99 of the trace" in caplog.text


async def test_a_browser_that_takes_nothing_is_let_go() -> None:
    class Stuck:
        writes = 0

        async def write(self, data: bytes) -> None:
            self.writes += 1
            await asyncio.Event().wait()

    engine = WatchedEngine()
    running = SimpleNamespace(engine=engine, is_running=True, stats=engine.stats)
    metrics = ServerMetrics("m", engine.stats, engine.cache_config, vllm_aliases=False)
    dashboard = Dashboard(running, ServerConfig(), metrics, frame_s=0.001, write_s=0.05)  # type: ignore[arg-type]
    stuck = Stuck()
    with pytest.raises(TimeoutError):
        await dashboard._send_frames(stuck)  # type: ignore[arg-type]
    assert stuck.writes == 1
