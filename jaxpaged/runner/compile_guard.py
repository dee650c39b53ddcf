"""Counts compilations, so that serving can prove that it does none."""

from __future__ import annotations

import weakref

import jax

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


class CompileGuard:
    """Counts every program that XLA compiles, or fetches from the persistent cache, in this process.

    Attributes:
        count: since the last `reset`.
    """

    def __init__(self) -> None:
        self.count = 0
        # JAX keeps listeners for the life of the process: it must not keep the guard alive too.
        guard = weakref.ref(self)

        def on_event(event: str, duration_secs: float, **_: str | int) -> None:
            if event == _BACKEND_COMPILE and (live := guard()) is not None:
                live.count += 1

        jax.monitoring.register_event_duration_secs_listener(on_event)

    def reset(self) -> None:
        """Starts counting from 0, as after warm-up."""
        self.count = 0
