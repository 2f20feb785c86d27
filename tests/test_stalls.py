"""Stalls in rows made by hand: what is flagged, against which median, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from results_rows import header, sample, write

from toolkit.bench.stalls import Cause, Stall, find
from toolkit.cli import cli

HEAD = header(["s"] * 4)
MIB = 1 << 20


def _row(token_ms: list[float], position: int = 0, *, test: str = "tg8", **counters: Any) -> dict[str, Any]:
    """A row of one run; a counter given as one number is that of the slowest batch, the others have none."""
    columns = {
        name: value if isinstance(value, list) else [value if ms == max(token_ms) else 0.0 for ms in token_ms]
        for name, value in counters.items()
    }
    return sample(HEAD, position, position, "stock", 2.5, test, token_ms=token_ms, token_counters=columns)


def _only(rows: list[dict[str, Any]], **options: float) -> Stall:
    (stall,) = find(rows, **options)
    return stall


NORMAL = [100.0, 110.0, 90.0, 100.0, 100.0]


def test_a_token_beyond_five_times_the_median_of_its_row_is_flagged_with_its_place() -> None:
    stall = _only([_row([*NORMAL, 600.0], position=3)])
    assert (stall.arm, stall.test, stall.block, stall.position) == ("stock", "tg8", 3, 3)
    assert (stall.what, stall.index, stall.ms, stall.median_ms) == ("token", 5, 600.0, 100.0)
    assert find([_row([*NORMAL, 500.0])]) == []
    assert _only([_row([*NORMAL, 500.0])], factor=4.9).index == 5


def test_a_timeline_of_an_arm_without_the_payload_has_empty_columns() -> None:
    """So it is stored: nothing was counted, and the token is judged by the others."""
    stall = _only([_row([*NORMAL, 600.0], cpu_ms=0.0, layer=[], layer_ms=[], wait_ms=[], read_ms=[])])
    assert stall.shares == {"busy": 0.0}


def test_many_times_nearly_nothing_is_no_stall() -> None:
    assert find([_row([1.0, 1.0, 1.0, 1.0, 50.0])]) == []
    assert _only([_row([1.0, 1.0, 1.0, 1.0, 50.0])], least_ms=49).ms == 50.0


def test_what_is_slow_in_every_run_is_none() -> None:
    """The first token reads what nothing has read before, in every run: its like are the other first tokens."""
    runs = [_row([900.0, *NORMAL], position=n) for n in range(3)]
    assert find(runs) == []
    assert len(find(runs[:2])) == 2  # two runs are too few to know
    stall = _only([*runs, _row([5000.0, *NORMAL], position=3)])
    assert (stall.position, stall.index, stall.median_ms) == (3, 0, 900.0)


def test_a_prompt_in_one_chunk_is_held_against_other_runs() -> None:
    runs = [_row([1000.0], position=n, test="pp64") for n in range(3)]
    assert find([_row([9000.0], test="pp64")]) == []
    stall = _only([*runs, _row([9000.0], position=3, test="pp64")])
    assert (stall.what, stall.position, stall.cause) == ("chunk", 3, Cause.UNKNOWN)
    # another arm's runs say nothing about it
    other = {**_row([9000.0], position=3, test="pp64"), "arm": "hint"}
    assert find([*runs, other]) == []


def test_failed_rows_and_rows_without_tokens_do_no_harm() -> None:
    bare = sample(HEAD, 0, 0, "stock", 2.5)
    failed = {**_row([*NORMAL, 600.0], position=1), "status": "failed"}
    assert _only([bare, failed]).position == 1


# 5 tokens of 100 ms and one of 5100: 5000 ms are to be explained, on 2 threads
CAUSES = [
    # waited for the disk and read as much as ever
    ({"psi_io_ms": 5000.0, "read_bytes": 40 * MIB, "cpu_ms": 5000.0, "psi_memory_ms": 0.0}, Cause.STORAGE),
    # the other CPU was busy, so the pressure counts half; two CPUs were not idle
    ({"psi_io_ms": 2000.0, "busy_cpus": 2.0, "read_bytes": 1, "cpu_ms": 5100.0, "psi_memory_ms": 0.0}, Cause.STORAGE),
    # a refault is memory pressure too, yet nothing more was read than usual
    (
        {"psi_io_ms": 5000.0, "psi_memory_ms": 5000.0, "read_bytes": [MIB] * 6, "major_faults": 9, "cpu_ms": 0.0},
        Cause.STORAGE,
    ),
    # 50 times as much was read in 51 times the time: what had been there was dropped
    (
        {"psi_io_ms": 5000.0, "psi_memory_ms": 5000.0, "read_bytes": [*[MIB] * 5, 50 * MIB], "cpu_ms": 0.0},
        Cause.MEMORY,
    ),
    # reclaim without any reading
    ({"psi_io_ms": 0.0, "psi_memory_ms": 4000.0, "read_bytes": 0, "cpu_ms": 3000.0}, Cause.MEMORY),
    # both threads computed
    ({"psi_io_ms": 0.0, "psi_memory_ms": 0.0, "read_bytes": 0, "cpu_ms": 9800.0}, Cause.COMPUTE),
    # ready to compute, and no core was free
    ({"psi_io_ms": 0.0, "psi_memory_ms": 0.0, "read_bytes": 0, "cpu_ms": 500.0, "queued_ms": 4700.0}, Cause.COMPUTE),
    # no core was free for half of the time, and both threads computed in the other half
    ({"psi_io_ms": 0.0, "psi_memory_ms": 0.0, "read_bytes": 0, "cpu_ms": 5500.0, "queued_ms": 2300.0}, Cause.COMPUTE),
    # one thread spun at the barrier, the other did nothing
    ({"psi_io_ms": 0.0, "psi_memory_ms": 0.0, "read_bytes": 0, "cpu_ms": 5000.0, "queued_ms": 0.0}, Cause.SOFTWARE),
    # the whole process was stopped while others used the disk
    ({"psi_io_ms": 5000.0, "psi_memory_ms": 0.0, "read_bytes": 0, "major_faults": 0, "cpu_ms": 0.0}, Cause.UNKNOWN),
    # waited for a layer whose reads had long been there
    (
        {"psi_io_ms": 0.0, "psi_memory_ms": 0.0, "read_bytes": 9, "cpu_ms": 0.0, "wait_ms": 4900.0, "read_ms": 30.0},
        Cause.SOFTWARE,
    ),
    # a system that tells of no pressure: the reads themselves tell
    ({"read_bytes": 9, "cpu_ms": 5000.0, "wait_ms": 4900.0, "read_ms": 4900.0, "psi_io_ms": None}, Cause.STORAGE),
    ({"read_bytes": None, "cpu_ms": 200.0, "psi_io_ms": None, "psi_memory_ms": None}, Cause.UNKNOWN),
]


@pytest.mark.parametrize(("counters", "cause"), CAUSES)
def test_the_cause_is_what_holds_half_of_the_time_beyond_the_median(counters: dict[str, Any], cause: Cause) -> None:
    row = _row([100.0] * 5 + [5100.0], **{k: v for k, v in counters.items() if v is not None})
    row["token_counters"] |= {k: None for k, v in counters.items() if v is None}
    assert _only([row]).cause == cause


def test_the_evidence_names_shares_bytes_and_speed() -> None:
    counters = {"psi_io_ms": 4500.0, "read_bytes": 51 * MIB, "major_faults": 7, "cpu_ms": 4000.0, "psi_memory_ms": 0.0}
    stall = _only([_row([100.0] * 5 + [5100.0], **counters)])
    # of 5000 ms beyond the median: 4500 in I/O, 4000 of CPU on 2 threads; 51 MiB in 5.1 s
    assert stall.shares == {"io": 0.9, "memory": 0.0, "busy": 0.4}
    assert (stall.read_bytes, stall.major_faults) == (51 * MIB, 7)
    assert stall.evidence == "90% in I/O pressure, cores 40% busy, 51 MiB read, 10 MiB/s, 7 major faults"


def _layer(n: int, **times: float) -> dict[str, Any]:
    entry = {"layer": n, "name": f"blk.{n}.ffn_gate_exps.weight", "bytes": 9, "late": 0, "in_time": 1}
    return entry | {"hint_ms": 0.0, "wait_ms": 5.0, "read_ms": 8.0, "compute_ms": 10.0} | times


@pytest.mark.parametrize(
    ("times", "io", "cause"),
    [
        # waited for reads that took as long, and something waited for I/O meanwhile
        ({"wait_ms": 42000.0, "read_ms": 42100.0}, 42000.0, Cause.STORAGE),
        # the same without any I/O: nobody ran the reads
        ({"wait_ms": 42000.0, "read_ms": 42100.0}, 30.0, Cause.SOFTWARE),
        # the reads had come
        ({"wait_ms": 42000.0, "read_ms": 8.0}, 30.0, Cause.SOFTWARE),
        # faults while computing: only the pressure tells
        ({"compute_ms": 42000.0}, 42000.0, Cause.STORAGE),
        ({"compute_ms": 42000.0}, 30.0, Cause.UNKNOWN),
    ],
)
def test_a_stalled_layer_is_named_and_told_apart(times: dict[str, float], io: float, cause: Cause) -> None:
    timeline = [_layer(n, **(times if n == 2 else {})) for n in range(6)]
    row = _row([42100.0], test="pp64", psi_io_ms=io, read_bytes=MIB, cpu_ms=0.0, psi_memory_ms=0.0)
    stall = _only([row | {"timeline": timeline}])
    assert (stall.what, stall.index, stall.layer) == ("layer", 2, "blk.2.ffn_gate_exps.weight")
    assert (stall.median_ms, stall.cause) == (15.0, cause)


def test_a_layer_that_computed_all_the_time_is_compute() -> None:
    timeline = [_layer(n, compute_ms=42000.0 if n == 2 else 10.0) for n in range(6)]
    row = _row([42100.0], test="pp64", psi_io_ms=0.0, psi_memory_ms=0.0, read_bytes=0.0, cpu_ms=84200.0)
    assert _only([row | {"timeline": timeline}]).cause == Cause.COMPUTE


def test_a_stalled_token_names_the_layer_that_took_it() -> None:
    timeline = [_layer(n) for n in range(6)]
    columns = {"layer": [0, 1, 0, 1, 0, 4], "layer_ms": [9.0, 9.0, 9.0, 9.0, 9.0, 480.0]}
    row = _row([100.0] * 5 + [600.0], **columns)
    assert _only([row | {"timeline": timeline}]).layer == "blk.4.ffn_gate_exps.weight"
    # a layer with less than half of it is not to blame
    columns["layer_ms"][5] = 240.0
    assert _only([row | {"timeline": timeline, "token_counters": columns}]).layer is None


def test_the_command_tells_stalls_as_lines_and_as_json(tmp_path: Path) -> None:
    calm, slow = _row(NORMAL, 0), _row([*NORMAL, 1100.0], 1, psi_io_ms=900.0, read_bytes=MIB, cpu_ms=0.0)
    path = write(tmp_path / "r.jsonl", HEAD, calm, slow)
    shown = CliRunner().invoke(cli, ["bench", "stalls", str(path)], catch_exceptions=False).stdout.splitlines()
    assert shown == [
        "stock tg8 run 1, token 5: 1100 ms, median 100 ms: storage (90% in I/O pressure, 1 MiB read, 0.909 MiB/s)",
        "1 stall",
    ]
    told = CliRunner().invoke(cli, ["bench", "stalls", str(path), "--json", "--factor", "12"], catch_exceptions=False)
    assert json.loads(told.stdout) == {"stalls": []}
    told = CliRunner().invoke(cli, ["bench", "stalls", str(path), "--json"], catch_exceptions=False)
    (stall,) = json.loads(told.stdout)["stalls"]
    assert (stall["what"], stall["index"], stall["cause"], stall["shares"]["io"]) == ("token", 5, "storage", 0.9)
