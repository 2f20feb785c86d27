"""A comparison with an arm on other machines: which one it is, where, and what a token moves."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from results_rows import header, rows, write

from toolkit.evidence import report, setting
from toolkit.evidence.compare import compare
from toolkit.evidence.findings import Findings
from toolkit.results import Row, RunData, read

ORDER = [["stock", "rpc"], ["rpc", "stock"], ["stock", "rpc"]]
SERVERS = ["10.0.0.2:50052", "10.0.0.3:50052"]
# bytes per token of the three distributed runs: their mean is 2 KiB
WIRE = [1024.0, 2048.0, 3072.0]


def head() -> Row:
    found = header(ORDER)
    found["arms"]["rpc"] |= {"rpc": SERVERS, "rpc_protocol": "7.0.0", "rpc_memory_bytes": [3 << 29, 3 << 29]}
    return found


def run(tmp_path: Path) -> RunData:
    found = head()
    samples = rows(["sr", "rs", "sr"], [10, 20, 20, 10, 10, 20], found, disk_mib_s=2000.0, compute_ms_per_token=10.0)
    wire = iter(WIRE)
    for row in samples:
        distributed = row["arm"] == "rpc"
        row["wire_bytes_per_token"] = next(wire) if distributed else None
        row["mib_per_token"] = 0.0 if distributed else 100.0
    (data,) = read([write(tmp_path / "run.jsonl", found, *samples)])
    return data


@pytest.fixture
def findings(tmp_path: Path) -> Findings:
    return compare([run(tmp_path)])


def test_json_says_which_arm_is_distributed_where_and_what_a_token_moves(findings: Findings) -> None:
    data = json.loads(report.to_json(findings))
    (comparison,) = data["comparisons"]
    assert (comparison["baseline"], comparison["baseline_servers"]) == ("stock", [])
    assert (comparison["candidate"], comparison["candidate_servers"]) == ("rpc", SERVERS)
    assert comparison["baseline_wire_bytes_per_token"] is None
    assert comparison["candidate_wire_bytes_per_token"] == 2048
    assert {arm["arm"]: (arm["servers"], arm["wire_bytes_per_token"]) for arm in data["arms"]} == {
        "stock": ([], None),
        "rpc": (SERVERS, 2048),
    }


def test_the_table_and_the_words_say_it_too(findings: Findings) -> None:
    headings, cells = report.table(findings)
    shown = [dict(zip(headings, row, strict=True)) for row in cells]
    assert [(row["arm"], row["layers"], row["wire KiB/token"]) for row in shown] == [
        ("stock", "local", "-"),
        ("rpc", "2 servers", "2"),
    ]
    assert (
        "rpc is distributed: its layers are on 10.0.0.2:50052, 10.0.0.3:50052; "
        "in tg48 a token moves 2 KiB over the wire"
    ) in report.markdown(findings)
    (stock, rpc) = csv.DictReader(io.StringIO(report.to_csv(findings)))
    assert (stock["servers"], stock["wire_bytes_per_token"]) == ("", "")
    assert (rpc["servers"], rpc["wire_bytes_per_token"]) == ("10.0.0.2:50052 10.0.0.3:50052", "2048.0")


def test_a_comparison_on_one_machine_has_no_such_columns(tmp_path: Path) -> None:
    found = header([["stock", "hint"]])
    (data,) = read([write(tmp_path / "run.jsonl", found, *rows(["sh"], [10, 20], found))])
    headings, _ = report.table(compare([data]))
    assert "layers" not in headings
    assert "wire KiB/token" not in headings


def test_the_limit_of_this_machines_disk_is_not_that_of_other_machines(findings: Findings) -> None:
    (limit,) = findings.rooflines
    assert limit.must_read_mib == 100  # the local arm's, not the 0 that the distributed one reads here
    assert limit.limit_ms == 50  # 100 MiB at 2000 MiB/s
    assert {s.arm: s.read_amplification for s in findings.summaries} == {"stock": 1.5, "rpc": None}
    # stock takes 100 ms
    assert {s.arm: s.limit_fraction for s in findings.summaries} == {"stock": pytest.approx(0.5), "rpc": None}


def test_the_same_build_on_servers_is_not_the_same_arm(tmp_path: Path) -> None:
    found = header([["off", "rpc"]])
    for arm in found["arms"].values():
        arm |= {"wheel_sha256": "0", "mode": "off", "env": {"MOE_MADV_MODE": "off"}}
    found["arms"]["rpc"]["rpc"] = SERVERS
    (data,) = read([write(tmp_path / "run.jsonl", found, *rows(["or"], [10, 20], found))])
    (comparison,) = compare([data]).comparisons
    assert not comparison.same_build


def test_the_conditions_hold_place_and_command(tmp_path: Path) -> None:
    pairs = dict(setting.rows(run(tmp_path)))
    assert pairs["layers"] == "stock local; rpc on 10.0.0.2:50052, 10.0.0.3:50052"
    assert "--arms stock --rpc 10.0.0.2:50052,10.0.0.3:50052" in pairs["command"]
    assert "--arm rpc" not in pairs["command"]
