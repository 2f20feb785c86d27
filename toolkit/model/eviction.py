"""Which expert to give up: eviction policies simulated on a routing trace, against LRU and against the optimum."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from toolkit.model.queues import Arc, HeldLru, Lru, S3Fifo, WTinyLfu
from toolkit.model.routing import Trace

# A slot is one expert of one layer, numbered layer * n_expert + expert. All layers share the capacity.

TAIL_WEIGHT = 0.001
TAIL_HALF_LIFE = 16.0  # tokens


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a resident slot is worth; the least goes.

    The worth is a sum of decayed counts of its uses, times 2^(-cycle * wait), where wait in (0, 1] is how much of
    a token passes until its layer runs again. A count decays each time the slot's own layer runs.
    """

    scales: tuple[tuple[float, float], ...]  # weight and half-life in runs of the layer
    cycle: float = 0.0
    # A prompt is no repetition: as one batch it raises the counts to 1 at least and lets nothing decay. The tail, a
    # count over all tokens too small to matter otherwise, then orders what only the prompt has used.
    prompt_as_batch: bool = False
    router: float = 0.0  # share of a use that is in proportion to the router's weight
    concentration: float = 0.0  # exponent of how uneven the layer's counts are

    @classmethod
    def decay(cls, half_life: float) -> Score:
        """One count that decays by the clock, token by token: as a wait of 1 / half-life the other way does."""
        return cls(scales=((1.0, half_life),), cycle=-1 / half_life)


TWO_SCALES = Score(scales=((4.0, 1.0), (1.0, 24.0)), cycle=0.2, prompt_as_batch=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """A trace to run through caches; `weights` are the router's, float [token, layer, k], where they were recorded."""

    trace: Trace
    weights: NDArray[np.float32] | None = None

    @property
    def n_slots(self) -> int:
        return int(self.trace.experts.shape[1]) * self.trace.n_expert

    @property
    def n_accesses(self) -> int:
        """Of decoded tokens."""
        n_tokens, n_layers, top_k = self.trace.experts.shape
        return int(n_tokens - self.trace.n_prompt) * int(n_layers) * int(top_k)


class Cache(Protocol):
    """Holds at most a capacity of slots."""

    def serve(self, token: int, layer: int, slots: list[int]) -> int:
        """Bring in what one layer needs at the same time, none of which may leave; return how many were missing."""
        ...


class _RankedCache(ABC):
    """Evicts the slots of the least worth, which is kept as one row of values per layer."""

    def __init__(self, workload: Workload, capacity: int) -> None:
        self.experts = workload.trace.experts.astype(np.int64)
        self.n_prompt = workload.trace.n_prompt
        self.capacity = capacity
        self.shape = (self.experts.shape[1], workload.trace.n_expert)
        self.worth = np.zeros(self.shape)
        self.resident = np.zeros(self.shape[0] * self.shape[1], dtype=bool)
        self.n_resident = 0

    def serve(self, token: int, layer: int, slots: list[int]) -> int:
        self.worth[layer] = self._row(token, layer)
        missing = [slot for slot in slots if not self.resident[slot]]
        surplus = self.n_resident + len(missing) - self.capacity
        if surplus > 0:
            worth = np.where(self.resident, (self.worth * self._by_layer(layer)[:, None]).ravel(), math.inf)
            worth[slots] = math.inf
            self.resident[np.argpartition(worth, surplus - 1)[:surplus]] = False
        self.resident[missing] = True
        self.n_resident += len(missing) - max(surplus, 0)
        return len(missing)

    @abstractmethod
    def _row(self, token: int, layer: int) -> NDArray[np.float64]:
        """Worth of a layer's experts, [expert], once the layer has taken its experts for this token."""

    def _by_layer(self, layer: int) -> NDArray[np.float64]:
        """Factor on the worth, [layer], while `layer` runs."""
        return np.ones(self.shape[0])


class ScoredCache(_RankedCache):
    """Evicts by a Score."""

    def __init__(self, workload: Workload, capacity: int, score: Score) -> None:
        super().__init__(workload, capacity)
        self.score = score
        self.counts = np.zeros((len(score.scales), *self.shape))
        self.tail = np.zeros(self.shape)
        self.weight = np.array([weight for weight, _ in score.scales])
        self.fade = np.array([0.5 ** (1 / half_life) for _, half_life in score.scales])[:, None]
        self.uses = np.ones(self.experts.shape)
        if score.router:
            if workload.weights is None:
                raise ValueError("the trace has no router weights")
            relative = workload.weights / np.maximum(workload.weights.mean(axis=2, keepdims=True), 1e-6)
            self.uses += score.router * (relative - 1)
        n_layers = self.shape[0]
        wait = np.arange(n_layers, 0, -1) / n_layers  # of the running layer, the one before it, and so on
        ahead = (np.arange(n_layers)[:, None] - np.arange(n_layers)) % n_layers
        self.soon = 0.5 ** (score.cycle * wait[ahead])

    def _by_layer(self, layer: int) -> NDArray[np.float64]:
        return self.soon[layer]

    def _row(self, token: int, layer: int) -> NDArray[np.float64]:
        used, counts = self.experts[token, layer], self.counts[:, layer]
        self.tail[layer] *= 0.5 ** (1 / TAIL_HALF_LIFE)
        self.tail[layer, used] += 1
        if self.score.prompt_as_batch and token < self.n_prompt:
            counts[:, used] = np.maximum(counts[:, used], 1)
        else:
            counts *= self.fade
            counts[:, used] += self.uses[token, layer]
        row = self.weight @ counts
        if self.score.prompt_as_batch:
            row += TAIL_WEIGHT * self.tail[layer]
        if self.score.concentration:
            slow = counts[-1]
            row *= ((slow**2).sum() / slow.sum()) ** self.score.concentration
        return row


class Belady(_RankedCache):
    """Evicts what is needed again last: no policy misses less. It looks into the future of the trace."""

    def __init__(self, workload: Workload, capacity: int) -> None:
        super().__init__(workload, capacity)
        n_tokens = len(self.experts)
        # The first token at or after that uses the slot. Finite, so that one never used again still counts as resident.
        self.next = np.full((n_tokens + 1, *self.shape), 2 * n_tokens, dtype=np.float32)
        for token in range(n_tokens - 1, -1, -1):
            self.next[token] = self.next[token + 1]
            np.put_along_axis(self.next[token], self.experts[token], token, axis=1)

    def _row(self, token: int, layer: int) -> NDArray[np.float64]:
        return -(self.next[token + 1, layer] + layer / self.shape[0])


Policy = Callable[[Workload, int], Cache]


def _scored(score: Score) -> Policy:
    return lambda workload, capacity: ScoredCache(workload, capacity, score)


def _held(percent: int) -> Policy:
    return lambda _, capacity: HeldLru(capacity, percent / 100)


POLICIES: dict[str, Policy] = {
    "LRU": lambda _, capacity: Lru(capacity),
    **{f"LRU, hold {percent} %": _held(percent) for percent in (10, 25, 50)},
    "LFU": _scored(Score(scales=((1.0, math.inf),))),
    "ARC": lambda _, capacity: Arc(capacity),
    "S3-FIFO": lambda _, capacity: S3Fifo(capacity),
    "W-TinyLFU": lambda _, capacity: WTinyLfu(capacity),
    **{f"decay {half_life}": _scored(Score.decay(half_life)) for half_life in (4, 8, 12, 16, 24, 32, 64, 128)},
    "two scales": _scored(TWO_SCALES),
    "two scales, no cycle": _scored(replace(TWO_SCALES, cycle=0.0)),
    "two scales, prompt by token": _scored(replace(TWO_SCALES, prompt_as_batch=False)),
    "slow scale alone": _scored(replace(TWO_SCALES, scales=TWO_SCALES.scales[1:])),
    "three scales": _scored(replace(TWO_SCALES, scales=((4.0, 1.0), (1.0, 6.0), (1.0, 32.0)))),
    "two scales, router weights": _scored(replace(TWO_SCALES, router=0.4)),
    "two scales, per layer": _scored(replace(TWO_SCALES, concentration=-0.25)),
    "Belady": Belady,
}
CHOSEN = "two scales"
NEED_WEIGHTS = frozenset({"two scales, router weights"})


def misses(workload: Workload, policy: Policy, capacity: int) -> NDArray[np.int64]:
    """Missing slots of every token, prompt first, [token]; see `layer_misses`."""
    return layer_misses(workload, policy, capacity).sum(axis=1)


def layer_misses(workload: Workload, policy: Policy, capacity: int) -> NDArray[np.int64]:
    """Missing slots of every layer, [token, layer], prompt first, of a cache of `capacity` slots that starts empty.

    Tokens come one by one, each layer by layer; what a layer takes stays while it runs, so the capacity must be
    top_k at least.
    """
    experts, n_expert = workload.trace.experts.astype(np.int64), workload.trace.n_expert
    if capacity < workload.trace.top_k:
        raise ValueError(f"a capacity of {capacity} slots does not hold the {workload.trace.top_k} of one layer")
    slots = (experts + np.arange(experts.shape[1])[None, :, None] * n_expert).tolist()
    cache = policy(workload, capacity)
    return np.array([[cache.serve(t, layer, row) for layer, row in enumerate(rows)] for t, rows in enumerate(slots)])
