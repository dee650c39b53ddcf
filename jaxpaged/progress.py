"""Progress bars on stderr, for work that takes long: compiling, generating."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future, as_completed
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def as_they_finish(futures: Collection[Future], title: str) -> Iterator[Future]:
    """The futures as they finish, under a progress bar where stderr is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        yield from bar.track(as_completed(futures), total=len(futures))


class GenerationProgress:
    """Requests done and output tokens/s, on stderr; nothing at all unless `shown`."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self.shown = shown
        self._bar = Progress(
            TextColumn("Generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not shown,
        )
        self._task = self._bar.add_task("", total=total, rate=0.0)
        self._start = time.perf_counter()
        self._first_tokens: int | None = None

    def update(self, num_done: int, generated_tokens_total: int) -> None:
        """Takes the requests done so far and the engine's count of tokens generated since its own start."""
        if self._first_tokens is None:
            self._first_tokens = generated_tokens_total
        elapsed = time.perf_counter() - self._start
        rate = (generated_tokens_total - self._first_tokens) / elapsed
        self._bar.update(self._task, completed=num_done, rate=rate)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()
