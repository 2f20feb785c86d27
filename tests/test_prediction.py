"""Guesses of the next layer's experts: each rule by hand, what counts as right, and the command."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from toolkit import cli as command_line
from toolkit.errors import ModelError
from toolkit.model import prediction, prediction_report, trace
from toolkit.model.eviction import CHOSEN, POLICIES, Workload, misses
from toolkit.model.prediction import Rule, judge
from toolkit.model.routing import Trace, generate


def by_hand(*rows: tuple[int, ...], n_prompt: int = 0, n_expert: int = 4) -> Trace:
    """One expert a layer: tokens as rows of layers."""
    experts = np.array(rows, dtype=np.int16)[:, :, None]
    return Trace(experts=experts, n_prompt=n_prompt, n_expert=n_expert, source="hand.npz")


def generated(seed: int) -> Workload:
    return Workload(trace=generate(layers=3, n_prompt=6, n_decode=20, n_expert=16, top_k=3, seed=seed))


# --- Scores


def test_recent_and_frequent_by_hand() -> None:
    work = by_hand((0,), (1,), (0,), (3,))
    recent = prediction.recent(work)
    # Before the last token 0 was used one token ago, 1 two ago, the others never.
    assert np.argsort(-recent[3, 0], kind="stable").tolist() == [0, 1, 2, 3]
    assert recent[3, 0, 0] - recent[3, 0, 1] == 1
    frequent = prediction.frequent(work)
    half = 0.5 ** (1 / 16)
    assert frequent[3, 0] == pytest.approx([half**2 + 1, half, 0, 0])
    assert not frequent[0].any()


def test_followers_by_hand() -> None:
    # Layer 1 takes 2 after 0 twice and 3 after 0 once; layer 0 comes after layer 1 of the token before.
    scores = prediction.followers(by_hand((0, 2), (0, 3), (0, 2), (1, 1), (0, 2)))
    assert scores[0, 1].tolist() == [0, 0, 0, 0]
    assert scores[4, 1] == pytest.approx([0, 0, 2 / 4, 1 / 4])  # 0 was taken three times; one is added
    assert scores[3, 0] == pytest.approx([1 / 2, 0, 0, 0])  # 2 in layer 1 was followed by 0 once
    assert scores[4, 0].tolist() == [0, 0, 0, 0]  # 1 never had a follower


def test_followers_of_several_experts_count_by_their_mean() -> None:
    experts = np.array([[[0, 1], [2, 3]], [[0, 2], [2, 1]], [[0, 1], [0, 1]]], dtype=np.int16)
    work = Trace(experts=experts, n_prompt=0, n_expert=4, source="hand.npz")
    # After 0: 2 twice, 3 and 1 once, of two; after 1: 2 and 3 once, of one.
    assert prediction.followers(work)[2, 1] == pytest.approx(
        [0, (1 / 3 + 0) / 2, (2 / 3 + 1 / 2) / 2, (1 / 3 + 1 / 2) / 2]
    )


def test_followers_and_frequent_is_the_formula() -> None:
    work = generate(layers=3, n_prompt=2, n_decode=10, n_expert=6, top_k=2, seed=3)
    scores = prediction.followers_and_frequent(work)
    rows = work.experts.tolist()
    order = [(token, layer) for token in range(12) for layer in range(3)]
    for i, (token, layer) in enumerate(order[1:], start=1):
        now = rows[order[i - 1][0]][order[i - 1][1]]
        seen = [(rows[t][n], rows[order[j][0]][order[j][1]]) for j, (t, n) in enumerate(order[1:i]) if n == layer]
        pairs = Counter((a, b) for taken, before in seen for a in taken for b in before)
        single = Counter(b for _, before in seen for b in before)
        for expert in range(6):
            uses = [t for t in range(token) if expert in rows[t][layer]]
            rate = (len(uses) + 0.5) / (token + 1)
            expected = math.log(sum(0.5 ** ((token - 1 - t) / 16) for t in uses) + 0.1)
            for b in now:
                expected += math.log((pairs[expert, b] + 8 * rate) / (single[b] + 8) / rate)
            assert scores[token, layer, expert] == pytest.approx(expected, abs=1e-5)


# --- What is guessed, and what is right


def test_rules_name_absent_experts_only() -> None:
    scores = np.array([[[5, 4, 3, 2]]], dtype=np.float32)
    held = np.array([[[True, False, False, False]]])

    def guess(**how: object) -> list[int]:
        rule = Rule(name="", scores=prediction.recent, **how)  # type: ignore[arg-type]
        return np.flatnonzero(rule.guess(scores, held, top_k=2)).tolist()

    assert guess(top=2) == [1, 2]
    assert guess(least=3.0) == [1, 2]
    assert guess(of_top_k=True) == [1]
    everything: NDArray[np.bool_] = ~np.zeros_like(held)
    assert not Rule(name="", scores=prediction.recent, top=2).guess(scores, everything, 2).any()


def test_residency_is_what_the_cache_misses() -> None:
    work = generated(2)
    held = prediction.residency(work, 12)
    used = np.zeros(held.shape, dtype=bool)
    np.put_along_axis(used, work.trace.experts.astype(int), True, axis=2)
    assert (used & ~held).sum(axis=(1, 2)).tolist() == misses(work, POLICIES[CHOSEN], 12).tolist()
    assert held.sum(axis=(1, 2)).max() <= 3 * 12  # three looks a token at no more than 12 slots


def test_judged_is_what_counting_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Rule(name="best 2", scores=prediction.frequent, top=2)
    monkeypatch.setattr(prediction, "RULES", (rule,))
    work, nbytes = generated(4), (10, 20, 40)
    setting, (result,) = judge(work, nbytes, 25, name="x")
    held = prediction.residency(work, 48 * 25 // 100)
    scores = prediction.frequent(work.trace)
    right, wrong, later, missing = [], [], 0, 0
    for token in range(6, 26):
        for layer in range(3):
            absent = [e for e in range(16) if not held[token, layer, e]]
            guessed = sorted(absent, key=lambda e: -scores[token, layer, e])[:2]
            taken = {*work.trace.experts[token, layer].tolist()}
            missing += len(taken & {*absent})
            right += [nbytes[layer] for e in guessed if e in taken]
            wrong += [nbytes[layer] for e in guessed if e not in taken]
            later += sum(e in taken for e in guessed) if token >= 16 else 0
    assert (result.right, result.wrong, result.right_later) == (len(right), len(wrong), later)
    assert (result.right_bytes, result.wrong_bytes) == (sum(right), sum(wrong))
    assert result.precision == len(right) / (len(right) + len(wrong))
    assert (setting.missing, setting.decode_tokens, setting.layers) == (missing, 20, 3)
    assert len(right) > 0 < len(wrong)
    _, (unsized,) = judge(work, (), 25, name="x")
    assert (unsized.right, unsized.right_bytes) == (result.right, None)


def test_a_routing_that_repeats_is_guessed_from_followers() -> None:
    # Expert e of a layer is always followed by e + 1: once seen, one guess finds all that is missing.
    rng = np.random.default_rng(0)
    first = rng.integers(0, 40, 120)
    work = Workload(
        trace=Trace(
            experts=((first[:, None] + np.arange(4)) % 40).astype(np.int16)[:, :, None],
            n_prompt=60,
            n_expert=40,
            source="chain.npz",
        )
    )
    setting, results = judge(work, (), 20, name="chain")
    found = {r.rule: r for r in results}
    # Layers 1 to 3 can be known, the first of a random token not.
    assert found["followers, best 1"].right_later > 0.6 * setting.missing_later
    assert found["recent, best 1"].right_later < 0.2 * setting.missing_later


# --- The command


def save(path: Path, work: Workload, **arrays: object) -> Path:
    phase = np.array([0] * work.trace.n_prompt + [1] * (len(work.trace.experts) - work.trace.n_prompt), dtype=np.uint8)
    np.savez(path, experts=work.trace.experts, phase=phase, n_expert=work.trace.n_expert, **arrays)  # type: ignore[arg-type]
    return path


def test_the_command_writes_json_and_tables(tmp_path: Path) -> None:
    sized = save(tmp_path / "one.npz", generated(0), expert_bytes=[1 << 20] * 3)
    plain = save(tmp_path / "two.npz", generated(1))
    out = tmp_path / "new" / "prediction.json"
    args = ["model", "predict", str(sized), str(plain), "--capacity", "30%, 50", "--out", str(out), "--json"]
    done = CliRunner().invoke(command_line.cli, args, catch_exceptions=False)
    report = json.loads(done.stdout)
    assert report == json.loads(out.read_text(encoding="utf-8"))
    settings = {(s["trace"], s["capacity_percent"]): s for s in report["settings"]}
    assert [*settings] == [("one", 30), ("one", 50), ("two", 30), ("two", 50)]
    decoded = misses(generated(1), POLICIES[CHOSEN], 14)[6:]
    assert settings["two", 30]["missing"] == decoded.sum()
    assert settings["one", 30]["missing_bytes"] == settings["one", 30]["missing"] << 20
    rows = {(r["trace"], r["capacity_percent"], r["rule"]): r for r in report["results"]}
    row = rows["one", 30, "followers, best 2"]
    assert row["recall"] == pytest.approx(row["right"] / settings["one", 30]["missing"], abs=1e-4)
    assert [r["rule"] for r in report["results"] if r["modelled"]][:3] == [
        "next router early, 0.80",
        "next router early, 0.85",
        "next router early, 0.89",
    ]
    page = out.with_suffix(".md").read_text(encoding="utf-8")
    cell = f"{row['right'] / 20:.1f} + {row['wrong'] / 20:.1f} ({row['right'] / 20:.0f} + {row['wrong'] / 20:.0f})"
    assert cell in page
    assert f"{row['precision']:.0%} / {row['recall']:.0%}" in page
    assert "## Reading" in page and "20 decoded tokens" in page


def test_a_capacity_that_holds_no_layer_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path / "x.npz", generated(0))
    with pytest.raises(ModelError, match="a layer alone takes 3"):
        prediction_report.study([trace.read(file)], [5], progress=print)
