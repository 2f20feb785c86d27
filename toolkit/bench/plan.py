"""What a comparison will run: arms, tests, order, forced tokens. Pure data, decided before anything is measured."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

STOCK = "stock"
RPC = "rpc"  # the arm whose layers are on other machines
MODES = ("off", "madv", "hint", "overlap", "cache")  # of the payload, ggml-moe-prefetch.h


class Stretch(NamedTuple):
    """Some bytes of a file."""

    path: str
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of a comparison: a runtime and the environment it is started with."""

    name: str
    python: Path  # interpreter of the arm's own environment
    label: str  # local version label of its wheel, such as base.cpu
    wheel_sha256: str
    payload: str | None  # version of the payload the wheel carries, None when unpatched
    mode: str | None  # payload mode that must be in force, None when unpatched
    env: dict[str, str] = field(default_factory=dict)
    rpc: tuple[str, ...] = ()  # HOST:PORT of the servers that hold its layers; none: all is in its own process
    rpc_protocol: str | None = None  # version that all of them speak
    rpc_memory: tuple[int, ...] = ()  # bytes that each says it has
    injected_slowdown_percent: float = 0.0  # of each measured span, on purpose: to see whether it is found
    prewarm: tuple[Stretch, ...] = ()  # read into the page cache before each run, within its memory


class Span(NamedTuple):
    """Where the timed tokens of one test stand in the list, and how much context its prompt and decode started with."""

    first: int
    end: int
    depth: int


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The forced token list: the same in every arm, so that routing is the same."""

    prompt: tuple[int, ...]
    gen: tuple[int, ...]
    source: str  # where they come from, for the record
    depth: tuple[int, ...] = ()  # context before the first test, not timed
    experts: np.ndarray | None = None  # prescribed expert ids [token, layer, k] of a synthetic model
    further: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()  # (prompt, gen) after them, in the same process

    @property
    def all(self) -> list[int]:
        return [*self.depth, *self.prompt, *self.gen, *(t for pair in self.further for part in pair for t in part)]

    @property
    def spans(self) -> dict[str, Span]:
        """What is timed, by the name of the test, in order."""
        found: dict[str, Span] = {}
        end = len(self.depth)
        for prompt, gen in ((self.prompt, self.gen), *self.further):
            depth, lengths = end, [len(part) for part in (prompt, gen) if part]
            for name, n in zip(test_names(len(prompt), len(gen), depth), lengths, strict=True):
                found[name] = Span(end, end + n, depth)
                end += n
        return found

    @property
    def sha256(self) -> str:
        return hashlib.sha256(np.array(self.all, dtype="<i4").tobytes()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What all arms share; None stands for a default that depends on the machine or the model."""

    blocks: int | None  # None: until the time is over
    n_batch: int
    n_ubatch: int
    cold: bool  # evict the model before each run
    minutes: float | None = None  # after the fewest blocks that can decide, start no other past this time
    pause_s: float = 0.0  # before each run but the first
    n_threads: int | None = None
    budget_bytes: int | None = None
    n_ctx: int | None = None  # size of the context, None: as much as the tokens need
    n_gpu_layers: int = 0  # layers on a GPU, without their experts
    lazy_mode: str | None = None  # llama.cpp's for row-sparse tables, None: its default
    timeline: bool = False  # keep where the time of each layer went
    series: bool = False  # keep what the machine did over time, beside its summary
    one_process: bool = False  # all runs in one process, which switches the mode and warms up before each


@dataclass(frozen=True, kw_only=True)
class Step:
    """One fresh process: `position` counts over the whole run."""

    block: int
    position: int
    arm: str


def order(arms: Sequence[str], blocks: int) -> list[Step]:
    """Each block holds every arm once, forwards and backwards in turn (A B, B A, …): linear drift cancels out."""
    return list(itertools.islice(endless(arms), len(arms) * blocks))


def endless(arms: Sequence[str]) -> Iterator[Step]:
    """The same order, block after block."""
    for block in itertools.count():
        for i, arm in enumerate(arms if block % 2 == 0 else reversed(arms)):
            yield Step(block=block, position=block * len(arms) + i, arm=arm)


def test_names(n_prompt: int, n_gen: int, n_depth: int = 0) -> list[str]:
    """llama-bench's names: pp64, tg48, tg48 @ d512."""
    names = [f"pp{n_prompt}"] * (n_prompt > 0) + [f"tg{n_gen}"] * (n_gen > 0)
    return [f"{name} @ d{n_depth}" if n_depth else name for name in names]
