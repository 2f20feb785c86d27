"""Routing traces: loading with holes, statistics against hand-made and independent values, the generator."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from toolkit.errors import ModelError
from toolkit.model.routing import generate, load_trace, lru_hit_rate, statistics
from toolkit.model.shape import PRESETS, routing


def save(path: Path, experts: Any, *, n_prompt: int, n_expert: int = 8) -> Path:
    experts = np.array(experts, dtype=np.int16)
    phase = np.array([0] * n_prompt + [1] * (len(experts) - n_prompt), dtype=np.uint8)
    np.savez(path, experts=experts, phase=phase, n_expert=n_expert)
    return path


def one_layer(rows: list[list[int]]) -> NDArray[np.int16]:
    return np.array(rows, dtype=np.int16)[:, None, :]


# --- LRU ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequence", "n_prompt", "capacity", "expected"),
    [
        # a b a c b a: capacity 2 keeps {a}, {a b}, {b a} hit, {a c}, {c b}, {b a}
        ([0, 1, 0, 2, 1, 0], 0, 2, 1 / 6),
        # the first-in order would have dropped a at c; the least recent is b, so the last a hits
        ([0, 1, 0, 2, 0], 0, 2, 2 / 5),
        # the prompt warms the cache and is not counted: a hits, c misses, b was dropped by c
        ([0, 1, 0, 2, 1], 2, 2, 1 / 3),
        ([0, 1, 2, 0, 1, 2], 3, 3, 1.0),
        ([0, 1, 2, 0, 1, 2], 3, 2, 0.0),
        ([5, 5, 5], 0, 0, 0.0),
    ],
)
def test_lru_by_hand(sequence: list[int], n_prompt: int, capacity: int, expected: float) -> None:
    assert lru_hit_rate(one_layer([[e] for e in sequence]), n_prompt, capacity) == pytest.approx(expected)


def test_lru_keeps_the_experts_of_different_layers_apart() -> None:
    # Expert 0 in both layers, capacity 1: each layer's expert evicts the other's.
    experts = np.zeros((3, 2, 1), dtype=np.int16)
    assert lru_hit_rate(experts, 1, 1) == 0.0
    assert lru_hit_rate(experts, 1, 2) == 1.0


def test_lru_equals_a_list_kept_in_order_of_use() -> None:
    experts = generate(layers=3, n_prompt=5, n_decode=20, n_expert=16, top_k=3, seed=4).experts
    recent: list[tuple[int, int]] = []  # most recent last
    hits = 0
    for token in range(25):
        for layer in range(3):
            for expert in experts[token, layer].tolist():
                if (layer, expert) in recent[-10:]:
                    hits += token >= 5
                if (layer, expert) in recent:
                    recent.remove((layer, expert))
                recent.append((layer, expert))
    assert lru_hit_rate(experts, 5, 10) == pytest.approx(hits / (20 * 3 * 3))


# --- statistics -----------------------------------------------------------------------------------------------


def test_statistics_by_hand() -> None:
    # 8 experts, so the static set is the one most frequent expert of the first 5 of 10 decode tokens: 0 (4 times).
    prompt = [[6, 7]]
    decode = [[0, 1], [0, 1], [0, 2], [0, 3], [4, 5], [0, 6], [1, 2], [1, 2], [0, 1], [6, 7]]
    got = statistics(one_layer(prompt + decode), 1, 8)
    # neighbours share 2, 1, 1, 0, 0, 0, 2, 1, 0 of two: Jaccard 1, 1/3, 1/3, 0, 0, 0, 1, 1/3, 0
    assert got.adjacent_jaccard == pytest.approx(3 / 9)
    # tokens 8 and 9 have a full window of decode tokens before them: 0, 1 seen; 6 seen, 7 not (the prompt is outside)
    assert got.recent_reuse == pytest.approx(3 / 4)
    # expert 0 covers 2 of the 10 choices of the second half
    assert got.static_coverage == pytest.approx(2 / 10)
    # 50 % of 8 pairs are 4. Hits after {6,7}: 0 1 | 0 1 hit hit | 0 hit 2 | 0 hit, 3 | 4 5 drop 6.. and so on:
    # caches {6 7 0 1} {6 7 0 1} {7 1 0 2} {1 2 0 3} {0 3 4 5} {4 5 0 6} {0 6 1 2} hits {0 6 1 2} {6 2 0 1} {0 1 6 7}
    assert got.lru_hits[50] == pytest.approx((2 + 1 + 1 + 0 + 1 + 0 + 2 + 2 + 1) / 20)
    assert got.lru_hits[10] == 0.0  # capacity 0


def test_statistics_equal_those_from_sets() -> None:
    trace = generate(layers=4, n_prompt=7, n_decode=30, n_expert=32, top_k=4, seed=9)
    sets = [[set(row.tolist()) for row in token] for token in trace.experts[7:]]
    layers = range(4)
    jaccard = [len(a[i] & b[i]) / len(a[i] | b[i]) for a, b in itertools.pairwise(sets) for i in layers]
    seen = [
        len(sets[t][i] & set().union(*(sets[s][i] for s in range(t - 8, t)))) / 4 for t in range(8, 30) for i in layers
    ]
    covered = 0
    for i in layers:
        counts = [sum(e in token[i] for token in sets[:15]) for e in range(32)]
        top = sorted(range(32), key=lambda e: (-counts[e], e))[:4]
        covered += sum(len(token[i] & set(top)) for token in sets[15:])
    got = statistics(trace.experts, 7, 32)
    assert got.adjacent_jaccard == pytest.approx(sum(jaccard) / len(jaccard))
    assert got.recent_reuse == pytest.approx(sum(seen) / len(seen))
    assert got.static_coverage == pytest.approx(covered / (15 * 4 * 4))


def test_statistics_need_a_full_window() -> None:
    with pytest.raises(ValueError, match="8 decode tokens"):
        statistics(np.zeros((9, 1, 1), dtype=np.int16), 1, 8)


def test_statistics_of_more_than_512_experts() -> None:
    # 896 experts, 16 used; every token takes the same ones, 0, 255, 256 and 895 among them.
    row = [0, 255, 256, 895, *range(500, 512)]
    got = statistics(one_layer([row] * 12), 2, 896)
    assert (got.adjacent_jaccard, got.recent_reuse, got.static_coverage) == (1.0, 1.0, 1.0)
    assert got.lru_hits[10] == 1.0


# --- the generator --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["demo", "bench"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_generated_routing_is_like_recorded_routing(preset: str, seed: int) -> None:
    _, trace = routing(PRESETS[preset], None, seed)
    got = statistics(trace.experts, trace.n_prompt, trace.n_expert)
    measured = [got.adjacent_jaccard, got.recent_reuse, got.static_coverage, got.lru_hits[20], got.lru_hits[30]]
    assert measured == pytest.approx([0.25, 0.72, 0.57, 0.74, 0.87], abs=0.03)


def test_generated_rows_are_distinct_experts_and_the_seed_decides() -> None:
    def draw(seed: int) -> NDArray[np.int16]:
        return generate(layers=2, n_prompt=3, n_decode=9, n_expert=10, top_k=10, seed=seed).experts

    assert np.array_equal(np.sort(draw(1), axis=2), np.broadcast_to(np.arange(10), (12, 2, 10)))
    assert np.array_equal(draw(1), draw(1))
    assert not np.array_equal(draw(1), draw(2))


# --- recorded traces ------------------------------------------------------------------------------------------


def test_missing_prompt_rows_mirror_the_recorded_ones(tmp_path: Path) -> None:
    first = [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6]]
    last = [[-1, -1], [-1, -1], [0, 7], [1, 7], [2, 7], [3, 7]]  # only the prompt's last token, then all
    experts = [[a, b] for a, b in zip(first, last, strict=True)]
    trace = load_trace(save(tmp_path / "real.npz", experts, n_prompt=3), layers=2)
    assert trace.experts[:, 0].tolist() == first
    assert trace.experts[:, 1].tolist() == [[2, 7], [1, 7], [0, 7], [1, 7], [2, 7], [3, 7]]
    assert (trace.n_filled, trace.n_prompt, trace.n_expert, trace.top_k) == (2, 3, 8, 2)
    assert trace.source == "real.npz"


def test_the_first_layers_are_taken(tmp_path: Path) -> None:
    path = save(tmp_path / "t.npz", [[[0], [1], [2]], [[3], [4], [5]]], n_prompt=1)
    assert load_trace(path, layers=2).experts.tolist() == [[[0], [1]], [[3], [4]]]
    with pytest.raises(ModelError, match="3 layers, 4 are wanted") as e:
        load_trace(path, layers=4)
    assert e.value.hint == "add --layers 3"


@pytest.mark.parametrize(
    ("experts", "n_prompt", "message"),
    [
        ([[[0, 0]], [[1, 2]]], 1, r"token 0, layer 0 takes experts \[0, 0\]"),
        ([[[0, 1]], [[1, 8]]], 1, r"token 1, layer 0 takes experts \[1, 8\]"),
        ([[[0, 1]], [[1, -1]]], 1, r"token 1, layer 0 takes experts \[1, -1\]"),
        ([[[-1, -1]], [[-1, -1]]], 1, "no token has a row in this layer"),
        ([[[0, 1]], [[1, 2]]], 2, "at least one decoded token"),
        ([[0, 1], [1, 2]], 1, r"experts has shape \[2, 2\]"),
    ],
)
def test_unusable_traces_are_refused(tmp_path: Path, experts: Any, n_prompt: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_trace(save(tmp_path / "bad.npz", experts, n_prompt=n_prompt), layers=1)


def test_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    text, other = tmp_path / "text.npz", tmp_path / "other.npz"
    text.write_text("not a trace", encoding="utf-8")
    np.savez(other, ids=np.zeros(3))
    single, locked, damaged, fifo = (tmp_path / f"{name}.npz" for name in ("single", "locked", "damaged", "fifo"))
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "a.npy").rename(single)
    good = save(tmp_path / "good.npz", [[[0]], [[1]]], n_prompt=1).read_bytes()
    # Bit 0 of the flags, at byte 6 of a member's local header and byte 8 of its central one, means encrypted.
    raw = bytearray(good)
    for magic, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        for i in range(len(raw)):
            if raw[i : i + 4] == magic:
                raw[i + at] |= 1
    locked.write_bytes(raw)
    packed = tmp_path / "packed.npz"
    np.savez_compressed(packed, experts=np.zeros((2, 1, 1), np.int16), phase=np.zeros(2), n_expert=8)
    raw = bytearray(packed.read_bytes())
    start = 30 + int.from_bytes(raw[26:28], "little") + int.from_bytes(raw[28:30], "little")
    raw[start : start + 8] = b"\xff" * 8  # no deflate block begins so
    damaged.write_bytes(raw)
    os.mkfifo(fifo)
    for path in (text, other, single, locked, damaged, fifo, tmp_path / "absent.npz"):
        with pytest.raises(ModelError, match="not a routing trace") as e:
            load_trace(path, layers=1)
        assert e.value.where == str(path)


def test_the_generator_can_be_set_to_no_popularity_and_no_memory() -> None:
    """Uniform draws of 8 of 128: neighbours share 8 * 8 / 128 = 0.5 experts, a Jaccard of 0.5 / 15.5 = 0.032."""
    plain = generate(layers=24, n_prompt=0, n_decode=128, n_expert=128, top_k=8, seed=0, popularity=0.0, recency=0.0)
    found = statistics(plain.experts, 0, 128)
    assert abs(found.adjacent_jaccard - 0.032) < 0.01
    # seen in the last 8 tokens: 1 - (1 - 8/128) ** 8 = 0.403
    assert abs(found.recent_reuse - 0.403) < 0.02
    # the top 1/8 of the first half holds a little over 1/8 of the second half's uses
    assert found.static_coverage < 0.16
