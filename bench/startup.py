"""Seconds from the start of `jaxpaged serve` until it answers, and its memory then. Linux only.

    python bench/startup.py smollm2-135m-instruct --max-num-seqs 16      (anything `jaxpaged serve` takes)
    python bench/startup.py --parts smollm2-135m-instruct                what a start consists of

The first run compiles; run it again for a start with a warm cache. `--parts` does in one process, one after the other,
what a server does at its start; a server reads weights, loads programs and moves weights to huge pages at the same time
where there are cores for it. Processor time says more than elapsed time where other programs run.
"""

from __future__ import annotations

import argparse
import functools
import gc
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_S = 1800
# Of a part that is worth a row; a shorter one counts to the next.
LEAST_S = 0.01


def free_port() -> int:
    """A TCP port of this machine that nothing uses now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:  # of urllib, or of a server that takes the connection and says nothing
        return False


def memory(pid: int | str, name: str = "VmHWM") -> int:
    """Resident memory of a process in bytes: the most so far, or with "VmRSS" what it is now."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = next(line for line in status.splitlines() if line.startswith(f"{name}:")).split()[1]
    return int(kib) * 1024


def start_server(arguments: list[str]) -> int:
    port = free_port()
    start = time.perf_counter()
    command = [sys.executable, "-m", "jaxpaged.cli", "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command)
    try:
        while not is_healthy(port):
            if server.poll() is not None or time.perf_counter() - start > TIMEOUT_S:
                print("the server did not come up", file=sys.stderr)
                return 1
            time.sleep(0.05)
        seconds = time.perf_counter() - start
        now, peak = (memory(server.pid, name) / 1e9 for name in ("VmRSS", "VmHWM"))
        print(f"ready after {seconds:.1f} s, memory {now:.2f} GB, peak {peak:.2f} GB")
        return 0
    finally:
        server.terminate()
        server.wait()


class Parts:
    """Prints a row of the table for each part of a start."""

    def __init__(self) -> None:
        print("| part | elapsed s | processor s | memory then, MB |\n| --- | --- | --- | --- |")
        self._mark = self._now()

    def done(self, name: str) -> None:
        """`name` is what has been done since the last call."""
        elapsed, used = (now - before for now, before in zip(self._now(), self._mark, strict=True))
        if elapsed >= LEAST_S:
            print(f"| {name} | {elapsed:.2f} | {used:.2f} | {memory('self', 'VmRSS') / 1e6:.0f} |", flush=True)
            self._mark = self._now()

    def wrapped(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`function`, whose time is a part of its own; what came before it is another."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.done("sizes, options")
            result = function(*args, **kwargs)
            self.done(name)
            return result

        return call

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


def show_parts(model: str, options: dict[str, Any]) -> int:
    gc.disable()
    parts = Parts()
    import jax

    parts.done("import JAX and flax")
    import jaxpaged.engine.engine as engines
    import jaxpaged.server  # noqa: F401
    from jaxpaged.config import EngineConfig
    from jaxpaged.runner import runner

    parts.done("import jaxpaged and the HTTP server")
    jax.devices()
    parts.done("JAX's devices")
    for module, function, name in (
        (engines, "open_tokenizer", "tokenizer"),
        (engines, "load_model", "weights"),
        (runner, "make_programs", "programs, and huge pages meanwhile"),
        (runner, "KVCache", "pool"),
        (runner.Runner, "_run_all", "first run of each program"),
    ):
        setattr(module, function, parts.wrapped(getattr(module, function), name))
    engines.Engine.from_pretrained(model, EngineConfig.from_options(options))
    parts.done("scheduler and the rest")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", action="store_true", help="with the name of a model, and name=value for the engine")
    args, rest = parser.parse_known_args()
    if not rest or rest[0].startswith("-"):
        parser.print_help()
        return 2
    if args.parts:
        return show_parts(rest[0], dict(option.split("=", 1) for option in rest[1:]))
    return start_server(rest)


if __name__ == "__main__":
    sys.exit(main())
