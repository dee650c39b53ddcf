"""Host memory: what there is, and what is free but still held."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path


def release_free_memory() -> None:
    """Hands memory that malloc keeps for reuse back to the system, where the C library is glibc.

    Compilation frees hundreds of megabytes a thread, and loading a program tens, in arenas that nothing would use
    again.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_bytes() -> int | None:
    """Memory that this process can still take, by the machine and its control group; None where that is not known."""
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    limits = [int(found[1]) * 1024] if found else []
    try:
        most, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        limits.append(most - used)
    except (OSError, ValueError):  # no control group, or "max"
        pass
    return min(limits, default=None)
