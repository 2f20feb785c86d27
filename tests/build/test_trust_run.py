"""A known slowdown, arms switched in one process, and a kill in the middle, with real wheels and a small model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from toolkit import results
from toolkit.cli import cli
from toolkit.model.layout import read_model

pytestmark = pytest.mark.build

ONE_PROCESS = ["--arms", "off,madv,hint,cache", "--one-process", "--warm"]


@pytest.fixture(autouse=True)
def wheels(both_wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_MADV_HOME", str(both_wheels))


def _bench_run(*args: Any) -> dict[str, Any]:
    done = CliRunner().invoke(cli, ["bench", "run", *map(str, args), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_measured_span_of_a_slowed_arm_is_longer_by_the_percentage(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "aa.jsonl"
    args = ["--aa", "--inject-slowdown", "stock-2=10%", "--blocks", "2", "-p", "16", "-n", "8", "--out", out]
    found = _bench_run(tiny, *args)
    (run,) = results.read([out])
    assert run.header["arms"]["stock-2"]["injected_slowdown_percent"] == 10
    assert "injected_slowdown_percent" not in run.header["arms"]["stock"]
    assert run.header["command"].startswith("moe-madv bench run './-m é.gguf' --aa --inject-slowdown stock-2=10%")
    slowed = [row for row in run.samples if row["arm"] == "stock-2"]
    assert [row["test"] for row in slowed] == ["pp16", "tg8"] * 2
    for row in slowed:
        assert row["injected_slowdown_percent"] == 10
        assert len(row["injected_ns"]) == len(row["token_ms"])
        for ms, waited_ns in zip(row["token_ms"], row["injected_ns"], strict=True):
            # a span is its own time and the wait, and what is waited for is a tenth of the former
            assert waited_ns >= round(ms * 1e6 - waited_ns) / 10
    assert not [row for row in run.samples if row["arm"] == "stock" and "injected_ns" in row]
    # the check is of the outputs, and of the time in memory: not slowed
    assert {c["arm"]: c["outputs_equal"] for c in run.checks} == {"stock": True, "stock-2": True}
    assert {c["injected_ratio"] for c in found["comparisons"]} == {1 / 1.1}
    assert "stock-2 (slowed by 10 % on purpose)" in found["conditions"][0]


def test_modes_switched_in_one_process_hint_as_in_their_own_and_compute_the_same(tiny: Path, tmp_path: Path) -> None:
    out, fresh = tmp_path / "one.jsonl", tmp_path / "fresh.jsonl"
    tests = ["-p", "16", "-n", "8", "-t", "2"]
    found = _bench_run(tiny, *ONE_PROCESS, *tests, "--blocks", "2", "--out", out)
    _bench_run(tiny, "--arms", "stock,off", "--warm", *tests, "--blocks", "1", "--out", fresh)
    (run,) = results.read([out])
    names = ["off", "madv", "hint", "cache"]
    assert [row["arm"] for row in run.samples if row["test"] == "tg8"] == [*names, *reversed(names)]
    assert {(row["status"], row["process"], row["cold"]) for row in run.samples} == {("ok", "shared", False)}
    assert {c["outputs_equal"] for c in found["comparisons"]} == {True}
    # after every switch the context is as new: the logits are those of a fresh process
    (alone,) = results.read([fresh])
    for test in ("pp16", "tg8"):
        hashes = {row["logits_sha256"] for r in (run, alone) for row in r.samples if row["test"] == test}
        assert len(hashes) == 1
    # counters are of the measured pass alone: each token takes top-k experts in gate, up and down of each layer
    layout = read_model(tiny)
    slices, groups = 8 * sum(3 * layer.top_k for layer in layout.layers), 8 * len(layout.layers)
    for row in (row for row in run.samples if row["test"] == "tg8"):
        hints = row["hints"]
        if row["arm"] == "off":
            assert hints["groups"] == hints["slices"] == 0
        elif row["arm"] == "madv":
            assert (hints["slices"], hints["groups"]) == (slices, 3 * groups)
        else:
            # what keeps finding everything in memory stops looking at the slices
            assert hints["groups"] == groups


def _start(model: Path, out: Path, args: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "toolkit", "bench", "run", str(model), *args, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=dict(os.environ),
        cwd=Path(__file__).parents[2],
    )


def _wait_for_samples(out: Path, n: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        if out.exists() and out.read_bytes().count(b'"kind": "sample"') >= n:
            return
        time.sleep(0.01)
    raise AssertionError("no rows came")


FRESH = ["--arms", "stock,hint"]


@pytest.mark.parametrize("arms", [FRESH, ONE_PROCESS], ids=["fresh", "one-process"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill", "interrupt"])
def test_no_finished_row_is_lost_and_the_same_command_continues(
    tiny: Path, tmp_path: Path, arms: list[str], number: signal.Signals
) -> None:
    out = tmp_path / "run.jsonl"
    args = [*arms, "-p", "8", "-n", "4", "-t", "2", "--blocks", "4"]
    for n in (1, 5):  # a kill in the first block, and one after it was continued
        process = _start(tiny, out, args)
        _wait_for_samples(out, n, process)
        process.send_signal(number)
        _, said = process.communicate()
        assert process.returncode == (-9 if number == signal.SIGKILL else 130), said
        assert number == signal.SIGKILL or "run the same command again to continue" in said
        kept = out.read_bytes()
        whole = [line for line in kept.splitlines(keepends=True) if line.endswith(b"\n")]
        (run,) = results.read([out])
        assert len(results.finished(run)) * 2 >= n - 1
    found = _bench_run(tiny, *args, "--out", out)
    again = out.read_bytes().splitlines(keepends=True)
    # rows of a position that was cut in two are made again, all others stay as they were
    done = results.finished(run)
    for line in whole:
        row = json.loads(line)
        assert row["kind"] != "sample" or (row["block"], row["position"]) not in done or line in again
    assert again[0] == whole[0]
    (run,) = results.read([out])
    names = arms[1].split(",")
    order = [*names, *reversed(names)] * 2
    assert [row["arm"] for row in run.samples if row["test"] == "tg4"] == order
    assert [row["position"] for row in run.samples if row["test"] == "tg4"] == list(range(len(order)))
    assert {row["status"] for row in run.samples} == {"ok"}
    assert {(c["n_blocks"], c["outputs_equal"]) for c in found["comparisons"]} == {(4, True)}


def test_at_a_depth_prompt_and_decode_both_start_from_it(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "depth.jsonl"
    args = ["--arms", "stock", "--aa", "-d", "12", "-p", "8", "-n", "4", "-t", "2", "--blocks", "1", "--out", out]
    _bench_run(tiny, *args)
    (run,) = results.read([out])
    assert [row["test"] for row in run.samples] == ["pp8 @ d12", "tg4 @ d12"] * 2
    assert {row["n_depth"] for row in run.samples} == {12}
    # the experts that were selected are those of the tokens, wherever these stand
    assert run.checks[0]["experts_match"] is True
    assert run.checks[1]["outputs_equal"] is True
