"""A run by the clock. Its workers are real processes with made-up answers, so that one can kill the whole run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from gguf_builder import moe
from results_rows import header, sample, write

from toolkit import results
from toolkit.bench import header as head
from toolkit.bench import longrun, machine
from toolkit.bench.plan import Arm, Conditions, Tokens
from toolkit.bench.run import run
from toolkit.cli import cli
from toolkit.errors import ResultsError
from toolkit.model.layout import read_model

WORKER = """#!{python}
import json, os, signal, sys
import numpy as np
job = json.load(open(sys.argv[3]))
def say(**row):
    print(json.dumps(row), flush=True)
measured = "logits_file" not in job and not job.get("trace")
if measured:
    with open({runs!r}, "a") as f:
        f.write("x")
    n = len(open({runs!r}).read())
    if n == {kill_at}:
        os.kill(os.getppid(), signal.SIGKILL)
say(event="loaded", payload=None, mode=None, buffers=["CPU_Mapped"], hints=None, libraries="lib", load_s=0.1,
    load_read_bytes=0)
first, n_prompt = job["n_depth"], job["n_prompt"]
n_gen = len(job["tokens"]) - first - n_prompt
suffix = " @ d%d" % first if first else ""
for name, sizes, start in (("pp", [n_prompt], first), ("tg", [1] * n_gen, first + n_prompt)):
    test = name + str(sum(sizes)) + suffix
    if job.get("logits_file"):
        np.save(job["logits_file"] + "." + test + ".npy", np.ones((len(sizes), 8), dtype=np.float32))
    ns = [10**7] * len(sizes)
    if measured and name == "tg" and n == {slow_at}:
        ns[-1] = 10**9
    say(event="test", test=test, n_tokens=sizes, ns=ns, read_bytes=0, major_faults=0, minor_faults=0, cpu_s=0.0,
        logits_sha256="ff", logits_finite=True, greedy=[1] * len(sizes), hints=None, timeline=None, wire_bytes=None,
        token_counters={{"read_bytes": [0] * len(sizes)}},
        experts=[[layer, start, [[0, 1]] * sum(sizes)] for layer in (1, 2, 3)])
say(event="done")
"""


def _measure(
    folder: Path, *, minutes: float, kill_at: int = 0, slow_at: int = 0, depth: int = 0, series: bool = False
) -> Path:
    """A long run of two arms in the folder; `kill_at` and `slow_at` count its runs from 1."""
    model, out = folder / "model.gguf", folder / "run.jsonl"
    if not model.exists():
        moe(layers=4).write(model)
    python = folder / "python"
    values = {"python": sys.executable, "runs": str(folder / "runs"), "kill_at": kill_at, "slow_at": slow_at}
    python.write_text(WORKER.format(**values), encoding="utf-8")
    python.chmod(0o755)
    arms = [
        Arm(name=name, python=python, label="base.cpu", wheel_sha256="00", payload=None, mode=None) for name in "ab"
    ]
    tokens = Tokens(depth=tuple(range(depth)), prompt=(1, 2, 3, 4), gen=(5, 6, 7, 8), source="test")
    conditions = Conditions(blocks=None, minutes=minutes, n_batch=8, n_ubatch=8, n_threads=1, cold=False, series=series)
    layout = read_model(model)
    made = head.make(layout, arms, tokens, conditions, machine.facts(model), pin="p", series="s")
    run(layout, arms, tokens, conditions, out, made, on_run=longrun.tell_stalls)
    return out


def _steps(path: Path) -> list[tuple[int, int, str]]:
    (found,) = results.read([path])
    return [(row["block"], row["position"], row["arm"]) for row in found.samples if row["test"].startswith("tg")]


SIX = [(0, 0, "a"), (0, 1, "b"), (1, 2, "b"), (1, 3, "a"), (2, 4, "a"), (2, 5, "b")]


def test_three_blocks_are_made_however_short_the_time_and_then_no_other_starts(tmp_path: Path) -> None:
    out = _measure(tmp_path, minutes=1e-6)
    assert _steps(out) == SIX
    (found,) = results.read([out])
    spent = [row["elapsed_s"] for row in found.samples if row["test"] == "tg4"]
    assert spent == sorted(spent)
    assert "blocks" not in found.header["plan"]
    # the time is over for the next call too, and more of it continues: block 3 goes backwards
    whole = out.read_bytes()
    _measure(tmp_path, minutes=1e-6)
    assert out.read_bytes() == whole
    _measure(tmp_path, minutes=spent[-1] / 60 + 0.01)
    assert out.read_bytes().startswith(whole)
    assert _steps(out)[:8] == [*SIX, (3, 6, "b"), (3, 7, "a")]


def test_a_kill_in_the_middle_loses_no_finished_row_and_the_same_call_continues(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_longrun import _measure
        _measure(Path({str(tmp_path)!r}), minutes=1e-6, kill_at=4)
        """
    )
    died = subprocess.run([sys.executable, "-c", program], capture_output=True, env=os.environ, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    out = tmp_path / "run.jsonl"
    kept = out.read_bytes()
    assert _steps(out) == SIX[:3]
    _measure(tmp_path, minutes=1e-6)
    assert out.read_bytes().startswith(kept)
    assert _steps(out) == SIX
    (found,) = results.read([out])
    assert len(found.checks) == 2
    # the killed run, its repetition, and the other five
    assert len((tmp_path / "runs").read_text(encoding="utf-8")) == 7


def test_a_stall_is_told_when_its_run_ends_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = _measure(tmp_path, minutes=1e-6, slow_at=4)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stall")]
    assert len(lines) == 1
    assert lines[0].startswith("stall  a tg4 run 3, token 3: 1000 ms, median 10 ms: unknown")
    found = longrun.summarize(results.read([out])[0])
    assert [(s.arm, s.position, s.index) for s in found.stalls] == [("a", 3, 3)]
    case = next(case for case in found.cases if (case.arm, case.test) == ("a", "tg4"))
    # 4 tokens in 40 ms are 100 t/s, in 1030 ms they are 3.88
    assert (case.runs, case.failed, case.ts_max) == (3, 0, pytest.approx(100))
    assert case.ts_min == pytest.approx(4 / 1.03)
    assert case.ts_mean == pytest.approx((100 + 100 + 4 / 1.03) / 3)


def test_other_commands_read_the_file(tmp_path: Path) -> None:
    out = _measure(tmp_path, minutes=1e-6, depth=3)
    shown = CliRunner().invoke(cli, ["bench", "compare", str(out), "--json"], catch_exceptions=False)
    compared = {(c["test"], c["n_blocks"], c["outputs_equal"]) for c in json.loads(shown.stdout)["comparisons"]}
    assert compared == {("pp4 @ d3", 3, True), ("tg4 @ d3", 3, True)}
    page = tmp_path / "r.html"
    CliRunner().invoke(cli, ["bench", "report", str(out), "--out", str(page)], catch_exceptions=False)
    assert "tg4 @ d3" in page.read_text(encoding="utf-8")
    (found,) = results.read([out])
    assert {(row["n_depth"], row["needed_bytes"]) for row in found.samples if row["test"] == "pp4 @ d3"} != {(3, None)}
    assert found.header["plan"]["n_depth"] == 3


@pytest.mark.parametrize("series", [False, True])
def test_the_machine_is_watched_while_a_worker_runs(tmp_path: Path, series: bool) -> None:
    (found,) = results.read([_measure(tmp_path, minutes=1e-6, series=series)])
    for row in found.samples:
        seen = row["observed"]
        memory = seen["available_bytes"]
        assert 0 < memory["min"] <= memory["mean"] <= memory["max"]
        assert len(memory.get("values", [])) == (seen["readings"] if series else 0)
        assert row["power_before"] == row["power_after"]
        assert row["minutes"] == 1e-6


def test_a_run_with_a_number_of_blocks_is_another_plan(tmp_path: Path) -> None:
    out = _measure(tmp_path, minutes=1e-6)
    first, *rest = out.read_text(encoding="utf-8").splitlines(keepends=True)
    changed = json.loads(first)
    changed["plan"]["blocks"] = 3
    out.write_text(json.dumps(changed) + "\n" + "".join(rest), encoding="utf-8")
    with pytest.raises(ResultsError, match=r"plan\.blocks"):
        _measure(tmp_path, minutes=1e-6)


def test_failed_runs_are_counted_and_leave_the_means_alone(tmp_path: Path) -> None:
    made = header(["s"] * 3)
    failed = sample(made, 2, 2, "stock", 1.0) | {"status": "failed", "avg_ts": None, "reason": "ended by SIGABRT"}
    path = write(tmp_path / "r.jsonl", made, *(sample(made, n, n, "stock", 2.0 + n) for n in range(2)), failed)
    (case,) = longrun.summarize(results.read([path])[0]).cases
    # sample SD of 2 and 3
    assert (case.runs, case.failed, case.ts_mean, case.ts_sd) == (3, 1, 2.5, pytest.approx(0.5**0.5))


def _command(*args: Any) -> Result:
    return CliRunner().invoke(cli, ["bench", "longrun", *map(str, args)])


def test_how_long_has_to_be_said_once(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    moe().write(model)
    assert _command(model).exit_code == 2
    assert _command(model, "--hours", "1", "--minutes", "2").exit_code == 2
    shown = _command(model, "--arms", "stock,hint", "--hours", "2", "--pause", "30", "--dry-run")
    assert shown.exit_code == 0, shown.output
    lines = shown.stderr.splitlines()
    assert any("as many blocks as 120 minutes hold, 30 s between runs" in line for line in lines)
    assert [line for line in lines if line.startswith("block")] == [
        "block 0: stock",
        "block 0: hint",
        "block 1: hint",
        "block 1: stock",
    ]
