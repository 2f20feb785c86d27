"""Before any speed: do all arms compute the same, and does the model choose the experts it was made to choose?"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.bench.launch import Outcome, launch
from toolkit.bench.limits import Budget
from toolkit.bench.plan import Arm, Tokens
from toolkit.errors import BenchError

CHECK_TOKENS = 8  # decoded positions compared beside the end of the prompt
GREEDY_TOKENS = 16  # that the model itself goes on with after these


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two logit arrays [position, n_vocab] compared."""

    equal: bool  # bit for bit, and finite
    max_abs: float | None
    text: str


def compare_logits(baseline: np.ndarray, candidate: np.ndarray) -> Difference:
    """Bitwise equality first; otherwise how far apart, from which position on, and whether only shifted by one."""
    if baseline.shape != candidate.shape or baseline.size == 0:
        return Difference(equal=False, max_abs=None, text=f"shapes {baseline.shape} and {candidate.shape}")
    if not (np.isfinite(baseline).all() and np.isfinite(candidate).all()):
        return Difference(equal=False, max_abs=None, text="logits are not finite")
    n = len(baseline)
    if baseline.tobytes() == candidate.tobytes():
        return Difference(equal=True, max_abs=0.0, text=f"logits equal bit for bit at {n} positions")
    apart = np.abs(baseline.astype(np.float64) - candidate).max(axis=1)
    for a, b in ((baseline[1:], candidate[:-1]), (baseline[:-1], candidate[1:])):
        if len(a) and a.tobytes() == b.tobytes():
            return Difference(
                equal=False, max_abs=float(apart.max()), text="misaligned: the same logits one position apart"
            )
    first = int(np.flatnonzero(apart)[0]) if apart.any() else 0
    text = f"logits differ by up to {apart.max():.3g}, first at position {first} of {n}"
    return Difference(equal=False, max_abs=float(apart.max()), text=text)


def check_arms(arms: Sequence[Arm], tokens: Tokens, job: dict[str, Any], unlimited: Budget) -> list[dict[str, Any]]:
    """One `check` row per arm, the first arm being the baseline: equality with it, and its time when nothing is read.

    Raises BenchError when an arm cannot run at all. Runs without a memory budget.
    """
    gen = tokens.gen[:CHECK_TOKENS]
    short = {**job, "tokens": [*tokens.depth, *tokens.prompt, *gen], "further": [], "n_greedy": GREEDY_TOKENS}
    rows: list[dict[str, Any]] = []
    baseline: np.ndarray | None = None
    greedy: tuple[int, ...] | None = None
    with tempfile.TemporaryDirectory(prefix="moe-madv-check-") as folder:
        for arm in arms:
            stem = Path(folder) / f"{len(rows)}"
            outcome = launch(arm, {**short, "logits_file": str(stem)}, unlimited)
            require_done(arm, outcome)
            logits = np.concatenate([np.load(f"{stem}.{test['test']}.npy") for test in outcome.tests])
            baseline = logits if baseline is None else baseline
            found = compare_logits(baseline, logits)
            greedy = outcome.tokens if greedy is None else greedy
            last = outcome.tests[-1]
            rows.append(
                {
                    "arm": arm.name,
                    "outputs_equal": found.equal,
                    "max_abs_diff": found.max_abs,
                    "text": f"{found.text}{_greedy(greedy, outcome.tokens)}",
                    "greedy_equal": outcome.tokens == greedy if greedy else None,
                    "greedy": [token for test in outcome.tests for token in test["greedy"]],
                    "buffers": outcome.loaded["buffers"] if outcome.loaded else None,
                    "decode_ms": float(np.median(last["ns"])) / 1e6 if gen else None,
                    "decode_read_bytes": last["read_bytes"] if gen else None,
                    "prefill_ms": _per_token_ms(outcome.tests[0]) if tokens.prompt else None,
                    "prefill_read_bytes": outcome.tests[0]["read_bytes"] if tokens.prompt else None,
                }
            )
    return rows


def _per_token_ms(test: dict[str, Any]) -> float:
    return float(sum(test["ns"])) / 1e6 / float(sum(test["n_tokens"]))


def compute_ms(check: Mapping[str, Any], test: str) -> float | None:
    """Milliseconds per token of a test with the model in memory, from the baseline's check row.

    None when the check read from the disk, or did not time this test. Prefill is timed with the batches of the plan.
    It has the first touch of every mapped page in it, as it has in each process that maps a model.
    """
    kind = "decode" if test.startswith("tg") else "prefill"
    in_memory = check.get(f"{kind}_read_bytes") == 0
    return check.get(f"{kind}_ms") if in_memory else None


def _greedy(baseline: Sequence[int], candidate: Sequence[int]) -> str:
    """How far two continuations go together, in words; nothing where there is none."""
    if not baseline:
        return ""
    if baseline == candidate:
        return f", greedy text of {len(baseline)} tokens equal"
    pairs = enumerate(zip(baseline, candidate, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(baseline), len(candidate)))
    return f", greedy text differs from token {first} of {len(baseline)}"


def trace_experts(
    arm: Arm, tokens: Tokens, job: dict[str, Any], unlimited: Budget, blocks: Sequence[int], top_k: int
) -> np.ndarray:
    """Expert ids that a real run selected, int32 [token, layer, k] for these blocks, -1 where none was computed.

    In the last layer llama.cpp computes the rows that give logits only, which of a prompt is the last token.
    """
    outcome = launch(arm, {**job, "tokens": tokens.all, "trace": True}, unlimited)
    require_done(arm, outcome)
    experts = np.full((len(tokens.all), len(blocks), top_k), -1, dtype=np.int32)
    for test in outcome.tests:
        for layer, first, ids in test["experts"]:
            experts[first : first + len(ids), blocks.index(layer)] = ids
    return experts


def matches_prescription(experts: np.ndarray, prescribed: np.ndarray) -> bool:
    """Whether every computed selection is the prescribed set; order within a token does not matter."""
    computed = (experts >= 0).all(axis=2)
    same = (np.sort(experts, axis=2) == np.sort(prescribed, axis=2)).all(axis=2)
    return bool(computed.any() and same[computed].all())


def require_done(arm: Arm, outcome: Outcome) -> None:
    """BenchError with the worker's own reason unless it came to its end."""
    if outcome.reason is not None:
        raise BenchError(f"arm {arm.name} failed: {outcome.reason}", where=arm.python)
