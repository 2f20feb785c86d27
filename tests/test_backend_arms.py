"""Arms of other backends and on other machines: which wheel, which settings, and what is said when one lacks."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from wheel_builder import PIN, manifest, raw_wheel, series

from toolkit.bench import limits
from toolkit.bench.launch import Outcome, launch
from toolkit.bench.plan import Arm
from toolkit.bench.select import arms_by_name, device_settings
from toolkit.build import wheelfile
from toolkit.build.backends import BACKENDS, get_backend
from toolkit.build.wheelfile import BuildRecord
from toolkit.errors import BenchError

SERIES = series()


def wheel(home: Path, label: str, **changes: object) -> None:
    """A finished wheel of this label in the home, too small to load."""
    folder = home / "wheels" / label
    folder.mkdir(parents=True)
    patched = label.startswith("moe1")
    fields = {
        "arm": "patched" if patched else "baseline",
        "label": label,
        "version": f"0.3.36+{label}",
        "backend": label.partition(".")[2],
        "pin": PIN.commit,
        "series": SERIES.digest if patched else None,
        "payload": "1" if patched else None,
    }
    record = BuildRecord(seconds=1.0, objects=None, ccache_hits=None, host_flags=())
    wheelfile.store(raw_wheel(folder), manifest(**{**fields, **changes}), record)


@pytest.mark.parametrize(
    ("there", "names", "missing"),
    [
        ([], ["stock", "hint"], "both"),
        ([], ["stock"], "baseline"),
        ([], ["hint", "cache"], "patched"),
        (["base.vulkan"], ["stock", "hint"], "patched"),
        (["moe1.vulkan"], ["stock", "hint"], "baseline"),
        (["base.cpu", "moe1.cpu"], ["stock", "hint"], "both"),  # of another backend
    ],
)
def test_the_hint_builds_what_is_missing_of_the_backend_asked_for(
    home: Path, there: list[str], names: list[str], missing: str
) -> None:
    for label in there:
        wheel(home, label)
    with pytest.raises(BenchError, match="there is no vulkan wheel of") as e:
        arms_by_name(names, PIN, SERIES, home, backend="vulkan")
    assert e.value.hint == f"moe-madv build --backend vulkan --arm {missing}"


def test_wheels_of_two_compilers_are_built_again_as_what_they_are(home: Path) -> None:
    wheel(home, "base.rpc")
    wheel(home, "moe1.rpc", compiler="cc 13")
    with pytest.raises(BenchError, match="other compiler: cc 12 and cc 13") as e:
        arms_by_name(["stock", "hint"], PIN, SERIES, home, backend="rpc")
    assert e.value.hint == "moe-madv build --backend rpc --arm both --force"


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("cpu", {}),
        ("rpc", {}),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "1"}),
        ("vulkan+rpc", {"GGML_VK_VISIBLE_DEVICES": "0", "VK_ICD_FILENAMES": "/lvp.json"}),
        ("hip", {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": ""}),
    ],
)
def test_what_chooses_devices_of_the_backend_belongs_to_the_arm(backend: str, expected: dict[str, str]) -> None:
    environ = {
        "CUDA_VISIBLE_DEVICES": "1",
        "GGML_VK_VISIBLE_DEVICES": "0",
        "VK_ICD_FILENAMES": "/lvp.json",
        "HIP_VISIBLE_DEVICES": "",  # set and empty: no device
        "GGML_SCHED_DEBUG": "1",
        "PATH": "/bin",
    }
    assert device_settings(backend, environ) == expected


def test_every_gpu_backend_but_metal_has_such_settings() -> None:
    assert {name for name, backend in BACKENDS.items() if backend.selects} == {"cuda", "vulkan", "hip"}
    assert get_backend("cuda+rpc").selects == BACKENDS["cuda"].selects


LOADED = {"event": "loaded", "payload": None, "mode": None, "buffers": ["CPU_Mapped"], "hints": None, "libraries": "l"}


def arm(folder: Path, body: str, **changes: Any) -> Arm:
    """An arm whose interpreter is a script: it gets `-I worker.py job.json` like a real one."""
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\nimport json, os, signal\n{body}\n", encoding="utf-8")
    python.chmod(0o755)
    fields: dict[str, Any] = {"name": "hint", "python": python, "label": "moe1.cpu", "wheel_sha256": "0" * 64}
    return Arm(**fields | {"payload": None, "mode": None} | changes)


def say(*rows: dict[str, Any]) -> str:
    return "\n".join(f"print({json.dumps(json.dumps(row))}, flush=True)" for row in rows)


def start(which: Arm, job: dict[str, Any] | None = None) -> Outcome:
    with limits.memory_budget(None) as unlimited:
        return launch(which, job or {}, unlimited)


def test_settings_of_the_arm_reach_the_worker_and_stray_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    seen = "[int(os.environ.get(k, -1)) for k in ('GGML_VK_VISIBLE_DEVICES', 'CUDA_VISIBLE_DEVICES')]"
    body = f"print(json.dumps({{'event': 'tokens', 'tokens': {seen}}}))\n" + say({"event": "done"})
    assert start(arm(tmp_path, body)).tokens == (-1, -1)
    assert start(arm(tmp_path, body, env=device_settings("vulkan"))).tokens == (3, -1)
    assert start(arm(tmp_path, body, env=device_settings("cuda"))).tokens == (-1, 1)


def test_a_worker_that_aborts_starts_no_debugger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GGML_NO_BACKTRACE", raising=False)
    body = "print(json.dumps({'event': 'tokens', 'tokens': [int(os.environ['GGML_NO_BACKTRACE'])]}))\n"
    assert start(arm(tmp_path, body + say({"event": "done"}))).tokens == (1,)


@pytest.mark.parametrize(
    ("label", "payload", "command"),
    [
        ("moe1.vulkan", "1", "--backend vulkan --arm patched"),
        ("moe1.cuda130.rpc", "1", "--backend cuda+rpc --arm patched"),
        ("base.rpc", None, "--backend rpc --arm baseline"),
        ("base.cpu", None, "--backend cpu --arm baseline"),
    ],
)
def test_an_arm_that_is_not_what_it_claims_is_built_again_as_itself(
    tmp_path: Path, label: str, payload: str | None, command: str
) -> None:
    lying = arm(tmp_path, say(LOADED | {"payload": "0"}), label=label, payload=payload)
    with pytest.raises(BenchError, match="runs with payload 0") as e:
        start(lying)
    assert e.value.hint == f"build its wheel again: moe-madv build {command} --force"


def test_layers_that_reach_no_gpu_are_explained_by_the_arms_own_backend(tmp_path: Path) -> None:
    body = say(LOADED, {"event": "done"})
    with pytest.raises(BenchError, match="put no layer on a GPU") as e:
        start(arm(tmp_path, body, label="moe1.vulkan"), {"n_gpu_layers": 9})
    assert e.value.hint == (
        "see that a driver for vulkan answers here, and choose one of its devices: GGML_VK_VISIBLE_DEVICES=0"
    )
    with pytest.raises(BenchError, match="put no layer on a GPU") as e:
        start(arm(tmp_path, body), {"n_gpu_layers": 9})
    assert "--backend cuda: moe-madv build --backend cuda --arm both" in (e.value.hint or "")


def test_a_server_that_went_away_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    said = "os.write(2, b'ggml-rpc.cpp:354: Remote RPC server crashed or returned malformed response')"
    body = f"{said}\nos.kill(os.getpid(), signal.SIGABRT)"
    outcome = start(arm(tmp_path, body, rpc=(f"127.0.0.1:{port}",)))
    assert (outcome.reason or "").splitlines()[0] == (
        f"no RPC server answers any more at 127.0.0.1:{port}; what it said last is why (ended by SIGABRT)"
    )
    # without servers nobody is asked
    assert (start(arm(tmp_path, body)).reason or "").startswith("ended by SIGABRT")
