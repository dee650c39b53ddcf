"""The way of outputs to their reader: order, the short way, and ends."""

from __future__ import annotations

import asyncio
from dataclasses import fields

import pytest

from jaxpaged.engine.request_stream import EngineRequest, OpenRequest, RequestStream
from jaxpaged.errors import EngineDeadError
from jaxpaged.outputs import RequestMetrics, RequestOutput
from jaxpaged.request import SamplingParams


def output(number: int, request_id: str = "a", finished: bool = False) -> RequestOutput:
    return RequestOutput(request_id, None, [number], [], finished, RequestMetrics(0.0))


class Harness:
    """A stream of requests "a" and "b", and what became of its outputs, by number.

    Attributes:
        accepts: whether the consumer takes what it is offered.
        pause: the reader waits for it after each batch that it took.
    """

    def __init__(self, *, with_consumer: bool = True) -> None:
        self.released: list[list[str]] = []
        requests = [OpenRequest(EngineRequest(i, "hi", SamplingParams()), [1], 0.0) for i in ("a", "b")]
        self.stream = RequestStream(requests, self.released.append)
        self.accepts = True
        self.pause = asyncio.Event()
        self.pause.set()
        self.seen: list[tuple[str, int]] = []
        if with_consumer:
            self.stream.hand_to(self._consume)

    def _consume(self, outputs: list[RequestOutput]) -> bool:
        if self.accepts:
            self.seen += [("consumer", o.prompt_token_ids[0]) for o in outputs]
        return self.accepts

    async def read(self) -> None:
        while outputs := await self.stream.take():
            self.seen += [("reader", o.prompt_token_ids[0]) for o in outputs]
            await self.pause.wait()

    def step(self, *outputs: RequestOutput) -> None:
        for o in outputs:
            self.stream.put(o)
        self.stream.notify()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_outputs_go_to_the_consumer_while_the_reader_waits() -> None:
    h = Harness()
    h.step(output(0))  # nobody reads yet
    reader = asyncio.create_task(h.read())
    await turns()
    h.step(output(1), output(2, "b"))
    h.step(output(3, finished=True))
    assert h.seen == [("reader", 0), ("consumer", 1), ("consumer", 2), ("consumer", 3)]
    assert not reader.done()
    h.step(output(4, "b", finished=True))
    await reader
    assert [number for _, number in h.seen] == [0, 1, 2, 3, 4]
    assert h.released == []


async def test_what_the_consumer_refuses_waits_for_the_reader_and_nothing_overtakes_it() -> None:
    h = Harness()
    reader = asyncio.create_task(h.read())
    await turns()
    h.accepts = False
    h.step(output(0))
    h.accepts = True
    h.step(output(1))  # the reader has been woken, but did not run yet
    h.pause.clear()
    await turns()
    h.step(output(2))  # the reader is at work on the first two
    assert h.seen == [("reader", 0), ("reader", 1)]
    h.pause.set()
    await turns()
    h.step(output(3))
    h.step(output(4, finished=True), output(5, "b", finished=True))
    await reader
    assert [number for _, number in h.seen] == [0, 1, 2, 3, 4, 5]
    assert h.seen[2:4] == [("reader", 2), ("consumer", 3)]


async def test_what_the_consumer_raises_reaches_the_reader() -> None:
    h = Harness()

    def fail(_: list[RequestOutput]) -> bool:
        raise ConnectionResetError("gone")

    h.stream.hand_to(fail)
    reader = asyncio.create_task(h.read())
    await turns()
    h.step(output(0), output(1, "b"))
    with pytest.raises(ConnectionResetError, match="gone"):
        await reader
    h.stream.close()
    assert h.released == [["a", "b"]]


async def test_nothing_is_read_behind_what_the_consumer_did_not_take() -> None:
    h = Harness()

    def fail(_: list[RequestOutput]) -> bool:
        raise ValueError("request a failed")

    h.stream.hand_to(fail)
    reader = asyncio.create_task(h.read())
    await turns()
    h.step(output(0))
    h.step(output(1, "b"))  # before the reader's turn
    async with asyncio.timeout(10):
        with pytest.raises(ValueError, match="request a failed"):
            await reader
    assert h.seen == []


@pytest.mark.parametrize("with_consumer", [False, True])
async def test_a_dead_engine_is_raised_after_what_it_has_put(with_consumer: bool) -> None:
    h = Harness(with_consumer=with_consumer)
    h.step(output(0))
    h.stream.fail(EngineDeadError("dead"))
    with pytest.raises(EngineDeadError, match="dead"):
        await h.read()
    assert h.seen == [("reader", 0)]
    assert await h.stream.take() == []
    h.stream.close()
    assert h.released == []  # the engine holds nothing any more


async def test_a_closed_stream_ends_and_ignores_what_comes() -> None:
    h = Harness()
    reader = asyncio.create_task(h.read())
    await turns()
    h.stream.close()
    h.step(output(0))
    await reader
    assert h.seen == [] and h.released == [["a", "b"]]


async def test_a_cancelled_reader_takes_nothing() -> None:
    h = Harness()
    reader = asyncio.create_task(h.read())
    await turns()
    reader.cancel()
    h.step(output(0))
    await asyncio.wait([reader])
    assert h.seen == []
    assert [o.prompt_token_ids[0] for o in await h.stream.take()] == [0]


async def test_iteration_gives_one_at_a_time_and_ends() -> None:
    h = Harness(with_consumer=False)
    h.step(output(0), output(1), output(2, "b", finished=True))
    numbers = [(await anext(h.stream)).prompt_token_ids[0]]
    h.step(output(3, finished=True))
    numbers += [o.prompt_token_ids[0] async for o in h.stream]
    assert numbers == [0, 1, 2, 3]


def test_a_copy_of_times_has_all_of_them() -> None:
    names = [f.name for f in fields(RequestMetrics)]
    times = RequestMetrics(**{name: i + 1 for i, name in enumerate(names)})
    copied = times.copy()
    assert copied == times and copied is not times
