"""Rows of results files for tests: a plan and one sample per run, with the fields a real run has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.results import FORMAT, Row, Writer

GIB = 1 << 30


def header(order: Sequence[Sequence[str]], *, tests: Sequence[str] = ("tg48",), run_id: str = "r1", **plan: Any) -> Row:
    arms = list(dict.fromkeys(order[0]))
    return {
        "kind": "run",
        "format": FORMAT,
        "run_id": run_id,
        "created": "2026-01-02T03:04:05Z",
        "model": {"filename": "demo.gguf", "size": 3 * GIB, "architecture": "qwen3moe"},
        "plan": {
            "arms": arms,
            "tests": list(tests),
            "blocks": len(order),
            "order": [list(block) for block in order],
            "n_threads": 2,
            "budget_bytes": 2 * GIB,
            "budget_method": "cgroup-v1",
            "cold": True,
            "tokens_sha256": "aa",
            **plan,
        },
        "machine": {
            "kernel": "6.1.0",
            "storage": {"read_ahead_kb": 128, "device": "loop0", "filesystem": "ext4", "loop_on": "tmpfs"},
        },
        "arms": {arm: {"label": arm, "wheel_sha256": arm * 2, "mode": arm, "env": {}} for arm in arms},
    }


def sample(head: Row, block: int, position: int, arm: str, avg_ts: float, test: str = "tg48", **more: Any) -> Row:
    return {
        "kind": "sample",
        "run_id": head["run_id"],
        "block": block,
        "position": position,
        "arm": arm,
        "test": test,
        "status": "ok",
        "reason": None,
        "avg_ts": avg_ts,
        "n_threads": 2,
        "cold": True,
        "effective_budget_bytes": 2 * GIB,
        "logits_sha256": "ff",
        "mib_per_token": 100.0,
        "read_amplification": 1.5,
        "major_faults": 480,
        "p50_ms": 1000 / avg_ts,
        "p95_ms": 1500 / avg_ts,
        **more,
    }


def rows(order: Sequence[str], values: Sequence[float], head: Row, **more: Any) -> list[Row]:
    """One sample per letter of `order` (a string of arm initials per block), in run order."""
    names = {arm[0]: arm for arm in head["plan"]["arms"]}
    flat = [(block, names[letter]) for block, letters in enumerate(order) for letter in letters]
    return [
        sample(head, block, position, arm, value, **more)
        for position, ((block, arm), value) in enumerate(zip(flat, values, strict=True))
    ]


def write(path: Path, head: Row, *data: Row) -> Path:
    with Writer(path, head) as w:
        w.write(*data)
    return path
