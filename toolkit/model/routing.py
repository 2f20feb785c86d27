"""Routing traces: which experts each token takes in each layer; recorded, generated, and measured."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import ModelError

WINDOW = 8  # tokens, for `recent_reuse`
LRU_PERCENT = (10, 20, 30, 50)

# The generator's constants. An expert's weight is its popularity (log-normal in each layer, mean 1) plus an addend
# by the tokens since its last use; k experts are drawn without replacement. Fitted by random search, on 128
# experts, top 8, 24 layers, 64 + 128 tokens, to what real models showed with top 6: Jaccard 0.25, recent re-use
# 0.72, static coverage 0.57, LRU 0.74 / 0.87 at 20 / 30 %. Means over 8 seeds: 0.256, 0.741, 0.586, 0.719, 0.870.
# The gap from 6 to 8 tokens allows it: eight experts a token fill an LRU cache faster than six, so at equal hit
# rates more of the re-use comes from before the last 8 tokens.
POPULARITY = 2.9  # sigma of the log-normal popularity; 0: all experts alike
RECENCY = 1.0  # factor on the addends; 0: no memory
_RECENCY = np.zeros(42)
_RECENCY[1] = 3.2
_RECENCY[2:6] = 1.6
_RECENCY[9:41] = 1.6


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """A complete routing trace; `experts` is int16 [token, layer, k], best expert first, k distinct ids a row."""

    experts: NDArray[np.int16]
    n_prompt: int  # tokens before the first decoded one
    n_expert: int
    source: str  # file name of the recording, or "generated"
    n_filled: int = 0  # rows the recorder had missed

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])


@dataclass(frozen=True, kw_only=True)
class RoutingStatistics:
    """How far a trace re-uses experts; every number is a fraction, over decode tokens."""

    adjacent_jaccard: float  # of the expert sets of a layer at neighbouring tokens
    recent_reuse: float  # share of experts that the layer used in the 8 tokens before
    static_coverage: float  # share of the second half that hits the first half's top 1/8 of each layer
    lru_hits: dict[int, float]  # capacity in percent of all experts -> hit rate, cache warmed by the prompt


def load_trace(path: Path, *, layers: int | None = None) -> Trace:
    """Read the first `layers` layers, by default all, of a recorded trace (.npz with experts, phase, n_expert).

    Raises ModelError; see `complete` for what it fills.
    """
    try:
        experts, phase, n_expert = _load(path)
    except Exception as e:  # zipfile, its decompressors and numpy have many, and some change with the release
        raise ModelError(
            f"not a routing trace: {e}",
            where=path,
            hint="give an .npz file with the arrays experts [token, layer, k], phase [token] and n_expert",
        ) from e
    return complete(experts, phase, n_expert, layers=layers, path=path)


def complete(
    experts: NDArray[Any], phase: NDArray[Any], n_expert: int, *, layers: int | None = None, path: Path
) -> Trace:
    """A trace of what was recorded: experts [token, layer, k], phase [token] 0 in the prompt, then 1.

    Rows the recorder has missed (-1) take the rows of other tokens of the same layer, in reversed order from
    the nearest one, so that neighbouring tokens stay as alike as recorded ones. Raises ModelError.
    """
    if (
        experts.ndim != 3
        or not experts.size
        or phase.shape != experts.shape[:1]
        or experts.dtype.kind != "i"
        or phase.dtype.kind not in "iub"
    ):
        raise ModelError(
            f"experts has shape {list(experts.shape)} and type {experts.dtype}, phase {list(phase.shape)}",
            where=path,
            hint="experts must be integers [token, layer, k] and phase [token]",
        )
    layers = experts.shape[1] if layers is None else layers
    if layers > experts.shape[1]:
        raise ModelError(
            f"the trace has {experts.shape[1]} layers, {layers} are wanted",
            where=path,
            hint=f"add --layers {experts.shape[1]}",
        )
    n_prompt = int(np.count_nonzero(phase == 0))
    if n_prompt == len(phase) or np.any(phase[:n_prompt]):
        raise ModelError("phase must be 0 for the prompt, then 1 for at least one decoded token", where=path, hint=None)
    experts = experts[:, :layers].astype(np.int64)
    n_filled = sum(_fill(experts[:, layer], path, layer) for layer in range(layers))
    check_experts(experts, n_expert, where=path)
    return Trace(
        experts=experts.astype(np.int16),
        n_prompt=n_prompt,
        n_expert=n_expert,
        source=path.name,
        n_filled=n_filled,
    )


def _load(path: Path) -> tuple[NDArray[Any], NDArray[Any], int]:
    if path.exists() and not path.is_file():  # opening a FIFO would wait for a writer
        raise ValueError("not a regular file")
    arrays = np.load(path, allow_pickle=False)
    if not isinstance(arrays, np.lib.npyio.NpzFile):
        raise ValueError("a single array (.npy)")
    with arrays:
        return np.asarray(arrays["experts"]), np.asarray(arrays["phase"]), int(arrays["n_expert"])


def _fill(rows: NDArray[np.int64], path: Path, layer: int) -> int:
    """Fill the -1 rows of one layer, [token, k], in place; return how many there were."""
    missing = np.flatnonzero(np.all(rows == -1, axis=1))
    recorded = np.setdiff1d(np.arange(len(rows)), missing)
    if not len(recorded):
        raise ModelError("no token has a row in this layer", where=f"{path}, layer {layer}")
    # The last missing token takes the recorded row after next, the one before it the next but one, and so on.
    rows[missing] = rows[recorded[np.arange(len(missing), 0, -1) % len(recorded)]]
    return len(missing)


def generate(
    *,
    layers: int,
    n_prompt: int,
    n_decode: int,
    n_expert: int,
    top_k: int,
    seed: int,
    popularity: float = POPULARITY,
    recency: float = RECENCY,
) -> Trace:
    """Draw a trace, by default with the statistics of recorded ones; the same arguments give the same trace.

    `popularity` spreads how often experts are used over all, `recency` how much recent use counts.
    """
    rng = np.random.default_rng(seed)
    # Quantiles instead of draws: layers differ in which experts are popular, not in how popular.
    quantiles = [NormalDist().inv_cdf((i + 0.5) / n_expert) for i in range(n_expert)]
    weight = np.exp(popularity * np.array(quantiles))
    weight = rng.permuted(np.tile(weight / weight.mean(), (layers, 1)), axis=1)
    age = np.full((layers, n_expert), len(_RECENCY) - 1)
    experts = np.empty((n_prompt + n_decode, layers, top_k), dtype=np.int16)
    for row in experts:
        # The k largest of log weight + Gumbel noise are a draw without replacement.
        score = np.log(weight + recency * _RECENCY[age]) + rng.gumbel(size=age.shape)
        row[:] = np.argsort(-score, axis=1, kind="stable")[:, :top_k]
        age = np.minimum(age + 1, len(_RECENCY) - 1)
        np.put_along_axis(age, row.astype(np.int64), 1, axis=1)
    return Trace(experts=experts, n_prompt=n_prompt, n_expert=n_expert, source="generated")


def check_experts(experts: NDArray[np.int64], n_expert: int, *, where: object) -> None:
    """Raise ModelError unless every row holds distinct ids in [0, n_expert)."""
    ordered = np.sort(experts, axis=2)
    bad = np.any((ordered < 0) | (ordered >= n_expert), axis=2) | np.any(np.diff(ordered, axis=2) == 0, axis=2)
    if np.any(bad):
        token, layer = (int(i) for i in np.argwhere(bad)[0])
        raise ModelError(
            f"token {token}, layer {layer} takes experts {experts[token, layer].tolist()}; "
            f"they must be distinct and in 0..{n_expert - 1}",
            where=where,
        )


def statistics(experts: NDArray[np.int16], n_prompt: int, n_expert: int) -> RoutingStatistics:
    """Measure a complete trace [token, layer, k] over its decode tokens, of which there must be at least 9."""
    n_tokens, n_layers, top_k = experts.shape
    if n_tokens - n_prompt <= WINDOW:
        raise ValueError(f"{n_tokens - n_prompt} decode tokens; statistics need more than {WINDOW}")
    used = np.zeros((n_tokens - n_prompt, n_layers, n_expert), dtype=bool)
    np.put_along_axis(used, experts[n_prompt:].astype(np.int64), True, axis=2)

    shared = np.count_nonzero(used[1:] & used[:-1], axis=2)
    seen = [np.count_nonzero(used[t - WINDOW : t].any(0) & used[t]) for t in range(WINDOW, len(used))]
    half = len(used) // 2
    ranked = np.argsort(-used[:half].sum(0), axis=1, kind="stable")
    covered = np.take_along_axis(used[half:].sum(0), ranked[:, : n_expert // 8], axis=1)
    return RoutingStatistics(
        adjacent_jaccard=float(np.mean(shared / (2 * top_k - shared))),
        recent_reuse=float(np.mean(seen)) / (n_layers * top_k),
        static_coverage=float(covered.sum()) / ((len(used) - half) * n_layers * top_k),
        lru_hits={p: lru_hit_rate(experts, n_prompt, n_layers * n_expert * p // 100) for p in LRU_PERCENT},
    )


def lru_hit_rate(experts: NDArray[np.int16], n_prompt: int, capacity: int) -> float:
    """Hit rate on decode tokens of one least-recently-used cache of `capacity` (layer, expert) pairs.

    Accesses run token by token, layer by layer; the prompt warms the cache and is not counted.
    """
    if capacity < 1:
        return 0.0
    n_tokens, n_layers, top_k = experts.shape
    pairs = experts.astype(np.int64) * n_layers + np.arange(n_layers)[None, :, None]
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for i, pair in enumerate(pairs.ravel().tolist()):
        if pair in cache:
            cache.move_to_end(pair)
            hits += i >= n_prompt * n_layers * top_k
        else:
            cache[pair] = None
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits / ((n_tokens - n_prompt) * n_layers * top_k)
