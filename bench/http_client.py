"""An HTTP client that takes next to no time from a server on the same machine: it notes what comes, and when.

What was noted is read later, when nobody is measured any more. Each request has a connection of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

# Bytes, and when they came: seconds of the performance counter.
Piece = tuple[float, bytes]
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True)
class Answer:
    """Attributes:
    body: as the chunks came.
    is_complete: whether the server said that this is all; where it says nothing of a length, the connection's end does.
    """

    status: int
    body: list[Piece]
    is_complete: bool

    @property
    def text(self) -> str:
        return b"".join(data for _, data in self.body).decode(errors="replace")


@dataclass(frozen=True)
class HTTPClient:
    """Attributes:
    headers: of every request.
    timeout_s: seconds that a request may take in all.
    """

    timeout_s: float
    headers: Mapping[str, str] = field(default_factory=dict)

    async def request(self, method: str, url: str, body: bytes = b"") -> list[Piece]:
        """All that is received, for `read_answer`.

        Raises:
            OSError, TimeoutError: no connection, or it broke off, or it took too long.
        """
        parts = urlsplit(url)
        is_secure = parts.scheme == "https"
        async with asyncio.timeout(self.timeout_s):
            transport, receiver = await asyncio.get_running_loop().create_connection(
                _Receiver, parts.hostname or "", parts.port or (443 if is_secure else 80), ssl=is_secure or None
            )
            try:
                headers = {
                    "Host": parts.netloc.rpartition("@")[2],
                    "Content-Type": "application/json",
                    "Content-Length": str(len(body)),
                    "Connection": "close",
                    **self.headers,
                }
                target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
                transport.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
                await receiver.ended
            finally:
                transport.abort()
        return receiver.pieces


@dataclass(frozen=True)
class _Head:
    """Of an answer.

    Attributes:
        size: bytes, the empty line included.
        length: bytes of the body; None where the server does not say, or sends chunks.
    """

    status: int
    size: int
    is_chunked: bool
    length: int | None

    @classmethod
    def of(cls, data: bytes) -> _Head | None:
        """None: not all of it has come.

        Raises:
            ValueError: it is not HTTP.
        """
        head, end, _ = data.partition(b"\r\n\r\n")
        if not end:
            return None
        first, *lines = head.split(b"\r\n")
        version, code, *_ = [*first.split(None, 2), b""]
        if not version.startswith(b"HTTP/"):
            raise ValueError(f"not an answer in HTTP: {head[:80]!r}")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        is_chunked = fields.get(b"transfer-encoding", b"").lower().endswith(b"chunked")
        length = None if is_chunked else fields.get(b"content-length")
        return cls(int(code), len(head) + 4, is_chunked, None if length is None else int(length))


class _Receiver(asyncio.Protocol):
    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head: _Head | None = None
        self._size = 0
        self._tail = b""

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))
        self._size += len(data)
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        # Not every server hangs up when it is asked to.
        if self._is_over():
            self.connection_lost(None)

    def _is_over(self) -> bool:
        try:
            self._head = self._head or _Head.of(b"".join(data for _, data in self.pieces))
            if self._head is None:
                return False
            if self._head.is_chunked:
                return self._tail == _LAST_CHUNK and read_answer(self.pieces).is_complete
        except ValueError:  # whoever reads the pieces is told
            return True
        return self._head.length is not None and self._size >= self._head.size + self._head.length

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


def read_answer(pieces: Sequence[Piece]) -> Answer:
    """What the server has answered, without the framing of HTTP/1.1; a chunk's time is that of its last byte.

    Raises:
        ValueError: it is not HTTP, or ended before the answer began.
    """
    head: _Head | None = None
    held, body, is_last = b"", [], False
    for moment, data in pieces:
        held += data
        if head is None:
            head = _Head.of(held)
            if head is None:
                continue
            held = held[head.size :]
        if not head.is_chunked:
            body.append((moment, held))
            held = b""
            continue
        while not is_last:
            size, end, rest = held.partition(b"\r\n")
            length = int(size.partition(b";")[0], 16) if end else 0
            if not end or len(rest) < length + 2:
                break
            if length:
                body.append((moment, rest[:length]))
            held, is_last = rest[length + 2 :], length == 0
    if head is None:
        raise ValueError("the connection ended before an answer")
    is_whole = head.length is None or sum(len(data) for _, data in body) >= head.length
    return Answer(head.status, body, is_last if head.is_chunked else is_whole)
