"""One model over two servers, each in a network of its own and with less memory than the model."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from toolkit import results
from toolkit.bench import limits
from toolkit.bench.launch import Outcome, job_of, launch
from toolkit.bench.plan import Arm, Conditions
from toolkit.bench.select import arm_of_wheel
from toolkit.build.backends import get_backend
from toolkit.build.buildplan import plan_build
from toolkit.build.wheel import build_wheel
from toolkit.build.wheelcheck import check_wheel
from toolkit.build.wheelfile import Wheel
from toolkit.config import patches_dir
from toolkit.console import MIB
from toolkit.errors import MachineError
from toolkit.model.layout import read_model
from toolkit.model.shape import PRESETS, routing
from toolkit.model.synth import Synth
from toolkit.patch.patching import apply
from toolkit.patch.series import load_series
from toolkit.patch.upstream import arm_tree, load_pin, pristine

pytestmark = pytest.mark.build

BUDGET = 190 * MIB  # of a server; the model below has 216 MiB of experts
CONDITIONS = Conditions(blocks=1, n_batch=512, n_ubatch=512, cold=False, n_threads=2)
TOKENS = [7919 * i % 4000 for i in range(20)]


@pytest.fixture(scope="module")
def rpc_wheels(real_home: Path) -> dict[str, Wheel]:
    pin, series = load_pin(), load_series(patches_dir())
    apply(series, arm_tree(pin, "patched", real_home).llama, pin.commit)
    backend = get_backend("rpc")
    return {
        "baseline": build_wheel(plan_build("baseline", backend, pin, None, real_home)),
        "patched": build_wheel(plan_build("patched", backend, pin, series, real_home)),
    }


@pytest.fixture(scope="module")
def model(real_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = replace(PRESETS["tiny"], layers=8, experts=64, embd=512, ff=512)
    shape, trace = routing(shape, None, 0)
    out = tmp_path_factory.mktemp("rpc") / "wide.gguf"
    vocab = pristine(load_pin(), real_home).llama / "models" / "ggml-vocab-qwen2.gguf"
    Synth(shape, trace, vocab=vocab, seed=0, preset="tiny").write(out, force=False, advance=lambda _: None)
    return out


@dataclass(frozen=True, kw_only=True)
class Host:
    """A network namespace with one address, reachable from here."""

    enter: tuple[str, ...]  # command that runs another one there
    address: str


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    if sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter"))):
        pytest.skip("network namespaces need root, ip and nsenter")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_host(number)) for number in (1, 2)]


@contextlib.contextmanager
def _host(number: int) -> Iterator[Host]:
    name, link = f"moe-rpc-{os.getpid()}-{number}", f"moe{os.getpid() % 100000}n{number}"
    near, far = f"10.203.{number}.1", f"10.203.{number}.2"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as e:
        pytest.skip(f"no network namespaces here: {e.stderr.decode().strip()}")
    try:
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("address", "add", f"{near}/30", "dev", link)
        ip("link", "set", link, "up")
        ip("-n", name, "address", "add", f"{far}/30", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        # not `ip netns exec`: it mounts another /sys, without the memory groups
        yield Host(enter=("nsenter", f"--net=/run/netns/{name}"), address=far)
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False)  # the pair of links goes with it


@contextlib.contextmanager
def server(wheel: Wheel, host: Host, home: Path, *options: str) -> Iterator[str]:
    """A server in a host, by the command a person types; yields its endpoint once it answers."""
    command = [*host.enter, sys.executable, "-m", "toolkit", "rpc", "serve", "--json"]
    command += ["--host", host.address, "--wheel", str(wheel.path), "--threads", "1", *options]
    env = {**os.environ, "MOE_MADV_HOME": str(home)}
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        said = process.stdout.readline()
        assert said, process.stderr.read()
        row = json.loads(said)
        assert (row["protocol"], len(row["devices"])) == (wheel.manifest.rpc_protocol, 1)
        yield row["endpoint"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def decode(arm: Arm, model: Path, rpc: Sequence[str] = ()) -> Outcome:
    job = job_of(read_model(model), CONDITIONS, len(TOKENS)) | {"tokens": TOKENS, "n_prompt": 12}
    with limits.memory_budget(None) as unlimited:
        return launch(replace(arm, rpc=tuple(rpc)), job, unlimited)


def test_the_wheels_of_both_arms_can_serve(rpc_wheels: dict[str, Wheel]) -> None:
    base, patched = rpc_wheels["baseline"].manifest, rpc_wheels["patched"].manifest
    assert (base.label, patched.label) == ("base.rpc", "moe1.rpc")
    assert base.defines == patched.defines
    assert base.rpc_protocol == patched.rpc_protocol
    assert (base.rpc_protocol or "").count(".") == 2
    for wheel in rpc_wheels.values():
        assert "libggml-rpc.so" in wheel.manifest.libraries
        assert check_wheel(wheel.path).problems == ()


def test_two_servers_decode_what_neither_could_hold(
    rpc_wheels: dict[str, Wheel], hosts: list[Host], model: Path, real_home: Path
) -> None:
    if limits.detect().name == "none":
        pytest.skip("this machine cannot limit memory")
    wheel = rpc_wheels["patched"]
    (arm,) = [arm_of_wheel("rpc", wheel.path, [], real_home)]
    local = decode(arm, model)
    assert local.reason is None
    budget = ("--budget", str(BUDGET))
    with server(wheel, hosts[0], real_home, *budget) as one, server(wheel, hosts[1], real_home, *budget) as two:
        spread = decode(arm, model, [one, two])
    assert spread.reason is None
    assert spread.loaded is not None
    assert [name for name in spread.loaded["buffers"] if name.startswith("RPC")] == [f"RPC0[{one}]", f"RPC0[{two}]"]
    # bit for bit what one process computes
    for here, there in zip(local.tests, spread.tests, strict=True):
        assert there["logits_sha256"] == here["logits_sha256"]
        assert there["greedy"] == here["greedy"]
        assert here["wire_bytes"] is None
    # every token sends at least its embedding to the first server, from there to the second, and gets its logits back
    prompt, generated = spread.tests
    width = 512 * 4
    assert generated["wire_bytes"] >= 8 * (3 * width + 4096 * 4)
    assert prompt["wire_bytes"] >= 12 * 3 * width + 4096 * 4

    with server(wheel, hosts[0], real_home, *budget) as alone:
        failed = decode(arm, model, [alone])
    assert (failed.reason or "").startswith("ended by SIGABRT")  # llama.cpp's answer to a server that is gone


def test_a_server_is_for_this_machine_alone_unless_asked(rpc_wheels: dict[str, Wheel], real_home: Path) -> None:
    options = ("--wheel", str(rpc_wheels["patched"].path))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    here = Host(enter=(), address="127.0.0.1")
    with server(rpc_wheels["baseline"], here, real_home, "--port", str(port)) as endpoint:
        assert endpoint == f"127.0.0.1:{port}"
        (row,) = json.loads(_rpc(real_home, "check", endpoint, "--json", *options).stdout)["servers"]
        assert row["endpoint"] == endpoint
        assert row["devices"][0]["total"] > 0
        # the port is taken: a second server says so and does not start
        second = _rpc(real_home, "serve", "--port", str(port), *options)
        assert second.returncode == MachineError.exit_code
        assert "cannot listen there" in second.stderr


def test_a_comparison_says_which_arm_is_distributed_and_what_crossed_the_wire(
    rpc_wheels: dict[str, Wheel], tiny: Path, real_home: Path, tmp_path: Path
) -> None:
    here, out = Host(enter=(), address="127.0.0.1"), tmp_path / "run.jsonl"
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(str(free.getsockname()[1]))
    wheel = rpc_wheels["patched"]
    with (
        server(wheel, here, real_home, "--port", ports[0]) as one,
        server(wheel, here, real_home, "--port", ports[1]) as two,
    ):
        words = ["bench", "run", str(tiny), "--arms", "stock", "--rpc", f"{one},{two}", "--out", str(out), "--json"]
        words += ["-p", "8", "-n", "4", "-t", "2", "--blocks", "2"]
        done = _toolkit(real_home, *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["comparisons"]
    assert {(c["baseline"], c["candidate"], c["outputs_equal"]) for c in found} == {("stock", "rpc", True)}
    (run,) = results.read([out])
    assert {name: arm["label"] for name, arm in run.header["arms"].items()} == {"stock": "base.rpc", "rpc": "moe1.rpc"}
    assert run.header["arms"]["rpc"]["rpc"] == [one, two]
    assert "rpc" not in run.header["arms"]["stock"]
    for sample in run.samples:
        if sample["arm"] == "stock":
            assert sample["wire_bytes_per_token"] is None
        else:  # at least the embedding there and on
            assert sample["wire_bytes_per_token"] > 3 * 256 * 4


def _rpc(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return _toolkit(home, "rpc", *words)


def _toolkit(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolkit", *words]
    env = {**os.environ, "MOE_MADV_HOME": str(home)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)
