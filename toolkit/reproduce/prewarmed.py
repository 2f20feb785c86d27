"""Arms that run after a prewarm: the most used experts are read into memory first, as in the published matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from toolkit.bench.plan import Tokens
from toolkit.bench.prewarm import hottest, stretches
from toolkit.console import MIB, note
from toolkit.reproduce import positions
from toolkit.reproduce.setup import Setup

PREWARM = "prewarm-"  # before the name of the arm that runs after it
_ONE_IN = 16  # published: 16 of 256 experts


def with_prewarm(setup: Setup, names: Sequence[str], tokens: Sequence[Tokens]) -> tuple[Setup, float]:
    """These arms once more with a prewarm, and which part of all choices it covers.

    Warmed are the most used experts of each layer, 16 of 256, over every token that a synthetic model prescribes
    or that the prompts have.
    """
    experts = _selections(setup, tokens)
    per_layer = max(1, max(layer.experts for layer in setup.layout.layers) // _ONE_IN)
    chosen = hottest(experts, per_layer)
    what = stretches(setup.layout, chosen)
    note(f"prewarm: {per_layer} experts of each layer, {sum(s.nbytes for s in what) / MIB:.0f} MiB")
    known = experts >= 0
    hit = (experts[..., None] == chosen[None, :, None, :]).any(axis=-1)
    warmed = [replace(arm, name=f"{PREWARM}{arm.name}", prewarm=what) for arm in setup.arms if arm.name in names]
    return replace(setup, arms=(*setup.arms, *warmed)), float(hit[known].mean())


def _selections(setup: Setup, tokens: Sequence[Tokens]) -> NDArray[np.int32]:
    """Experts [token, layer, k]: those prescribed by the model, else those that a run of the prompts takes."""
    if (pool := positions.prescribed(setup)) is not None and pool.experts is not None:
        return pool.experts
    return np.concatenate([positions.selected(setup, setup.arms[0], t, setup.conditions) for t in tokens])
