"""More than one machine on one: network namespaces, and an RPC server with a memory of its own in each."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.bench import cgroup
from toolkit.errors import CommandError, MachineError
from toolkit.process import run

_PATH = {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
_STOP_SECONDS = 30
_HOSTS = 4


@dataclass(frozen=True, kw_only=True)
class Host:
    """A network of its own with one address, reachable from here."""

    enter: tuple[str, ...]  # command that runs another one there
    address: str
    link: str  # our end of the wire to it

    def wire_bytes(self) -> int:
        """Bytes that went over the wire since it is there, both ways, headers of packets included."""
        counts = Path("/sys/class/net") / self.link / "statistics"
        return sum(int((counts / name).read_text(encoding="ascii")) for name in ("rx_bytes", "tx_bytes"))


@contextlib.contextmanager
def host(number: int) -> Iterator[Host]:
    """Host `number`, 0 to 3, gone at the end. Raises MachineError where there are no network namespaces."""
    if sys.platform != "linux" or os.geteuid() != 0 or not all(map(_which, ("ip", "nsenter"))):
        raise MachineError(
            "network namespaces need Linux, root, ip and nsenter",
            hint="run the command as root; sudo apt-get install -y iproute2 util-linux",
        )
    name, link = f"moe-rpc-{os.getpid()}-{number}", f"moe{os.getpid() % 100000}n{number}"
    # a network of four addresses, not that of another process that does the same
    first = ipaddress.IPv4Address("10.203.0.0") + 4 * ((os.getpid() * _HOSTS + number) % (1 << 14))
    near, far = first + 1, first + 2
    with contextlib.ExitStack() as stack:
        try:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)  # the pair of links goes with it
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("address", "add", f"{near}/30", "dev", link)
            _ip("link", "set", link, "up")
            _ip("-n", name, "address", "add", f"{far}/30", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        except CommandError as e:
            raise MachineError(f"no network namespace can be made: {e.what}", where=e.where) from e
        # not `ip netns exec`: it mounts another /sys, without the memory groups
        yield Host(enter=("nsenter", f"--net=/run/netns/{name}"), address=str(far), link=link)


@dataclass(frozen=True, kw_only=True)
class Server:
    """An RPC server that answers, started as a person would."""

    endpoint: str
    protocol: str
    memory: int  # bytes it says it has
    pid: int  # of the process that holds the weights
    process: subprocess.Popen[bytes]
    log: Path

    def peak_bytes(self) -> int | None:
        """Most memory that its group has held, file pages included; None once it is gone, or where nothing tells."""
        hierarchy = cgroup.Hierarchy.find(cgroup.ROOT)
        if hierarchy is None:
            return None
        name = "memory.max_usage_in_bytes" if hierarchy.version == 1 else "memory.peak"
        try:
            return cgroup.number(hierarchy.path_of(self.pid, cgroup.PROC)[0] / name)
        except OSError:
            return None

    def wait(self) -> tuple[int, str]:
        """Exit code and words of one that ends by itself."""
        return self.process.wait(timeout=_STOP_SECONDS), self.words()

    def words(self) -> str:
        """All that it has said so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def server(enter: Sequence[str], *options: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """`moe-madv rpc serve` with these options, after `enter`, ended when we leave; `env` is added to our environment.

    Raises CommandError with its words when it does not start.
    """
    command = [*enter, sys.executable, "-m", "toolkit", "rpc", "serve", "--json", *options]
    with tempfile.TemporaryDirectory(prefix="moe-madv-rpc-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as sink:
            full = {**os.environ, **(env or {})}
            process = subprocess.Popen(command, env=full, stdout=subprocess.PIPE, stderr=sink)
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            if not said:
                words = log.read_text(encoding="utf-8", errors="replace").strip()
                raise CommandError(f"the server did not start:\n{words}", where=" ".join(command))
            row = json.loads(said)
            yield Server(
                endpoint=row["endpoint"],
                protocol=row["protocol"],
                memory=sum(device["total"] for device in row["devices"]),
                pid=row["pid"],
                process=process,
                log=log,
            )
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=_STOP_SECONDS)
            process.stdout.close()


def _which(program: str) -> str | None:
    return shutil.which(program, path=_PATH["PATH"])


def _ip(*words: str) -> None:
    run(["ip", *words], env=_PATH)
