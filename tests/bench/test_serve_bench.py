"""The load generator: its arithmetic against numpy, and whole runs against a small server that counts."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from bench.bench_scripts import load_script

bench = load_script("serve")
http = sys.modules["http_client"]


def chunk(text: str = "", finish: str | None = None) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


class FakeServer:
    """Answers each request with `max_tokens` chunks, as an OpenAI server streams them.

    Attributes:
        bodies: the requests, in order of arrival.
        most: most requests in progress at once.
        fail: prompts for which the answer is an error, by what kind of error.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.most = self.running = 0
        self.fail: dict[str, str] = {}
        app = web.Application()
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_get("/v1/models", self.models)
        self.server = TestServer(app)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        failure = self.fail.get(str(body.get("prompt")))
        if failure == "status":
            return web.json_response({"error": {"message": "full"}}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        self.most = max(self.most, self.running)
        for event in self.events(body, failure):
            await response.write(f"data: {event}\n\n".encode())
            await asyncio.sleep(0.002)
        self.running -= 1
        return response

    def events(self, body: dict[str, Any], failure: str | None) -> list[str]:
        count = body["max_tokens"]
        if "messages" in body:
            deltas = [{"role": "assistant", "content": ""}, *({"content": "x"} for _ in range(count)), {}]
            events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
            events[-1]["choices"][0]["finish_reason"] = "length"
            texts = [json.dumps(event) for event in events]
            num_prompt = len(body["messages"][0]["content"].split())
        else:
            texts = [chunk("x", "length" if i == count - 1 else None) for i in range(count)]
            num_prompt = len(body["prompt"])
        if failure == "cut":
            return texts[:1]
        if failure == "event":
            return [texts[0], json.dumps({"error": {"message": "boom"}}), "[DONE]"]
        usage = {"prompt_tokens": num_prompt, "completion_tokens": count}
        return [*texts, json.dumps({"choices": [], "usage": usage}), "[DONE]"]


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    await fake.server.start_server()
    yield fake
    await fake.server.close()


async def run(server: FakeServer, *args: str) -> dict[str, Any]:
    options = bench.parse_args(["--base-url", str(server.server.make_url("/")), *args])
    return await bench.run(options)


async def test_counts_are_exact(server: FakeServer) -> None:
    result = await run(
        server, "--num-prompts", "20", "--input-len", "uniform:3,9", "--output-len", "uniform:1,5", "--ignore-eos",
        "--max-concurrency", "4", "--shared-prefix-len", "6", "--warmup", "2",
    )  # fmt: skip
    counted = server.bodies[2:]
    assert len(counted) == 20
    assert (result["completed"], result["failed"]) == (20, 0)
    assert result["total_input_tokens"] == sum(len(b["prompt"]) for b in counted)
    assert result["total_output_tokens"] == sum(b["max_tokens"] for b in counted)
    assert sorted(result["output_lens"]) == sorted(b["max_tokens"] for b in counted)
    assert result["max_concurrent_requests"] == server.most == 4
    assert result["model_id"] == "fake"
    assert len({tuple(b["prompt"][:6]) for b in server.bodies}) == 1
    assert len({tuple(b["prompt"][6:]) for b in server.bodies}) == 22
    assert all(3 <= len(b["prompt"]) - 6 <= 9 for b in server.bodies)
    assert all(b["ignore_eos"] and b["stream_options"] == {"include_usage": True} for b in server.bodies)
    assert result["generated_texts"] == ["x" * n for n in result["output_lens"]]
    assert [len(gaps) for gaps in result["itls"]] == [n - 1 for n in result["output_lens"]]


async def test_distributions_equal_numpy_over_the_requests_that_succeeded(server: FakeServer) -> None:
    prompts = [[7, i] for i in range(8)]
    server.fail = {str([7, 1]): "status", str([7, 2]): "cut", str([7, 3]): "event"}
    args = bench.parse_args(["--model", "fake"])
    loads = [bench.Workload(bench.request_body(args, {"prompt": p}, 4), 2, 4) for p in prompts]
    url = str(server.server.make_url("/v1/completions"))
    client = http.HTTPClient(timeout_s=60.0)
    results, duration, most = await bench.send_all(client, url, loads, [0.0] * 8, None, lambda done: None)
    summary = bench.report(results, duration, most)
    assert (summary["completed"], summary["failed"]) == (5, 3)
    assert [bool(r.error) for r in results] == [False, True, True, True, False, False, False, False]
    assert "503" in results[1].error and "ended" in results[2].error and "boom" in results[3].error
    good = [r for r in results if not r.error]
    expected = {
        "ttft": [r.ttft for r in good],
        "tpot": [(r.latency - r.ttft) / 3 for r in good],
        "itl": [gap for r in good for gap in r.itls],
        "e2el": [r.latency for r in good],
        "norm": [r.latency / 4 for r in good],
    }
    for name, seconds in expected.items():
        ms = np.array(seconds) * 1000
        assert summary[f"mean_{name}_ms"] == pytest.approx(np.mean(ms))
        assert summary[f"median_{name}_ms"] == pytest.approx(np.median(ms))
        for p in (90, 99):
            assert summary[f"p{p}_{name}_ms"] == pytest.approx(np.percentile(ms, p))
    assert summary["output_throughput"] == pytest.approx(20 / duration)
    assert summary["input_throughput"] == pytest.approx(10 / duration)
    assert all(r.latency == pytest.approx(r.ttft + sum(r.itls)) for r in good)


async def test_chat_sends_text_and_takes_the_servers_count(server: FakeServer) -> None:
    result = await run(server, "--endpoint", "chat", "--num-prompts", "3", "--input-len", "5", "--output-len", "2")
    assert all(len(b["messages"][0]["content"].split()) == 5 for b in server.bodies)
    assert result["input_lens"] == [5, 5, 5]
    assert result["total_output_tokens"] == 6
    assert [len(gaps) for gaps in result["itls"]] == [1, 1, 1]


async def test_prompts_from_a_file(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "ab", "output_len": 3}\n\n{"prompt": "abc"}\n')
    result = await run(server, "--dataset", str(file), "--num-prompts", "3", "--output-len", "2")
    assert sorted((b["prompt"], b["max_tokens"]) for b in server.bodies) == [("ab", 3), ("ab", 3), ("abc", 2)]
    assert result["input_lens"] == [2, 3, 2]


def test_same_seed_same_load_and_other_seed_another() -> None:
    def prompts(seed: int) -> list[Any]:
        args = bench.parse_args(["--model", "m", "--input-len", "lognormal:8,0.5,2,20"])
        return [load.body["prompt"] for load in bench.random_workloads(args, 5, np.random.default_rng(seed), [1])]

    assert prompts(1) == prompts(1) != prompts(2)


def test_times_come_from_the_moments_of_the_events() -> None:
    result = bench.Result(start=0.0, input_len=3)
    reader = bench.StreamReader(result, sent=10.0)
    events = [(10.5, chunk()), (11.0, chunk("a")), (11.25, chunk("b")), (12.0, chunk()), (12.5, chunk("", "stop"))]
    for moment, data in events:
        reader.event(data, moment)
    reader.end()
    assert (result.ttft, result.itls, result.latency) == (1.0, [0.25], 2.5)
    assert result.success and result.output_len == 2


def test_events_are_found_wherever_the_bytes_were_cut() -> None:
    body = b': ping\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b":\n\ndata: [DONE]\n\n'
    for cut in range(len(body)):
        found = list(bench.server_sent_events([(1.0, body[:cut]), (2.0, body[cut:])]))
        assert [data for data, _ in found] == [b'{"a": 1}', b'{"b":']
        lines = [body.index(b"1}\r\n") + 4, body.index(b'"b":\n') + 5]
        assert [moment for _, moment in found] == [1.0 if cut >= end else 2.0 for end in lines]


@pytest.mark.parametrize("num_cuts", [1, 2, 7])
def test_answers_are_put_together_wherever_the_bytes_were_cut(num_cuts: int) -> None:
    rng = np.random.default_rng(num_cuts)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = [b"data: 1\n\n", b"0\r\n\r\n", bytes(range(256)) * 3, b"x"]
    frames = [b"%x%s\r\n%s\r\n" % (len(c), ext, c) for c, ext in zip(chunks, (b"", b";a=b", b"", b""), strict=True)]
    whole = head + b"".join(frames) + b"0\r\n\r\n"
    ends = (len(head) + np.cumsum([len(f) for f in frames])).tolist()
    for _ in range(200):
        cuts = [0, *sorted(rng.integers(1, len(whole), size=num_cuts).tolist()), len(whole)]
        pieces = [(float(b), whole[a:b]) for a, b in pairwise(cuts)]
        answer = http.read_answer(pieces)
        assert (answer.status, answer.is_complete) == (200, True)
        assert [data for _, data in answer.body] == chunks
        assert [moment for moment, _ in answer.body] == [next(float(c) for c in cuts if c >= end) for end in ends]
        assert not http.read_answer([(1.0, whole[: max(cuts[1], len(head))])]).is_complete


def test_answers_without_chunks_and_what_is_no_answer() -> None:
    refused = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nfull"
    answer = http.read_answer([(1.0, refused[:30]), (2.0, refused[30:-2]), (3.0, refused[-2:])])
    assert (answer.status, answer.text, answer.is_complete) == (503, "full", True)
    assert not http.read_answer([(1.0, refused[:-1])]).is_complete
    unsized = http.read_answer([(1.0, b"HTTP/1.0 200 OK\r\n\r\nhel"), (2.0, b"lo")])
    assert (unsized.text, unsized.is_complete) == ("hello", True)  # the connection's end says so
    for pieces in ([], [(1.0, b"HTTP/1.1 200")], [(1.0, b"SSH-2.0 hello there\r\n\r\n")]):
        with pytest.raises(ValueError, match=r"ended before an answer|not an answer in HTTP"):
            http.read_answer(pieces)


@pytest.mark.parametrize(
    "event", ["null", "[]", "3", '{"choices": [null]}', '{"usage": 3}', "{", '{"usage": {"x": 1}}']
)
def test_an_event_that_makes_no_sense_fails_its_request_only(event: str) -> None:
    pieces = [(1.0, b"HTTP/1.1 200 OK\r\n\r\ndata: %s\n\n" % event.encode())]
    result = bench.Recording(0.0, 0.0, 1, pieces).result()
    assert result.error and not result.success


async def test_a_server_that_does_not_hang_up_or_does_so_too_soon() -> None:
    """What it answers and whether it hangs up, by path: a piece of bytes after the other, None being the end."""
    text = b"data: %s\n\n" % chunk("x", "stop").encode()
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding:chunked\r\n\r\n%x\r\n%s\r\n" % (len(text), text)
    answers: dict[str, list[bytes | None]] = {
        "keeps": [chunked + b"0\r\n\r\n"],
        "splits": [chunked + b"0\r", b"\n\r\n"],
        "cuts": [chunked, None],
        # The head ends like a last chunk, in a segment of its own.
        "refuses": [b"HTTP/1.1 503 Busy\r\nContent-Length: 10\r\n\r\n", b"0123456789"],
        "shortens": [b"HTTP/1.1 503 Busy\r\nContent-Length: 10\r\n\r\n", b"012345678", None],
        "mumbles": [b"SSH-2.0\r\n\r\n"],
        "never": [],
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        for piece in answers[request.split()[1].decode().strip("/")]:
            if piece is None:
                writer.close()
                return
            writer.write(piece)
            await asyncio.sleep(0.02)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    load = bench.Workload({"prompt": "hi"}, 1, 1)
    errors = {}
    for path in answers:
        timeout_s = 0.5 if path == "never" else 30.0
        recording = await bench.send(http.HTTPClient(timeout_s), f"{url}/{path}", load, 0.0)
        errors[path] = recording.result().error
    server.close()
    assert errors == {
        "keeps": "",
        "splits": "",
        "cuts": "the connection ended before the answer did",
        "refuses": "HTTP 503: 0123456789",
        "shortens": "HTTP 503: 012345678",
        "mumbles": "ValueError: not an answer in HTTP: b'SSH-2.0'",
        "never": "TimeoutError: ",
    }
    result = (await bench.send(http.HTTPClient(timeout_s=5), url, load, 0.0)).result()
    assert "refused" in result.error or "Connect" in result.error


def test_length_distributions() -> None:
    rng = np.random.default_rng(0)
    assert bench.draw_lengths("128", 3, rng) == [128, 128, 128]
    uniform = bench.draw_lengths("uniform:2,4", 400, rng)
    assert set(uniform) == {2, 3, 4}
    lengths = bench.draw_lengths("lognormal:160,0.7,1,100000", 20_000, rng)
    assert np.mean(lengths) == pytest.approx(160, rel=0.03)
    assert np.std(np.log(lengths)) == pytest.approx(0.7, rel=0.03)
    clipped = bench.draw_lengths("lognormal:160,0.7,16,1024", 20_000, rng)
    assert min(clipped) == 16 and max(clipped) == 1024


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_variation_of_a_gamma_process(burstiness: float) -> None:
    gaps = np.diff(bench.arrival_times(40_000, 5.0, burstiness, np.random.default_rng(0)))
    assert np.mean(gaps) == pytest.approx(1 / 5, rel=0.03)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.03)
    assert bench.arrival_times(3, float("inf"), burstiness, np.random.default_rng(0)) == [0.0, 0.0, 0.0]
    assert bench.arrival_times(1, 5.0, burstiness, np.random.default_rng(0)) == [0.0]


async def test_command_line_saves_every_request_and_fails_where_a_request_failed(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "result.json"
    args = ["--base-url", str(server.server.make_url("/v1/")), "--num-prompts", "4", "--output-len", "2", "--json"]
    assert await asyncio.to_thread(bench.main, [*args, "--save-result", str(saved)]) == 0
    printed, stored = json.loads(capsys.readouterr().out), json.loads(saved.read_text())
    assert printed["completed"] == 4 and printed.items() <= stored.items()
    assert len(stored["ttfts"]) == len(stored["errors"]) == 4
    assert await asyncio.to_thread(bench.main, args[:-1]) == 0
    assert "4 succeeded, 0 failed" in capsys.readouterr().out

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "good"}\n{"prompt": "bad"}\n')
    server.fail = {"bad": "status"}
    assert await asyncio.to_thread(bench.main, [*args, "--dataset", str(prompts)]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["failed"] == 2
    assert "HTTP 503" in captured.err


@pytest.mark.parametrize("spec", ["0", "x", "uniform:5", "lognormal:1,2", "uniform:0,3"])
def test_bad_lengths_are_refused(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.parse_args(["--input-len", spec])
    assert "error:" in capsys.readouterr().err
