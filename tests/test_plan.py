"""Order of the arms and identity of the forced tokens."""

from __future__ import annotations

import hashlib
import struct

from toolkit.bench import plan
from toolkit.bench.plan import Tokens


def test_two_arms_run_a_b_b_a() -> None:
    steps = plan.order(["a", "b"], 4)
    assert [s.arm for s in steps] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert [s.block for s in steps] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [s.position for s in steps] == list(range(8))


def test_over_two_blocks_every_arm_has_the_same_mean_position() -> None:
    steps = plan.order(["stock", "off", "madv", "hint"], 2)
    sums = {arm: sum(s.position for s in steps if s.arm == arm) for arm in ("stock", "off", "madv", "hint")}
    # positions 0..7: each arm has i and 7 - i
    assert set(sums.values()) == {7}


def test_test_names_are_those_of_llama_bench() -> None:
    assert plan.test_names(64, 48) == ["pp64", "tg48"]
    assert plan.test_names(0, 48) == ["tg48"]
    assert plan.test_names(64, 0) == ["pp64"]


def test_token_hash_is_over_little_endian_int32() -> None:
    tokens = Tokens(prompt=(1, 2), gen=(70000,), source="test")
    assert tokens.all == [1, 2, 70000]
    assert tokens.sha256 == hashlib.sha256(struct.pack("<3i", 1, 2, 70000)).hexdigest()
