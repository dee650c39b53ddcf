"""The address that a server takes, before it listens on it."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from jaxpaged.errors import ConfigError
from jaxpaged.server.config import ServerConfig

# Time that a server which still listens on a Unix socket has to answer.
_PROBE_S = 1.0


def bind(config: ServerConfig) -> list[socket.socket]:
    """Takes the server's address, so that one in use is known at once; clients are refused until somebody listens.

    Returns:
        One bound socket, or one for each address that the host's name stands for.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        return [_bind_unix(config.uds)] if config.uds is not None else _bind_tcp(config.host, config.port)
    except OSError as error:
        raise cannot_listen(config, error) from error


def cannot_listen(config: ServerConfig, error: OSError) -> ConfigError:
    address = f"unix:{config.uds}" if config.uds is not None else f"{config.host}:{config.port}"
    return ConfigError(f"cannot listen on {address}: {error.strerror or error}; choose another address")


def _bind_unix(path: str) -> socket.socket:
    if Path(path).is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_S)
            try:
                probe.connect(path)
            except ConnectionRefusedError:  # left behind by a server that has ended
                Path(path).unlink()
    sock = socket.socket(socket.AF_UNIX)
    return _bound(sock, path)


def _bind_tcp(host: str, port: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        try:
            sock = socket.socket(family, kind, protocol)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sockets.append(_bound(sock, address))
        except OSError as error:
            # "localhost" stands for an IPv6 address on machines that have none.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for taken in sockets:
                    taken.close()
                raise
            missing = error
    if not sockets and missing is not None:
        raise missing
    return sockets


def _bound(sock: socket.socket, address: object) -> socket.socket:
    try:
        sock.bind(address)  # type: ignore[arg-type]
    except OSError:
        sock.close()
        raise
    return sock
