"""What reading ahead can win: times worked out by hand, and bounds that hold for any routing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from toolkit.cli import cli
from toolkit.model.ahead import Machine, token_ms
from toolkit.model.eviction import CHOSEN, POLICIES, misses
from toolkit.model.trace import read


def time_of(
    missing: list[list[int]], read_ms: float, *, top_k: int = 1, compute_ms: float = 9, early: int = 0, by_expert: bool
) -> float:
    machine = Machine(compute_ms=compute_ms, experts_share=2 / 3, shared_share=0, disk_mib_s=1)
    return token_ms(np.array(missing), top_k=top_k, read_ms=read_ms, machine=machine, early=early, by_expert=by_expert)


@pytest.mark.parametrize("by_expert", [True, False])
def test_what_misses_nothing_takes_the_compute(by_expert: bool) -> None:
    assert time_of([[0, 0], [0, 0]], 5, by_expert=by_expert) == pytest.approx(9)


def test_one_expert_is_waited_for_whole_or_by_matrix() -> None:
    # 3 ms before the experts, 6 ms in them; a read of 12 ms
    assert time_of([[1]], 12, by_expert=True) == pytest.approx(3 + 12 + 6)
    # gate there at 7, done at 9; up there at 11, done at 13; down there at 15, done at 17
    assert time_of([[1]], 12, by_expert=False) == pytest.approx(17)


def test_resident_experts_hide_a_read() -> None:
    # two experts of 3 ms, one missing: read from 3 to 6 while the other computes
    assert time_of([[1]], 3, top_k=2, by_expert=True) == pytest.approx(9)
    # a read of 4 ms ends 1 ms late; by matrix its third for gate is there at 4.33, before gate of the other is done
    # at 4, so 0.33 ms are lost there: gate 5.33, up 6.33 of the other (read at 5.67) and 7.33, down 8.33 and 9.33
    assert time_of([[1]], 4, top_k=2, by_expert=True) == pytest.approx(10)
    assert time_of([[1]], 4, top_k=2, by_expert=False) == pytest.approx(9 + 1 / 3)


@pytest.mark.parametrize("by_expert", [True, False])
def test_a_layer_early_hides_a_read_behind_the_layer_before(by_expert: bool) -> None:
    # of each layer 3 ms and 6 ms; the second layer's read of 6 ms starts at 3 and is there at 9, wanted at 12
    assert time_of([[0, 1]], 6, compute_ms=18, early=1, by_expert=by_expert) == pytest.approx(18)
    assert time_of([[0, 1]], 6, compute_ms=18, early=0, by_expert=True) == pytest.approx(24)


def test_a_shared_expert_hides_a_read_when_it_comes_first() -> None:
    # 2 ms of other weights, 3 ms in the selected expert, 1 ms in the shared one; a read of 3 ms for each matrix
    machine = Machine(compute_ms=6, experts_share=1 / 2, shared_share=1 / 6, disk_mib_s=1)

    def time(shared_first: bool) -> float:
        missing = np.array([[1]])
        return token_ms(missing, top_k=1, read_ms=9, machine=machine, early=0, shared_first=shared_first)

    # gate is there at 5, up at 8, down at 11: done at 12, and the shared expert at 13
    assert time(False) == pytest.approx(13)
    # it is done at 3, long before gate
    assert time(True) == pytest.approx(12)


def test_reads_do_not_start_before_their_token() -> None:
    # the first layer of each token waits in full however early the others are known
    assert time_of([[1, 0], [1, 0]], 6, compute_ms=18, early=2, by_expert=True) == pytest.approx(24)


def test_no_time_is_below_the_disk_or_the_compute_and_none_grows_with_more_notice() -> None:
    missing = np.random.default_rng(3).integers(0, 5, (40, 8))
    for read_ms in (0.1, 0.7, 3.0):
        for by_expert in (True, False):
            times = [
                time_of(missing.tolist(), read_ms, top_k=4, early=early, by_expert=by_expert) for early in range(4)
            ]
            assert min(times) >= max(9, missing.sum() * read_ms / 40) - 1e-9
            assert times == sorted(times, reverse=True)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    experts = np.array([[rng.choice(16, 2, replace=False) for _ in range(3)] for _ in range(30)])
    path = tmp_path / "routing.npz"
    np.savez(path, experts=experts.astype(np.int16), phase=np.array([0] * 10 + [1] * 20), n_expert=16)
    return path


def test_command_gives_a_row_for_each_policy(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "ahead.json"
    args = ["--compute", "6", "--disk", "1000", "--capacity", "25%", "--expert-bytes", "1MiB", "--json"]
    done = CliRunner().invoke(cli, ["model", "ahead", str(trace), *args, "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    rows = {row["policy"]: row for row in found["rows"]}
    assert list(rows) == ["LRU", CHOSEN, "Belady"]
    missed = misses(read(trace).workload(), POLICIES["LRU"], 12)[10:].sum() / 20
    assert rows["LRU"]["mib"] == pytest.approx(missed)
    assert rows["LRU"]["read_ms"] == pytest.approx(missed)  # 1 MiB in 1 ms
    assert rows["Belady"]["mib"] <= min(row["mib"] for row in rows.values())
    assert "| routing | 25 % | Belady |" in out.with_suffix(".md").read_text()


def test_a_trace_that_does_not_tell_the_size_of_an_expert_asks_for_it(trace: Path) -> None:
    done = CliRunner().invoke(cli, ["model", "ahead", str(trace), "--compute", "6", "--disk", "1000"])
    assert "--expert-bytes" in str(done.exception.hint)  # type: ignore[union-attr]
