"""Eviction policies: by hand on short sequences, the optimum by trying everything, and the command's output."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from toolkit import cli as command_line
from toolkit.errors import ModelError
from toolkit.model import eviction_report
from toolkit.model.eviction import CHOSEN, NEED_WEIGHTS, POLICIES, Belady, Score, ScoredCache, Workload, misses
from toolkit.model.queues import Arc, HeldLru, S3Fifo, WTinyLfu
from toolkit.model.routing import Trace, generate, lru_hit_rate


def workload(experts: NDArray[np.int16], *, n_prompt: int = 0, n_expert: int = 8) -> Workload:
    return Workload(trace=Trace(experts=experts, n_prompt=n_prompt, n_expert=n_expert, source="hand.npz"))


def sequence(*experts: int, n_prompt: int = 0) -> Workload:
    """One layer, one expert a token."""
    return workload(np.array(experts, dtype=np.int16)[:, None, None], n_prompt=n_prompt)


def layers(*rows: tuple[int, ...]) -> Workload:
    """Some layers, one expert each a token."""
    return workload(np.array(rows, dtype=np.int16)[:, :, None])


def generated(seed: int, *, n_layers: int = 3) -> Workload:
    trace = generate(layers=n_layers, n_prompt=6, n_decode=20, n_expert=16, top_k=3, seed=seed)
    return Workload(trace=trace, weights=np.ones(trace.experts.shape, dtype=np.float32))


# --- The optimum


def fewest_misses(work: Workload, capacity: int) -> int:
    """By trying every choice of victims."""
    n_tokens, n_layers, _ = work.trace.experts.shape
    needs = [
        frozenset((layer, int(e)) for e in work.trace.experts[token, layer])
        for token in range(n_tokens)
        for layer in range(n_layers)
    ]

    @functools.cache
    def best(i: int, held: frozenset[tuple[int, int]]) -> int:
        if i == len(needs):
            return 0
        free = held - needs[i]
        room = capacity - len(needs[i])
        keeps = [free] if len(free) <= room else map(frozenset, itertools.combinations(sorted(free), room))
        return len(needs[i] - held) + min(best(i + 1, needs[i] | keep) for keep in keeps)

    return best(0, frozenset())


@pytest.mark.parametrize(("seed", "capacity"), [(0, 4), (1, 5), (2, 6), (3, 4), (4, 7)])
def test_belady_misses_as_little_as_any_choice_of_victims(seed: int, capacity: int) -> None:
    trace = generate(layers=2, n_prompt=1, n_decode=8, n_expert=5, top_k=2, seed=seed)
    work = Workload(trace=trace)
    assert misses(work, Belady, capacity).sum() == fewest_misses(work, capacity)


def test_no_policy_beats_belady_and_none_misses_what_fits() -> None:
    for seed, capacity in [(0, 9), (1, 14), (2, 20)]:
        work = generated(seed)
        optimum = misses(work, Belady, capacity).sum()
        distinct = sum(len(np.unique(work.trace.experts[:, layer])) for layer in range(3))
        for name, policy in POLICIES.items():
            assert misses(work, policy, capacity).sum() >= optimum, name
            assert misses(work, policy, work.n_slots).sum() == distinct, name


@pytest.mark.parametrize("name", POLICIES)
def test_a_layer_keeps_its_experts_and_the_capacity_is_kept(name: str) -> None:
    work = generated(5)
    cache = POLICIES[name](work, 7)
    slots = work.trace.experts.astype(int) + np.arange(3)[None, :, None] * 16
    for token, layer in np.ndindex(slots.shape[:2]):
        row = slots[token, layer].tolist()
        cache.serve(token, layer, row)
        held = [s for s in range(work.n_slots) if holds(cache, s)]
        assert set(row) <= set(held)
        assert len(held) <= 7
        assert cache.serve(token, layer, row) == 0


def holds(cache: object, slot: int) -> bool:
    return bool(cache.resident[slot]) if hasattr(cache, "resident") else slot in cache  # type: ignore[operator]


# --- LRU, LFU and scores by hand


def test_lru_agrees_with_the_statistics_of_traces() -> None:
    # One expert a layer: then no order within a layer can differ.
    trace = generate(layers=4, n_prompt=10, n_decode=40, n_expert=12, top_k=1, seed=3)
    for capacity in (5, 11, 20):
        missed = misses(Workload(trace=trace), POLICIES["LRU"], capacity)[10:].sum()
        assert 1 - missed / 160 == pytest.approx(lru_hit_rate(trace.experts, 10, capacity))


def test_the_tokens_of_the_prompt_come_first() -> None:
    # a b | a c b, capacity 2: the prompt misses a, b; then a hits, c puts b out, b puts a out
    assert misses(sequence(0, 1, 0, 2, 1, n_prompt=2), POLICIES["LRU"], 2).tolist() == [1, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("half_life", "expected"),
    [
        # a a a b c, capacity 2. At c, b has count 1/2^(1/h), a has the rest of three; then a and b come again.
        # h = 4: a's 1 + 2^(-1/4) + 2^(-1/2) has halved twice by 1/4: 1.80; b's is 0.84: b goes, a hits.
        (4.0, [1, 0, 0, 1, 1, 0, 1]),
        # h = 1/4: at c a's 1.07 has faded to 1.07 / 256, b's 1 to 1 / 16: a goes, comes back for b, which misses too
        (0.25, [1, 0, 0, 1, 1, 1, 1]),
    ],
)
def test_decay_by_hand(half_life: float, expected: list[int]) -> None:
    work = sequence(0, 0, 0, 1, 2, 0, 1)
    score = Score(scales=((1.0, half_life),))
    assert misses(work, lambda w, c: ScoredCache(w, c, score), 2).tolist() == expected


def test_cycle_keeps_the_slot_whose_layer_runs_next() -> None:
    # Three layers, capacity 3. At token 1, layer 0 takes a new expert, and a slot of layer 0, 1 or 2 must go. All
    # have been used once; those of layers 1 and 2 are needed in this very token, that of layer 0 in the next one.
    work = layers((0, 0, 0), (1, 0, 0))
    for cycle, expected in [(0.5, [3, 1]), (-0.5, [3, 3])]:
        # With -0.5 layer 1's goes first and at its own turn layer 2's.
        # The count of layer 0's own old expert has faded by 2^(-1/64), less than the cycle changes.
        policy = functools.partial(ScoredCache, score=Score(scales=((1.0, 64.0),), cycle=cycle))
        assert misses(work, policy, 3).tolist() == expected


def test_decay_by_the_clock_equals_a_count_of_ages() -> None:
    work = generated(7)
    n_layers, half_life, capacity = 3, 8.0, 15
    last: dict[int, float] = {}
    count: dict[int, float] = {}
    held: set[int] = set()
    missed = []
    for token in range(26):
        missed.append(0)
        for layer in range(n_layers):
            now = token + layer / n_layers
            slots = {layer * 16 + int(e) for e in work.trace.experts[token, layer]}
            missed[-1] += len(slots - held)
            held |= slots
            worth = {s: count[s] * 0.5 ** ((now - last[s]) / half_life) for s in held - slots}
            while len(held) > capacity:
                victim = min(held - slots, key=lambda s: worth[s])
                held.remove(victim)
            for s in slots:
                count[s] = count.get(s, 0.0) * 0.5 ** ((now - last.get(s, now)) / half_life) + 1
                last[s] = now
    assert misses(work, POLICIES["decay 8"], capacity).tolist() == missed


def test_two_scales_equals_the_formula_slot_by_slot() -> None:
    """As the runtime computes it: state of a slot brought up to date when it is used or compared."""
    work = generated(9)
    n_layers, capacity, n_prompt = 3, 15, 6
    state = {s: [0.0, 0.0, 0, 0.0, 0] for s in range(work.n_slots)}  # fast, slow, pass; tail, token
    passes, tokens = [0] * n_layers, [0] * n_layers
    held: set[int] = set()
    missed = []

    def worth(slot: int, now: int) -> float:
        layer = slot // 16
        fast, slow, at, tail, tail_at = state[slot]
        d, e = passes[layer] - at, tokens[layer] - tail_at
        wait = ((layer - now + n_layers - 1) % n_layers + 1) / n_layers
        value = 4 * fast * 2**-d + slow * 2 ** (-d / 24) + 0.001 * tail * 2 ** (-e / 16)
        return float(value * 2 ** (-0.2 * wait))

    for token in range(26):
        missed.append(0)
        for layer in range(n_layers):
            slots = {layer * 16 + int(e) for e in work.trace.experts[token, layer]}
            passes[layer] += token >= n_prompt
            tokens[layer] += 1
            for s in slots:
                fast, slow, at, tail, tail_at = state[s]
                d = passes[layer] - at
                fast, slow = fast * 2**-d, slow * 2 ** (-d / 24)
                fast, slow = (max(fast, 1), max(slow, 1)) if token < n_prompt else (fast + 1, slow + 1)
                tail = tail * 2 ** (-(tokens[layer] - tail_at) / 16) + 1
                state[s] = [fast, slow, passes[layer], tail, tokens[layer]]
            missed[-1] += len(slots - held)
            held |= slots
            while len(held) > capacity:
                held.remove(min(held - slots, key=lambda s: worth(s, layer)))
    assert misses(work, POLICIES[CHOSEN], capacity).tolist() == missed


def test_router_weights_count_by_their_share() -> None:
    # Two experts a token; 0 has nearly all the weight, 1 nearly none, and each was used once when 4, 5 come.
    experts = np.array([[[0, 1]], [[2, 3]], [[4, 5]], [[0, 1]]], dtype=np.int16)
    weights = np.array([[[0.9, 0.1]], [[0.9, 0.1]], [[0.5, 0.5]], [[0.5, 0.5]]], dtype=np.float32)
    work = Workload(trace=workload(experts).trace, weights=weights)
    score = Score(scales=((1.0, 100.0),), router=1.0)
    cache = ScoredCache(work, 4, score)
    assert [cache.serve(t, 0, experts[t, 0].tolist()) for t in range(4)] == [2, 2, 2, 1]  # 1 and 3 had gone
    with pytest.raises(ValueError, match="no router weights"):
        ScoredCache(workload(experts), 4, score)


# --- Queues by hand


def test_held_slots_stay_and_are_chosen_again_by_decayed_counts() -> None:
    cache = HeldLru(3, 0.5)  # one slot held
    for token, slot in enumerate((0, 0, 0, 1, 2, 3, 4, 5)):
        cache.serve(token, 0, [slot])
    # Nothing is held before the first choice, at token 8: LRU.
    assert list(cache.queue) == [3, 4, 5]
    cache.serve(8, 0, [3])  # all resident ones were used once: the oldest is held
    assert cache.held == {3}
    for token, slot in enumerate((4, 6, 7, 6, 7, 6, 7), start=9):
        cache.serve(token, 0, [slot])
    assert set(cache.queue) == {3, 6, 7}  # 3 is the least recently used
    # At token 16 the counts are 3: (1 + 2^(1/4)) / 2^(1/2), as it was used at tokens 5 and 8; 6 and 7: 3 / 2^(1/4)
    cache.serve(16, 0, [8])
    assert cache.held == {6}
    assert set(cache.queue) == {6, 7, 8}
    assert cache.counts[3] == pytest.approx(2**-0.5 + 2**-0.25)
    assert cache.counts[6] == pytest.approx(3 * 2**-0.25)


def test_held_slots_leave_when_a_layer_needs_their_room() -> None:
    cache = HeldLru(2, 1.0)
    cache.serve(0, 0, [0, 1])
    cache.serve(8, 0, [0, 1])
    assert cache.held == {0, 1}
    assert cache.serve(9, 0, [2, 3]) == 2
    assert set(cache.queue) == {2, 3}


def test_arc_by_hand() -> None:
    cache = Arc(2)
    for slot in (0, 0, 1, 2):  # 0 is used again; 2 takes the place of 1, which was used once and leaves a ghost
        cache.access(slot, {slot})
    assert (list(cache.again), list(cache.once), list(cache.once_ghosts)) == ([0], [2], [1])
    cache.access(1, {1})  # a ghost of `once`: its wanted length grows to 1, so 0 goes, and 1 counts as used again
    assert (list(cache.again), list(cache.once), list(cache.again_ghosts), cache.target) == ([1], [2], [0], 1.0)


def test_s3_fifo_by_hand() -> None:
    cache = S3Fifo(10)  # small queue of 1
    for slot in range(10):
        cache.access(slot, {slot})
    for _ in range(2):
        cache.access(0, {0})
    cache.access(10, {10})  # the oldest, 0, was used twice since: to the main queue; the next, 1, leaves a ghost
    assert (list(cache.main), 1 in cache, list(cache.ghosts)) == ([0], False, [1])
    cache.access(1, {1})  # a ghost: straight to the main queue
    assert (list(cache.main), list(cache.ghosts), len(cache.count)) == ([0, 1], [2], 10)


def test_w_tinylfu_by_hand() -> None:
    cache = WTinyLfu(3)  # a window of 1, and 2 in the main part, all but none protected
    for slot in (0, 1, 2):
        cache.access(slot, {slot})
    assert (list(cache.window), list(cache.probation)) == ([2], [0, 1])
    cache.access(3, {3})  # 2 leaves the window; it is not more frequent than 0, so it is gone
    assert 2 not in cache
    cache.access(3, {3})
    cache.access(4, {4})  # 3 was used twice, 0 once: 0 goes
    assert (list(cache.window), list(cache.probation)) == ([4], [1, 3])


# --- The comparison and the command


def test_misses_refuses_a_capacity_below_one_layer() -> None:
    with pytest.raises(ValueError, match="does not hold the 3"):
        misses(generated(0), POLICIES["LRU"], 2)


def test_first_uses_are_of_slots_that_nothing_used_before() -> None:
    # Decode uses 0 (seen in the prompt), 2, 2, 3: two first uses.
    compared = eviction_report.compare([sequence(0, 1, 0, 2, 2, 3, n_prompt=2)], [50], validate=False, progress=print)
    assert (compared.settings[0].first_uses, compared.settings[0].accesses) == (2, 4)
    # No weights: every other policy has a row; all need at least the first uses.
    assert {r.policy for r in compared.results} == POLICIES.keys() - NEED_WEIGHTS
    assert min(r.misses for r in compared.results) == 2


def test_a_capacity_that_holds_no_layer_is_refused() -> None:
    with pytest.raises(ModelError, match="a layer alone takes 3") as e:
        eviction_report.compare([generated(0)], [5], validate=False, progress=print)
    assert "--capacity" in str(e.value)


def save(path: Path, work: Workload) -> Path:
    phase = np.array([0] * work.trace.n_prompt + [1] * (len(work.trace.experts) - work.trace.n_prompt), dtype=np.uint8)
    np.savez(path, experts=work.trace.experts, phase=phase, n_expert=work.trace.n_expert)
    return path


def test_the_command_writes_json_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction_report, "_FAST_WEIGHTS", (4.0,))
    monkeypatch.setattr(eviction_report, "_SLOW_HALF_LIVES", (8.0, 24.0))
    files = [str(save(tmp_path / f"{name}.npz", generated(seed))) for seed, name in enumerate(("one", "two"))]
    out = tmp_path / "new" / "eviction.json"
    args = ["model", "evict", *files, "--capacity", "30%, 50", "--validate", "--out", str(out), "--json"]
    done = CliRunner().invoke(command_line.cli, args, catch_exceptions=False)
    report = json.loads(done.stdout)
    assert report == json.loads(out.read_text(encoding="utf-8"))
    rows = {(r["trace"], r["capacity_percent"], r["policy"]): r for r in report["results"]}
    assert rows["one", 30, "LRU"]["of_lru"] == 1.0
    assert rows["two", 50, CHOSEN]["misses"] == misses(generated(1), POLICIES[CHOSEN], 24)[6:].sum()
    assert [(c["chosen_on"], c["tested_on"]) for c in report["choices"]] == [
        ("one", "two"),
        ("two", "one"),
        ("first half", "second half"),
        ("second half", "first half"),
    ]
    half = {c["chosen_on"]: c for c in report["choices"]}["first half"]
    cells = [(w, percent) for w in (generated(0), generated(1)) for percent in (30, 50)]
    ratios = [
        misses(w, POLICIES[CHOSEN], 48 * p // 100)[16:].sum() / misses(w, POLICIES["LRU"], 48 * p // 100)[16:].sum()
        for w, p in cells
    ]
    assert half["shipped_of_lru"] == pytest.approx(np.mean(ratios), abs=1e-4)
    page = out.with_suffix(".md").read_text(encoding="utf-8")
    assert f"| **{CHOSEN}** | {rows['one', 30, CHOSEN]['of_lru']:.3f} |" in page
    assert "| chosen on |" in page
    saved = [rows["one", 30, "LRU"]["misses"] - rows["one", 30, policy]["misses"] for policy in (CHOSEN, "Belady")]
    assert f"{saved[0] / saved[1]:.0%} (one 30 %), " in page


def test_the_command_refuses_a_capacity_that_is_no_share(tmp_path: Path) -> None:
    for text in ("0", "101%", "x", "20%,,30%"):
        done = CliRunner().invoke(command_line.cli, ["model", "evict", str(tmp_path / "x.npz"), "--capacity", text])
        assert done.exit_code == 2
        assert "is not a share such as 20%" in done.stderr
