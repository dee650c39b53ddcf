"""AsyncEngine: requests of many tasks, one engine thread."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from server.fake_engine import FakeEngine

from jaxpaged.engine.async_engine import INLINE_TOKENIZE_CHARS, AsyncEngine
from jaxpaged.engine.request_stream import EngineRequest
from jaxpaged.errors import EngineDeadError, InvalidRequestError, QueueFullError
from jaxpaged.outputs import RequestOutput
from jaxpaged.request import OutputKind, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=5)
DELTA = SamplingParams(temperature=0, max_tokens=5, output_kind=OutputKind.DELTA)
ENDLESS = SamplingParams(temperature=0, max_tokens=200, output_kind=OutputKind.DELTA)


@pytest.fixture
def fake(byte_tokenizer: Any) -> FakeEngine:
    return FakeEngine(tokenizer=byte_tokenizer, max_num_seqs=4)


async def collect(engine: AsyncEngine, request_id: str, params: SamplingParams) -> list[RequestOutput]:
    return [o async for o in engine.generate("hi", params, request_id)]


async def settled(engine: AsyncEngine, fake: FakeEngine) -> None:
    async with asyncio.timeout(5):
        while engine.num_open_requests or fake.has_unfinished_requests():
            await asyncio.sleep(0.005)


async def test_outputs_follow_the_output_kind(fake: FakeEngine) -> None:
    async with AsyncEngine(fake) as engine:
        deltas = await collect(engine, "a", DELTA)
        [final] = await collect(engine, "b", GREEDY)
    assert [o.outputs[0].text for o in deltas] == list("abcde")
    assert [o.finished for o in deltas] == [False] * 4 + [True]
    assert final.outputs[0].text == "abcde" and final.outputs[0].finish_reason == "length"
    assert final.prompt == "hi" and final.prompt_token_ids == [256, 71, 72]


async def test_concurrent_requests_get_their_own_outputs(fake: FakeEngine) -> None:
    for i in range(8):
        fake.scripts[str(i)] = fake.ids(f"<{i}>")
    params = SamplingParams(max_tokens=3)

    async def one(i: int) -> str:
        return [o async for o in engine.generate(str(i), params, f"r{i}")][-1].outputs[0].text

    async with AsyncEngine(fake) as engine:
        assert await asyncio.gather(*map(one, range(8))) == [f"<{i}>" for i in range(8)]


async def test_only_one_thread_calls_the_engine(fake: FakeEngine) -> None:
    threads = set()
    for name in ("add_request", "abort_request", "step", "has_unfinished_requests", "shutdown"):
        original = getattr(fake, name)

        def spy(*args: Any, original: Any = original, **options: Any) -> Any:
            threads.add(threading.get_ident())
            return original(*args, **options)

        setattr(fake, name, spy)
    async with AsyncEngine(fake) as engine:
        await asyncio.gather(*(collect(engine, f"r{i}", GREEDY) for i in range(4)))
        stream = await engine.submit([EngineRequest("x", "hi", ENDLESS)])
        stream.close()
        while engine.num_open_requests:
            await asyncio.sleep(0.005)
    assert len(threads) == 1 and threads != {threading.get_ident()}


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], GREEDY, "prompt"),
        ([99_999], GREEDY, "prompt"),
        ([1] * 256, GREEDY, "input_tokens"),
        ([1], SamplingParams(max_tokens=257), "max_tokens"),
        ([1], SamplingParams(n=5), "n"),
        ([1], SamplingParams(logprobs=21), "logprobs"),
    ],
)
async def test_bad_requests_raise_to_their_caller(
    fake: FakeEngine, prompt: list[int], params: SamplingParams, param: str
) -> None:
    async with AsyncEngine(fake) as engine:
        with pytest.raises(InvalidRequestError) as caught:
            await anext(engine.generate(prompt, params, "a"))
        assert caught.value.param == param
        assert engine.num_open_requests == 0
        assert len(await collect(engine, "a", DELTA)) == 5


async def test_errors_of_add_request_reach_the_caller_and_nobody_else(byte_tokenizer: Any) -> None:
    fake = FakeEngine(tokenizer=byte_tokenizer, step_s=0.01, max_num_seqs=1, max_queued=1)
    async with AsyncEngine(fake) as engine:
        running = await engine.submit([EngineRequest("running", "hi", ENDLESS)])
        await anext(running)
        waiting = await engine.submit([EngineRequest("waiting", "hi", DELTA)])
        with pytest.raises(QueueFullError):
            await engine.submit([EngineRequest("late", "hi", DELTA)])
        assert engine.num_open_requests == 2
        running.close()
        assert "".join([o.outputs[0].text async for o in waiting]) == "abcde"
        assert len(await collect(engine, "late", DELTA)) == 5


async def test_a_submission_is_taken_whole_or_not_at_all(byte_tokenizer: Any) -> None:
    fake = FakeEngine(tokenizer=byte_tokenizer, max_queued=2)
    async with AsyncEngine(fake) as engine:
        with pytest.raises(QueueFullError):
            await engine.submit([EngineRequest(f"r{i}", "hi", ENDLESS) for i in range(3)])
        await settled(engine, fake)
        assert fake.held == {} and fake.stats().generation_tokens_total == 0


async def test_request_ids_are_unique_while_in_use(fake: FakeEngine) -> None:
    async with AsyncEngine(fake) as engine:
        stream = await engine.submit([EngineRequest("a", "hi", ENDLESS)])
        with pytest.raises(InvalidRequestError, match="'a' is in use"):
            await engine.submit([EngineRequest("a", "hi", GREEDY)])
        stream.close()
        await settled(engine, fake)
        assert len(await collect(engine, "a", DELTA)) == 5


async def test_a_closed_iterator_frees_its_request(fake: FakeEngine) -> None:
    fake.step_s = 0.005
    async with AsyncEngine(fake) as engine:
        outputs = engine.generate("hi", ENDLESS, "a")
        await anext(outputs)
        await outputs.aclose()
        await settled(engine, fake)
        assert fake.held == {} and engine.stats().finished == {"abort": 1}


async def test_a_cancelled_task_frees_its_request(fake: FakeEngine) -> None:
    fake.step_s = 0.005
    async with AsyncEngine(fake) as engine:
        for delay in (0, 0.001, 0.02):  # before it was taken, and while it runs
            task = asyncio.create_task(collect(engine, "a", ENDLESS))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await settled(engine, fake)
            assert fake.held == {}


async def test_a_loop_that_is_left_frees_its_request(fake: FakeEngine) -> None:
    fake.step_s = 0.005
    async with AsyncEngine(fake) as engine:
        async for _ in engine.generate("hi", ENDLESS, "a"):
            break
        await settled(engine, fake)
        assert fake.held == {}


async def test_a_cancelled_abort_still_frees(fake: FakeEngine) -> None:
    fake.step_s = 0.01
    async with AsyncEngine(fake) as engine:
        stream = await engine.submit([EngineRequest("a", "hi", ENDLESS)])
        abort = asyncio.create_task(engine.abort("a"))
        await asyncio.sleep(0)
        abort.cancel()
        assert [o.outputs[0].finish_reason async for o in stream][-1] == "abort"
        await settled(engine, fake)
        assert fake.held == {} and engine.num_open_requests == 0


@pytest.mark.parametrize("kind", OutputKind)
async def test_abort_ends_the_stream(fake: FakeEngine, kind: OutputKind) -> None:
    fake.step_s = 0.005
    params = SamplingParams(n=2, temperature=0, max_tokens=200, output_kind=kind)
    async with AsyncEngine(fake) as engine:
        task = asyncio.create_task(collect(engine, "a", params))
        while not fake.held:
            await asyncio.sleep(0.005)
        assert await engine.abort("a")
        last = (await task)[-1]
        assert last.finished and [o.finish_reason for o in last.outputs] == ["abort", "abort"]
        assert [o.index for o in last.outputs] == [0, 1]
        if kind is OutputKind.CUMULATIVE:
            assert last.outputs[0].text.startswith("abc"[: len(last.outputs[0].text)])
        await settled(engine, fake)
        assert fake.held == {} and not await engine.abort("a")


async def test_a_failed_step_fails_only_its_requests(fake: FakeEngine) -> None:
    async with AsyncEngine(fake) as engine:
        fake.fail_steps = 1
        [output] = await collect(engine, "a", GREEDY)
        assert output.error == "RuntimeError: out of memory" and output.outputs[0].finish_reason == "error"
        assert engine.is_running
        assert len(await collect(engine, "b", DELTA)) == 5


async def test_a_dead_engine_tells_everyone(fake: FakeEngine) -> None:
    fake.step_s = 0.01
    async with AsyncEngine(fake) as engine:
        tasks = [asyncio.create_task(collect(engine, f"r{i}", ENDLESS)) for i in range(3)]
        while len(fake.held) < 3:
            await asyncio.sleep(0.005)
        fake.dies = True
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError) and "the device is gone" in str(result)
        assert not engine.is_running and engine.dead_error is not None and engine.num_open_requests == 0
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await collect(engine, "late", GREEDY)
        with pytest.raises(EngineDeadError):
            await engine.reset_prefix_cache()


async def test_shutdown_lets_requests_finish(fake: FakeEngine) -> None:
    fake.step_s = 0.005
    engine = AsyncEngine(fake)
    task = asyncio.create_task(collect(engine, "a", DELTA))
    while not fake.held:
        await asyncio.sleep(0.001)
    shutdown = asyncio.create_task(engine.shutdown(5))
    await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match="shutting down"):
        await collect(engine, "late", GREEDY)
    assert "".join(o.outputs[0].text for o in await task) == "abcde"
    await shutdown
    assert fake.is_shut_down and not engine.is_running
    await engine.shutdown()  # once more is harmless


async def test_shutdown_aborts_what_is_late(fake: FakeEngine) -> None:
    fake.step_s = 0.01
    engine = AsyncEngine(fake)
    tasks = [asyncio.create_task(collect(engine, f"r{i}", ENDLESS)) for i in range(6)]  # four run, two wait
    while len(fake.held) < 4:
        await asyncio.sleep(0.005)
    await engine.shutdown(0.02)
    for outputs in await asyncio.gather(*tasks):
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
    assert fake.held == {} and engine.num_open_requests == 0


async def test_the_thread_is_over_after_shutdown(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    post = AsyncEngine._post

    def post_slowly(self: AsyncEngine, *args: Any) -> bool:
        done = post(self, *args)
        time.sleep(0.05)
        return done

    monkeypatch.setattr(AsyncEngine, "_post", post_slowly)
    before = set(threading.enumerate())
    async with AsyncEngine(fake) as engine:
        await collect(engine, "a", GREEDY)
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) == before


async def test_shutdown_of_an_unused_engine(fake: FakeEngine) -> None:
    async with AsyncEngine(fake):
        pass
    assert fake.is_shut_down


async def test_an_idle_engine_does_not_step(fake: FakeEngine) -> None:
    async with AsyncEngine(fake) as engine:
        await collect(engine, "a", GREEDY)
        steps = engine.stats().steps_total
        await asyncio.sleep(0.05)
        assert fake.stats().steps_total == steps == 5


async def test_outputs_of_a_step_come_in_one_callback(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncEngine(fake) as engine:
        await collect(engine, "warm", GREEDY)
        loop, calls = asyncio.get_running_loop(), []
        original = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *a, **k: calls.append(a) or original(*a, **k))
        before = engine.stats().steps_total
        await asyncio.gather(*(collect(engine, f"r{i}", DELTA) for i in range(4)))
        steps = engine.stats().steps_total - before
        assert len(calls) <= steps + 1  # an abort or an addition may come between two steps


async def test_long_texts_are_tokenized_off_the_loop(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    tokenizer = fake.tokenizer

    class Spy:
        def encode(self, text: str, add_special_tokens: bool) -> Any:
            threads.append(threading.get_ident())
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(fake, "tokenizer", Spy())
    engine = AsyncEngine(fake)
    half = "x" * (INLINE_TOKENIZE_CHARS // 2)
    assert await engine.tokenize([half, half]) == [tokenizer.encode(half)] * 2
    [ids] = await engine.tokenize([half + half + "x"], add_special_tokens=False)
    assert ids == tokenizer.encode(half + half + "x", add_special_tokens=False)
    assert len(await engine.tokenize([half, half, "x"])) == 3
    here = threading.get_ident()
    assert [t == here for t in threads] == [True, True, False, False, False, False]


def test_a_second_event_loop_is_refused(fake: FakeEngine) -> None:
    engine = AsyncEngine(fake)

    async def first() -> None:
        await collect(engine, "a", GREEDY)

    asyncio.run(first())
    with pytest.raises((RuntimeError, EngineDeadError)):
        asyncio.run(first())
