"""Early routing: the next layer's router applied to this layer's input, and how often a synthetic model's is right.

Prescribed routing alone would make it exact. With an accuracy asked for, a token has a code in three places, and the
norm before each layer's router passes one of them, in turn. A router finds the true logits where its own layer
shows the code, and early ones, worse with the distance, where the one or two layers before show theirs. Routing stays
the prescribed one, and nothing in a layer's input tells more than its early logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolkit.model.routing import WINDOW, Trace

BANKS = 3  # places of a code: the layer's own, one before, two before

# Experts that were not chosen follow in an order drawn for each token; one that a token within WINDOW uses counts this
# much. In recordings such experts are 0.92 of first choices and 0.82 of sixth ones, and 0.24 of all unchosen: the
# next choices would be some 0.77.
_NEAR = 10.0
_STEPS = 24  # of the bisection


@dataclass(frozen=True, kw_only=True, eq=False)
class Early:
    """Logits of routers that run one and two layers early: float32 [distance - 1, token, layer, expert]."""

    logits: NDArray[np.float32]
    accuracy: tuple[float, ...]  # share of the true experts among the k best, for each distance that there is


def prescribe(trace: Trace, accuracy: float, seed: int) -> Early:
    """Early logits whose top k holds `accuracy` of the true experts one layer ahead, over all tokens and layers.

    They are the true order as -log rank, which is how the weights of recorded routers fall, plus noise; the noise of
    two layers ahead is that of one layer and as much again. So late choices are missed more than first ones, and the
    experts taken instead are mostly some that tokens near use.
    """
    rng = np.random.default_rng((seed, BANKS))
    base = -np.log1p(_ranks(trace, rng))
    one, two = rng.standard_normal((2, *base.shape))
    low, high = 0.0, 16.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        right = _overlap_ahead(base + middle * one, trace, 1)
        low, high = (middle, high) if right > accuracy else (low, middle)
    logits = np.stack([base + high * one, base + high * (one + two)]).astype(np.float32)
    return Early(
        logits=logits,
        accuracy=tuple(_overlap_ahead(logits[d - 1], trace, d) for d in range(1, min(BANKS, trace.experts.shape[1]))),
    )


def overlap(logits: NDArray[np.floating], experts: NDArray[np.integer]) -> float:
    """Mean share of experts [..., k] that are among the k best of logits [..., expert]."""
    top_k = experts.shape[-1]
    best = np.argpartition(-logits, top_k - 1, axis=-1)[..., :top_k]
    return float((experts[..., :, None] == best[..., None, :]).any(axis=-1).mean())


def _overlap_ahead(logits: NDArray[np.floating], trace: Trace, distance: int) -> float:
    return overlap(logits[:, distance:], trace.experts[:, distance:])  # the layers that have one so far before them


def _ranks(trace: Trace, rng: np.random.Generator) -> NDArray[np.int64]:
    """Rank of every expert, [token, layer, expert]: the prescribed ones in their order, then the drawn rest."""
    experts = trace.experts.astype(np.int64)
    used = np.zeros((*experts.shape[:2], trace.n_expert), dtype=bool)
    np.put_along_axis(used, experts, True, axis=2)
    near = np.stack([used[max(0, t - WINDOW) : t + WINDOW + 1].sum(axis=0) > used[t] for t in range(len(used))])
    score = np.where(near, np.log(_NEAR), 0.0) + rng.gumbel(size=used.shape)
    chosen = score.max() + np.arange(trace.top_k, 0, -1)
    np.put_along_axis(score, experts, np.broadcast_to(chosen, experts.shape), axis=2)
    order = np.argsort(-score, axis=2, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.broadcast_to(np.arange(trace.n_expert), order.shape), axis=2)
    return ranks
