"""Servers of llama.cpp's RPC backend: which protocol they speak and what they offer, asked without loading anything."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.build import wheelfile
from toolkit.build.backends import build_command
from toolkit.build.wheelfile import Manifest, Wheel
from toolkit.console import MIB
from toolkit.errors import BuildError, MachineError

DEFAULT_PORT = 50052  # of llama.cpp's own server

# enum rpc_cmd of ggml-rpc.cpp; the number of HELLO is asserted there to be the same in every version.
_HELLO, _DEVICE_MEMORY, _DEVICE_COUNT = 14, 11, 15
_HELLO_BYTES = 24  # capabilities of the connection, all zero for plain TCP
_MOST_BYTES = 64  # no answer to these questions is longer
_BUILD = build_command("rpc")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """HOST:PORT of a server; IPv4, as llama.cpp reads it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @staticmethod
    def parse(text: str) -> Endpoint:
        """Raises BuildError unless `text` is HOST or HOST:PORT."""
        host, colon, port = text.partition(":")
        number = int(port) if port.isascii() and port.isdigit() else (0 if colon else DEFAULT_PORT)
        if not host or not 0 < number < 65536:
            raise BuildError(f"{text!r} is not HOST:PORT", hint=f"write it as 127.0.0.1:{DEFAULT_PORT}")
        return Endpoint(host=host, port=number)


@dataclass(frozen=True, kw_only=True)
class Device:
    """Memory of one device of a server, in bytes."""

    free: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Server:
    """What a running server says about itself. The protocol has no name of a build, only its own version."""

    endpoint: Endpoint
    protocol: str
    devices: tuple[Device, ...]


def ask(endpoint: Endpoint, *, expected: str | None = None, timeout: float = 5.0) -> Server:
    """Greet a server and ask for its devices; with `expected`, only when it speaks that version.

    A server talks to one client at a time, so one that is busy does not answer in time.
    Raises MachineError when nothing answers, when it is no RPC server, or when it speaks another version.
    """
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout=timeout) as connection:
            major, minor, patch = _ask(connection, _HELLO, bytes(_HELLO_BYTES))[:3]
            protocol = f"{major}.{minor}.{patch}"
            if expected is not None:
                require_protocol(endpoint, protocol, expected)
            (count,) = struct.unpack("<I", _ask(connection, _DEVICE_COUNT, b""))
            memory = [
                struct.unpack("<QQ", _ask(connection, _DEVICE_MEMORY, struct.pack("<I", i))) for i in range(count)
            ]
    except (ValueError, EOFError, struct.error) as e:
        raise MachineError(
            f"what answers at {endpoint} is not an RPC server of this kind: {e}",
            hint="start it from a wheel of the same version there: moe-madv rpc serve",
        ) from e
    except TimeoutError as e:
        raise MachineError(
            f"the server does not answer within {timeout:g} s",
            where=endpoint,
            hint="it serves one client at a time: end the other one, or restart it",
        ) from e
    except OSError as e:
        raise MachineError(
            f"no server answers: {e.strerror or e}",
            where=endpoint,
            hint=f"start one there: moe-madv rpc serve --port {endpoint.port}",
        ) from e
    return Server(
        endpoint=endpoint,
        protocol=protocol,
        devices=tuple(Device(free=free, total=total) for free, total in memory),
    )


def require_room(servers: Sequence[Server], nbytes: int) -> None:
    """Raises MachineError when the servers together say that they have less free memory than these weights take.

    The weights are a lower bound: cache and buffers come on top, and llama.cpp shares layers out whole.
    """
    free = [sum(device.free for device in server.devices) for server in servers]
    if sum(free) < nbytes:
        each = ", ".join(f"{server.endpoint} {n / MIB:.0f}" for server, n in zip(servers, free, strict=True))
        raise MachineError(
            f"the weights take {nbytes / MIB:.0f} MiB, the servers have {sum(free) / MIB:.0f} MiB free ({each})",
            where=", ".join(str(server.endpoint) for server in servers),
            hint="name more servers, or start them with more memory: moe-madv rpc serve --budget SIZE",
        )


def require_protocol(endpoint: Endpoint, spoken: str, expected: str) -> None:
    """Raises MachineError unless both are the same.

    llama.cpp lets an older minor or another patch version pass; the latter changes with the list of operations,
    and then a graph means something else at the other end.
    """
    if spoken != expected:
        raise MachineError(
            f"the server speaks RPC protocol {spoken}, this wheel {expected}",
            where=endpoint,
            hint=f"build both ends from one pin: {_BUILD}, and copy the wheel there",
        )


def _ask(connection: socket.socket, command: int, question: bytes) -> bytes:
    """One request and its answer: a command byte and two sizes of 8 bytes, little-endian."""
    connection.sendall(struct.pack("<BQ", command, len(question)) + question)
    (size,) = struct.unpack("<Q", _receive(connection, 8))
    if not 3 <= size <= _MOST_BYTES:
        raise ValueError(f"an answer of {size} bytes")
    return _receive(connection, size)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (piece := connection.recv(size - len(data))):
            raise EOFError("it closed the connection")
        data += piece
    return data


def rpc_wheel(home: Path, pin: str) -> Wheel:
    """The newest finished wheel of the pin that can serve. Raises BuildError when there is none."""
    found: list[Wheel] = []
    for path in (home / "wheels").glob("*/*rpc*.whl"):
        try:
            wheel = wheelfile.load(path)
        except BuildError:
            continue  # unfinished, or from another version of the toolkit
        if wheel.manifest.pin == pin and wheel.manifest.rpc_protocol:
            found.append(wheel)
    if not found:
        raise BuildError(f"there is no wheel with RPC of {pin[:9]}", where=home / "wheels", hint=_BUILD)
    return max(found, key=lambda wheel: wheel.path.stat().st_mtime)


def protocol_of(manifest: Manifest, where: Path) -> str:
    """Version the wheel speaks. Raises BuildError for a wheel without RPC."""
    if manifest.rpc_protocol is None:
        raise BuildError(f"the {manifest.backend} wheel has no RPC", where=where, hint=_BUILD)
    return manifest.rpc_protocol


def check_servers(servers: Iterable[str], manifest: Manifest, where: Path) -> list[Server]:
    """Every server, asked before a model is loaded. Raises MachineError or BuildError at the first that will not do."""
    expected = protocol_of(manifest, where)
    return [ask(Endpoint.parse(text), expected=expected) for text in servers]
