"""Bytes that crossed this process's connections to RPC servers. Imports nothing of the toolkit."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
# struct tcp_info of linux/tcp.h: tcpi_bytes_acked and tcpi_bytes_received, since Linux 4.1.
_BYTES = struct.Struct("=120xQQ")


def wire_bytes(endpoints: Sequence[str]) -> int | None:
    """Payload sent and received so far over TCP connections to HOST:PORT endpoints, without headers.

    None without endpoints, and where the system does not tell: no /proc, or no connection to be found.
    """
    if not endpoints:
        return None
    peers = {(socket.gethostbyname(host), int(port)) for host, _, port in (e.partition(":") for e in endpoints)}
    counts = [count for fd in _descriptors() if (count := _of_connection(fd, peers)) is not None]
    return sum(counts) if counts else None


def _descriptors() -> list[int]:
    try:
        return [int(entry.name) for entry in _DESCRIPTORS.iterdir()]
    except OSError:
        return []


def _of_connection(fd: int, peers: set[tuple[str, int]]) -> int | None:
    try:
        if not str((_DESCRIPTORS / str(fd)).readlink()).startswith("socket:"):
            return None
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family != socket.AF_INET or connection.getpeername() not in peers:
                return None
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES.size)
        return sum(_BYTES.unpack(info))
    except (OSError, struct.error):  # the descriptor is gone, or the kernel is older
        return None
