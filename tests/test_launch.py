"""A worker process of any kind: noisy, dying, lying. The workers here are real processes with made-up answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.bench import limits
from toolkit.bench.launch import Outcome, launch
from toolkit.bench.plan import Arm
from toolkit.errors import BenchError

LOADED = {
    "event": "loaded",
    "payload": None,
    "mode": None,
    "buffers": ["CPU_Mapped"],
    "hints": None,
    "libraries": "lib",
}
TEST = {"event": "test", "test": "tg2", "ns": [1, 2]}


def _arm(folder: Path, body: str, **changes: Any) -> Arm:
    """An arm whose interpreter is a script: it gets `-I worker.py job.json` like a real one."""
    python = folder / "fake python"
    python.write_text(f"#!{sys.executable}\nimport json, os, signal, sys\njob = json.load(open(sys.argv[3]))\n{body}\n")
    python.chmod(0o755)
    fields: dict[str, Any] = {"name": "hint", "python": python, "label": "moe1.cpu", "wheel_sha256": "0" * 64}
    return Arm(**fields | {"payload": None, "mode": None} | changes)


def _say(*rows: dict[str, Any]) -> str:
    return "\n".join(f"print({json.dumps(json.dumps(row))}, flush=True)" for row in rows)


def _launch(arm: Arm, job: dict[str, Any] | None = None) -> Outcome:
    with limits.memory_budget(None) as unlimited:
        return launch(arm, job or {}, unlimited)


def test_rows_of_a_finished_worker(tmp_path: Path) -> None:
    outcome = _launch(_arm(tmp_path, _say(LOADED, TEST, {"event": "done"})))
    assert outcome.reason is None
    assert [t["test"] for t in outcome.tests] == ["tg2"]
    assert outcome.loaded is not None
    assert outcome.loaded["buffers"] == ["CPU_Mapped"]


def test_rows_before_a_crash_are_kept_and_the_signal_and_last_words_are_the_reason(tmp_path: Path) -> None:
    body = _say(LOADED, TEST) + "\nos.write(2, b'GGML_ASSERT failed')\nos.kill(os.getpid(), signal.SIGABRT)"
    outcome = _launch(_arm(tmp_path, body))
    assert len(outcome.tests) == 1
    assert outcome.reason == "ended by SIGABRT\nGGML_ASSERT failed"


def test_an_error_row_is_the_reason(tmp_path: Path) -> None:
    outcome = _launch(_arm(tmp_path, _say({"event": "error", "reason": "LlamaError: no", "log": "line\n"})))
    assert outcome.reason == "LlamaError: no\nline"


def test_silence_is_a_failure(tmp_path: Path) -> None:
    assert _launch(_arm(tmp_path, "pass")).reason == "ended with exit code 0 before its last row"


def test_an_arm_in_another_mode_than_its_name_says_is_refused(tmp_path: Path) -> None:
    arm = _arm(tmp_path, _say(LOADED | {"payload": "1", "mode": "off"}), payload="1", mode="hint")
    with pytest.raises(BenchError, match="runs with mode off, not hint"):
        _launch(arm)


def test_a_line_that_is_no_row_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    outcome = _launch(_arm(tmp_path, _say(LOADED, TEST) + "\nprint('cut of')"))
    assert len(outcome.tests) == 1
    assert outcome.reason == "said what is no row: b'cut of\\n'"


def test_weights_in_no_known_buffer_are_refused(tmp_path: Path) -> None:
    arm = _arm(tmp_path, _say(LOADED | {"buffers": []}, {"event": "done"}))
    with pytest.raises(BenchError, match="no known buffer"):
        _launch(arm)


def test_a_worker_outside_of_its_budget_is_refused(tmp_path: Path) -> None:
    """A manager that moves the process out of its group, as seen by the worker's own /proc entry."""
    method = limits.detect()
    if method.name not in ("cgroup-v1", "cgroup-v2"):
        pytest.skip(f"no memory cgroup to make: {method.why or method.name}")
    assert method.parent is not None
    leave = f"open({str(method.parent / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    arm = _arm(tmp_path, leave + _say(LOADED, {"event": "done"}))
    with (
        limits.memory_budget(64 << 20, method=method) as budget,
        pytest.raises(BenchError, match=f"instead of {64 << 20} bytes"),
    ):
        launch(arm, {}, budget)


def test_repacked_experts_are_refused(tmp_path: Path) -> None:
    arm = _arm(tmp_path, _say(LOADED | {"buffers": ["CPU_Mapped", "CPU_REPACK"]}, {"event": "done"}))
    with pytest.raises(BenchError, match="CPU_REPACK"):
        _launch(arm)


def test_an_arm_gets_its_own_settings_and_no_stray_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_MADV_MODE", "madv")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/elsewhere")
    monkeypatch.setenv("GGML_SCHED_DEBUG", "1")
    # text stands in for the environment: a worker reports it as tokens
    seen = (
        "[int(k in os.environ) for k in ('MOE_MADV_MODE', 'MOE_MADV_LOAD', 'LLAMA_CPP_LIB_PATH', 'GGML_SCHED_DEBUG')]"
    )
    body = f"print(json.dumps({{'event': 'tokens', 'tokens': {seen}}}))\n" + _say({"event": "done"})
    outcome = _launch(_arm(tmp_path, body, env={"MOE_MADV_LOAD": "off"}))
    assert outcome.tokens == (0, 1, 0, 0)


def test_the_worker_does_not_run_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp").mkdir()
    monkeypatch.chdir(tmp_path)
    body = "print(json.dumps({'event': 'tokens', 'tokens': [int(os.path.exists('llama_cpp'))]}))\n" + _say(
        {"event": "done"}
    )
    assert _launch(_arm(tmp_path, body)).tokens == (0,)


def test_an_out_of_memory_kill_names_the_budget(tmp_path: Path) -> None:
    method = limits.detect()
    if method.name not in ("cgroup-v1", "cgroup-v2"):
        pytest.skip(f"no memory cgroup to make: {method.why or method.name}")
    arm = _arm(tmp_path, _say(LOADED, TEST) + "\nkeep = b'1' * (256 << 20)")
    with limits.memory_budget(64 << 20, method=method) as budget:
        outcome = launch(arm, {}, budget)
    assert outcome.reason == f"killed by the memory budget of {64 << 20} bytes (SIGKILL)"
    assert len(outcome.tests) == 1
    assert outcome.effective_budget == 64 << 20
