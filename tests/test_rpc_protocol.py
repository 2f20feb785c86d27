"""Servers of the RPC backend, asked over a real socket by what a small fake answers."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from gguf_builder import moe
from wheel_builder import manifest, raw_wheel

from toolkit.bench.wire import wire_bytes
from toolkit.build import rpc, wheelfile
from toolkit.build.rpc import DEFAULT_PORT, Device, Endpoint, Server, ask, check_servers, protocol_of, require_room
from toolkit.build.wheelfile import BuildRecord
from toolkit.cli import cli
from toolkit.config import patches_dir
from toolkit.errors import BuildError, MachineError
from toolkit.patch.series import load_series
from toolkit.patch.upstream import load_pin

HELLO_7_0_0 = bytes([7, 0, 0, 0]) + bytes(24)


@contextlib.contextmanager
def fake(answers: dict[int, bytes], clients: int = 1) -> Iterator[tuple[Endpoint, list[tuple[int, bytes]]]]:
    """A server that gives one answer per command, and ends the connection at a command it does not know.

    On the wire: a request is command (1 byte), size (8 bytes), data; an answer is size (8 bytes), data.
    """
    asked: list[tuple[int, bytes]] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for _ in range(clients):
            connection, _ = listener.accept()
            with contextlib.suppress(ConnectionError), connection, connection.makefile("rb") as stream:
                while head := stream.read(9):
                    command, size = struct.unpack("<BQ", head)
                    asked.append((command, stream.read(size)))
                    if command not in answers:
                        break
                    connection.sendall(struct.pack("<Q", len(answers[command])) + answers[command])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Endpoint(host="127.0.0.1", port=listener.getsockname()[1]), asked
        thread.join(timeout=10)
    finally:
        listener.close()


def test_a_server_is_greeted_and_asked_for_its_devices() -> None:
    answers = {14: HELLO_7_0_0, 15: struct.pack("<I", 1), 11: struct.pack("<QQ", 3 << 30, 4 << 30)}
    with fake(answers) as (endpoint, asked):
        server = ask(endpoint, expected="7.0.0")
    assert (server.protocol, server.devices) == ("7.0.0", (Device(free=3 << 30, total=4 << 30),))
    assert asked == [(14, bytes(24)), (15, b""), (11, bytes(4))]


@pytest.mark.parametrize("spoken", ["7.1.0", "7.0.1", "6.0.0"])
def test_another_version_is_refused_with_both_named(spoken: str) -> None:
    hello = bytes(map(int, spoken.split("."))) + bytes(25)
    said = f"server speaks RPC protocol {spoken}, this wheel 7.0.0"
    with fake({14: hello}) as (endpoint, asked), pytest.raises(MachineError, match=said) as e:
        ask(endpoint, expected="7.0.0")
    assert asked == [(14, bytes(24))]  # nothing else was asked
    assert "build both ends from one pin" in (e.value.hint or "")


def test_an_older_greeting_still_tells_its_version() -> None:
    """Servers of protocol 3 answer with three bytes and a padding."""
    with fake({14: bytes([3, 6, 1, 0])}) as (endpoint, _), pytest.raises(MachineError, match=r"3\.6\.1, this wheel 7"):
        ask(endpoint, expected="7.0.0")


@pytest.mark.parametrize("answer", [b"", b"H" * 200])
def test_what_is_no_such_server_is_named(answer: bytes) -> None:
    said = "is not an RPC server of this kind"
    with fake({14: answer} if answer else {}) as (endpoint, _), pytest.raises(MachineError, match=said):
        ask(endpoint)


def test_a_server_that_is_not_there_names_the_command_that_starts_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(MachineError, match="no server answers") as e:
        ask(Endpoint(host="127.0.0.1", port=port))
    assert e.value.hint == f"start one there: moe-madv rpc serve --port {port}"


def test_a_busy_server_is_not_waited_for_without_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, and never answers
        endpoint = Endpoint(host="127.0.0.1", port=listener.getsockname()[1])
        with pytest.raises(MachineError, match=r"does not answer within 0\.2 s") as e:
            ask(endpoint, timeout=0.2)
    assert "one client at a time" in (e.value.hint or "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10.0.0.2:70", ("10.0.0.2", 70)), ("node1", ("node1", DEFAULT_PORT)), ("a:65535", ("a", 65535))],
)
def test_an_endpoint_is_a_host_and_a_port(text: str, expected: tuple[str, int]) -> None:
    found = Endpoint.parse(text)
    assert (found.host, found.port) == expected
    assert Endpoint.parse(str(found)) == found


@pytest.mark.parametrize("text", ["", ":70", "a:", "a:0", "a:65536", "a:x", "::1", "a:\u0663"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(BuildError, match=r"is not HOST:PORT"):
        Endpoint.parse(text)


def test_every_server_is_asked_before_one_is_used() -> None:
    good = {14: HELLO_7_0_0, 15: struct.pack("<I", 1), 11: struct.pack("<QQ", 1, 2)}
    own = manifest(backend="rpc", rpc_protocol="7.0.0")
    newer = {14: bytes([8, 0, 0, 0]) + bytes(24)}
    with fake(good) as (first, _), fake(newer) as (second, _), pytest.raises(MachineError, match=r"8\.0\.0") as e:
        check_servers([str(first), str(second)], own, Path("x.whl"))
    assert e.value.where == str(second)


def test_a_wheel_without_rpc_is_refused_by_name() -> None:
    with pytest.raises(BuildError, match="the cpu wheel has no RPC") as e:
        protocol_of(manifest(), Path("x.whl"))
    assert e.value.hint == "moe-madv build --backend rpc --arm both"
    with pytest.raises(BuildError, match="no wheel with RPC"):
        rpc.rpc_wheel(Path("/nonexistent"), "a" * 40)


def test_servers_with_too_little_memory_for_the_weights_are_refused_with_what_each_has() -> None:
    def server(host: str, *free: int) -> Server:
        devices = tuple(Device(free=n << 20, total=n << 21) for n in free)
        return Server(endpoint=Endpoint(host=host, port=1), protocol="7.0.0", devices=devices)

    pair = [server("a", 1000), server("b", 300, 200)]
    require_room(pair, 1500 << 20)
    with pytest.raises(MachineError, match=r"take 1501 MiB, the servers have 1500 MiB free \(a:1 1000, b:1 500\)"):
        require_room(pair, (1500 << 20) + (1 << 20))


def test_servers_of_two_versions_stop_a_run_before_anything_is_installed_or_loaded(home: Path, tmp_path: Path) -> None:
    """Both versions and the server are named; the other server and the wheels are as they were."""
    pin, digest = load_pin(), load_series(patches_dir()).digest
    record = BuildRecord(seconds=1.0, objects=None, ccache_hits=None, host_flags=())
    for label, series in (("base.rpc", None), ("moe1.rpc", digest)):
        folder = home / "wheels" / label
        folder.mkdir(parents=True)
        about = manifest(label=label, backend="rpc", pin=pin.commit, series=series, rpc_protocol="7.0.0")
        wheelfile.store(raw_wheel(folder), about, record)
    model, out = tmp_path / "small.gguf", tmp_path / "run.jsonl"
    moe().write(model)
    good = {14: HELLO_7_0_0, 15: struct.pack("<I", 1), 11: struct.pack("<QQ", 1 << 40, 1 << 40)}
    with fake(good) as (same, _), fake({14: bytes([7, 1, 0, 0]) + bytes(24)}) as (newer, asked):
        words = ["--arms", "stock,hint", "--rpc", f"{same},{newer}", "-p", "2", "-n", "2", "--out", str(out)]
        done = CliRunner().invoke(cli, ["bench", "run", str(model), *words])
    assert isinstance(done.exception, MachineError), done.output
    assert done.exception.what == "the server speaks RPC protocol 7.1.0, this wheel 7.0.0"
    assert done.exception.where == str(newer)
    assert "moe-madv build --backend rpc --arm both" in (done.exception.hint or "")
    assert asked == [(14, bytes(24))]  # greeted, and asked for nothing
    assert not (home / "arms").exists()
    assert not out.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="counted by Linux")
def test_bytes_on_the_wire_are_those_of_the_connections_to_the_servers_alone() -> None:
    def echo(listener: socket.socket, answer: bytes) -> None:
        connection, _ = listener.accept()
        with connection:
            while connection.recv(1 << 16):
                connection.sendall(answer)

    with contextlib.ExitStack() as stack:
        addresses = []
        for answer in (b"a" * 500, b"b" * 70):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            threading.Thread(target=echo, args=(listener, answer)).start()
            addresses.append(listener.getsockname())
        one, two = (stack.enter_context(socket.create_connection(address)) for address in addresses)
        endpoints = [f"{host}:{port}" for host, port in addresses]
        before = wire_bytes(endpoints), wire_bytes(endpoints[:1])
        for connection, size in ((one, 500), (two, 70)):
            for _ in range(3):
                connection.sendall(b"question")
                left = size
                while left:
                    left -= len(connection.recv(left))
        after = wire_bytes(endpoints), wire_bytes(endpoints[:1])
    assert None not in (*before, *after)
    assert [b - a for a, b in zip(before, after, strict=True)] == [3 * (8 + 500) + 3 * (8 + 70), 3 * (8 + 500)]  # type: ignore[operator]
    assert wire_bytes([]) is None
    assert wire_bytes(["127.0.0.1:1"]) is None


def test_serving_needs_a_wheel_first() -> None:
    done = CliRunner().invoke(cli, ["rpc", "serve"])
    assert isinstance(done.exception, BuildError)
    assert done.exception.hint == "moe-madv build --backend rpc --arm both"
