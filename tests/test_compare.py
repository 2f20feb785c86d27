"""Comparisons beyond one file of this toolkit: arms of llama-bench, A/A, blocks needed, limits, drift, marks."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from results_rows import GIB, header, rows, write
from scipy import stats as reference  # type: ignore[import-untyped]

from toolkit.cli.bench import bench
from toolkit.errors import ResultsError
from toolkit.evidence import export
from toolkit.evidence.compare import compare, pools, tokens
from toolkit.evidence.findings import Comparison, Findings
from toolkit.evidence.imported import load
from toolkit.evidence.report import sentence, statements
from toolkit.results import Row, read
from toolkit.stats import Verdict

ABBA = [["stock", "hint", "hint", "stock"]] * 3
SPEEDS = [1.9, 2.9, 3.1, 2.1, 2.2, 3.3, 3.5, 2.2, 2.0, 3.2, 3.2, 2.2]


def run_cli(*args: object) -> Result:
    result = CliRunner().invoke(bench, [str(a) for a in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def one(found: Findings) -> Comparison:
    (comparison,) = found.comparisons
    return comparison


def theirs(commit: str, samples: list[float], *, n_prompt: int = 0, n_gen: int = 128, **more: Any) -> Row:
    """A row as llama-bench writes it, of the fields that matter here."""
    return {
        "build_commit": commit,
        "build_number": 6000,
        "cpu_info": "CPU",
        "backends": "CPU",
        "model_filename": "models/m.gguf",
        "model_type": "qwen3moe 30B.A3B Q4_K - Medium",
        "model_size": 18_600_000_000,
        "model_n_params": 30_500_000_000,
        "n_threads": 8,
        "flash_attn": -1,
        "repack": True,
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "n_depth": 0,
        "test_time": "2026-05-06T07:08:09Z",
        "avg_ns": 1,
        "stddev_ns": 1,
        "avg_ts": sum(samples) / len(samples),
        "stddev_ts": 0.1,
        "samples_ns": [round(1e9 * n_gen / v) for v in samples],
        "samples_ts": samples,
        **more,
    }


BEFORE, AFTER = [10.0, 10.2, 9.9, 10.1, 10.0], [11.1, 11.0, 11.3, 11.2, 11.1]


def put(path: Path, *data: Row) -> Path:
    """As json, jsonl or csv by the name's ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(data), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in data), encoding="utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as f:
            flat = [{k: int(v) if isinstance(v, bool) else v for k, v in r.items() if "samples" not in k} for r in data]
            writer = csv.DictWriter(f, list(flat[0]), quoting=csv.QUOTE_ALL)
            f.write(",".join(flat[0]) + "\n")
            writer.writerows(flat)
    return path


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_two_files_of_llama_bench_are_two_unpaired_arms(tmp_path: Path, ending: str) -> None:
    files = [
        put(tmp_path / f"before.{ending}", theirs("aaa", BEFORE)),
        put(tmp_path / f"after.{ending}", theirs("bbb", AFTER)),
    ]
    shown = json.loads(run_cli("compare", *files, "--json").stdout)
    (c,) = shown["comparisons"]
    assert (c["test"], c["baseline"], c["candidate"]) == ("tg128", "before", "after")
    assert (c["n_blocks"], c["unpaired"], c["outputs_equal"]) == (0, [5, 5], None)
    assert c["ratio"] == pytest.approx(55.7 / 50.2)
    se = math.sqrt(sum(np.var(x, ddof=1) / 5 / np.mean(x) ** 2 for x in (BEFORE, AFTER)))
    # Welch's degrees of freedom lie between 4 and 8.
    narrow, wide = (reference.t.ppf(0.975, df) * se for df in (8, 4))
    assert narrow <= math.log(c["ci95"][1] / c["ratio"]) <= wide
    assert c["verdict"] == "faster"
    assert "(95 % interval 1.09-1.13, unpaired, n = 5 and 5, outputs not compared)" in c["sentence"]
    assert shown["drift"] == []  # the order of another program's rows is not known
    assert any("tokens (random there), outputs, reads and order are not recorded" in w for w in shown["warnings"])
    assert any("repetitions inside one process stand for runs" in w for w in shown["warnings"])
    assert shown["conditions"][0] == "m.gguf · 8 threads · 2026-05-06 · by llama-bench"


def test_csv_has_no_samples_so_one_row_decides_nothing(tmp_path: Path) -> None:
    files = [put(tmp_path / "before.csv", theirs("aaa", BEFORE)), put(tmp_path / "after.csv", theirs("bbb", AFTER))]
    c = one(compare(load(files)))
    assert (c.ci95, c.verdict, c.unpaired) == (None, Verdict.UNDECIDED, (1, 1))
    assert c.ratio == pytest.approx(55.7 / 50.2)
    assert sentence(c).startswith(
        "undecided: after against before in tg128 is unpaired, 1.11x, and without repetitions"
    )


def test_processes_count_when_there_are_three_of_them(tmp_path: Path) -> None:
    slow = [theirs("aaa", [v, v]) for v in (10.0, 10.2, 9.9)]
    files = [put(tmp_path / "before.jsonl", *slow), put(tmp_path / "after.jsonl", theirs("bbb", AFTER))]
    found = compare(load(files))
    assert one(found).unpaired == (3, 5)
    assert found.summaries[0].ts == (10.0, 10.2, 9.9)


def test_configurations_of_one_file_are_arms_named_by_what_differs(tmp_path: Path) -> None:
    path = put(
        tmp_path / "sweep.json",
        theirs("aaa", BEFORE, n_threads=4),
        theirs("aaa", AFTER, n_threads=8),
        theirs("aaa", [50.0, 51.0], n_threads=4, n_prompt=512, n_gen=0),
    )
    found = compare(load([path]))
    assert [(s.test, s.arm, len(s.ts)) for s in found.summaries] == [
        ("tg128", "sweep:n_threads=4", 5),
        ("tg128", "sweep:n_threads=8", 5),
        ("pp512", "sweep:n_threads=4", 2),
        ("pp512", "sweep:n_threads=8", 0),
    ]
    builds = put(tmp_path / "builds.jsonl", theirs("aaa", BEFORE), theirs("bbb", AFTER, build_number=6001))
    assert [s.arm for s in compare(load([builds])).summaries] == ["builds:aaa", "builds:bbb"]


def test_files_of_one_name_take_their_folder(tmp_path: Path) -> None:
    files = [
        put(tmp_path / "a" / "r.json", theirs("aaa", BEFORE)),
        put(tmp_path / "b" / "r.json", theirs("bbb", AFTER)),
    ]
    c = one(compare(load(files)))
    assert (c.baseline, c.candidate) == ("a/r", "b/r")
    with pytest.raises(ResultsError, match="is given twice"):
        compare(load([files[0], files[0]]))


@pytest.mark.parametrize(
    ("change", "told"),
    [({"n_threads": 4}, "n_threads"), ({"model_n_params": 7}, "model_n_params"), ({"model_type": "x"}, "model_type")],
)
def test_files_of_other_conditions_are_refused(tmp_path: Path, change: Row, told: str) -> None:
    files = [put(tmp_path / "a.json", theirs("aaa", BEFORE)), put(tmp_path / "b.json", theirs("bbb", AFTER, **change))]
    with pytest.raises(ResultsError, match=f"differ in {told} "):
        compare(load(files))


def test_a_file_of_ours_and_one_of_llama_bench_are_compared_unpaired(tmp_path: Path) -> None:
    ours = write(tmp_path / "r.jsonl", header(ABBA), *rows(["shhs"] * 3, SPEEDS, header(ABBA)))
    other = put(tmp_path / "old.json", theirs("aaa", [1.5, 1.6, 1.4], n_gen=48, n_threads=2))
    found = compare(load([ours, other]))
    paired, unpaired = found.comparisons
    assert (paired.candidate, paired.n_blocks, paired.unpaired) == ("hint", 3, None)
    assert (unpaired.candidate, unpaired.unpaired, unpaired.outputs_equal) == ("old", (6, 3), None)
    assert unpaired.verdict is Verdict.SLOWER
    assert "the files name different models: demo.gguf, m.gguf" in found.warnings


def test_what_export_writes_is_read_back(tmp_path: Path) -> None:
    head = {**header(ABBA), "pin": "0c1e57098bba"}
    table = export.rows(read([write(tmp_path / "r.jsonl", head, *rows(["shhs"] * 3, SPEEDS, head))]))
    for form in ("json", "jsonl", "csv"):
        path = tmp_path / f"out.{form}"
        path.write_text(export.FORMATS[form](table), encoding="utf-8")
        c = one(compare(load([path])))
        assert (c.baseline, c.candidate) == ("out:0c1e57098+stock", "out:0c1e57098+hint=")
        assert c.ratio == pytest.approx(9.6 / 6.3)
        assert c.outputs_equal is None


@pytest.mark.parametrize(
    ("name", "text", "told", "place"),
    [
        ("a.json", "[]", "holds no test", "a.json"),
        ("a.json", '[{"build_commit": "a"', "not a whole JSON list", "a.json"),
        ("a.json", "[1]", "no build_commit, model_filename", "a.json: entry 1"),
        ("a.json", json.dumps([theirs("a", [1.0], avg_ts=0)]), "not above 0", "a.json: entry 1"),
        ("a.json", json.dumps([theirs("a", [1.0])]).replace("1.0", "NaN"), "NaN is not JSON", "a.json"),
        ("a.json", json.dumps([theirs("a", [1.0], n_gen=0)]), "times no token", "a.json: entry 1"),
        ("a.json", json.dumps([{**theirs("a", [1.0]), "n_gen": "128"}]), "n_gen is not int: '128'", "a.json: entry 1"),
        ("a.json", json.dumps([theirs("a", [1.0]), theirs("a", [1.0], model_type="x")]), "one model", "a.json"),
        ("a.jsonl", json.dumps(theirs("a", [1.0])) + "\nggml_init: found\n", "not a row of llama-bench", "a.jsonl:2"),
        ("a.csv", 'build_commit,n_gen\n"a"\n', "columns of the first", "a.csv:2"),
        ("a.csv", 'build_commit,n_gen\n"a","x"\n', "n_gen is not int: 'x'", "a.csv:2"),
        ("a.txt", "| model | size |\n", "not a row of a results file", "a.txt:1"),
        ("a.json", '{"comparisons": []}', "no known kind", "a.json:1"),
    ],
)
def test_a_file_that_is_neither_is_one_error_with_its_place(
    tmp_path: Path, name: str, text: str, told: str, place: str
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ResultsError, match=told) as caught:
        load([path])
    assert str(caught.value.where).endswith(place)


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", theirs("aaa", BEFORE), theirs("bbb", AFTER))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:100])
    found = compare(load([path]))
    assert one(found).verdict is Verdict.FASTER
    assert any("unfinished row" in w for w in found.warnings)


def test_a_missing_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="cannot read the results file"):
        load([tmp_path / "none.json"])


def test_one_build_under_two_names_is_the_noise_floor(tmp_path: Path) -> None:
    head = header([["stock", "again"]] * 4)
    head["arms"]["again"] = dict(head["arms"]["stock"])
    speeds = [2.0, 2.02, 2.0, 2.03, 1.99, 2.01, 2.0, 2.02]
    found = compare(read([write(tmp_path / "r.jsonl", head, *rows(["sa", "as"] * 2, speeds, head))]))
    c = one(found)
    assert (c.same_build, c.verdict) == (True, Verdict.UNDECIDED)
    assert sentence(c).startswith("noise floor: again is stock again (A/A) in tg48: ")
    assert "no difference larger than" in sentence(c)


def test_one_build_that_differs_from_itself_is_a_warning(tmp_path: Path) -> None:
    head = header([["stock", "again"]] * 3)
    head["arms"]["again"] = dict(head["arms"]["stock"])
    speeds = [2.0, 2.5, 2.5, 2.0, 2.01, 2.52]
    c = one(compare(read([write(tmp_path / "r.jsonl", head, *rows(["sa", "as", "sa"], speeds, head))])))
    assert sentence(c).startswith("warning: again is stock again (A/A) in tg48: 1.251x")
    other = header(ABBA)
    assert not one(compare(read([write(tmp_path / "s.jsonl", other, *rows(["shhs"] * 3, SPEEDS, other))]))).same_build


@pytest.mark.parametrize("size", ["5%", "0.05", "5 %"])
def test_effect_says_how_many_blocks_find_it(tmp_path: Path, size: str) -> None:
    path = write(tmp_path / "r.jsonl", header(ABBA), *rows(["shhs"] * 3, SPEEDS, header(ABBA)))
    (c,) = json.loads(run_cli("compare", path, "--effect", size, "--json").stdout)["comparisons"]
    # Block means 2.0 2.2 2.1 and 3.0 3.4 3.2, each over its own mean.
    spread = np.std(np.array([3.0, 3.4, 3.2]) / 3.2 - np.array([2.0, 2.2, 2.1]) / 2.1, ddof=1)
    assert c["blocks_needed"]["spread"] == pytest.approx(spread)

    def power(n: int) -> float:
        return float(reference.nct.sf(reference.t.ppf(0.975, n - 1), n - 1, math.log(1.05) / spread * math.sqrt(n)))

    assert c["blocks_needed"]["n_blocks"] == next(n for n in range(3, 99) if power(n) >= 0.8)
    text = run_cli("compare", path, "--effect", size).stdout
    assert "- a difference of 5 % between hint and stock in tg48 takes 3 blocks (" in text
    short = header(ABBA[:1])
    single = write(tmp_path / "one.jsonl", short, *rows(["shhs"], SPEEDS[:4], short))
    assert "how many blocks hint in tg48 needs is unknown" in run_cli("compare", single, "--effect", size).stdout


@pytest.mark.parametrize("size", ["0", "-5%", "nan", "inf", "much", ""])
def test_an_effect_that_is_no_size_is_refused(tmp_path: Path, size: str) -> None:
    result = CliRunner().invoke(bench, ["compare", str(tmp_path / "r.jsonl"), "--effect", size])
    assert result.exit_code == 2
    assert "is not a size such as 5% or 0.05" in result.stderr


def test_marks_apart_and_outliers_are_told_in_json(tmp_path: Path) -> None:
    data = rows(["shhs"] * 3, SPEEDS, header(ABBA))
    data[0] |= {"avg_ts": 0.5}
    data[1] |= {"cold": False}
    path = write(tmp_path / "r.jsonl", header(ABBA), *data)
    stock, hint = json.loads(run_cli("compare", path, "--json").stdout)["arms"]
    assert (stock["outliers"], stock["ts"][0]) == ([0], 0.5)
    assert (hint["ts_apart"], hint["ts"]) == ([2.9], [3.1, 3.3, 3.5, 3.2, 3.2])


def test_drift_is_estimated_even_when_it_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", header(ABBA), *rows(["shhs"] * 3, SPEEDS, header(ABBA)))
    (drift,) = json.loads(run_cli("compare", path, "--json").stdout)["drift"]
    # Least squares with a level per arm, by numpy's general solver instead of centred sums.
    is_hint = np.array([letter == "h" for letter in "shhs" * 3])
    x = np.column_stack([~is_hint, is_hint, np.arange(12)]).astype(float)
    slope = np.linalg.lstsq(x, np.log(SPEEDS), rcond=None)[0][2]
    assert drift["per_run"] == pytest.approx(slope)
    assert drift["ci95"][0] < slope < drift["ci95"][1]
    assert (drift["test"], drift["significant"]) == ("tg48", False)


def test_the_limit_is_one_for_all_arms_and_set_by_what_the_best_read(tmp_path: Path) -> None:
    data = rows(["shhs"] * 3, SPEEDS, header(ABBA), disk_mib_s=300.0, compute_ms_per_token=50)
    for row in data:
        row["mib_per_token"] = 60.0 if row["arm"] == "hint" else 600.0
    found = compare(read([write(tmp_path / "r.jsonl", header(ABBA), *data)]))
    (roof,) = found.rooflines
    # 60 MiB at 300 MiB/s take 200 ms: 5 t/s, of which hint reaches 3.2 and stock 2.1.
    assert (roof.must_read_mib, roof.limit_ms) == (60.0, pytest.approx(200))
    assert [s.limit_fraction for s in found.summaries] == pytest.approx([2.1 / 5, 3.2 / 5])
    assert any(
        "limit of tg48: 200 ms per token; reading 60 MiB at 300 MiB/s takes 200 ms" in s for s in statements(found)
    )


def test_distinct_bytes_needed_bound_the_reads_and_compute_the_rest(tmp_path: Path) -> None:
    needed = 48 * 6 * (1 << 20)  # 6 MiB for each of 48 tokens: 20 ms at 300 MiB/s
    data = rows(["shhs"] * 3, SPEEDS, header(ABBA), disk_mib_s=300.0, compute_ms_per_token=50, needed_bytes=needed)
    (roof,) = compare(read([write(tmp_path / "r.jsonl", header(ABBA), *data)])).rooflines
    assert (roof.must_read_mib, roof.read_ms, roof.limit_ms) == (6.0, pytest.approx(20), 50)


def test_an_arm_with_other_outputs_sets_no_limit(tmp_path: Path) -> None:
    data = rows(["shhs"] * 3, SPEEDS, header(ABBA), disk_mib_s=300.0, compute_ms_per_token=50)
    for row in data:
        if row["arm"] == "hint":
            row |= {"mib_per_token": 1.0, "logits_sha256": "ee"}
    (roof,) = compare(read([write(tmp_path / "r.jsonl", header(ABBA), *data)])).rooflines
    assert roof.must_read_mib == 100.0


def test_runs_are_grouped_as_they_may_be_pooled(tmp_path: Path) -> None:
    paths = []
    for name, budget in (("a", 2 * GIB), ("b", GIB), ("c", 2 * GIB)):
        head = header(ABBA, run_id=name, budget_bytes=budget)
        paths.append(write(tmp_path / f"{name}.jsonl", head, *rows(["shhs"] * 3, SPEEDS, head)))
    assert [[run.run_id for run in group] for group in pools(read(paths))] == [["a", "c"], ["b"]]
    with pytest.raises(ResultsError, match="run a is given twice"):
        pools(read([paths[0], paths[0]]))


def test_a_test_of_both_phases_times_both_tokens(tmp_path: Path) -> None:
    assert tokens("pp64+tg128") == 192
    assert tokens("pp64+tg128 @ d512") == 192
    path = put(tmp_path / "a.json", theirs("a", [1.0, 1.1], n_prompt=64), theirs("b", [1.0, 1.1], n_prompt=64))
    assert one(compare(load([path]))).test == "pp64+tg128"


def test_an_injected_gain_of_ten_percent_is_found_and_one_percent_is_not(tmp_path: Path) -> None:
    noise = [0.01, -0.012, 0.004, 0.015, -0.011, 0.006, -0.013, 0.008]
    verdicts = []
    for gain in (1.01, 1.10):
        head = header([["stock", "hint"], ["hint", "stock"]] * 2)
        speeds = [5 * (1 + e) * (gain if letter == "h" else 1) for letter, e in zip("shhs" * 2, noise, strict=True)]
        path = write(tmp_path / f"{gain}.jsonl", head, *rows(["sh", "hs"] * 2, speeds, head))
        verdicts.append(one(compare(read([path]))).verdict)
    assert verdicts == [Verdict.UNDECIDED, Verdict.FASTER]
