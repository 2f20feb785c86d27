"""Equality of outputs, and of selected experts with the prescribed ones."""

from __future__ import annotations

import numpy as np

from toolkit.bench.check import compare_logits, matches_prescription


def _logits(seed: int = 0, positions: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(positions, 50)).astype(np.float32)


def test_equal_logits_are_equal_bit_for_bit() -> None:
    found = compare_logits(_logits(), _logits())
    assert found.equal
    assert found.max_abs == 0.0
    assert "4 positions" in found.text


def test_noise_is_named_with_its_size_and_first_position() -> None:
    noisy = _logits()
    noisy[2, 7] += np.float32(0.25)
    found = compare_logits(_logits(), noisy)
    assert not found.equal
    assert found.max_abs is not None
    assert abs(found.max_abs - 0.25) < 1e-6
    assert "first at position 2" in found.text


def test_a_shift_by_one_position_is_called_misaligned() -> None:
    base = _logits()
    shifted = np.concatenate([base[1:], _logits(seed=9, positions=1)])
    found = compare_logits(base, shifted)
    assert not found.equal
    assert found.text.startswith("misaligned")


def test_nan_and_missing_positions_are_never_equal() -> None:
    broken = _logits()
    broken[1, 1] = np.nan
    assert not compare_logits(broken, broken).equal
    assert not compare_logits(_logits(), _logits(positions=3)).equal
    assert not compare_logits(np.empty((0, 5)), np.empty((0, 5))).equal


def test_negative_zero_is_not_the_same_bits() -> None:
    a, b = np.zeros((1, 3), np.float32), np.zeros((1, 3), np.float32)
    b[0, 0] = -0.0
    assert not compare_logits(a, b).equal


def test_selection_is_compared_as_a_set_and_where_it_was_computed() -> None:
    prescribed = np.array([[[3, 1]], [[0, 2]]], dtype=np.int32)
    assert matches_prescription(np.array([[[1, 3]], [[2, 0]]]), prescribed)
    assert matches_prescription(np.array([[[-1, -1]], [[2, 0]]]), prescribed)
    assert not matches_prescription(np.array([[[1, 2]], [[2, 0]]]), prescribed)
    # nothing computed proves nothing
    assert not matches_prescription(np.full((2, 1, 2), -1), prescribed)
