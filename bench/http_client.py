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


class _Receiver(asyncio.Protocol):
    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))
        # Not every server hangs up when it is asked to.
        if data.endswith(_LAST_CHUNK) and read_answer(self.pieces).is_complete:
            self.connection_lost(None)

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
    status, is_chunked, is_complete = 0, False, False
    held, body = b"", []
    for moment, data in pieces:
        held += data
        if not status:
            head, end, rest = held.partition(b"\r\n\r\n")
            if not end:
                continue
            version, code, *_ = head.split(None, 2)
            if not version.startswith(b"HTTP/"):
                raise ValueError(f"not an answer in HTTP: {head[:80]!r}")
            status, is_chunked, held = int(code), b"\ntransfer-encoding: chunked" in head.lower(), rest
        if not is_chunked:
            body.append((moment, held))
            held = b""
            continue
        while not is_complete:
            size, end, rest = held.partition(b"\r\n")
            length = int(size.partition(b";")[0], 16) if end else 0
            if not end or len(rest) < length + 2:
                break
            if length:
                body.append((moment, rest[:length]))
            held, is_complete = rest[length + 2 :], length == 0
    if not status:
        raise ValueError("the connection ended before an answer")
    return Answer(status, body, is_complete or not is_chunked)
