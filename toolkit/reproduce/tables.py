"""What the reports of all experiments have in common, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit import stats
from toolkit.console import MIB
from toolkit.evidence.report import markdown_table, number
from toolkit.reproduce.published import Published
from toolkit.reproduce.rows import Condition, RatioRow
from toolkit.results import RunData


def page(
    published: Published,
    sections: Sequence[tuple[str, str]],
    conditions: Sequence[Condition],
    failures: Sequence[str],
    runs: Sequence[RunData],
) -> str:
    """Title and source, the sections, then what differs, what failed and where the rows are."""
    parts = [f"# {published.title}, again", f"Published figures: {published.source}."]
    listed = [*sections, ("What differs", condition_table(conditions))]
    if failures:
        listed.append(("Failed", "\n".join(f"- {text}" for text in failures)))
    listed.append(("Rows", "\n".join(f"- [{run.path.name}]({run.path.name}), {_measured(run)}" for run in runs)))
    for title, body in listed:
        parts += [f"## {title}", body]
    return "\n\n".join(parts)


def _measured(run: RunData) -> str:
    header = run.header
    return f"{header['created'][:10]}, pin {header['pin'][:9]}, series {header['series'][:12]}"


def ratio_table(ratios: Sequence[RatioRow]) -> str:
    """One line for each arm and figure."""
    body = []
    for r in ratios:
        ours = "-" if r.ratio is None else f"{r.ratio:.2f}"
        if r.ratio is not None and r.ci95 is not None:
            ours += f" [{r.ci95[0]:.2f}, {r.ci95[1]:.2f}]"
        published = "-" if r.published is None else f"{r.published:.2f}"
        body.append([r.what, f"{r.arm} over {r.over}", published, ours, str(r.n_pairs), r.verdict])
    return markdown_table(["figure", "arms", "published", "ours [95 %]", "pairs", "verdict"], body)


def condition_table(conditions: Sequence[Condition]) -> str:
    """One line for each condition that differs."""
    return markdown_table(["condition", "published", "ours"], [[c.what, c.published, c.ours] for c in conditions])


def mean(values: Sequence[float | None]) -> str:
    """Of the known ones; `-` when there is none."""
    known = [v for v in values if v is not None]
    return number(stats.mean(known)) if known else "-"


def spread(found: dict[str, Any] | None) -> str:
    """`7.91 ± 0.05` of what `rows.spread` returns; no deviation of a single value."""
    if found is None:
        return "-"
    return number(found["mean"]) if found["sd"] is None else f"{number(found['mean'])} ± {number(found['sd'], 2)}"


def listed(values: Sequence[float | None]) -> str:
    """Every value: among three or four no rule can tell an outlier, a reader can."""
    return ", ".join(number(value) for value in values)


def mib(nbytes: float | None) -> str:
    """Whole MiB, or `n/a`."""
    return "n/a" if nbytes is None else f"{nbytes / MIB:.0f} MiB"
