"""A folder of files that only this user can have written, for what must not be read from anyone else."""

from __future__ import annotations

import errno
import logging
import os
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

# Anything that others may do to a file or folder beside reading it.
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class PrivateFolder:
    """Files by name. What cannot be read is not there; what cannot be written is not kept, with one warning.

    Attributes:
        path: made at the first `write`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_failed = False

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none, or it or the folder is another's or others may write it."""
        try:
            if not _is_private(self.path.stat()):
                return None
            with (self.path / name).open("rb") as file:
                return file.read() if _is_private(os.fstat(file.fileno())) else None
        except OSError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """All of a file or nothing: other processes may be reading and writing the same. After one that could not be
        written no other is tried."""
        if self._has_failed:
            return
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(self.path.stat()):
                raise PermissionError(errno.EPERM, "it is another user's, or others may write to it")
            with tempfile.TemporaryDirectory(dir=self.path) as folder:
                file = Path(folder, name)
                file.touch(0o600)
                file.write_bytes(content)
                file.replace(self.path / name)
        except OSError as error:
            self._has_failed = True
            reason = error.strerror or error
            logger.warning("what makes later starts faster cannot be kept in %s: %s", self.path, reason)


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & _WRITABLE_BY_OTHERS
