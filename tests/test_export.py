from __future__ import annotations

import csv
import importlib.util
import io
import json
import re
import sqlite3
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from results_rows import GIB, header, rows, sample, write

from toolkit.cli.bench import bench
from toolkit.errors import ResultsError
from toolkit.evidence import export, llama_bench
from toolkit.patch.upstream import load_pin, pristine
from toolkit.results import Row, read

ABBA = [["stock", "hint", "hint", "stock"]] * 3
# Block means: stock 2.0, 2.2, 2.1 and hint 3.0, 3.4, 3.2.
SPEEDS = [1.9, 2.9, 3.1, 2.1, 2.2, 3.3, 3.5, 2.2, 2.0, 3.2, 3.2, 2.2]

# llama-bench's columns as its README and its source list them, with the type of each one's JSON value.
LLAMA_BENCH: dict[str, type] = {
    **dict.fromkeys(["build_commit"], str),
    **dict.fromkeys(["build_number"], int),
    **dict.fromkeys(["cpu_info", "gpu_info", "backends", "model_filename", "model_type"], str),
    **dict.fromkeys(["model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads"], int),
    **dict.fromkeys(["cpu_mask"], str),
    **dict.fromkeys(["cpu_strict"], bool),
    **dict.fromkeys(["poll"], int),
    **dict.fromkeys(["type_k", "type_v"], str),
    **dict.fromkeys(["n_gpu_layers", "n_cpu_moe"], int),
    **dict.fromkeys(["split_mode"], str),
    **dict.fromkeys(["main_gpu"], int),
    **dict.fromkeys(["no_kv_offload"], bool),
    **dict.fromkeys(["flash_attn"], int),
    **dict.fromkeys(["devices", "tensor_split", "tensor_buft_overrides", "load_mode", "lazy_mode"], str),
    **dict.fromkeys(["embeddings"], bool),
    **dict.fromkeys(["no_op_offload"], int),
    **dict.fromkeys(["no_host", "repack"], bool),
    **dict.fromkeys(["fit_target", "fit_min_ctx", "n_prompt", "n_gen", "n_depth"], int),
    **dict.fromkeys(["test_time"], str),
    **dict.fromkeys(["avg_ns", "stddev_ns"], int),
    **dict.fromkeys(["avg_ts", "stddev_ts"], float),
}
NOT_KNOWN = {"model_n_params"}  # of a results file


def head(**plan: Any) -> Row:
    return {
        **header(ABBA, n_batch=2048, n_ubatch=512, **plan),
        "pin": "0c1e57098bba43ac29e6e3b677cdceebdd22334f",
        "series": "deccc2dc",
        "toolkit_version": "0.1.0",
    }


def usual(**more: Any) -> list[Row]:
    return rows(["shhs"] * 3, SPEEDS, head(), test_time="2026-01-02T03:05:00Z", **more)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return write(tmp_path / "r.jsonl", head(), *usual())


def table(path: Path) -> list[Row]:
    return export.rows(read([path]))


def run_cli(*args: object) -> Result:
    result = CliRunner().invoke(bench, [str(a) for a in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_json_rows_have_llama_benchs_fields_first_in_order_and_type(stored: Path) -> None:
    found = json.loads(run_cli("export", stored, "--json").stdout)
    assert [row["arm"] for row in found] == ["stock", "hint"]
    for row in found:
        assert list(row)[: len(LLAMA_BENCH) + 2] == [*LLAMA_BENCH, "samples_ns", "samples_ts"]
        wrong = {k: row[k] for k, kind in LLAMA_BENCH.items() if type(row[k]) is not kind}
        assert wrong == dict.fromkeys(NOT_KNOWN)
    assert llama_bench.FIELDS == LLAMA_BENCH


def test_statistics_are_those_of_the_samples(stored: Path) -> None:
    stock, hint = table(stored)
    # 48 tokens at each speed, in run order.
    assert hint["samples_ts"] == [2.9, 3.1, 3.3, 3.5, 3.2, 3.2]
    assert hint["samples_ns"] == [round(48e9 / v) for v in hint["samples_ts"]]
    assert hint["avg_ts"] == pytest.approx(19.2 / 6)
    assert hint["stddev_ts"] == pytest.approx(statistics.stdev(hint["samples_ts"]))
    assert hint["avg_ns"] == pytest.approx(statistics.mean(hint["samples_ns"]), abs=1)
    assert hint["stddev_ns"] == pytest.approx(statistics.stdev(hint["samples_ns"]), abs=1)
    assert (stock["n_prompt"], stock["n_gen"], stock["n_depth"]) == (0, 48, 0)
    assert stock["model_size"] == 3 * GIB
    assert (stock["n_threads"], stock["n_batch"], stock["load_mode"], stock["repack"]) == (2, 2048, "mmap", False)


def test_our_fields_follow(stored: Path) -> None:
    stock, hint = table(stored)
    assert list(stock)[len(LLAMA_BENCH) + 2 :][:4] == ["arm", "run_id", "label", "wheel_sha256"]
    assert (hint["budget_bytes"], hint["read_ahead_kb"], hint["device"]) == (2 * GIB, 128, "loop0")
    assert (hint["n_samples"], hint["n_failed"], hint["outputs_equal"]) == (6, 0, True)
    assert (hint["mib_per_token"], hint["major_faults_per_token"]) == (100.0, 10.0)


def test_an_arm_is_a_build_of_one_length_for_tools_that_cut_to_the_shortest(tmp_path: Path) -> None:
    order = [["stock", "a'b", "c d"]] * 2
    h = {**header(order), "pin": "0c1e57098bba"}
    data = [sample(h, b, b * 3 + i, arm, 1.0 + i) for b in (0, 1) for i, arm in enumerate(order[0])]
    commits = [row["build_commit"] for row in table(write(tmp_path / "r.jsonl", h, *data))]
    assert commits == ["0c1e57098+stock", "0c1e57098+a%27b", "0c1e57098+c%20d"]
    assert len(set(map(len, commits))) == 1


def test_every_test_and_depth_is_a_row(tmp_path: Path) -> None:
    h = header([["stock"]], tests=["pp64", "tg48", "tg16 @ d4096"])
    data = [sample(h, 0, 0, "stock", 2.0, test) for test in h["plan"]["tests"]]
    found = table(write(tmp_path / "r.jsonl", h, *data))
    assert [(r["n_prompt"], r["n_gen"], r["n_depth"]) for r in found] == [(64, 0, 0), (0, 48, 0), (0, 16, 4096)]
    assert [llama_bench.test_name(r) for r in found] == h["plan"]["tests"]
    assert (found[0]["stddev_ts"], found[0]["stddev_ns"]) == (0.0, 0)  # a single run, as llama-bench prints it


def test_a_field_of_the_row_or_plan_comes_before_what_runs_usually_set(tmp_path: Path) -> None:
    h = head(n_gpu_layers=7)
    data = [{**row, "flash_attn": 1} for row in usual()]
    stock, _ = table(write(tmp_path / "r.jsonl", h, *data))
    assert (stock["n_gpu_layers"], stock["flash_attn"], stock["type_k"]) == (7, 1, "f16")


def test_failed_and_unplanned_samples_are_left_out(tmp_path: Path) -> None:
    data = usual()
    data[1] |= {"status": "failed", "avg_ts": None, "reason": "out of memory"}
    data[2] |= {"cold": False}
    _, hint = table(write(tmp_path / "r.jsonl", head(), *data))
    assert (hint["samples_ts"], hint["n_failed"]) == ([3.3, 3.5, 3.2, 3.2], 1)


def test_differing_outputs_are_a_field_and_a_warning(tmp_path: Path) -> None:
    data = usual()
    data[1] |= {"logits_sha256": "ee"}
    result = run_cli("export", write(tmp_path / "r.jsonl", head(), *data))
    stock, hint = (json.loads(line) for line in result.stdout.splitlines())
    assert (stock["outputs_equal"], hint["outputs_equal"]) == (True, False)
    assert "hint: outputs differ from the baseline's" in result.stderr


def test_nothing_finished_is_one_error(tmp_path: Path) -> None:
    data = [{**row, "status": "failed", "avg_ts": None} for row in usual()]
    with pytest.raises(ResultsError, match="nothing to export"):
        table(write(tmp_path / "r.jsonl", head(), *data))


def test_csv_is_quoted_without_samples_as_llama_bench_writes_it(stored: Path) -> None:
    text = run_cli("export", stored, "--format", "csv").stdout
    first, second = text.splitlines()[:2]
    assert first.startswith(",".join(LLAMA_BENCH) + ",arm,")
    assert second.startswith('"0c1e57098+stock","0","')
    stock, hint = csv.DictReader(io.StringIO(text))
    assert float(hint["avg_ts"]) == pytest.approx(3.2)
    assert (stock["repack"], stock["model_n_params"], stock["outputs_equal"]) == ("0", "", "1")
    assert "samples_ts" not in stock


def test_sql_fits_into_a_database_of_llama_bench(stored: Path) -> None:
    kinds = {str: "TEXT", bool: "INTEGER", int: "INTEGER", float: "REAL"}
    theirs = ",".join(f"{name} {kinds[kind]}" for name, kind in LLAMA_BENCH.items())
    db = sqlite3.connect(":memory:")
    db.execute(f"CREATE TABLE llama_bench ({theirs})")
    db.execute("INSERT INTO llama_bench (build_commit, avg_ts) VALUES ('aaaa', 1.5)")
    db.executescript(run_cli("export", stored, "--format", "sql").stdout)
    assert db.execute("SELECT build_commit, round(avg_ts, 6) FROM llama_bench ORDER BY 2").fetchall() == [
        ("aaaa", 1.5),
        ("0c1e57098+stock", 2.1),
        ("0c1e57098+hint=", 3.2),
    ]
    joined = "SELECT arm, mib_per_token, outputs_equal FROM moe_madv JOIN llama_bench USING (build_commit)"
    assert db.execute(joined).fetchall() == [("stock", 100.0, 1), ("hint", 100.0, 1)]


def test_sql_survives_quotes_in_names(tmp_path: Path) -> None:
    h = head()
    h["model"]["filename"] = "it's; DROP TABLE llama_bench.gguf"
    db = sqlite3.connect(":memory:")
    db.executescript(export.to_sql(table(write(tmp_path / "r.jsonl", h, *usual()))))
    assert db.execute("SELECT DISTINCT model_filename FROM llama_bench").fetchall() == [(h["model"]["filename"],)]


def test_markdown_has_llama_benchs_columns_then_ours(stored: Path) -> None:
    lines = run_cli("export", stored, "--format", "md").stdout.splitlines()
    cells = [cell.strip() for cell in lines[3].strip("|").split("|")]
    assert lines[0].startswith("| model | size | params | backend | ngl | threads | fa | lm | rpk | test | t/s | arm |")
    assert cells[:12] == ["qwen3moe", "3.00 GiB", "-", "CPU", "0", "2", "0", "mmap", "0", "tg48", "3.20 ± 0.20", "hint"]


def test_export_to_a_file_says_nothing_on_stdout(stored: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = run_cli("export", stored, "--out", out)
    assert result.stdout == ""
    assert [json.loads(line)["arm"] for line in out.read_text(encoding="utf-8").splitlines()] == ["stock", "hint"]


@pytest.fixture(scope="session")
def llama_cpp(real_home: Path) -> Path:
    return pristine(load_pin(), real_home).llama


def test_the_fields_are_those_of_the_pinned_llama_bench(llama_cpp: Path) -> None:
    source = (llama_cpp / "tools" / "llama-bench" / "llama-bench.cpp").read_text(encoding="utf-8")
    body = re.search(r"get_fields\(\) \{(.*?)\};", source, re.DOTALL)
    kinds = re.search(r"get_field_type\(.*?\) \{(.*?)\n    \}\n", source, re.DOTALL)
    assert body and kinds
    assert re.findall(r'"(\w+)"', body[1]) == list(LLAMA_BENCH)
    names = {"INT": int, "BOOL": bool, "FLOAT": float, "STRING": str}
    said: dict[str, type] = {}
    for conditions, kind in re.findall(r"if \((.*?)\) \{\s*return (\w+);", kinds[1], re.DOTALL):
        said |= dict.fromkeys(re.findall(r'"(\w+)"', conditions), names[kind])
    assert {name: said.get(name, str) for name in LLAMA_BENCH} == LLAMA_BENCH


@pytest.mark.parametrize("form", ["json", "jsonl", "csv", "sql"])
def test_llama_cpps_own_script_reads_it(form: str, stored: Path, tmp_path: Path, llama_cpp: Path) -> None:
    for module in ("git", "tabulate"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"compare-llama-bench.py needs the Python package {module}")
    text = run_cli("export", stored, "--format", form).stdout
    path = tmp_path / f"theirs.{form}"
    if form == "sql":
        path = tmp_path / "theirs.sqlite"
        with sqlite3.connect(path) as db:
            db.executescript(text)
        db.close()
    else:
        path.write_text(text, encoding="utf-8")
    script = llama_cpp / "scripts" / "compare-llama-bench.py"
    argv = [sys.executable, str(script), "--tool", "llama-bench", "-i", str(path)]
    done = subprocess.run(
        [*argv, "-b", "0c1e57098+stock", "-c", "0c1e57098+hint="],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last = [cell.strip() for cell in done.stdout.splitlines()[-1].strip("|").split("|")]
    assert last[-4:] == ["tg48", "2.10", "3.20", "1.52"]  # 9.6 / 6.3
