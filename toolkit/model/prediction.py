"""Which experts a layer will take, guessed when the layer before has chosen, without hidden states; judged on traces.

What counts is experts that are not in the cache: those that are need no early read. A guess is scored against what the
layer then misses. Guesses learn as the run goes on, prompt first, and see nothing that a runtime would not have seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolkit.model.early import prescribe
from toolkit.model.eviction import CHOSEN, POLICIES, Workload
from toolkit.model.routing import Trace

Scores = NDArray[np.float32]  # [token, layer, expert]: the higher, the likelier
Marks = NDArray[np.bool_]  # of the same shape

SURE = 0.3
ROUTER = (0.80, 0.85, 0.89)  # early accuracy, the range published for real models
_HALF_LIFE = 16.0  # tokens
_PSEUDO = 8.0  # observations of an expert's own rate that a pair starts with


def recent(trace: Trace) -> Scores:
    """The shorter the time since the expert's last use."""
    scores = np.empty((*trace.experts.shape[:2], trace.n_expert), dtype=np.float32)
    age = np.full(scores.shape[1:], len(scores), dtype=np.float32)
    for token, row in enumerate(trace.experts.astype(np.int64)):
        scores[token] = -age
        age += 1
        np.put_along_axis(age, row, 0, axis=1)
    return scores


def frequent(trace: Trace) -> Scores:
    """The number of its uses, halved every 16 tokens."""
    scores = np.empty((*trace.experts.shape[:2], trace.n_expert), dtype=np.float32)
    count = np.zeros(scores.shape[1:])
    for token, used in enumerate(_used(trace)):
        scores[token] = count
        count = count * 0.5 ** (1 / _HALF_LIFE) + used
    return scores


def followers(trace: Trace) -> Scores:
    """Co-occurrence: how often the expert was taken after one that the layer before has just taken, mean over these.

    The layer before the first one is the last one of the token before.
    """
    scores = np.zeros((*trace.experts.shape[:2], trace.n_expert), dtype=np.float32)
    for token, layer, pairs, single in _pairs(trace):
        scores[token, layer] = (pairs / (single[:, None] + 1)).mean(axis=0)
    return scores


def followers_and_frequent(trace: Trace) -> Scores:
    """Naive Bayes: the log of the decayed frequency, and of how much each expert taken before raises the rate."""
    counts = frequent(trace)
    scores = np.zeros(counts.shape, dtype=np.float32)
    total = np.zeros(counts.shape[1:])
    used = _used(trace)
    for token, layer, pairs, single in _pairs(trace):
        if layer == 0 and token:
            total += used[token - 1]
        rate = (total[layer] + 0.5) / (token + 1)
        given = (pairs + _PSEUDO * rate) / (single[:, None] + _PSEUDO)
        scores[token, layer] = np.log(counts[token, layer] + 0.1) + np.log(given / rate).sum(axis=0)
    return scores


def residency(workload: Workload, capacity: int) -> Marks:
    """What the cache holds, under the policy in use, just before a layer asks for its experts."""
    trace = workload.trace
    cache = POLICIES[CHOSEN](workload, capacity)
    held = np.zeros((*trace.experts.shape[:2], trace.n_expert), dtype=bool)
    slots = trace.experts.astype(np.int64) + np.arange(held.shape[1])[None, :, None] * trace.n_expert
    for token, layer in np.ndindex(held.shape[:2]):
        held[token, layer] = cache.resident.reshape(held.shape[1:])[layer]  # type: ignore[attr-defined]
        cache.serve(token, layer, slots[token, layer].tolist())
    return held


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A way to guess: scores, and which of the absent experts are read early."""

    name: str
    scores: Callable[[Trace], Scores]
    top: int | None = None  # the best of the absent ones
    least: float | None = None  # or those with at least this score
    of_top_k: bool = False  # or those among the k best of all
    modelled: bool = False  # not from the trace

    def guess(self, scores: Scores, held: Marks, top_k: int) -> Marks:
        """Experts to read early, none of them resident."""
        if self.least is not None:
            return (scores >= self.least) & ~held
        ranked = scores if self.of_top_k else np.where(held, -np.inf, scores)
        best = np.argsort(-ranked, axis=2, kind="stable")[..., : top_k if self.of_top_k else self.top]
        guessed = np.zeros(held.shape, dtype=bool)
        np.put_along_axis(guessed, best, True, axis=2)
        return guessed & ~held


def _router(accuracy: float) -> Callable[[Trace], Scores]:
    return lambda trace: prescribe(trace, accuracy, seed=0).logits[0]


RULES = (
    *(Rule(name=f"recent, best {top}", scores=recent, top=top) for top in (1, 4)),
    *(Rule(name=f"frequent, best {top}", scores=frequent, top=top) for top in (1, 4)),
    *(Rule(name=f"followers, best {top}", scores=followers, top=top) for top in (1, 2, 4)),
    Rule(name=f"followers, share of {SURE:g}", scores=followers, least=SURE),
    *(Rule(name=f"followers and frequent, best {top}", scores=followers_and_frequent, top=top) for top in (1, 2, 4)),
    *(
        Rule(name=f"next router early, {accuracy:.2f}", scores=_router(accuracy), of_top_k=True, modelled=True)
        for accuracy in ROUTER
    ),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One rule on one trace at one capacity, over decoded tokens; counts of experts."""

    trace: str
    capacity_percent: int
    rule: str
    right: int  # guessed and missing: read early
    wrong: int  # guessed and not taken: read for nothing
    right_later: int  # of `right`, in the second half of the tokens
    right_bytes: int | None
    wrong_bytes: int | None

    @property
    def precision(self) -> float:
        return self.right / max(self.right + self.wrong, 1)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a cache misses without guesses, over decoded tokens."""

    trace: str
    capacity_percent: int
    decode_tokens: int
    top_k: int
    layers: int
    missing: int
    missing_later: int  # in the second half of the tokens
    missing_bytes: int | None
    absent: float  # experts a layer has outside of the cache, mean


def judge(
    workload: Workload, expert_bytes: tuple[int, ...], percent: int, *, name: str
) -> tuple[Setting, tuple[Result, ...]]:
    """Run the cache at this share of all experts, and every rule beside it; early reads do not change the cache."""
    trace = workload.trace
    held = residency(workload, workload.n_slots * percent // 100)[trace.n_prompt :]
    missing = _used(trace)[trace.n_prompt :] & ~held
    half = len(held) // 2

    def nbytes(marks: Marks) -> int | None:
        return int(marks.sum(axis=(0, 2)) @ np.array(expert_bytes, dtype=np.int64)) if expert_bytes else None

    setting = Setting(
        trace=name,
        capacity_percent=percent,
        decode_tokens=len(held),
        top_k=trace.top_k,
        layers=held.shape[1],
        missing=int(missing.sum()),
        missing_later=int(missing[half:].sum()),
        missing_bytes=nbytes(missing),
        absent=float((~held).sum(axis=2).mean()),
    )
    scores = {make: make(trace)[trace.n_prompt :] for make in dict.fromkeys(rule.scores for rule in RULES)}
    results = []
    for rule in RULES:
        guessed = rule.guess(scores[rule.scores], held, trace.top_k)
        right = guessed & missing
        results.append(
            Result(
                trace=name,
                capacity_percent=percent,
                rule=rule.name,
                right=int(right.sum()),
                wrong=int((guessed & ~missing).sum()),
                right_later=int(right[half:].sum()),
                right_bytes=nbytes(right),
                wrong_bytes=nbytes(guessed & ~missing),
            )
        )
    return setting, tuple(results)


def _used(trace: Trace) -> Marks:
    used = np.zeros((*trace.experts.shape[:2], trace.n_expert), dtype=bool)
    np.put_along_axis(used, trace.experts.astype(np.int64), True, axis=2)
    return used


def _pairs(trace: Trace) -> Iterator[tuple[int, int, NDArray[np.int64], NDArray[np.int64]]]:
    """(token, layer, pairs, single), in the order of the run, as counted so far.

    pairs [k, expert]: how often the layer took the expert after each one that the layer before has just taken;
    single [k]: how often each of these was taken there.
    """
    experts = trace.experts.astype(np.int64)
    n_tokens, n_layers, _ = experts.shape
    pairs = np.zeros((n_layers, trace.n_expert, trace.n_expert), dtype=np.int64)
    single = np.zeros((n_layers, trace.n_expert), dtype=np.int64)
    for token, layer in itertools.product(range(n_tokens), range(n_layers)):
        if token == layer == 0:
            continue
        before = experts[token, layer - 1] if layer else experts[token - 1, -1]
        yield token, layer, pairs[layer, before], single[layer, before]
        pairs[layer, before[:, None], experts[token, layer]] += 1
        single[layer, before] += 1
