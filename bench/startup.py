"""Seconds from the start of `jaxpaged serve` until it answers, and its peak memory then. Linux only.

    python bench/startup.py smollm2-135m-instruct --max-num-seqs 16      (anything `jaxpaged serve` takes)

The first run compiles; run it again for a start with a warm compilation cache.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_S = 1800


def free_port() -> int:
    """A TCP port of this machine that nothing uses now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def peak_memory(pid: int) -> int:
    """Largest resident memory of a process so far, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]
    return int(kib) * 1024


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    port = free_port()
    start = time.perf_counter()
    command = [sys.executable, "-m", "jaxpaged.cli", "serve", *sys.argv[1:], "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command)
    try:
        while not is_healthy(port):
            if server.poll() is not None or time.perf_counter() - start > TIMEOUT_S:
                print("the server did not come up", file=sys.stderr)
                return 1
            time.sleep(0.1)
        print(f"ready after {time.perf_counter() - start:.1f} s, peak memory {peak_memory(server.pid) / 1e9:.2f} GB")
        return 0
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
