"""bench/compare.py with contestants of the test's own: real processes, started, loaded, stopped."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bench.bench_scripts import BENCH, load_script

compare = load_script("compare")
driver = load_script("peers/inside/driver")
contestants = importlib.import_module("peers.contestants")
processes = importlib.import_module("peers.processes")
rounds = importlib.import_module("peers.rounds")
sessions = importlib.import_module("peers.sessions")
workloads = importlib.import_module("peers.workloads")
Request, Load, Command = workloads.Request, workloads.Load, sessions.Command

# A token for each running request at each step; with "stop" in its options requests end after that many.
ENGINE = """
import time

class Engine:
    def __init__(self, options):
        self.options, self.left = options, {}
    def add(self, index, prompt, output_len):
        self.left[index] = min(output_len, self.options.get("stop", output_len))
    def step(self):
        if "crash" in self.options:
            raise ValueError("out of apples")
        time.sleep(0.001)
        running = [index for index, left in self.left.items() if left]
        for index in running:
            self.left[index] -= 1
        return [(index, time.perf_counter()) for index in running]

def start(options):
    print("a library says hello")
    return Engine(options)
"""
SERVER = """
import asyncio, json, os, subprocess, sys
from aiohttp import web

# A worker in a group of its own, as servers have them.
worker = subprocess.Popen(["sleep", "600"], process_group=0)
print("worker", worker.pid, flush=True)

async def health(request):
    return web.Response()

async def complete(request):
    body = await request.json()
    count = body["max_tokens"] - int(sys.argv[2])
    answer = web.StreamResponse()
    await answer.prepare(request)
    for i in range(count):
        choice = {"index": 0, "text": "x", "finish_reason": "length" if i == count - 1 else None}
        await answer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\\n\\n")
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
    await answer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\\n\\ndata: [DONE]\\n\\n")
    return answer

app = web.Application()
app.router.add_get("/health", health)
app.router.add_post("/v1/completions", complete)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    """A command that runs the driver with ENGINE."""
    (tmp_path / "apple_engine.py").write_text(ENGINE)

    def command(**options: Any) -> Any:
        argv = [sys.executable, str(sessions.DRIVER), "apple_engine", json.dumps(options)]
        return Command(argv, {"PYTHONPATH": str(tmp_path)})

    return command


def server(missing_tokens: int = 0) -> Any:
    return Command([sys.executable, "-c", SERVER, "{port}", str(missing_tokens)])


def requests(*lengths: int, arrival: float = 0.0) -> list[Any]:
    return [Request([1000 + i, 1001], length, arrival) for i, length in enumerate(lengths)]


def test_a_library_is_loaded_through_its_driver(engine: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with sessions.driver_session(engine(), log, time_limit_s=60) as (session, first_token_s):
        outcome = session.run(Load(requests(3, 1, 2, 5), 2))
        assert session.process.session != os.getpid()
    assert log.read_text() == "a library says hello\n"
    assert [r.output_len for r in outcome.results] == [3, 1, 2, 5]
    assert [len(r.itls) for r in outcome.results] == [2, 0, 1, 4]
    assert all(r.success and r.latency == pytest.approx(r.ttft + sum(r.itls)) for r in outcome.results)
    assert outcome.max_concurrent == 2
    # Two at a time: the third begins when the second, of one token, is done, and the fourth when one more is.
    starts = [r.start for r in outcome.results]
    ends = [r.start + r.latency for r in outcome.results]
    assert starts[1] < ends[1] <= starts[2] and min(ends[0], ends[2]) <= starts[3]
    assert 0 < first_token_s < 60
    assert processes.usage_of(session.process.session).rss == 0


def test_a_server_is_loaded_over_http_and_leaves_nothing_behind(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with sessions.http_session(server(), log) as (session, first_token_s):
        outcome = session.run(Load(requests(3, 1, 4), 2))
        time.sleep(3 * processes.SAMPLE_S)
        worker = int(log.read_text().split()[1])
        assert os.getsid(worker) == session.process.session
        assert session.process.peak_rss > processes.usage_of(session.process.session).rss / 2 > 1_000_000
    assert [(r.output_len, r.input_len, r.error) for r in outcome.results] == [(3, 2, ""), (1, 2, ""), (4, 2, "")]
    assert outcome.max_concurrent == 2
    assert 0 < first_token_s < 60
    assert processes.usage_of(session.process.session).rss == 0  # the worker too


def test_what_is_paused_takes_no_processor_and_goes_on_after(engine: Any, tmp_path: Path) -> None:
    spin = "import sys, time\nwhile time.time() < float(sys.argv[1]): pass"
    with processes.Process([sys.executable, "-c", spin, str(time.time() + 60)], os.environ, tmp_path / "log") as busy:
        busy.pause()
        before = processes.usage_of(busy.session)
        time.sleep(0.2)
        assert before.rss > 0 and processes.usage_of(busy.session).cpu == before.cpu
        busy.resume()
        deadline = time.monotonic() + 20
        while processes.usage_of(busy.session).cpu == before.cpu and time.monotonic() < deadline:
            time.sleep(0.05)
        assert processes.usage_of(busy.session).cpu > before.cpu
        busy.pause()
    assert processes.usage_of(busy.session).rss == 0  # and what is paused can be ended
    with sessions.driver_session(engine(), tmp_path / "log", time_limit_s=60) as (session, _):
        session.process.pause()
        session.process.resume()
        assert session.run(Load(requests(2), 1)).results[0].success


def test_a_second_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(1, flush=True)\ntime.sleep(600)"
    log = tmp_path / "log"
    process = processes.Process([sys.executable, "-c", script], os.environ, log)
    deadline = time.monotonic() + 20
    while not log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(process.popen, "wait", interrupted)
        process.stop()
    assert process.popen.wait(20) == -signal.SIGKILL


def test_a_closed_terminal_ends_it_in_good_order(model: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        compare.main(["--model", str(model), "--peers", "openvino", "--list"])
        for number in before:
            with pytest.raises(SystemExit) as raised:
                signal.raise_signal(number)
            assert raised.value.code == 128 + number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_who_runs_without_its_library_does_not_stay(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    alive: list[list[bool]] = []
    start = rounds.session_of

    @contextmanager
    def noted(*args: Any) -> Iterator[Any]:
        with start(*args) as (session, seconds):
            started.append(session.process.session)
            yield session, seconds

    monkeypatch.setattr(rounds, "session_of", noted)
    monkeypatch.setattr(rounds, "measure", lambda *_: alive.append([processes.usage_of(s).rss > 0 for s in started]))
    fakes = [
        contestants.Contestant(
            name, False, ("bf16",), "transformers", lambda _: [], lambda _: engine(), library=library
        )
        for name, library in (("openvino", "libnothing.so"), ("jaxpaged-inprocess", ""))
    ]
    runs: list[Any] = []
    rounds.run_rounds(
        fakes, contestants.Setup(tmp_path, tmp_path, "bf16", 2048, 16, 1), ["W1"], 1, workloads.Settings(),
        time_limit_s=60, logs=tmp_path, runs=runs, save=lambda: None,
    )  # fmt: skip
    assert runs[0].error.startswith("runs without libnothing.so") and not runs[1].error
    assert alive == [[False, True]]


def test_memory_that_processes_share_counts_once(tmp_path: Path) -> None:
    script = """
import mmap, os, sys, time
shared = mmap.mmap(-1, 64 << 20)
shared.write(b"x" * len(shared))
own = b"y" * (16 << 20)
for _ in range(2):
    if os.fork() == 0:
        sum(shared[::4096])
        time.sleep(600)
print("there", flush=True)
time.sleep(600)
"""
    log = tmp_path / "log"
    with processes.Process([sys.executable, "-c", script], os.environ, log) as process:
        deadline = time.monotonic() + 20
        while "there" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        rss = processes.usage_of(process.session).rss
    # The 64 MiB count once; each child has the interpreter's pages and perhaps the other 16 MiB as its own.
    assert 80 << 20 <= rss < 180 << 20


def test_a_command_runs_on_its_processors(tmp_path: Path) -> None:
    one = sorted(os.sched_getaffinity(0))[:1]
    script = "import os; print(sorted(os.sched_getaffinity(0)))"
    command = contestants.pinned(Command([sys.executable, "-c", script]), ",".join(map(str, one)))
    with processes.Process(command.argv, os.environ, tmp_path / "log") as process:
        process.popen.wait(20)
    assert (tmp_path / "log").read_text() == f"{one}\n"
    assert contestants.Setup(tmp_path, tmp_path, "bf16", 2048, 16, 1).processors == str(one[0])


def test_requests_that_end_early_have_failed(tmp_path: Path) -> None:
    short = sessions.driver_result(Request([1], 3), 0.5, [0.7, 0.8])
    assert short.error == "2 tokens instead of 3" and not short.success
    with (
        pytest.raises(processes.StartError, match=r"first request failed: 0 tokens instead of 1|the stream ended"),
        sessions.http_session(server(missing_tokens=1), tmp_path / "log"),
    ):
        pass


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["/nowhere/vllm"], "/nowhere/vllm: No such file"),
        ([sys.executable, "-c", "import sys; sys.exit('one\\nno KV memory')"], "status 1.*\n.*one\n.*no KV memory"),
    ],
)
def test_what_does_not_start_says_why(argv: list[str], message: str, tmp_path: Path) -> None:
    for start in (
        lambda: sessions.http_session(Command(argv), tmp_path / "log"),
        lambda: sessions.driver_session(Command(argv), tmp_path / "log", 60),
    ):
        with pytest.raises(processes.StartError, match=f"(?s){message}"), start():
            pass


def test_a_library_that_breaks_under_load_says_why(engine: Any, tmp_path: Path) -> None:
    with (
        pytest.raises(processes.StartError, match=r"(?s)ended with status 1.*ValueError: out of apples"),
        sessions.driver_session(engine(crash=True), tmp_path / "log", 60),
    ):
        pass


class Slow:
    """In this process: one token a step, for the request that came first."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.queue: list[int] = []

    def add(self, index: int, prompt: list[int], output_len: int) -> None:
        self.queue += [index] * output_len

    def step(self) -> list[tuple[int, float]]:
        time.sleep(self.seconds)
        return [(self.queue.pop(0), time.perf_counter())] if self.queue else []


def test_an_open_loop_sends_at_the_arrivals() -> None:
    load = {"requests": [[[1], 1, 0.2], [[1], 1, 0.0], [[1], 1, 0.1]], "max_concurrency": None, "time_limit_s": 60}
    answer = driver.run_load(Slow(0.001), load)
    starts = [start for start, _ in answer["results"]]
    assert all(arrival <= start for start, arrival in zip(starts, (0.2, 0.0, 0.1), strict=True))
    assert starts == sorted(starts, key=[starts[1], starts[2], starts[0]].index) or starts[1] < starts[2] < starts[0]
    assert answer["duration"] >= 0.2


def test_after_the_time_limit_no_request_begins() -> None:
    load = {"requests": [[[1], 2, 0.0]] * 5, "max_concurrency": 1, "time_limit_s": 0.03}
    answer = driver.run_load(Slow(0.02), load)
    begun = [bool(times) for _, times in answer["results"]]
    assert begun == [True] * sum(begun) + [False] * (5 - sum(begun)) and 1 <= sum(begun) <= 2
    assert all((start is None) == (not times) for start, times in answer["results"])


def test_an_engine_that_gives_nothing_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "STALL_S", 0.05)
    load = {"requests": [[[1], 3, 0.0]], "max_concurrency": None, "time_limit_s": 60}
    slow = Slow(0.01)
    monkeypatch.setattr(slow, "add", lambda *_: slow.queue.append(0))
    with pytest.raises(TimeoutError, match="1 requests are running"):
        driver.run_load(slow, load)


def test_what_is_not_installed_is_skipped_with_the_remedy(tmp_path: Path) -> None:
    sections = [line.lstrip("# ") for line in (BENCH / "peers.md").read_text().splitlines() if line.startswith("## ")]
    setup = contestants.Setup(tmp_path / "smol", tmp_path, "bf16", 2048, 16, 2)
    for contestant in contestants.CONTESTANTS:
        reason = contestant.why_skipped(setup)
        assert contestant.section in sections
        assert str(tmp_path) in reason and f"{contestant.section!r}" in reason and "bench/peers.md" in reason
    setup = contestants.Setup(tmp_path, tmp_path, "int4", 2048, 16, 2)
    assert contestants.BY_NAME["vllm"].why_skipped(setup) == "has no int4; it can be compared with --dtype bf16 f32"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def two_contestants(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and a peer in process, and a server that does not start."""
    missing = Path("/nowhere/vllm")
    fakes = {
        "jaxpaged-inprocess": (False, engine(), []),
        "openvino": (False, engine(), []),
        "llama.cpp": (True, Command([sys.executable, "-c", "raise SystemExit('no such flag')"]), []),
        "vllm": (True, server(), [missing]),
    }
    for name, (is_server, command, needs) in fakes.items():
        fake = contestants.Contestant(
            name, is_server, ("bf16",), "transformers", lambda _, n=needs: n, lambda _, c=command: c
        )
        monkeypatch.setitem(contestants.BY_NAME, name, fake)


@pytest.mark.usefixtures("two_contestants")
def test_a_whole_comparison(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    names = ["jaxpaged-inprocess", "llama.cpp", "vllm", "openvino"]
    status = compare.main(
        ["--model", str(model), "--peers", *names, "--workloads", "W1", "prefix", "--repeats", "2", "--small",
         "--json", str(file)]
    )  # fmt: skip
    out = capsys.readouterr().out
    assert status == 1  # one of them failed
    content = json.loads(file.read_text())
    # Each is started once; what does not start is tried once. The second repeat begins with another.
    assert [(run["contestant"], run["repeat"], run["first_token_s"] is None) for run in content["runs"]] == [
        ("jaxpaged-inprocess", 0, False), ("llama.cpp", 0, True), ("openvino", 0, False),
        ("openvino", 1, True), ("jaxpaged-inprocess", 1, True),
    ]  # fmt: skip
    ours = content["runs"][0]["results"]["W1"]
    assert (ours["completed"], ours["failed"], ours["total_output_tokens"]) == (2, 0, 128)
    assert ours["output_throughput"] == pytest.approx(128 / ours["duration"], rel=1e-3)
    assert content["settings"]["seed"] == 0 and content["skipped"] == ["vllm bf16"]
    assert str(tmp_path) not in file.read_text()
    ratios = [
        run["results"]["W1"]["output_throughput"] / peer["results"]["W1"]["output_throughput"]
        for run, peer in ((content["runs"][0], content["runs"][2]), (content["runs"][4], content["runs"][3]))
    ]
    assert f"| openvino | bf16 | {sum(ratios) / 2:.2f}x" in out
    assert "llama.cpp bf16, repeat 1: ended with status 1; its log ends:\n    no such flag" in out
    assert "skipped vllm bf16: /nowhere/vllm is not there" in out


@pytest.mark.usefixtures("two_contestants")
def test_list_starts_nothing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--model", str(model), "--peers", "openvino", "vllm", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "openvino bf16: installed",
        "skipped vllm bf16: /nowhere/vllm is not there; install it as bench/peers.md says under 'transformers'",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plot", "x.png"], "add it to --workloads"),
        (["--max-model-len", "1024"], "1024, but the workloads need 2048"),
        (["--repeats", "0"], "must be above 0"),
        (["--rates", "2", "1"], "must rise from above 0, but are 2.0 1.0"),
        (["--latency-limit", "0.1"], "is 0.1, but W4 is compared at 0.2"),
        (["--json", "/nowhere/x.json"], "--json: the folder /nowhere is not there"),
    ],
)
def test_options_that_do_not_fit(
    model: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.parse_args(["--model", str(model), *options])
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare.parse_args(["--model", str(model / "nothing")])
    assert "has no config.json" in capsys.readouterr().err
