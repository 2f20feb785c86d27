"""What makes a comparison believable: known slowdowns, A/A, one process for all arms, the command in each file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from gguf_builder import moe
from results_rows import header, rows, write

from toolkit import results
from toolkit.bench import header as head
from toolkit.bench import limits, machine, pagecache
from toolkit.bench import run as running
from toolkit.bench.plan import Arm, Conditions, Tokens
from toolkit.bench.request import Request
from toolkit.bench.shared import SharedProcess
from toolkit.bench.slowdown import end_span
from toolkit.cli import cli
from toolkit.errors import BenchError, ResultsError, ToolkitError
from toolkit.evidence import export
from toolkit.evidence.compare import compare
from toolkit.evidence.report import sentence
from toolkit.evidence.results_page import results_page
from toolkit.model.layout import read_model
from toolkit.results import Row, read
from toolkit.stats import Verdict


def _moe_madv(*args: Any) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in args])


def _error(result: Result) -> ToolkitError:
    assert isinstance(result.exception, ToolkitError), result.output
    return result.exception


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    moe(layers=4).write(path)
    return path


# --- The slowdown itself


class Clock:
    """Every reading takes `step` nanoseconds."""

    def __init__(self, now: int, step: int) -> None:
        self.now, self.step, self.readings = now, step, 0

    def __call__(self) -> int:
        self.readings += 1
        self.now += self.step
        return self.now


@pytest.mark.parametrize(
    ("percent", "took", "waited"),
    [
        (10, 5000, 504),  # readings 7 apart: the first at or after 500 is 504
        (1, 5000, 56),
        (250, 5000, 12502),
        (10, 5, 7),  # half a nanosecond is waited for too
        (0, 5000, 0),
    ],
)
def test_a_span_is_made_longer_by_the_percentage_of_its_own_time(percent: float, took: int, waited: int) -> None:
    clock = Clock(1000 + took - 7, 7)
    assert end_span(1000, percent, clock) == (took, waited)
    assert clock.now == 1000 + took + waited


def test_without_a_slowdown_the_clock_is_read_once() -> None:
    clock = Clock(1000, 1)
    assert end_span(1000, 0, clock) == (1, 0)
    assert clock.readings == 1


# --- A slowdown in what is shown


def _slowed(tmp_path: Path, *, run_id: str = "r1", name: str = "r.jsonl", percent: float | None = 10.0) -> Path:
    made = header([["stock", "2"]] * 4, run_id=run_id)
    made["arms"]["2"] = dict(made["arms"]["stock"])
    if percent is not None:
        made["arms"]["2"]["injected_slowdown_percent"] = percent
    speeds = [2.2, 2.0, 2.0, 2.21, 2.19, 2.0, 2.0, 2.2]
    path = tmp_path / "results" / "box" / name
    return write(path, made, *rows(["s2", "2s"] * 2, speeds, made))


def test_a_slowdown_on_purpose_is_told_wherever_the_arm_is_shown(tmp_path: Path) -> None:
    path = _slowed(tmp_path)
    found = compare(read([path]))
    (c,) = found.comparisons
    assert (c.verdict, c.same_build) == (Verdict.SLOWER, False)
    assert c.injected_ratio == pytest.approx(1 / 1.1)
    assert sentence(c).endswith("; slowed on purpose: that alone makes 0.909x")
    assert [s.injected_slowdown_percent for s in found.summaries] == [None, 10.0]

    told = "2 (slowed by 10 % on purpose)"
    shown = json.loads(_moe_madv("bench", "compare", path, "--json").stdout)
    assert told in shown["conditions"][0]
    assert [arm["injected_slowdown_percent"] for arm in shown["arms"]] == [None, 10.0]
    text = _moe_madv("bench", "compare", path).stdout
    assert f"| tg48 | {told} |" in text
    page = tmp_path / "r.html"
    assert _moe_madv("bench", "report", path, "--out", page).exit_code == 0
    assert told in page.read_text(encoding="utf-8")
    picture = tmp_path / "r.svg"
    assert _moe_madv("bench", "plot", path, "--out", picture).exit_code == 0
    assert told in picture.read_text(encoding="utf-8")
    assert f"| stock | {told} |" in results_page(tmp_path / "results")
    stock, slow = export.rows(read([path]))
    assert (stock["injected_slowdown_percent"], slow["injected_slowdown_percent"]) == (None, 10.0)
    # the name that llama-bench's own tools show
    assert slow["build_commit"].startswith("unknown+2-slowed-on-purpose")
    assert "slowed" not in stock["build_commit"]


def test_a_slowed_arm_is_not_pooled_with_an_ordinary_one_of_its_name(tmp_path: Path) -> None:
    files = [_slowed(tmp_path), _slowed(tmp_path, run_id="r2", name="real.jsonl", percent=None)]
    with pytest.raises(ResultsError, match="arm 2 is not the same in both runs: injected_slowdown_percent"):
        compare(read(files))
    (real,) = compare(read(files[1:])).comparisons
    assert real.same_build and real.injected_ratio is None


def test_an_a_a_run_says_which_difference_it_would_find(tmp_path: Path) -> None:
    made = header([["stock", "2"]] * 4)
    made["arms"]["2"] = dict(made["arms"]["stock"])
    speeds = [2.0, 2.02, 2.0, 2.03, 1.99, 2.01, 2.0, 2.02]
    (c,) = compare(read([write(tmp_path / "r.jsonl", made, *rows(["s2", "2s"] * 2, speeds, made))])).comparisons
    assert c.detectable_effect is not None
    assert 0 < c.detectable_effect < 0.05
    assert sentence(c).endswith(f", and one of {100 * c.detectable_effect:.2g} % would be found")


# --- The command line


def _dry(model: Path, *args: Any) -> list[str]:
    result = _moe_madv("bench", "run", model, "--blocks", 2, "--dry-run", *args)
    assert result.exit_code == 0, result.output
    return [line for line in result.stderr.splitlines() if line.startswith("block")]


def test_a_a_is_the_first_arm_twice(model: Path) -> None:
    assert _dry(model, "--aa") == ["block 0: stock", "block 0: stock-2", "block 1: stock-2", "block 1: stock"]
    assert _dry(model, "--arms", "hint,off", "--aa")[:3] == ["block 0: hint", "block 0: off", "block 0: hint-2"]
    assert _dry(model, "--aa", "--inject-slowdown", "stock-2=10%")[1] == "block 0: stock-2"


def test_a_slowdown_of_no_arm_names_those_that_are_there(model: Path) -> None:
    error = _error(_moe_madv("bench", "run", model, "--aa", "--inject-slowdown", "hint=10", "--dry-run"))
    assert "no arm hint to slow down" in error.what
    assert error.hint == "arms of this run: stock, stock-2"


@pytest.mark.parametrize("given", ["stock", "stock=", "=10", "stock=0", "stock=-5%", "stock=inf", "stock=nan"])
def test_a_slowdown_that_is_none_is_a_usage_error(model: Path, given: str) -> None:
    result = _moe_madv("bench", "run", model, "--inject-slowdown", given)
    assert result.exit_code == 2
    assert "is not an arm and a percentage" in result.stderr


@pytest.mark.parametrize(
    ("args", "told", "hint"),
    [
        (["--warm"], "stock cannot share a process", "--arms off,hint"),
        (["--warm", "--arms", "off", "--aa", "--arm", "own", "x.whl", ""], "own cannot share", "--arms off,hint"),
        (["--warm", "--arms", "off", "--rpc", "127.0.0.1:1"], "rpc cannot share a process", "--arms off,hint"),
        (["--arms", "off,hint"], "a cold run needs a fresh process", "add --warm"),
        (["--warm", "--arms", "off,hint", "--oversubscribe", "2"], "one memory for all arms", "leave out --budget"),
    ],
)
def test_what_one_process_cannot_measure_is_refused_before_anything_is(
    model: Path, args: list[str], told: str, hint: str
) -> None:
    error = _error(_moe_madv("bench", "run", model, "--one-process", "--dry-run", *args))
    assert told in error.what
    assert hint in str(error.hint)


def _asked(monkeypatch: pytest.MonkeyPatch, *args: Any) -> Request:
    """The request that a command line makes."""
    asked: list[Request] = []
    monkeypatch.setattr("toolkit.bench.request.measure", lambda request, **_: asked.append(request))
    monkeypatch.setattr("toolkit.bench.longrun.measure", lambda request, **_: asked.append(request))
    result = _moe_madv("bench", *args)
    assert result.exit_code == 0, result.output
    return asked[0]


def test_the_request_has_the_command_with_names_instead_of_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "/tmp/models of mine"
    own = ("--arm", "own", f"{folder}/a.whl", f"A={folder}/x,B=2")
    asked = _asked(monkeypatch, "run", f"{folder}/-m é.gguf", "--aa", *own, f"--out={folder}/out.jsonl")
    assert asked.command == "moe-madv bench run './-m é.gguf' --aa --arm own a.whl A=x,B=2 --out=out.jsonl"
    assert (asked.aa, asked.arms) == (True, ("stock",))
    longer = _asked(monkeypatch, "longrun", "m.gguf", "--hours", "2")
    assert longer.command == "moe-madv bench longrun m.gguf --hours 2"
    slowed = _asked(monkeypatch, "run", "m.gguf", "--inject-slowdown", "off=5", "--inject-slowdown", "a=b=0.5%")
    assert slowed.injected_slowdown == (("off", 5.0), ("a=b", 0.5))


def test_the_recorded_command_is_shown_with_the_results(tmp_path: Path) -> None:
    made = header([["stock", "hint"]] * 3) | {"command": "moe-madv bench run demo.gguf --arms stock,hint --out r.jsonl"}
    path = tmp_path / "results" / "box" / "r.jsonl"
    write(path, made, *rows(["sh", "hs", "sh"], [2.0, 3.0, 3.1, 2.1, 2.0, 3.0], made))
    assert f"made by: {made['command']}" in _moe_madv("bench", "compare", path).stdout
    assert json.loads(_moe_madv("bench", "compare", path, "--json").stdout)["commands"] == [made["command"]]
    page = tmp_path / "r.html"
    _moe_madv("bench", "report", path, "--out", page)
    assert made["command"] in page.read_text(encoding="utf-8")
    assert f"- [r.jsonl](box/r.jsonl): `{made['command']}`" in results_page(tmp_path / "results")


# --- One process

# A worker with made-up answers. `die_at` counts the steps of all its processes from 1.
WORKER = """#!{python}
import json, os, signal, sys
import numpy as np
job = json.load(open(sys.argv[3]))
def say(**row):
    print(json.dumps(row), flush=True)
def test(mode):
    name = "tg%d" % len(job["tokens"])
    if job.get("logits_file"):
        np.save(job["logits_file"] + "." + name + ".npy", np.ones((len(job["tokens"]), 8), dtype=np.float32))
    n = len(job["tokens"])
    say(event="test", test=name, n_tokens=[1] * n, ns=[10**7] * n, injected_ns=None, read_bytes=0, major_faults=0,
        minor_faults=0, cpu_s=0.0, memory={{}}, logits_sha256="ff", logits_finite=True, greedy=[1] * n,
        hints={{"mode": mode}}, timeline=None, wire_bytes=None, token_counters={{"read_bytes": [0] * n}},
        experts=[[layer, 0, [[0, 1]] * n] for layer in (1, 2, 3)])
mode = os.environ["MOE_MADV_MODE"]
say(event="loaded", payload="2", mode=mode, buffers=["CPU_Mapped"], hints=None, libraries="lib", load_s=0.1,
    load_read_bytes=0)
if not job.get("steps"):
    test(mode)
for line in sys.stdin if job.get("steps") else ():
    step = json.loads(line)
    with open({steps!r}, "a") as f:
        f.write("%d %s %s\\n" % (os.getpid(), step["mode"], step["injected_slowdown_percent"]))
    if len(open({steps!r}).readlines()) == {die_at}:
        os.kill(os.getpid(), signal.SIGABRT)
    test(step["mode"])
    say(event="step", mode={stuck!r} or step["mode"])
say(event="done")
"""


def _arms(folder: Path, *names: str, die_at: int = 0, stuck: str = "") -> list[Arm]:
    python = folder / "python"
    values = {"python": sys.executable, "steps": str(folder / "steps"), "die_at": die_at, "stuck": stuck}
    python.write_text(WORKER.format(**values), encoding="utf-8")
    python.chmod(0o755)
    return [
        Arm(
            name=name,
            python=python,
            label="moe1.cpu",
            wheel_sha256="00",
            payload="2",
            mode=name.partition("-")[0],
            env={"MOE_MADV_MODE": name.partition("-")[0]},
            injected_slowdown_percent=5.0 if name.endswith("-2") else 0.0,
        )
        for name in names
    ]


def _measure(model: Path, arms: list[Arm], out: Path, *, one_process: bool = True) -> results.RunData:
    layout = read_model(model)
    tokens = Tokens(prompt=(), gen=(5, 6, 7), source="test")
    conditions = Conditions(blocks=2, n_batch=8, n_ubatch=8, n_threads=1, cold=False, one_process=one_process)
    made = head.make(layout, arms, tokens, conditions, machine.facts(model), pin="p", series="s", command="moe-madv x")
    running.run(layout, arms, tokens, conditions, out, made)
    return read([out])[0]


def _steps(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "steps").read_text(encoding="utf-8").splitlines()]


def test_arms_are_switched_in_one_process_in_the_interleaved_order(model: Path, tmp_path: Path) -> None:
    run = _measure(model, _arms(tmp_path, "off", "hint", "off-2"), tmp_path / "r.jsonl")
    steps = _steps(tmp_path)
    assert [mode for _, mode, _ in steps] == ["off", "hint", "off", "off", "hint", "off"]
    assert [percent for *_, percent in steps] == ["0.0", "0.0", "5.0", "5.0", "0.0", "0.0"]
    assert len({pid for pid, *_ in steps}) == 1
    assert [row["arm"] for row in run.samples] == ["off", "hint", "off-2", "off-2", "hint", "off"]
    # each row has what the process said in its own step
    assert [row["hints"]["mode"] for row in run.samples] == [mode for _, mode, _ in steps]
    assert {row["process"] for row in run.samples} == {"shared"}
    assert [row.get("injected_slowdown_percent") for row in run.samples] == [None, None, 5.0, 5.0, None, None]
    assert run.header["plan"]["process"] == "shared"
    assert run.header["command"] == "moe-madv x"
    assert run.header["arms"]["off-2"]["injected_slowdown_percent"] == 5.0
    assert {c["arm"]: c["outputs_equal"] for c in run.checks} == {"off": True, "hint": True, "off-2": True}
    found = compare([run])
    assert {(c.candidate, c.n_blocks, c.outputs_equal) for c in found.comparisons} == {
        ("hint", 2, True),
        ("off-2", 2, True),
    }


def test_a_step_that_dies_is_a_failed_row_and_the_next_has_a_new_process(model: Path, tmp_path: Path) -> None:
    run = _measure(model, _arms(tmp_path, "off", "hint", die_at=2), tmp_path / "r.jsonl")
    assert [(row["arm"], row["status"]) for row in run.samples] == [
        ("off", "ok"),
        ("hint", "failed"),
        ("hint", "ok"),
        ("off", "ok"),
    ]
    assert run.samples[1]["reason"].startswith("ended by SIGABRT")
    first, second, third, fourth = (pid for pid, *_ in _steps(tmp_path))
    assert first == second != third == fourth


def test_a_process_that_stays_in_another_mode_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="not switched to the mode hint"):
        _measure(model, _arms(tmp_path, "off", "hint", stuck="off"), tmp_path / "r.jsonl")
    (run,) = read([tmp_path / "r.jsonl"])
    assert [row["arm"] for row in run.samples] == ["off"]


def test_a_shared_process_ends_with_its_user(tmp_path: Path) -> None:
    arms = _arms(tmp_path, "off", "hint")
    job = {"tokens": [1, 2]}
    with limits.memory_budget(None) as unlimited, SharedProcess(arms, job, unlimited) as shared:
        assert shared.measure(arms[1], lambda _: None).tests[0]["hints"] == {"mode": "hint"}
        ((pid, *_),) = _steps(tmp_path)
        os.kill(int(pid), 0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_rows_of_fresh_and_shared_processes_are_not_pooled(model: Path, tmp_path: Path) -> None:
    shared = _measure(model, _arms(tmp_path, "off", "hint"), tmp_path / "shared.jsonl")
    fresh = _measure(model, _arms(tmp_path, "off", "hint"), tmp_path / "fresh.jsonl", one_process=False)
    assert {row["process"] for row in fresh.samples} == {"fresh"}
    assert "process" not in fresh.header["plan"]
    with pytest.raises(ResultsError, match=r"differ in process \(shared and fresh\)"):
        compare([shared, fresh])
    text = _moe_madv("bench", "compare", shared.path).stdout
    assert "one process for all runs" in text
    # a file from before the process was recorded is one of fresh processes
    old = [{k: v for k, v in row.items() if k != "process"} for row in fresh.samples]
    assert {results.facts(fresh, row)["process"] for row in old} == {"fresh"}


# --- The state of the page cache


@pytest.fixture
def on_disk(model: Path) -> Path:
    if not pagecache.evict([model]).cold:
        pytest.skip("the file cannot be evicted here")
    return model


def test_the_first_warm_run_after_the_cache_was_dropped_is_cold_and_so_shown_apart(on_disk: Path) -> None:
    warm = Conditions(blocks=1, n_batch=1, n_ubatch=1, cold=False)
    first = running._cache_state([on_disk], warm)
    assert (first["cold"], first["why_warm"]) == (True, None)
    on_disk.read_bytes()
    then = running._cache_state([on_disk], warm)
    assert (then["cold"], then["resident_share"]) == (False, 1.0)
    evicted = running._cache_state([on_disk], Conditions(blocks=1, n_batch=1, n_ubatch=1, cold=True))
    assert evicted["cold"] is True
    # a shared process warms up before it measures
    shared = Conditions(blocks=1, n_batch=1, n_ubatch=1, cold=False, one_process=True)
    assert running._cache_state([on_disk], shared)["cold"] is False


def test_a_cold_row_of_a_warm_plan_is_in_no_mean(tmp_path: Path) -> None:
    made = header([["stock", "hint"]] * 4, cold=False)
    data: list[Row] = rows(["sh", "hs"] * 2, [0.5, 3.0, 3.1, 2.0, 2.1, 3.0, 3.0, 2.0], made, cold=False)
    data[0]["cold"] = True
    shown = json.loads(
        _moe_madv("bench", "compare", write(tmp_path / "r.jsonl", made, *data), "--effect", "5%", "--json").stdout
    )
    stock = next(arm for arm in shown["arms"] if arm["arm"] == "stock")
    assert (stock["ts_apart"], stock["ts"]) == ([0.5], [2.0, 2.1, 2.0])
    (c,) = shown["comparisons"]
    assert c["n_blocks"] == 3
    assert c["blocks_needed"]["effect"] == 0.05
    assert c["detectable_effect"] > 0
    assert shown["drift"][0]["test"] == "tg48"
