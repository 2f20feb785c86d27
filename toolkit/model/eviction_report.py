"""Eviction policies compared on traces, and how far the choice of their constants carries over to other traces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import ModelError
from toolkit.model.eviction import CHOSEN, NEED_WEIGHTS, POLICIES, TWO_SCALES, Score, ScoredCache, Workload, misses
from toolkit.model.routing import Trace

_FAST_WEIGHTS = (2.0, 4.0, 8.0)
_SLOW_HALF_LIVES = (12.0, 16.0, 24.0, 32.0)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One policy on one trace at one capacity; misses of decoded tokens only, the prompt warms the cache."""

    trace: str
    capacity_percent: int
    slots: int
    policy: str
    misses: int
    of_lru: float  # misses / LRU's


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What was simulated."""

    trace: str
    layers: int
    experts: int
    top_k: int
    prompt_tokens: int
    decode_tokens: int
    accesses: int  # of decoded tokens
    first_uses: int  # of these, of slots that neither prompt nor decode had used before: no cache has them


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Constants chosen as best on one part, and what they give on another; ratios to LRU over all capacities."""

    chosen_on: str
    fast_weight: float
    slow_half_life: float
    of_lru_there: float
    tested_on: str
    of_lru: float
    shipped_of_lru: float  # of the constants in use, on the same test


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything `moe-madv model evict` knows."""

    settings: tuple[Setting, ...]
    results: tuple[Result, ...]
    choices: tuple[Choice, ...]


def compare(
    workloads: Sequence[Workload],
    percents: Sequence[int],
    *,
    validate: bool,
    progress: Callable[[str], None],
) -> Comparison:
    """Run every policy over every trace; with `validate` also choose constants on one part and test on the rest.

    Policies that need router weights are left out where a trace has none. Raises ModelError.
    """
    for workload in workloads:
        check_capacities(workload, percents)
    results = []
    for workload in workloads:
        name = _name(workload.trace)
        progress(f"{name}: {len(POLICIES)} policies at {', '.join(f'{p} %' for p in percents)}")
        for percent in percents:
            slots = capacity_of(workload, percent)
            lru = 0
            for policy, make in POLICIES.items():
                if policy in NEED_WEIGHTS and workload.weights is None:
                    continue
                n = int(misses(workload, make, slots)[workload.trace.n_prompt :].sum())
                lru = n if policy == "LRU" else lru
                results.append(
                    Result(
                        trace=name,
                        capacity_percent=percent,
                        slots=slots,
                        policy=policy,
                        misses=n,
                        of_lru=n / max(lru, 1),
                    )
                )
    return Comparison(
        settings=tuple(map(_setting, workloads)),
        results=tuple(results),
        choices=_validated(workloads, percents, progress) if validate else (),
    )


def capacity_of(workload: Workload, percent: int) -> int:
    """Slots of a cache that holds this share of all experts."""
    return workload.n_slots * percent // 100


def check_capacities(workload: Workload, percents: Sequence[int]) -> None:
    """Raise ModelError for a share that does not even hold what one layer takes."""
    trace = workload.trace
    for percent in percents:
        if (slots := capacity_of(workload, percent)) < trace.top_k:
            raise ModelError(
                f"{percent} % of {workload.n_slots} experts are {slots}; a layer alone takes {trace.top_k}",
                where=trace.source,
                hint="give a larger --capacity",
            )


def _name(trace: Trace) -> str:
    return trace.source.rsplit(".", 1)[0]


def _setting(workload: Workload) -> Setting:
    trace = workload.trace
    n_tokens, n_layers, top_k = trace.experts.shape
    used = np.zeros((n_tokens, n_layers, trace.n_expert), dtype=bool)
    np.put_along_axis(used, trace.experts.astype(np.int64), True, axis=2)
    first_uses = np.count_nonzero(used.any(axis=0) & ~used[: trace.n_prompt].any(axis=0))
    return Setting(
        trace=_name(trace),
        layers=n_layers,
        experts=trace.n_expert,
        top_k=top_k,
        prompt_tokens=trace.n_prompt,
        decode_tokens=n_tokens - trace.n_prompt,
        accesses=workload.n_accesses,
        first_uses=int(first_uses),
    )


# --- Do the constants carry over?

# Misses of every decoded token by constants, then trace and capacity.
_Grid = dict[Score, list[NDArray[np.int64]]]


def _validated(
    workloads: Sequence[Workload], percents: Sequence[int], progress: Callable[[str], None]
) -> tuple[Choice, ...]:
    scores = [
        replace(TWO_SCALES, scales=((weight, TWO_SCALES.scales[0][1]), (1.0, half_life)))
        for weight, half_life in itertools.product(_FAST_WEIGHTS, _SLOW_HALF_LIVES)
    ]
    cells = [(workload, capacity_of(workload, percent)) for workload in workloads for percent in percents]

    def decoded(workload: Workload, slots: int, score: Score | None) -> NDArray[np.int64]:
        policy = POLICIES["LRU"] if score is None else lambda w, c: ScoredCache(w, c, score)
        return misses(workload, policy, slots)[workload.trace.n_prompt :]

    lru = [decoded(*cell, None) for cell in cells]
    grid: _Grid = {}
    for i, score in enumerate(scores):
        progress(
            f"constants {i + 1}/{len(scores)}: fast weight {score.scales[0][0]:g}, half-life {score.scales[1][1]:g}"
        )
        grid[score] = [decoded(*cell, score) for cell in cells]

    # A part is a label and a slice of the decoded tokens of some cells.
    n, names = len(percents), [_name(w.trace) for w in workloads]
    everything = range(len(cells))
    parts: dict[str, list[tuple[int, slice]]] = {
        name: [(i, slice(None)) for i in everything[t * n : (t + 1) * n]] for t, name in enumerate(names)
    }
    halves = {
        "first half": [(i, slice(len(lru[i]) // 2)) for i in everything],
        "second half": [(i, slice(len(lru[i]) // 2, None)) for i in everything],
    }
    pairs = [(a, b, parts) for a in names for b in names if a != b] + [
        (a, b, halves) for a in halves for b in halves if a != b
    ]

    def ratio(score: Score, part: list[tuple[int, slice]]) -> float:
        return float(np.mean([grid[score][i][s].sum() / max(lru[i][s].sum(), 1) for i, s in part]))

    choices = []
    for chosen_on, tested_on, among in pairs:
        best = min(scores, key=lambda score: ratio(score, among[chosen_on]))
        choices.append(
            Choice(
                chosen_on=chosen_on,
                fast_weight=best.scales[0][0],
                slow_half_life=best.scales[1][1],
                of_lru_there=ratio(best, among[chosen_on]),
                tested_on=tested_on,
                of_lru=ratio(best, among[tested_on]),
                shipped_of_lru=ratio(TWO_SCALES, among[tested_on]),
            )
        )
    return tuple(choices)


# --- Output


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Plain data; ratios rounded to what the counts can carry."""
    return {
        "format": 1,
        "chosen": CHOSEN,
        "traces": [asdict(setting) for setting in comparison.settings],
        "results": [{**asdict(r), "of_lru": round(r.of_lru, 4)} for r in comparison.results],
        "choices": [
            {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(c).items()}
            for c in comparison.choices
        ],
    }


def as_markdown(comparison: Comparison) -> str:
    """The tables as one page."""
    columns = list(dict.fromkeys((r.trace, r.capacity_percent) for r in comparison.results))
    cells = {(r.policy, r.trace, r.capacity_percent): r for r in comparison.results}
    lines = [
        "# Expert cache: which expert to give up",
        "",
        "One cache of whole experts, shared by all layers, warmed by the prompt. Misses of decoded tokens as a share",
        "of LRU's; in the row of LRU, its misses per access. Belady knows the future: no policy can miss less.",
        "LRU stands for the page cache, which keeps pages by last use; `hold` for the page cache with that share of",
        "the capacity locked, by frequency among what is resident and chosen anew every 8 tokens.",
        "",
        *table(
            ["policy", *(f"{trace} {percent} %" for trace, percent in columns)],
            [
                [
                    f"**{policy}**" if policy == CHOSEN else policy,
                    *(_cell(cells.get((policy, *column)), comparison.settings) for column in columns),
                ]
                for policy in dict.fromkeys(r.policy for r in comparison.results)
            ],
        ),
        "",
        *table(
            ["trace", "layers", "experts", "top k", "prompt", "decode", "accesses", "first uses"],
            [
                [
                    s.trace,
                    *map(str, (s.layers, s.experts, s.top_k, s.prompt_tokens, s.decode_tokens, s.accesses)),
                    f"{s.first_uses} ({s.first_uses / s.accesses:.1%})",
                ]
                for s in comparison.settings
            ],
        ),
        "",
        "First uses are of experts that neither the prompt nor an earlier decoded token has taken: every cache misses",
        "them.",
        "",
        f"Of the misses that Belady saves against LRU, `{CHOSEN}` saves",
        f"{', '.join(f'{_of_belady(cells, column):.0%} ({column[0]} {column[1]} %)' for column in columns)}.",
        "Traces have the router's weights of chosen experts only: what the scores of the others would tell about the",
        "next tokens cannot be seen in them. Those of the chosen ones tell little (`two scales, router weights`).",
    ]
    if comparison.choices:
        lines += [
            "",
            "## Do the constants carry over?",
            "",
            "The weight of the fast scale and the half-life of the slow one, chosen on one part, tested on another;",
            "misses as a share of LRU's, mean over the capacities. The form of the score was found on all traces.",
            "",
            *table(
                ["chosen on", "weight", "half-life", "there", "tested on", "misses / LRU's", "constants in use"],
                [
                    [
                        c.chosen_on,
                        f"{c.fast_weight:g}",
                        f"{c.slow_half_life:g}",
                        f"{c.of_lru_there:.3f}",
                        c.tested_on,
                        f"{c.of_lru:.3f}",
                        f"{c.shipped_of_lru:.3f}",
                    ]
                    for c in comparison.choices
                ],
            ),
        ]
    return "\n".join(lines) + "\n"


def _of_belady(cells: Mapping[tuple[str, str, int], Result], column: tuple[str, int]) -> float:
    lru, chosen, best = (cells[policy, column[0], column[1]].misses for policy in ("LRU", CHOSEN, "Belady"))
    return (lru - chosen) / max(lru - best, 1)


def _cell(result: Result | None, settings: Sequence[Setting]) -> str:
    if result is None:
        return ""
    if result.policy == "LRU":
        accesses = next(s.accesses for s in settings if s.trace == result.trace)
        return f"{result.misses / accesses:.1%} of accesses"
    return f"{result.of_lru:.3f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a markdown table, numbers to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]
