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

from toolkit.errors import ResultsError
from toolkit.results import FORMAT, Row, Writer, facts, finished, read, require_same_facts


def header(run_id: str = "r1", **plan: Any) -> Row:
    return {
        "kind": "run",
        "format": FORMAT,
        "run_id": run_id,
        "created": "2026-01-02T03:04:05Z",
        "model": {"filename": "demo.gguf", "size": 1000},
        "plan": {"arms": ["stock", "hint"], "tests": ["pp64", "tg48"], **plan},
        "machine": {"read_ahead_kb": 128, "kernel": "6.1"},
        "arms": {},
    }


def sample(block: int, position: int, test: str = "tg48", arm: str = "stock", **more: Any) -> Row:
    row = {"kind": "sample", "run_id": "r1", "block": block, "position": position, "arm": arm, "test": test}
    return {**row, "status": "ok", "avg_ts": 2.5, **more}


def test_rows_come_back_as_written_with_unknown_fields(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "r.jsonl"
    row = sample(0, 0, read_bytes=1 << 40, token_ms=[1.5, 2.25], hints=None, of_tomorrow={"ä": [1]})
    check = {"kind": "check", "run_id": "r1", "arm": "hint", "outputs_equal": True}
    with Writer(path, header()) as w:
        w.write(check)
        w.write(row, sample(0, 0, "pp64"))
    (run,) = read([path])
    assert (run.header, run.checks, run.samples[0]) == (header(), (check,), row)
    assert (len(run.samples), run.unfinished, run.run_id) == (2, False, "r1")
    assert len(path.read_bytes().splitlines()) == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_never_written(tmp_path: Path, value: float) -> None:
    path = tmp_path / "r.jsonl"
    with Writer(path, header()) as w:
        before = path.read_bytes()
        with pytest.raises(ResultsError, match="cannot be stored as JSON"):
            w.write(sample(0, 0), sample(0, 1, p50_ms=value))
    assert path.read_bytes() == before


def test_a_row_of_another_run_is_not_written(tmp_path: Path) -> None:
    with Writer(tmp_path / "r.jsonl", header()) as w, pytest.raises(ResultsError, match="of run r2, not r1"):
        w.write({**sample(0, 0), "run_id": "r2"})


def test_an_existing_file_is_continued_only_when_asked_and_of_the_same_run(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    Writer(path, header()).close()
    before = path.read_bytes()
    with pytest.raises(ResultsError, match="never overwrites"):
        Writer(path, header())
    with pytest.raises(ResultsError, match="holds run r1, not r2"):
        Writer(path, header("r2"), resume=True)
    assert path.read_bytes() == before
    with Writer(path, header(), resume=True) as w:
        w.write(sample(0, 0))
    assert len(read([path])[0].samples) == 1


def test_an_unwritable_path_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ResultsError, match="cannot write"):
        Writer(tmp_path / "file" / "r.jsonl", header())
    with pytest.raises(ResultsError, match="cannot read"):
        read([tmp_path / "missing.jsonl"])


def test_rows_before_a_kill_are_kept_and_the_unfinished_line_is_told(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    program = textwrap.dedent(
        f"""
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_results import header, sample
        from toolkit.results import Writer
        w = Writer(Path({str(path)!r}), header())
        os.write(1, b"native noise\\n")
        for position in (0, 1):
            w.write(sample(0, position, "pp64"), sample(0, position, "tg48"))
        w.write(sample(0, 2, "pp64"))
        os.write(2, b"native noise\\n")
        with open({str(path)!r}, "ab") as f:
            f.write(b'{{"kind": "sample", "run_')
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    died = subprocess.run([sys.executable, "-c", program], capture_output=True, env=os.environ, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    (run,) = read([path])
    assert run.unfinished
    assert len(run.samples) == 5
    assert finished(run) == {(0, 0), (0, 1)}
    # Resuming cuts the torn line and the half-done position, so that its tests can be measured together.
    with Writer(path, header(), resume=True) as w:
        w.write(sample(0, 2, "pp64"), sample(0, 2, "tg48"))
    (run,) = read([path])
    assert not run.unfinished
    assert finished(run) == {(0, 0), (0, 1), (0, 2)}


def test_resuming_keeps_finished_rows_whose_newline_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    rows = [header(), sample(0, 0, "pp64"), sample(0, 0, "tg48")]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert len(read([path])[0].samples) == 2
    with Writer(path, header(), resume=True) as w:
        w.write(sample(0, 1))
    assert len(read([path])[0].samples) == 3


def test_a_failed_position_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with Writer(path, header()) as w:
        w.write({**sample(0, 0), "status": "failed", "reason": "out of memory", "avg_ts": None})
        w.write(sample(0, 1))
    assert finished(read([path])[0]) == {(0, 0)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ggml_cuda_init: found 1 device", "not a row"),
        ('{"kind": "sample", "run_id": "r1", "avg_ts": NaN}', "NaN is not JSON"),
        ("[1]", "no known kind"),
        ('{"kind": "note", "run_id": "r1"}', "no known kind"),
        (json.dumps(header()), "must be the first line"),
        (json.dumps(sample(0, 0)), "repeats sample 0 0 stock tg48"),
        (json.dumps({**sample(0, 1), "run_id": "r2"}), "of run r2, not r1"),
        (json.dumps({**sample(0, 1), "block": "0"}), "block is not int: '0'"),
        (json.dumps({**sample(0, 1), "status": "fine"}), "not ok or failed: fine"),
        (json.dumps({**sample(0, 1), "avg_ts": 0}), "avg_ts is not above 0: 0"),
    ],
)
def test_a_line_that_does_not_belong_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "r.jsonl"
    lines = [json.dumps(header()), json.dumps(sample(0, 0)), line, json.dumps(sample(0, 2))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(ResultsError, match=message) as caught:
        read([path])
    assert caught.value.where == f"{path}:3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        (json.dumps(sample(0, 0)) + "\n", "must be the first line"),
        (json.dumps({**header(), "format": 2}) + "\n", "format 2 is not 1"),
        (json.dumps(header())[:40], "not a row"),
    ],
)
def test_a_file_without_a_usable_header_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ResultsError, match=message):
        read([path])


def test_facts_of_the_sample_go_before_those_of_the_header(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with Writer(path, header(budget_bytes=None, cold=True)) as w:
        w.write(sample(0, 0, read_ahead_kb=0), sample(0, 1))
    (run,) = read([path])
    first, second = (facts(run, row) for row in run.samples)
    expected = {"model_size": 1000, "budget_bytes": None, "cold": True, "read_ahead_kb": 0, "kernel": "6.1"}
    expected["process"] = "fresh"  # of every file before it was recorded
    assert first == expected
    assert second == {**expected, "read_ahead_kb": 128}


def test_differing_facts_are_refused_with_both_values() -> None:
    same = {"read_ahead_kb": 128, "n_threads": 2, "budget_bytes": None}
    require_same_facts([("a", same), ("b", {"n_threads": 2}), ("c", same)])
    with pytest.raises(ResultsError, match=r"budget_bytes \(None and 5\), read_ahead_kb \(128 and 0") as caught:
        require_same_facts([("stock", same), ("hint", {**same, "read_ahead_kb": 0, "budget_bytes": 5})])
    assert caught.value.where == "stock and hint"
