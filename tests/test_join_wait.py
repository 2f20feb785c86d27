"""How long computing waited for reads, from rows to every form of a report, and what the doctor says of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from results_rows import header, rows, write

from toolkit.doctor import kernel
from toolkit.evidence import html_report
from toolkit.evidence.compare import compare
from toolkit.evidence.findings import Findings
from toolkit.evidence.report import markdown, table, to_csv, to_json
from toolkit.results import Row, read

ABBA = [["stock", "hint"], ["hint", "stock"]]
# seconds of 48 tokens
WAITS = {"stock": 4.8, "hint": 1.2}


def found(tmp_path: Path, data: list[Row]) -> Findings:
    return compare(read([write(tmp_path / "r.jsonl", header(ABBA), *data)]))


def waited(tmp_path: Path, **why: str) -> Findings:
    data = rows(["sh", "hs"], [2.0, 3.0, 3.1, 2.1], header(ABBA))
    for row in data:
        reason = why.get(row["arm"])
        row |= {"io_wait_s": None if reason else WAITS[row["arm"]], "io_wait_why": reason}
    return found(tmp_path, data)


def test_the_wait_per_token_and_its_ratio_stand_beside_the_speed(tmp_path: Path) -> None:
    findings = waited(tmp_path)
    data = json.loads(to_json(findings))
    (c,) = data["comparisons"]
    assert c["baseline_io_wait_ms_per_token"] == pytest.approx(100)
    assert c["candidate_io_wait_ms_per_token"] == pytest.approx(25)
    assert c["io_wait_ratio"] == pytest.approx(0.25)
    assert {a["arm"]: a["io_wait_why"] for a in data["arms"]} == {"stock": None, "hint": None}
    headings, cells = table(findings)
    assert [row[headings.index("join wait ms/token")] for row in cells] == ["100", "25"]
    said = "join wait in tg48: 25 ms per token in hint, 100 ms in stock (0.25x)"
    assert f"- {said}\n" in markdown(findings)
    page = html_report.page([findings])
    assert said in page and "join wait ms/token" in page
    first = to_csv(findings).splitlines()[0].split(",")
    assert {"io_wait_ms_per_token", "io_wait_why"} <= set(first)


def test_where_it_is_not_known_the_reason_is_said(tmp_path: Path) -> None:
    findings = waited(tmp_path, hint="its layers are on other machines")
    (c,) = findings.comparisons
    assert (c.candidate_io_wait_ms_per_token, c.io_wait_ratio) == (None, None)
    headings, cells = table(findings)
    assert [row[headings.index("join wait ms/token")] for row in cells] == ["100", "n/a"]
    assert "- join wait of hint in tg48 is n/a: its layers are on other machines\n" in markdown(findings)


def test_a_baseline_that_never_waits_makes_no_ratio(tmp_path: Path) -> None:
    data = rows(["sh", "hs"], [2.0, 3.0, 3.1, 2.1], header(ABBA), io_wait_s=0.0, io_wait_why=None)
    (c,) = found(tmp_path, data).comparisons
    assert (c.baseline_io_wait_ms_per_token, c.candidate_io_wait_ms_per_token, c.io_wait_ratio) == (0, 0, None)


def test_no_wait_is_told_of_an_arm_whose_outputs_differ(tmp_path: Path) -> None:
    data = rows(["sh", "hs"], [2.0, 3.0, 3.1, 2.1], header(ABBA), io_wait_s=1.0, io_wait_why=None)
    data[1]["logits_sha256"] = "ee"
    assert "join wait in" not in markdown(found(tmp_path, data))


def test_rows_from_before_it_was_counted_have_no_column(tmp_path: Path) -> None:
    findings = found(tmp_path, rows(["sh", "hs"], [2.0, 3.0, 3.1, 2.1], header(ABBA)))
    assert "join wait" not in markdown(findings)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_doctor_says_whether_this_kernel_tells_it(tmp_path: Path) -> None:
    lacking = kernel.run_queue(tmp_path)
    assert lacking.works is False and "CONFIG_SCHED_INFO" in (lacking.why or "")
    (tmp_path / "thread-self").mkdir()
    (tmp_path / "thread-self/schedstat").write_text("1 2 3\n", encoding="utf-8")
    assert kernel.run_queue(tmp_path).works is True
