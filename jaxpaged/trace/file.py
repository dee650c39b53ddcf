"""A trace file that grows no larger than it may."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from jaxpaged.config import MIB, format_size
from jaxpaged.trace.format import Header, Record, TraceError
from jaxpaged.trace.recorder import Recorder

if TYPE_CHECKING:
    from jaxpaged.engine.engine import Engine

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 64 * MIB
# How old what is not in the file yet may be, when the process is killed.
FLUSH_S = 0.5


class TraceFile:
    """Takes records until it has `max_bytes`, or the disk is full; then it says so in the log and takes no more.

    Args:
        path: overwritten where it exists.

    Raises:
        TraceError: it cannot be written.
    """

    def __init__(self, path: str | Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.path = Path(path)
        self._room = self._max_bytes = max_bytes
        self._flushed = time.monotonic()
        try:
            self._file = self.path.open("w", encoding="ascii", newline="\n")
        except OSError as error:
            raise self._cannot_write(error) from error

    def begin(self, header: Header) -> None:
        """Writes the header; before any record."""
        self._write(header.to_json())

    def write(self, record: Record) -> None:
        """Takes a record; never raises: what is being recorded goes on without its trace."""
        if self._file.closed:
            return
        try:
            self._write(record.to_json())
            now = time.monotonic()
            if record.idle or now - self._flushed > FLUSH_S:
                self._file.flush()
                self._flushed = now
        except OSError as error:
            logger.error("%s; nothing more is recorded", self._cannot_write(error))
            self._give_up()

    def close(self) -> None:
        """
        Raises:
            TraceError: the last records cannot be written.
        """
        try:
            self._file.close()
        except OSError as error:
            raise self._cannot_write(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _write(self, line: str) -> None:
        self._room -= len(line) + 1
        if self._room < 0:
            logger.warning(
                "the trace %s is at its limit of %s; nothing more is recorded", self.path, format_size(self._max_bytes)
            )
            self._give_up()
            return
        self._file.write(line + "\n")

    def _give_up(self) -> None:
        try:
            self._file.close()
        except OSError:
            logger.debug("the end of %s is lost", self.path, exc_info=True)

    def _cannot_write(self, error: OSError) -> TraceError:
        return TraceError(f"cannot write the trace {self.path}: {error.strerror or error}")


@contextmanager
def recording(engine: Engine, file: TraceFile | None) -> Iterator[None]:
    """While it is open, the steps of `engine` go to `file`, if there is one."""
    if file is None:
        yield
        return
    now = time.time()
    file.begin(Header.of(engine.cache_config, model=engine.model_name, started=round(now, 3)))
    recorder = Recorder(file.write, by_priority=engine.scheduler_config.policy == "priority")
    engine.observers.append(recorder)
    try:
        yield
    finally:
        engine.observers.remove(recorder)
