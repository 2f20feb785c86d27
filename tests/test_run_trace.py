"""`bench run --trace`: the experts of the check, written once, before and apart from what is timed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from gguf_builder import moe
from test_longrun import WORKER

from toolkit import results
from toolkit.bench import header as head
from toolkit.bench import machine
from toolkit.bench.plan import Arm, Conditions, Tokens
from toolkit.bench.run import run
from toolkit.cli import cli
from toolkit.errors import BenchError
from toolkit.model import trace as traces
from toolkit.model.layout import read_model


def _measure(folder: Path, trace: Path | None, *, depth: int = 0) -> Path:
    """One block of one arm, whose worker takes experts 0 and 1 of the layers 1 to 3 for every token."""
    model, out, python = folder / "model.gguf", folder / "run.jsonl", folder / "python"
    if not model.exists():
        moe(layers=4).write(model)
    values = {"python": sys.executable, "runs": str(folder / "runs"), "kill_at": 0, "slow_at": 0}
    python.write_text(WORKER.format(**values), encoding="utf-8")
    python.chmod(0o755)
    arms = [Arm(name="a", python=python, label="base.cpu", wheel_sha256="00", payload=None, mode=None)]
    tokens = Tokens(depth=tuple(range(50, 50 + depth)), prompt=(1, 2, 3), gen=(4, 5), source="test")
    conditions = Conditions(blocks=1, n_batch=8, n_ubatch=8, n_threads=1, cold=False)
    layout = read_model(model)
    made = head.make(layout, arms, tokens, conditions, machine.facts(model), pin="p", series="s")
    run(layout, arms, tokens, conditions, out, made, trace=trace)
    return out


@pytest.mark.parametrize("name", ["a.npz", "deep/er/a.moetrace"])
def test_the_trace_holds_the_tokens_of_the_tests_and_is_made_beside_the_timed_runs(tmp_path: Path, name: str) -> None:
    out = _measure(tmp_path, tmp_path / name, depth=2)
    found = traces.read(tmp_path / name)
    assert found.records["token"].tolist() == [1, 2, 3, 4, 5]
    assert found.records["phase"].tolist() == [0, 0, 0, 1, 1]
    assert found.header.blocks == (1, 2, 3)
    assert found.experts.tolist() == [[[0, 1]] * 3] * 5
    assert (tmp_path / "runs").read_text(encoding="utf-8") == "x"  # one timed run
    (run,) = results.read([out])
    assert {row["test"] for row in run.samples} == {"pp3 @ d2", "tg2 @ d2"}


def test_a_run_that_goes_on_makes_up_for_a_trace_and_leaves_one_alone(tmp_path: Path) -> None:
    out, trace = _measure(tmp_path, None), tmp_path / "a.npz"
    rows = out.read_bytes()
    _measure(tmp_path, trace)
    assert out.read_bytes() == rows
    assert traces.read(trace).experts.shape == (5, 3, 2)
    trace.write_bytes(b"mine")
    _measure(tmp_path, trace)
    assert (trace.read_bytes(), out.read_bytes()) == (b"mine", rows)


def test_a_file_that_was_there_before_the_run_is_not_touched(tmp_path: Path) -> None:
    trace = tmp_path / "a.npz"
    trace.write_bytes(b"mine")
    with pytest.raises(BenchError, match="the file exists"):
        _measure(tmp_path, trace)
    assert trace.read_bytes() == b"mine"
    assert not (tmp_path / "run.jsonl").exists()


def test_a_trace_needs_decoded_tokens(tmp_path: Path) -> None:
    model = moe().write(tmp_path / "m.gguf")
    done = CliRunner().invoke(cli, ["bench", "run", str(model), "-n", "0", "--trace", str(tmp_path / "a.npz")])
    assert done.exit_code == 2
    assert "--trace needs decoded tokens" in done.output
