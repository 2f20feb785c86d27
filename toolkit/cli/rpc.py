"""`moe-madv rpc`: computing on more than one machine, with llama.cpp's RPC backend."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from toolkit import config
from toolkit.bench.limits import Budget, memory_budget, parse_size
from toolkit.build import wheelfile
from toolkit.build.arms import arm_environment
from toolkit.build.rpc import DEFAULT_PORT, Endpoint, Server, ask, check_servers, protocol_of, rpc_wheel
from toolkit.build.wheelfile import Wheel
from toolkit.console import MIB, note
from toolkit.errors import CommandError, MachineError, ToolkitError
from toolkit.patch.upstream import load_pin
from toolkit.process import running

_START_SECONDS = 60  # a GPU driver can take many of them

_WHEEL = click.option(
    "--wheel",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A wheel with RPC and its manifest. Default: the newest one of the pin.",
)


@click.group()
def rpc() -> None:
    """Serve memory and cores of this machine to a model elsewhere, and look at such servers.

    \b
    Example:
      moe-madv build --backend rpc --arm both
      moe-madv rpc serve --port 50052
      moe-madv rpc check 127.0.0.1:50052
    """


@rpc.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="Default: one per core.")
@click.option("--budget", metavar="SIZE", help="Memory limit of the server, such as 1.5GiB; clients are told.")
@_WHEEL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when the server is ready.")
def serve(host: str, port: int, threads: int | None, budget: str | None, wheel: Path | None, as_json: bool) -> None:
    """Serve until interrupted. Standard output gets one line, when the server answers.

    The protocol has neither password nor encryption, so only this machine can connect by default.

    \b
    Example:
      moe-madv rpc serve --port 50052 --budget 1.5GiB
    """
    chosen = _wheel(wheel)
    expected = protocol_of(chosen.manifest, chosen.path)
    address = _address(host)
    endpoint = Endpoint(host=str(address), port=port)
    _require_free(endpoint)
    if not address.is_loopback:
        note(
            f"warning: whoever can reach {endpoint} can use this server and, through its faults, this machine: there "
            "is no password and no encryption. Use a network of your own, or stay on 127.0.0.1 and connect with "
            f"ssh -L {port}:127.0.0.1:{port} THIS-MACHINE"
        )
    python = arm_environment(chosen, config.home()).python
    script = Path(wheelfile.__file__).with_name("rpc_server.py")
    nbytes = parse_size(budget) if budget else None
    command = [str(python), "-I", str(script), endpoint.host, str(port), str(threads or os.cpu_count() or 1)]
    command.append(str(nbytes or 0))
    with memory_budget(nbytes) as limit:
        if budget and limit.nbytes is None:
            raise MachineError(
                "this machine cannot limit the memory of a server",
                where=f"--budget {budget}",
                hint="start it without --budget, or as root",
            )
        env = {"GGML_NO_BACKTRACE": "1", **os.environ}  # an abort would start a debugger and wait for it
        with running(limit.command(command), env=env, stdout=sys.stderr) as process:
            asked = endpoint if not address.is_unspecified else Endpoint(host="127.0.0.1", port=port)
            server = _when_ready(process, asked, expected, limit)
            row = {**_row(server), "endpoint": str(endpoint), "label": chosen.manifest.label, "pid": process.pid}
            click.echo(json.dumps(row) if as_json else f"{endpoint} protocol {server.protocol} {chosen.manifest.label}")
            sys.stdout.flush()
            process.wait()
            raise _ended(process, endpoint, limit)


@rpc.command()
@click.argument("servers", nargs=-1, required=True, metavar="HOST:PORT...")
@_WHEEL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def check(servers: tuple[str, ...], wheel: Path | None, as_json: bool) -> None:
    """Greet servers and compare the protocol they speak with a wheel's; fails at the first that will not do.

    \b
    Example:
      moe-madv rpc check 127.0.0.1:50052 127.0.0.1:50053 --json
    """
    chosen = _wheel(wheel)
    rows = [_row(server) for server in check_servers(servers, chosen.manifest, chosen.path)]
    if as_json:
        click.echo(json.dumps({"protocol": chosen.manifest.rpc_protocol, "servers": rows}, indent=2))
        return
    for row in rows:
        memory = ", ".join(f"{d['free'] / MIB:.0f} of {d['total'] / MIB:.0f} MiB free" for d in row["devices"])
        click.echo(f"{row['endpoint']}  protocol {row['protocol']}  {memory}")


def _wheel(path: Path | None) -> Wheel:
    return wheelfile.load(path) if path else rpc_wheel(config.home(), load_pin().commit)


def _row(server: Server) -> dict[str, Any]:
    return {**asdict(server), "endpoint": str(server.endpoint)}


def _address(host: str) -> ipaddress.IPv4Address:
    """llama.cpp binds to a number only. Raises MachineError for a name without one."""
    try:
        return ipaddress.IPv4Address(socket.gethostbyname(host))
    except (OSError, ValueError) as e:
        raise MachineError(f"{host!r} is no address of this machine: {e}", where="--host") from e


def _require_free(endpoint: Endpoint) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((endpoint.host, endpoint.port))
        except OSError as e:
            raise MachineError(
                f"cannot listen there: {e.strerror}", where=endpoint, hint="choose another --port, or end what uses it"
            ) from e


def _ended(process: subprocess.Popen[bytes], endpoint: Endpoint, limit: Budget) -> ToolkitError:
    """Why a server is gone that nobody has ended."""
    if limit.nbytes and limit.stat()["oom_kills"]:
        return MachineError(
            f"the server was killed by its memory budget of {limit.nbytes / MIB:.0f} MiB: it and what "
            "clients put there need more",
            where=endpoint,
            hint="give it a larger --budget, or name more servers to the client",
        )
    return CommandError(f"the server ended with exit code {process.returncode}", where=endpoint)


def _when_ready(process: subprocess.Popen[bytes], endpoint: Endpoint, expected: str, limit: Budget) -> Server:
    """The first answer of a server that has just been started."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            return ask(endpoint, expected=expected)
        except MachineError as e:
            if process.poll() is not None:
                raise _ended(process, endpoint, limit) from e
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
