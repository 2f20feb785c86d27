from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from results_rows import GIB, header, rows, sample, write
from rich.console import Console

from toolkit.cli.bench import bench
from toolkit.errors import ResultsError
from toolkit.evidence.compare import Comparison, Findings, compare, tokens
from toolkit.evidence.report import (
    conditions,
    markdown,
    markdown_table,
    number,
    print_terminal,
    ratio_text,
    sentence,
    to_csv,
    to_json,
)
from toolkit.evidence.results_page import results_page, with_block
from toolkit.results import Row, read
from toolkit.stats import Verdict

ABBA = [["stock", "hint", "hint", "stock"]] * 3
# Block means: stock 2.0, 2.2, 2.1 and hint 3.0, 3.4, 3.2, so the ratio is 9.6 / 6.3.
SPEEDS = [1.9, 2.9, 3.1, 2.1, 2.2, 3.3, 3.5, 2.2, 2.0, 3.2, 3.2, 2.2]


def findings(tmp_path: Path, *data: Row, head: Row | None = None, baseline: str | None = None) -> Findings:
    head = head or header(ABBA)
    return compare(read([write(tmp_path / "r.jsonl", head, *data)]), baseline)


def one(found: Findings) -> Comparison:
    (comparison,) = found.comparisons
    return comparison


def usual(**more: Any) -> list[Row]:
    return rows(["shhs"] * 3, SPEEDS, header(ABBA), **more)


def change(data: list[Row], arm: str, **more: Any) -> list[Row]:
    return [{**row, **more} if row["arm"] == arm else row for row in data]


def run_cli(*args: object) -> Result:
    result = CliRunner().invoke(bench, [str(a) for a in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_compare_json_has_the_promised_shape(tmp_path: Path) -> None:
    data = change(
        usual(),
        "hint",
        mib_per_token=60.0,
        read_amplification=1.05,
        disk_mib_s=300.0,
        compute_ms_per_token=50,
    )
    path = write(tmp_path / "r.jsonl", header(ABBA), *data)
    shown = json.loads(run_cli("compare", path, "--json").stdout)
    (c,) = shown["comparisons"]
    low, high = c["ci95"]
    assert c["ratio"] == pytest.approx(9.6 / 6.3)
    assert 1.3 < low < 9.6 / 6.3 < high < 1.8
    assert (c["test"], c["baseline"], c["candidate"]) == ("tg48", "stock", "hint")
    assert (c["n_blocks"], c["verdict"], c["outputs_equal"]) == (3, "faster", True)
    assert (c["baseline_mib_per_token"], c["candidate_mib_per_token"]) == (100.0, 60.0)
    assert c["candidate_read_amplification"] == 1.05
    # Reads take 60 / 300 = 200 ms, more than 50 ms of compute, of 1 / 3.2 = 312.5 ms.
    assert c["candidate_limit_fraction"] == pytest.approx(0.64)
    arms = {a["arm"]: a for a in shown["arms"]}
    assert arms["stock"]["ts_mean"] == pytest.approx(2.1)
    # Deviations -.2 0 .1 .1 -.1 .1: squares sum to 0.08, over n - 1 = 5.
    assert arms["stock"]["ts_sd"] == pytest.approx(0.016**0.5)
    assert arms["stock"]["major_faults_per_token"] == 10
    assert c["sentence"].startswith("hint decodes 1.52x faster than stock (95 % interval 1.")
    assert "n = 3 blocks, same outputs)" in c["sentence"]
    assert shown["warnings"] == []


def test_compare_json_has_stalls_and_greedy_text_where_the_file_has_them(tmp_path: Path) -> None:
    def shown(name: str, *data: Row) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            run_cli("compare", write(tmp_path / name, header(ABBA), *data), "--json").stdout
        )
        return found

    bare = shown("bare.jsonl", *usual())
    assert (bare["stalls"], bare["comparisons"][0]["greedy_equal"]) == (None, None)
    checks = [{"kind": "check", "run_id": "r1", "arm": a, "greedy_equal": a == "stock"} for a in ("stock", "hint")]
    data = usual(token_ms=[10.0] * 48)
    data[1] = {**data[1], "token_ms": [10.0] * 40 + [70.0] + [10.0] * 7}
    full = shown("full.jsonl", *checks, *data)
    assert full["comparisons"][0]["greedy_equal"] is False
    # not as the first arm, neither of them: whether they are alike is not known
    checks[0]["greedy_equal"] = False
    assert shown("both.jsonl", *checks, *data)["comparisons"][0]["greedy_equal"] is None
    (stall,) = full["stalls"]
    assert (stall["arm"], stall["position"], stall["what"], stall["index"]) == ("hint", 1, "token", 40)
    assert (stall["ms"], stall["median_ms"], stall["cause"]) == (70.0, 10.0, "unknown")
    assert shown("quiet.jsonl", *usual(token_ms=[10.0] * 48))["stalls"] == []


def test_what_the_machine_did_stands_in_every_form(tmp_path: Path) -> None:
    def seen(disk: float, least: int, swapped: int) -> dict[str, Any]:
        return {
            "readings": 9,
            "disk_util_percent": {"min": 0, "mean": disk, "max": 100},
            "gpu_util_percent": None,
            "available_bytes": {"min": least, "mean": GIB, "max": GIB},
            "temperature_c": {"min": 40, "mean": 45, "max": 50 + disk / 10},
            "swap_delta_bytes": swapped,
        }

    data = [{**row, "observed": seen(10 * (i % 3), GIB - i * 1024**2, i * 1024**2)} for i, row in enumerate(usual())]
    found = findings(tmp_path, *data)
    stock, hint = (s.observed for s in found.summaries)
    assert stock is not None and hint is not None
    # stock stands at 0, 3, 4, 7, 8 and 11 of the order: 0, 0, 10, 10, 20 and 20 per cent
    assert (stock.disk_util_percent, stock.gpu_util_percent, stock.cpu_mhz) == (10, None, None)
    assert (stock.min_available_bytes, stock.swap_delta_bytes) == (GIB - 11 * 1024**2, 11 * 1024**2)
    # hint at 1, 2, 5, 6, 9 and 10: 10, 20, 20, 0, 0 and 10
    assert (hint.disk_util_percent, hint.max_temperature_c) == (10, 52)
    out = io.StringIO()
    print_terminal(found, Console(file=out, width=160))
    for text in (out.getvalue(), markdown(found)):
        assert "least free MiB" in text
        assert "GPU" not in text
    assert "| tg48 | stock | 10 | 1013 | +11 | 52 |" in markdown(found)
    shown = json.loads(to_json(found))["arms"][0]["observed"]
    assert (shown["disk_util_percent"], shown["gpu_util_percent"]) == (10, None)
    line = next(csv.DictReader(io.StringIO(to_csv(found))))
    assert (line["disk_util_percent"], line["max_temperature_c"], line["cpu_mhz"]) == ("10.0", "52.0", "")
    bare = csv.DictReader(io.StringIO(to_csv(findings(tmp_path / "bare", *usual()))))
    assert next(bare)["disk_util_percent"] == ""


def test_a_governor_that_changes_in_a_run_is_told(tmp_path: Path) -> None:
    data = usual(power_before={"governor": "performance"}, power_after={"governor": "performance"})
    assert findings(tmp_path / "a", *data).warnings == ()
    data[2] = {**data[2], "power_after": {"governor": "powersave"}}
    (warning,) = findings(tmp_path / "b", *data).warnings
    assert warning == "r.jsonl: hint tg48 run 2: the CPU governor changed from performance to powersave meanwhile"


def test_limit_is_unknown_without_disk_speed_or_compute_time(tmp_path: Path) -> None:
    assert one(findings(tmp_path, *usual(disk_mib_s=300.0))).candidate_limit_fraction is None


def test_slower_is_said_as_plainly(tmp_path: Path) -> None:
    c = one(findings(tmp_path, *usual(), baseline="hint"))
    assert (c.baseline, c.candidate, c.verdict) == ("hint", "stock", Verdict.SLOWER)
    assert sentence(c).startswith("slower: stock decodes at 0.66x the speed of hint")


def test_equal_times_with_other_fault_counts_are_no_difference(tmp_path: Path) -> None:
    speeds = [84.2, 84.5, 84.3, 84.7, 84.6, 84.4, 84.6, 84.2, 84.3, 84.5, 84.5, 84.4]
    data = rows(["shhs"] * 3, speeds, header(ABBA))
    data = change(change(data, "hint", major_faults=24_967), "stock", major_faults=10)
    c = one(findings(tmp_path, *data))
    assert c.verdict is Verdict.UNDECIDED
    assert "shows no difference larger than 0." in sentence(c)


@pytest.mark.parametrize(
    ("fact", "value"),
    [("read_ahead_kb", 0), ("budget_bytes", GIB), ("n_threads", 4), ("tokens_sha256", "bb")],
)
def test_arms_measured_under_other_conditions_are_refused(tmp_path: Path, fact: str, value: object) -> None:
    with pytest.raises(ResultsError, match=f"differ in {fact} ") as caught:
        findings(tmp_path, *change(usual(), "hint", **{fact: value}))
    assert str(value) in caught.value.what
    assert "stock" in str(caught.value.where) and "hint" in str(caught.value.where)


def test_a_cold_and_a_warm_arm_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"cold \(True and False\)"):
        findings(tmp_path, *change(usual(), "hint", cold=False))


def test_the_first_run_after_a_cache_drop_is_shown_apart(tmp_path: Path) -> None:
    head = header([["stock", "hint"]] * 5, cold=False)
    data = rows(["sh"] * 5, [0.6, 2.5, 1.9, 2.4, 2.4, 2.6, 2.6, 2.5, 2.4, 2.4], head, cold=False)
    data[0]["cold"] = True
    found = findings(tmp_path, *data, head=head)
    c = one(found)
    assert (c.n_blocks, c.verdict) == (4, Verdict.UNDECIDED)
    assert found.summaries[0].ts_mean == pytest.approx((1.9 + 2.4 + 2.6 + 2.4) / 4)
    assert "r.jsonl: stock tg48 run 0 was cold: 0.6 t/s, shown apart" in found.warnings


def test_runs_that_could_not_be_made_cold_are_compared_with_a_warning(tmp_path: Path) -> None:
    found = findings(tmp_path, *usual(cold=False))
    assert one(found).verdict is Verdict.FASTER
    assert "hint tg48: every run was warm, not as planned" in found.warnings


def test_a_cold_first_repetition_claims_nothing(tmp_path: Path) -> None:
    head = header([["stock", "hint"]] * 5)
    speeds = [0.6, 2.5, 1.9, 2.4, 2.4, 2.6, 2.6, 2.5, 2.4, 2.4]
    c = one(findings(tmp_path, *rows(["sh"] * 5, speeds, head), head=head))
    assert c.verdict is Verdict.UNDECIDED
    assert "too noisy to tell" in sentence(c)
    assert "1.25" not in sentence(c)


def test_drift_is_named_and_makes_no_winner(tmp_path: Path) -> None:
    wobble = [1.001, 0.999, 1.0, 1.002, 0.998, 1.001, 1.0, 0.999, 1.002, 1.0, 0.999, 1.001]
    data = rows(["shhs"] * 3, [5 * 1.01**i * w for i, w in enumerate(wobble)], header(ABBA))
    found = findings(tmp_path, *data)
    c = one(found)
    assert c.verdict is Verdict.UNDECIDED
    assert c.drift_per_run == pytest.approx(0.00995, abs=0.0005)
    assert "drift +1 % per run" in sentence(c)
    assert any(w.startswith("tg48: drift of +1 % per run") for w in found.warnings)


def test_other_logits_mean_no_speed(tmp_path: Path) -> None:
    data = usual()
    data[5]["logits_sha256"] = "ee"
    found = findings(tmp_path, *data)
    c = one(found)
    assert (c.outputs_equal, c.verdict) == (False, Verdict.UNDECIDED)
    assert sentence(c).startswith("outputs differ: no speed is reported for hint against stock in tg48")
    assert ratio_text(c) == "outputs differ"
    assert "1.52" not in sentence(c)


@pytest.mark.parametrize(
    ("check", "hashes", "expected"),
    [
        ({"outputs_equal": False, "text": "first differing token 3", "max_abs_diff": 0.25}, "ff", False),
        ({"outputs_equal": True}, "ff", True),
        ({"outputs_equal": None}, "ff", True),
        ({"outputs_equal": True}, None, None),
    ],
)
def test_outputs_are_equal_only_when_all_evidence_says_so(
    tmp_path: Path, check: Row, hashes: str | None, expected: bool | None
) -> None:
    row = {"kind": "check", "run_id": "r1", "arm": "hint", **check}
    c = one(findings(tmp_path, row, *usual(logits_sha256=hashes)))
    assert c.outputs_equal is expected
    if "max_abs_diff" in check:
        assert "(first differing token 3 (largest difference 0.25))" in sentence(c)
    if expected is None:
        assert "outputs not compared" in sentence(c)


def test_an_arm_whose_hints_all_fail_is_void(tmp_path: Path) -> None:
    c = one(findings(tmp_path, *change(usual(), "hint", hints={"calls": 20, "errors": 20})))
    assert (c.verdict, c.void) == (Verdict.UNDECIDED, "all 120 hints of hint failed")
    assert sentence(c) == "undecided: hint against stock in tg48 is void, all 120 hints of hint failed"
    (tmp_path / "r.jsonl").unlink()
    assert one(findings(tmp_path, *change(usual(), "hint", hints={"calls": 20, "errors": 3}))).void is None


def test_an_arm_that_reads_no_expert_from_a_mapping_is_void(tmp_path: Path) -> None:
    c = one(findings(tmp_path, *change(usual(), "hint", hints={"calls": 0, "errors": 0, "slices": 0, "unmapped": 72})))
    assert (c.verdict, c.void) == (Verdict.UNDECIDED, "no expert of hint was read from a mapping")


def test_a_refused_hint_is_never_silent(tmp_path: Path) -> None:
    found = findings(tmp_path, *change(usual(), "hint", hints={"calls": 20, "errors": 3}))
    assert "hint tg48: 18 hints were refused by the system" in found.warnings  # 3 in each of 6 runs


def test_logits_that_are_not_finite_are_never_equal(tmp_path: Path) -> None:
    data = usual(logits_sha256="ff")
    data[1] = {**data[1], "status": "failed", "reason": "logits are not finite"}
    c = one(findings(tmp_path, *data))
    assert (c.outputs_equal, c.verdict) == (False, Verdict.UNDECIDED)
    assert "not finite" in sentence(c)


def test_a_run_outside_of_its_budget_is_named(tmp_path: Path) -> None:
    data = usual(budget_bytes=GIB, effective_budget_bytes=None)
    found = findings(tmp_path, *data)
    assert sum("no memory limit was in force" in w for w in found.warnings) == len(data)


def test_failed_and_missing_runs_are_shown(tmp_path: Path) -> None:
    data = usual()[:9]
    data[1] = {**data[1], "status": "failed", "avg_ts": None, "reason": "out of memory"}
    found = findings(tmp_path, *data)
    assert one(found).n_blocks == 2  # the third block has no run of hint
    assert {s.arm: (len(s.ts), s.n_failed) for s in found.summaries} == {"stock": (5, 0), "hint": (3, 1)}
    assert "r.jsonl: hint tg48 run 1 failed: out of memory" in found.warnings
    assert "r.jsonl is incomplete: 9 of 12 planned runs are done" in found.warnings
    (tmp_path / "r.jsonl").unlink()
    head = header(ABBA, blocks=2)
    del head["plan"]["order"]  # then every arm runs once per block
    assert findings(tmp_path, *usual()[:2], head=head).warnings == (
        "r.jsonl is incomplete: 2 of 4 planned runs are done",
    )


def test_an_arm_that_never_finished_is_undecided(tmp_path: Path) -> None:
    data = change(usual(), "hint", status="failed", avg_ts=None, reason="no such mode")
    c = one(findings(tmp_path, *data))
    assert (c.ratio, c.ci95, c.n_blocks, c.verdict) == (None, None, 0, Verdict.UNDECIDED)
    assert "no block in which both arms finished" in sentence(c)


def test_one_block_decides_nothing(tmp_path: Path) -> None:
    c = one(findings(tmp_path, *usual()[:4], head=header(ABBA[:1])))
    assert (c.n_blocks, c.ci95, c.verdict) == (1, None, Verdict.UNDECIDED)
    assert "run at least 3" in sentence(c)


def test_warnings_name_outliers_budgets_and_impossible_reads(tmp_path: Path) -> None:
    data = usual(budget_bytes=2 * GIB, effective_budget_bytes=2 * GIB)
    data[0] |= {"avg_ts": 0.5, "effective_budget_bytes": 3 * GIB}
    data[4] |= {"disk_mib_s": 100.0}  # less than 100 MiB per token at 2.2 t/s
    warnings = findings(tmp_path, *data).warnings
    assert "r.jsonl: stock tg48 run 0 is an outlier: 0.5 t/s, kept" in warnings
    assert "stock: the memory budget was 3.00 GiB, not 2.00 GiB" in warnings
    assert "stock tg48: read faster than the measured disk, measure it again" in warnings


def test_a_model_that_chose_other_experts_is_named(tmp_path: Path) -> None:
    check = {"kind": "check", "run_id": "r1", "arm": "stock", "outputs_equal": True, "experts_match": False}
    warnings = findings(tmp_path, check, *usual()).warnings
    assert warnings == ("stock: the model did not choose the experts it was made to choose",)


def test_a_baseline_without_reads_has_nothing_to_gain(tmp_path: Path) -> None:
    warnings = findings(tmp_path, *usual(mib_per_token=0.0)).warnings
    assert "tg48: nothing to gain, stock read 0 bytes (the model is in memory)" in warnings


def test_files_of_the_same_conditions_are_pooled_by_block(tmp_path: Path) -> None:
    second = header(ABBA, run_id="r2")
    paths = [
        write(tmp_path / "a.jsonl", header(ABBA), *usual()),
        write(tmp_path / "b.jsonl", second, *rows(["shhs"] * 3, SPEEDS, second)),
    ]
    c = one(compare(read(paths)))
    assert (c.n_blocks, c.ratio) == (6, pytest.approx(9.6 / 6.3))
    assert c.method.startswith("paired bootstrap")
    with pytest.raises(ResultsError, match="run r1 is given twice"):
        compare(read([paths[0], paths[0]]))
    third = header(ABBA, run_id="r3", budget_bytes=GIB)
    other = write(tmp_path / "c.jsonl", third, *rows(["shhs"] * 3, SPEEDS, third))
    with pytest.raises(ResultsError, match=rf"budget_bytes \({2 * GIB} and {GIB}\)"):
        compare(read([paths[0], other]))
    fourth = header(ABBA, run_id="r4")
    fourth["arms"]["hint"]["wheel_sha256"] = "other"
    rebuilt = write(tmp_path / "d.jsonl", fourth, *rows(["shhs"] * 3, SPEEDS, fourth))
    with pytest.raises(ResultsError, match="arm hint is not the same in both runs: wheel_sha256 hinthint and other"):
        compare(read([paths[0], rebuilt]))


def test_every_candidate_meets_the_baseline_in_every_test(tmp_path: Path) -> None:
    order = [["stock", "off", "hint", "hint", "off", "stock"]] * 2
    head = header(order, tests=["pp64", "tg48"])
    data = [
        sample(head, block, block * 6 + i, arm, speed + i / 100, test)
        for block in (0, 1)
        for i, arm in enumerate(order[0])
        for test, speed in (("pp64", 10.0), ("tg48", 2.0))
    ]
    found = findings(tmp_path, *data, head=head, baseline="off")
    assert [(c.test, c.candidate) for c in found.comparisons] == [
        ("pp64", "stock"),
        ("pp64", "hint"),
        ("tg48", "stock"),
        ("tg48", "hint"),
    ]
    assert {c.baseline for c in found.comparisons} == {"off"}


def test_an_unknown_baseline_or_a_lone_arm_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no arm is called 'fast'") as caught:
        findings(tmp_path, *usual(), baseline="fast")
    assert caught.value.hint == "one of: stock, hint"
    (tmp_path / "r.jsonl").unlink()
    with pytest.raises(ResultsError, match="two arms"):
        findings(tmp_path, head=header([["stock"]]))


@pytest.mark.parametrize(("test", "expected"), [("tg48", 48), ("pp512", 512), ("tg128 @ d4096", 128)])
def test_tokens_of_a_test_name(test: str, expected: int) -> None:
    assert tokens(test) == expected


def test_a_name_that_is_no_test_is_refused() -> None:
    with pytest.raises(ResultsError, match="not a test name: 'latency'"):
        tokens("latency")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (12.345, "12.3"),
        (1234.5, "1234"),
        (999.7, "1000"),
        (0.0123, "0.0123"),
        (4.04e-6, "4.04e-06"),
    ],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_piped_table_is_markdown_with_the_conditions(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", header(ABBA), *usual())
    text = run_cli("compare", path).stdout
    assert text == run_cli("compare", path, "--output", "md").stdout
    lines = text.splitlines()
    assert lines[0].startswith("| test | arm | runs | t/s | p50 ms |")
    assert lines[2].startswith("| tg48 | stock | 6 | 2.1 ± 0.13 |")
    assert "| faster |" in lines[3]
    assert lines[5] == (
        "demo.gguf 3.00 GiB · memory budget 2.00 GiB (cgroup-v1) · read-ahead 128 KiB · "
        "loop0 ext4 in a file on tmpfs · cold · 3 blocks · 2 threads · kernel 6.1.0 · 2026-01-02"
    )
    assert lines[7].startswith("- hint decodes 1.52x faster than stock")


def test_conditions_leave_out_what_the_file_does_not_say(tmp_path: Path) -> None:
    head = header(ABBA)
    head |= {"machine": {}, "model": {}, "plan": {"arms": ["stock", "hint"], "tests": ["tg48"]}}
    found = findings(tmp_path, *usual(), head=head)
    assert conditions(found) == ["model · memory budget none · 2026-01-02"]


def test_terminal_shows_the_same_findings(tmp_path: Path) -> None:
    out = io.StringIO()
    print_terminal(findings(tmp_path, *usual(cold=False)), Console(file=out, width=160))
    assert "│ tg48 │ hint" in out.getvalue()
    assert "hint decodes 1.52x faster than stock" in out.getvalue()
    assert "warning: stock tg48: every run was warm" in out.getvalue()


def test_csv_has_a_line_per_test_and_arm(tmp_path: Path) -> None:
    stock, hint = csv.DictReader(io.StringIO(to_csv(findings(tmp_path, *usual()))))
    assert (stock["arm"], stock["verdict"], stock["ratio"]) == ("stock", "", "")
    assert (hint["arm"], hint["verdict"], hint["outputs_equal"]) == ("hint", "faster", "True")
    assert float(hint["ci95_low"]) < float(hint["ratio"]) < float(hint["ci95_high"])


def test_markdown_cells_cannot_break_the_table() -> None:
    assert markdown_table(["a"], [["x|y"]]) == "| a |\n| --- |\n| x\\|y |"


SCRIPT = Path(__file__).parent.parent / "scripts" / "results-readme"


def test_results_readme_is_made_from_the_files_and_checked(tmp_path: Path) -> None:
    box = tmp_path / "results" / "box"
    write(box / "2026-01-02-demo.jsonl", header(ABBA), *usual())
    readme = tmp_path / "README.md"
    begin = "<!-- results:begin results/box/2026-01-02-demo.jsonl -->"
    readme.write_text(f"# T\n\n{begin}\nold\n<!-- results:end -->\n\nend\n", encoding="utf-8")

    def script(*args: str) -> int:
        argv = [sys.executable, str(SCRIPT), "--root", str(tmp_path), *args]
        return subprocess.run(argv, capture_output=True, check=False).returncode

    assert script("--check") == 1
    assert "old" in readme.read_text(encoding="utf-8")
    assert script() == 0
    assert script("--check") == 0
    page = (tmp_path / "results" / "README.md").read_text(encoding="utf-8")
    cells = [cell.strip() for cell in page.splitlines()[6].strip("|").split("|")]
    assert cells[:8] == [
        "box",
        "[2026-01-02](box/2026-01-02-demo.jsonl)",
        "demo.gguf",
        "2.00 GiB (cgroup-v1)",
        "128 KiB",
        "tg48",
        "stock",
        "hint",
    ]
    assert cells[8].startswith("1.52 [1.")
    assert cells[9:] == ["faster", "100 → 100"]
    lines = readme.read_text(encoding="utf-8").splitlines()
    assert lines[:3] == ["# T", "", begin]
    assert lines[6].startswith("| box | [2026-01-02](results/box/2026-01-02-demo.jsonl) |")
    assert lines[-4:] == ["", "<!-- results:end -->", "", "end"]


def test_the_block_has_a_row_per_test_and_a_column_per_candidate(tmp_path: Path) -> None:
    both = header(["soh"] * 3)
    both["plan"]["arms"] = ["stock", "off", "hint"]
    # off by turns a little faster and slower than stock; hint twice as fast in every block
    data = rows(["soh"] * 3, [2.0, 2.1, 4.0, 2.1, 2.0, 4.2, 2.2, 2.2, 4.4], both)
    write(tmp_path / "results" / "box" / "a.jsonl", both, *data)
    write(tmp_path / "results" / "box" / "b.jsonl", header(ABBA, run_id="r2"), *(usual(run_id="r2")))
    readme = tmp_path / "README.md"
    files = "results/box/a.jsonl results/box/b.jsonl"
    readme.write_text(f"<!-- results:begin {files} -->\n<!-- results:end -->\n", encoding="utf-8")
    table = [line for line in with_block(readme).splitlines() if line.startswith("|")]
    heads, _, first, second = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    assert heads[5:] == ["test", "baseline", "off", "hint"]
    assert first[5:7] == second[5:7] == ["tg48", "stock"]
    assert first[7].startswith("1.0") and first[7].endswith("] ?")
    assert first[8].startswith("2.0") and first[8].endswith("]")
    assert second[7] == ""
    assert second[8].startswith("1.52 [1.")


def test_a_readme_without_files_or_block(tmp_path: Path) -> None:
    assert "No results yet." in results_page(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results:begin -->\n<!-- results:end -->\n", encoding="utf-8")
    assert with_block(readme) == "<!-- results:begin -->\n\nNo results yet.\n\n<!-- results:end -->\n"
    readme.write_text("# T\n", encoding="utf-8")
    with pytest.raises(ResultsError, match="no block for results"):
        with_block(readme)
