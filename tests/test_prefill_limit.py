"""The limit of a prompt: its compute time in memory, from the baseline's check, against the reads it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from results_rows import header, rows, write

from toolkit import results
from toolkit.bench import check
from toolkit.evidence.compare import compare

MIB = 1 << 20


def test_compute_time_is_known_for_what_the_check_computed_in_memory() -> None:
    row = {"prefill_ms": 50.0, "prefill_read_bytes": 0, "decode_ms": 80.0, "decode_read_bytes": 0}
    assert check.compute_ms(row, "pp64") == 50.0
    assert check.compute_ms(row, "tg48") == 80.0
    # one of them was read from the disk
    assert check.compute_ms(row | {"prefill_read_bytes": 4096}, "pp64") is None
    assert check.compute_ms(row | {"prefill_read_bytes": 4096}, "tg48") == 80.0
    # where reads are not counted, nothing is known; rows of older files have no time of the prompt
    assert check.compute_ms(row | {"prefill_read_bytes": None}, "pp64") is None
    assert check.compute_ms({"decode_ms": 80.0, "decode_read_bytes": 0}, "pp64") is None


def test_a_prompt_of_several_batches_takes_their_time_over_all_tokens() -> None:
    # 1.8 + 1.4 s for 40 + 24 tokens
    assert check._per_token_ms({"ns": [1_800_000_000, 1_400_000_000], "n_tokens": [40, 24]}) == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("compute_ms", "limit_ms"),
    [
        (50.0, 50.0),  # 640 MiB for 64 tokens at 400 MiB/s: 25 ms of reading hide behind 50 ms of computing
        (20.0, 25.0),  # and 20 ms of computing behind the reading
    ],
    ids=["bound by computing", "bound by reads"],
)
def test_a_prompt_is_measured_against_its_limit(tmp_path: Path, compute_ms: float, limit_ms: float) -> None:
    head = header([["stock", "overlap"]] * 3, tests=("pp64",))
    fields: dict[str, Any] = {
        "test": "pp64",
        "disk_mib_s": 400.0,
        "needed_bytes": 640 * MIB,
        "mib_per_token": 12.0,
        "compute_ms_per_token": compute_ms,
    }
    data = rows(["so"] * 3, [8.0, 16.0] * 3, head, **fields)
    found = compare(results.read([write(tmp_path / "a.jsonl", head, *data)]))
    (roofline,) = found.rooflines
    assert roofline.limit_ms == pytest.approx(limit_ms)
    (comparison,) = found.comparisons
    # 16 t/s are 62.5 ms a token
    assert comparison.candidate_limit_fraction == pytest.approx(limit_ms / 62.5)
