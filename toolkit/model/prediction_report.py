"""The tables and the reading of a study of guesses, from its counts alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.console import MIB
from toolkit.model.eviction import CHOSEN
from toolkit.model.eviction_report import check_capacities, table
from toolkit.model.prediction import RULES, Result, Setting, judge
from toolkit.model.trace import Recording

_MODELLED = frozenset(rule.name for rule in RULES if rule.modelled)


@dataclass(frozen=True, kw_only=True)
class Study:
    """Everything `moe-madv model predict` knows."""

    settings: tuple[Setting, ...]
    results: tuple[Result, ...]

    def of(self, rule: str) -> list[tuple[Setting, Result]]:
        """A rule's results with their settings, in the order of the settings."""
        found = {(r.trace, r.capacity_percent): r for r in self.results if r.rule == rule}
        return [(s, found[s.trace, s.capacity_percent]) for s in self.settings]


def study(recordings: Sequence[Recording], percents: Sequence[int], *, progress: Callable[[str], None]) -> Study:
    """Judge every rule on every recording. Raises ModelError."""
    workloads = [(recording, recording.workload()) for recording in recordings]
    for _, workload in workloads:
        check_capacities(workload, percents)
    settings: list[Setting] = []
    results: list[Result] = []
    for recording, workload in workloads:
        name = workload.trace.source.rsplit(".", 1)[0]
        progress(f"{name}: {len(RULES)} rules at {', '.join(f'{p} %' for p in percents)}")
        for percent in percents:
            setting, found = judge(workload, recording.header.expert_bytes, percent, name=name)
            settings.append(setting)
            results += found
    return Study(settings=tuple(settings), results=tuple(results))


def as_json(found: Study) -> dict[str, Any]:
    """Counts, and the shares made of them."""
    missing = {(s.trace, s.capacity_percent): s.missing for s in found.settings}
    return {
        "format": 1,
        "policy": CHOSEN,
        "settings": [{**asdict(s), "absent": round(s.absent, 2)} for s in found.settings],
        "results": [
            {
                **asdict(r),
                "modelled": r.rule in _MODELLED,
                "precision": round(r.precision, 4),
                "recall": round(r.right / max(missing[r.trace, r.capacity_percent], 1), 4),
            }
            for r in found.results
        ],
    }


def as_markdown(found: Study) -> str:
    """The tables as one page."""
    columns = [f"{s.trace} {s.capacity_percent} %" for s in found.settings]

    def rows(cell: Callable[[Setting, Result], str], rules: Sequence[str]) -> list[list[str]]:
        return [[rule, *(cell(*pair) for pair in found.of(rule))] for rule in rules]

    names = [rule.name for rule in RULES]
    lines = [
        "# Experts known before their layer runs",
        "",
        f"A cache of whole experts under the policy `{CHOSEN}`. When a layer has chosen, a rule names experts that the",
        "next layer may take, and those not in the cache are read early. Right: the next layer takes it and would have",
        "missed it. Precision is the share of early reads that are right, recall the share of all misses that they",
        "are. Decoded tokens only. Early reads have room of their own: what a wrong one would push out, or be good for",
        "later, is not in the figures.",
        "",
        *table(
            ["trace", "tokens", "missing experts a token", "MiB", "absent in a layer", "right by chance"],
            [
                [
                    column,
                    str(s.decode_tokens),
                    f"{s.missing / s.decode_tokens:.1f}",
                    _mb(s.missing_bytes, s),
                    f"{s.absent:.0f}",
                    f"{_chance(s):.1%}",
                ]
                for column, s in zip(columns, found.settings, strict=True)
            ],
        ),
        "",
        "Rules without hidden states: `recent`, `frequent` (uses, halved every 16 tokens), `followers` (experts that",
        "came after those just chosen, counted as the run goes on; the best ones, or all with a share of 0.3 or more),",
        "and the last with frequency too. `next router early` is modelled, not recorded: the next layer's router on",
        "this layer's input, right as often as its name says, wrong as `moe-madv model synth --early-accuracy` has it.",
        "",
        "## Precision / recall",
        "",
        *table(["rule", *columns], rows(lambda s, r: f"{r.precision:.0%} / {r.right / max(s.missing, 1):.0%}", names)),
        "",
        "## Experts a token: read early + read for nothing (MiB)",
        "",
        *table(["rule", *columns], rows(_reads, names)),
        "",
        "## Does it learn? Recall in the first and second half of the tokens",
        "",
        *table(["rule", *columns], rows(_halves, [name for name in names if name.startswith("followers")])),
        "",
        "## Reading",
        "",
        *_reading(found),
    ]
    return "\n".join(lines) + "\n"


def _chance(s: Setting) -> float:
    return s.missing / (s.decode_tokens * s.layers * s.absent)


def _mb(nbytes: int | None, s: Setting) -> str:
    return "" if nbytes is None else f"{nbytes / s.decode_tokens / MIB:.0f}"


def _reads(s: Setting, r: Result) -> str:
    cell = f"{r.right / s.decode_tokens:.1f} + {r.wrong / s.decode_tokens:.1f}"
    if r.right_bytes is None:
        return cell
    return f"{cell} ({_mb(r.right_bytes, s)} + {_mb(r.wrong_bytes, s)})"


def _halves(s: Setting, r: Result) -> str:
    first = (r.right - r.right_later) / max(s.missing - s.missing_later, 1)
    return f"{first:.0%}, {r.right_later / max(s.missing_later, 1):.0%}"


def _reading(found: Study) -> list[str]:
    """What the figures say, in sentences that other traces would change."""

    def precision(*rules: str) -> str:
        return _range([r.precision for rule in rules for _, r in found.of(rule)])

    def recall(*rules: str) -> str:
        return _range([r.right / max(s.missing, 1) for rule in rules for s, r in found.of(rule)])

    blind = [rule.name for rule in RULES if not rule.modelled]
    worth = [
        (r.right / max(s.missing, 1), r, s)
        for rule in blind
        for s, r in found.of(rule)
        if r.precision >= 0.5 and r.right
    ]
    lines = [
        f"- Recent and frequent experts are in the cache already: {precision('recent, best 1', 'frequent, best 1')} of",
        f"  such guesses at absent ones are right (by chance {_range([_chance(s) for s in found.settings])}).",
        f"- Followers know something: one guess a layer is right in {precision('followers, best 1')} of the cases and",
        f"  finds {recall('followers, best 1')} of what is missing, four find {recall('followers, best 4')} at a",
        f"  precision of {precision('followers, best 4')}.",
    ]
    if worth:
        best, r, s = max(worth, key=lambda found: found[0])
        lines += [
            "- Without hidden states, rules that are right at least as often as wrong find at most",
            f"  {best:.0%} of what is missing (`{r.rule}`, {s.trace} {s.capacity_percent} %).",
        ]
    else:
        lines.append("- Without hidden states, no rule is right as often as it is wrong.")
    lines += [
        f"- A router that is early with an accuracy of 0.85 would find {recall('next router early, 0.85')} at a",
        f"  precision of {precision('next router early, 0.85')}. Where that is less than its accuracy, the experts",
        "  that it names wrongly are more often absent than the right ones.",
        "- A right early read moves bytes to an earlier time, a wrong one adds bytes: both pay only as long as the",
        "  disk would be idle otherwise.",
        f"- Each trace is one text of {_whole([s.decode_tokens for s in found.settings])} decoded tokens: few for",
        "  counts of pairs. The halves above tell whether more would help.",
    ]
    return lines


def _range(shares: Sequence[float]) -> str:
    low, high = f"{min(shares):.1%}", f"{max(shares):.1%}"
    return low if low == high else f"{low} to {high}"


def _whole(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"
