"""A contestant's process: in a session of its own, watched (memory, processor time), always ended. Linux only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
TICK = 1 / os.sysconf("SC_CLK_TCK")
SAMPLE_S = 0.5
# For the first process to end after it was asked, and for those that it leaves behind.
TERMINATE_S = 20.0
WORKERS_S = 2.0
LOG_LINES = 25


class StartError(RuntimeError):
    """It did not start, or ended too early; the message has the end of its log."""


@dataclass(frozen=True)
class Usage:
    """Of all processes of a session together.

    Attributes:
        rss: resident bytes. What files and shared memory hold counts as in the process that has most of it, so that
            a library which several processes map counts once.
        cpu: seconds of processor time so far, of children that have ended too.
    """

    rss: int
    cpu: float


def usage_of(session: int) -> Usage:
    """Of all processes of a session; memory that they share counts once, processor time also of children that ended."""
    private, shared, cpu = 0, 0, 0.0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name, in parentheses, may hold blanks: fields are counted from behind it, the state being the third.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) != session:
                continue
            resident, with_others = (int(pages) * PAGE for pages in (entry / "statm").read_text().split()[1:3])
        except (FileNotFoundError, ProcessLookupError):
            continue
        private += resident - with_others
        shared = max(shared, with_others)
        cpu += sum(map(int, fields[11:15])) * TICK
    return Usage(private + shared, cpu)


def machine_cpu() -> tuple[float, float]:
    """Seconds that the processors have been busy, and seconds that the host took away ("steal"), since boot."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) * TICK, steal * TICK


class OtherLoad:
    """How many processors the rest of the machine took since this was made: beside others a figure counts little."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._start = time.perf_counter()
        self._own = self._own_cpu()
        self._busy, self._stolen = machine_cpu()

    def _own_cpu(self) -> float:
        return usage_of(self._session).cpu + time.process_time()

    def read(self) -> dict[str, float]:
        seconds = time.perf_counter() - self._start
        busy, stolen = machine_cpu()
        others = (busy - self._busy) - (self._own_cpu() - self._own)
        return {"other_cpus": max(0.0, others) / seconds, "stolen_cpus": (stolen - self._stolen) / seconds}


class Process:
    """A command in a session of its own, its output in a log; `with` ends all that it started.

    Attributes:
        peak_rss: most resident bytes of the session seen so far.
        started: reading of `time.perf_counter` just before.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, *, pipe: bool = False) -> None:
        """With `pipe` the process's standard input and output are `self.popen.stdin` and `stdout`, as text.

        Raises:
            StartError: there is no such program.
        """
        self._log = log
        self.peak_rss = 0
        self.started = time.perf_counter()
        self._ended = threading.Event()
        self._paused = threading.Event()
        with log.open("wb") as output:
            try:
                self.popen = subprocess.Popen(
                    list(command),
                    stdin=subprocess.PIPE if pipe else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if pipe else output,
                    stderr=output,
                    env=dict(env),
                    text=True,
                    start_new_session=True,
                )
            except OSError as error:
                raise StartError(f"{command[0]}: {error.strerror}") from error
        self._watch = threading.Thread(target=self._sample, daemon=True)
        self._watch.start()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def session(self) -> int:
        return self.popen.pid

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            if not self._paused.is_set():
                self.peak_rss = max(self.peak_rss, usage_of(self.session).rss)

    def pause(self) -> None:
        """Stops all processes of the session where they are: they keep their memory and use no processor."""
        self._paused.set()
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undoes `pause`; without effect on what is not paused."""
        self._signal(signal.SIGCONT)
        self._paused.clear()

    def _signal(self, number: signal.Signals) -> None:
        # By process, not by group: a server may put its workers into groups of their own.
        for pid in _members(self.session):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def log_tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LOG_LINES:])

    def failure(self, what: str) -> StartError:
        """`what` with the end of the log below it."""
        return StartError(f"{what}; its log ends:\n{self.log_tail()}")

    def check(self) -> None:
        """Raises:
        StartError: it has ended.
        """
        if (code := self.popen.poll()) is not None:
            raise self.failure(f"ended with status {code}")

    def has_mapped(self, library: str) -> bool:
        """Whether any process of the session has a file into memory whose path holds `library`."""
        for pid in _members(self.session):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if library in Path(f"/proc/{pid}/maps").read_text():
                    return True
        return False

    def stop(self) -> None:
        """Asks the first process to end, waits for all, then kills whatever is left of the session."""
        self._ended.set()
        self._watch.join()
        try:
            if self.popen.poll() is None:
                self.resume()
                self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(TERMINATE_S)
            self._wait_for_workers()
        finally:  # also when a second Ctrl-C ends the waiting
            self._signal(signal.SIGKILL)
        self.popen.wait()
        self._wait_for_workers()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _wait_for_workers(self) -> None:
        deadline = time.monotonic() + WORKERS_S
        while usage_of(self.session).rss and time.monotonic() < deadline:
            time.sleep(0.05)


def _members(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    members.append(int(entry.name))
            except ProcessLookupError:
                continue
    return members
