"""One model over two servers, each in a network of its own and with less memory than the model."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit import results
from toolkit.bench import limits, netlab
from toolkit.bench.launch import Outcome, job_of, launch
from toolkit.bench.netlab import Host, Server
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


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with contextlib.ExitStack() as stack:
        try:
            yield [stack.enter_context(netlab.host(number)) for number in (1, 2)]
        except MachineError as e:
            pytest.skip(e.what)


@contextlib.contextmanager
def server(wheel: Wheel, host: Host | None, home: Path, *options: str) -> Iterator[Server]:
    """A server in a host, or here, of this wheel."""
    where = ("--host", host.address) if host else ()
    words = (*where, "--wheel", str(wheel.path), "--threads", "1", *options)
    with netlab.server(host.enter if host else (), *words, env={"MOE_MADV_HOME": str(home)}) as found:
        assert found.protocol == wheel.manifest.rpc_protocol
        yield found


def decode(
    arm: Arm, model: Path, rpc: Sequence[Server] = (), on_test: Callable[[str], None] = lambda _: None
) -> Outcome:
    job = job_of(read_model(model), CONDITIONS, len(TOKENS)) | {"tokens": TOKENS, "n_prompt": 12}
    with limits.memory_budget(None) as unlimited:
        return launch(replace(arm, rpc=tuple(each.endpoint for each in rpc)), job, unlimited, on_test)


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
    on_the_links: list[int] = []

    def count(_test: str) -> None:
        on_the_links.append(sum(host.wire_bytes() for host in hosts))

    with server(wheel, hosts[0], real_home, *budget) as one, server(wheel, hosts[1], real_home, *budget) as two:
        # what clients share layers out by: the budget, not the memory of the machine
        assert [each.memory for each in (one, two)] == [BUDGET, BUDGET]
        spread = decode(arm, model, [one, two], count)
        peaks = [each.peak_bytes() for each in (one, two)]
    assert spread.reason is None
    assert spread.loaded is not None
    places = {f"RPC0[{each.endpoint}]" for each in (one, two)}
    assert {name for name in spread.loaded["buffers"] if name.startswith("RPC")} == places
    # bit for bit what one process computes
    for here, there in zip(local.tests, spread.tests, strict=True):
        assert there["logits_sha256"] == here["logits_sha256"]
        assert there["greedy"] == here["greedy"]
        assert here["wire_bytes"] is None
    # each held a part that the other could not have held too
    assert all(peak is not None and BUDGET // 2 < peak <= BUDGET for peak in peaks)
    # every token sends at least its embedding to the first server, from there to the second, and gets its logits back
    prompt, generated = spread.tests
    width = 512 * 4
    assert generated["wire_bytes"] >= 8 * (3 * width + 4096 * 4)
    assert prompt["wire_bytes"] >= 12 * 3 * width + 4096 * 4
    # what the links counted between the ends of both tests: the same with headers, and nothing else ran there
    assert generated["wire_bytes"] <= on_the_links[1] - on_the_links[0] <= 1.2 * generated["wire_bytes"]

    with server(wheel, hosts[0], real_home, *budget) as alone:
        failed = decode(arm, model, [alone])
        code, said = alone.wait()
    assert failed.reason is not None
    assert failed.reason.startswith(f"no RPC server answers any more at {alone.endpoint}; what it said last is why")
    assert "ended by SIGABRT" in failed.reason.splitlines()[0]
    assert "Thread" not in failed.reason  # no debugger has added its own words
    assert code == MachineError.exit_code
    assert "killed by its memory budget of 190 MiB" in said


def test_a_run_on_too_little_memory_is_refused_before_anything_is_loaded(
    rpc_wheels: dict[str, Wheel], model: Path, real_home: Path, tmp_path: Path
) -> None:
    if limits.detect().name == "none":
        pytest.skip("this machine cannot limit memory")
    options = ("--port", str(_free_port()), "--budget", str(BUDGET))
    with server(rpc_wheels["patched"], None, real_home, *options) as small:
        out = tmp_path / "run.jsonl"
        done = _toolkit(
            real_home, "bench", "run", str(model), "--arms", "stock", "--rpc", small.endpoint, "--out", str(out)
        )
    assert done.returncode == MachineError.exit_code
    assert "the servers have" in done.stderr
    assert small.endpoint in done.stderr
    assert not out.exists()


def test_a_server_is_for_this_machine_alone_unless_asked(rpc_wheels: dict[str, Wheel], real_home: Path) -> None:
    options = ("--wheel", str(rpc_wheels["patched"].path))
    port = str(_free_port())
    with server(rpc_wheels["baseline"], None, real_home, "--port", port) as found:
        assert found.endpoint == f"127.0.0.1:{port}"
        (row,) = json.loads(_rpc(real_home, "check", found.endpoint, "--json", *options).stdout)["servers"]
        assert row["endpoint"] == found.endpoint
        assert row["devices"][0]["total"] > 0
        # the port is taken: a second server says so and does not start
        second = _rpc(real_home, "serve", "--port", port, *options)
        assert second.returncode == MachineError.exit_code
        assert "cannot listen there" in second.stderr


def test_a_comparison_says_which_arm_is_distributed_and_what_crossed_the_wire(
    rpc_wheels: dict[str, Wheel], tiny: Path, real_home: Path, tmp_path: Path
) -> None:
    out, wheel = tmp_path / "run.jsonl", rpc_wheels["patched"]
    ports = [str(_free_port()) for _ in range(2)]
    with (
        server(wheel, None, real_home, "--port", ports[0]) as first,
        server(wheel, None, real_home, "--port", ports[1]) as second,
    ):
        one, two = first.endpoint, second.endpoint
        words = ["bench", "run", str(tiny), "--arms", "stock", "--rpc", f"{one},{two}", "--out", str(out), "--json"]
        words += ["-p", "8", "-n", "4", "-t", "2", "--blocks", "2"]
        done = _toolkit(real_home, *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["comparisons"]
    samples = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines() if '"sample"' in line]
    assert {(c["baseline"], c["candidate"], c["outputs_equal"]) for c in found} == {("stock", "rpc", True)}
    for comparison in found:
        assert (comparison["baseline_servers"], comparison["candidate_servers"]) == ([], [one, two])
        # the mean over the samples of the file
        expected = [s["wire_bytes_per_token"] for s in samples if s["test"] == comparison["test"] and s["arm"] == "rpc"]
        assert comparison["candidate_wire_bytes_per_token"] == pytest.approx(sum(expected) / len(expected))
        assert comparison["baseline_wire_bytes_per_token"] is None
    (run,) = results.read([out])
    assert {name: arm["label"] for name, arm in run.header["arms"].items()} == {"stock": "base.rpc", "rpc": "moe1.rpc"}
    assert run.header["arms"]["rpc"]["rpc"] == [one, two]
    assert run.header["arms"]["rpc"]["rpc_protocol"] == wheel.manifest.rpc_protocol
    assert "rpc" not in run.header["arms"]["stock"]
    for sample in run.samples:
        if sample["arm"] == "stock":
            assert sample["wire_bytes_per_token"] is None
        else:  # at least the embedding there and on
            assert sample["wire_bytes_per_token"] > 3 * 256 * 4


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _rpc(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return _toolkit(home, "rpc", *words)


def _toolkit(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolkit", *words]
    env = {**os.environ, "MOE_MADV_HOME": str(home)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)
