"""Forced tokens of reproduced experiments: neighbouring positions of one list that starts over at its end."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toolkit.bench import limits
from toolkit.bench.check import require_done, trace_experts
from toolkit.bench.launch import job_of, launch
from toolkit.bench.plan import Arm, Conditions, Tokens
from toolkit.model.synth import prescription
from toolkit.reproduce.setup import Setup

_PROMPTS = Path(__file__).with_name("prompts")


@dataclass(frozen=True, kw_only=True)
class Positions:
    """A token list, and what a synthetic model prescribes for it: experts [token, layer, k]."""

    tokens: tuple[int, ...]
    source: str
    experts: NDArray[np.int32] | None = None

    def take(self, first: int, n_prompt: int, n_gen: int, *further: tuple[int, int]) -> Tokens:
        """n_prompt + n_gen tokens from `first` on; past the end they go on from the beginning.

        Each pair of `further` adds a prompt and a decode of these lengths. Prescribed experts depend on the token
        alone, so they hold wherever it stands.
        """
        at = (first + np.arange(n_prompt + n_gen + sum(map(sum, further)))) % len(self.tokens)
        chosen = iter([self.tokens[i] for i in at])
        prompt, gen, *rest = (tuple(itertools.islice(chosen, n)) for n in itertools.chain((n_prompt, n_gen), *further))
        return Tokens(
            prompt=prompt,
            gen=gen,
            source=f"{self.source}, from position {first}" if first else self.source,
            experts=None if self.experts is None else self.experts[at],
            further=tuple(zip(rest[::2], rest[1::2], strict=True)),
        )


def prescribed(setup: Setup) -> Positions | None:
    """The list that a synthetic model has its experts prescribed for; None for a real model."""
    first = setup.layout.shards[0]
    if "moe_madv.tokens" not in first.header.metadata:
        return None
    found = prescription(first.path)
    tokens = tuple(int(token) for token in found.tokens)
    return Positions(tokens=tokens, source="prescribed by the model", experts=found.experts)


def of_text(setup: Setup, name: str) -> Positions:
    """One of the texts in prompts/, in the model's own tokens."""
    text = (_PROMPTS / f"{name}.txt").read_text(encoding="utf-8")
    job = job_of(setup.layout, setup.conditions, 256)
    with limits.memory_budget(None) as unlimited:
        outcome = launch(setup.arms[0], {**job, "text": text}, unlimited)
    require_done(setup.arms[0], outcome)
    return Positions(tokens=outcome.tokens, source=f"text {name}")


def selected(setup: Setup, arm: Arm, tokens: Tokens, conditions: Conditions) -> NDArray[np.int32]:
    """Experts [token, layer, k] that a run without a budget takes, -1 where none was computed."""
    job = job_of(setup.layout, conditions, len(tokens.all)) | {"n_prompt": len(tokens.prompt)}
    layers = setup.layout.layers
    with limits.memory_budget(None) as unlimited:
        return trace_experts(
            arm, tokens, job, unlimited, [layer.block for layer in layers], max(layer.top_k for layer in layers)
        )
