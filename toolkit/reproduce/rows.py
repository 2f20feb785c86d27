"""From rows to the numbers of an experiment: one entry for each process, ratios over pairs, what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit import stats
from toolkit.console import GIB
from toolkit.evidence.compare import compare
from toolkit.reproduce.published import Published
from toolkit.results import RunData


@dataclass(frozen=True, kw_only=True)
class Process:
    """One finished process: load, then the prompt, then decoded tokens; None for a part that was not asked for."""

    block: int
    wall_s: float  # load and both tests, without the start of the interpreter
    prompt_ts: float | None
    gen_ts: float | None
    mib_per_token: float | None  # of the decoded ones, of the prompt when nothing was decoded
    hints: dict[str, int]  # payload counters over both tests; empty for stock


def processes(run: RunData, arm: str) -> list[Process]:
    """Processes of one arm in run order; those with a failed test are left out."""
    found = []
    for position in sorted({row["position"] for row in run.samples if row["arm"] == arm}):
        rows = [row for row in run.samples if row["position"] == position]
        if any(row["status"] != "ok" for row in rows):
            continue
        prompt = next((row for row in rows if row["test"].startswith("pp")), None)
        gen = next((row for row in rows if row["test"].startswith("tg")), None)
        counters = [row["hints"] or {} for row in rows]
        last = gen or prompt
        found.append(
            Process(
                block=rows[0]["block"],
                wall_s=rows[0]["load_s"] + sum(row["avg_ns"] for row in rows) / 1e9,
                prompt_ts=prompt["avg_ts"] if prompt else None,
                gen_ts=gen["avg_ts"] if gen else None,
                mib_per_token=last["mib_per_token"] if last else None,
                hints={key: sum(c.get(key, 0) for c in counters) for key in {key for c in counters for key in c}},
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class RatioRow:
    """One arm over another in one figure; above 1 the arm is faster. `published` is the figure of others."""

    what: str
    arm: str
    over: str
    published: float | None
    ratio: float | None  # None when outputs differ or no pair was finished
    ci95: tuple[float, float] | None
    verdict: str
    n_pairs: int


def ratio(
    runs: Sequence[RunData], arm: str, over: str, what: str, field: str, published: float | None = None
) -> RatioRow:
    """Pair the processes of both arms by file and block; for `wall_s` less is faster."""
    base: list[list[float]] = []
    candidate: list[list[float]] = []
    for run in runs:
        by_block = [{p.block: getattr(p, field) for p in processes(run, name)} for name in (over, arm)]
        for block in sorted(by_block[0].keys() & by_block[1].keys()):
            a, b = by_block[0][block], by_block[1][block]
            base.append([b if field == "wall_s" else a])
            candidate.append([a if field == "wall_s" else b])
    equal = outputs_equal(runs, arm, over)
    found = stats.paired_ratio(base, candidate) if base and equal is not False else None
    return RatioRow(
        what=what,
        arm=arm,
        over=over,
        published=published,
        ratio=found.ratio if found else None,
        ci95=found.ci95 if found else None,
        verdict=found.verdict.value if found else "outputs differ" if equal is False else "nothing measured",
        n_pairs=len(base),
    )


def outputs_equal(runs: Sequence[RunData], arm: str, over: str) -> bool | None:
    """Whether logits were equal bit for bit in every file; None when some file cannot tell."""
    found = [c.outputs_equal for run in runs for c in compare([run], over).comparisons if c.candidate == arm]
    if False in found:
        return False
    return True if found and None not in found else None


def failures(runs: Sequence[RunData]) -> list[str]:
    """Failed rows, with their reasons."""
    return [
        f"{run.path.name}: {row['arm']} {row['test']} failed: {(row.get('reason') or '').splitlines()[0]}"
        for run in runs
        for row in run.samples
        if row["status"] == "failed"
    ]


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Something that was not the same in the published experiment and in ours."""

    what: str
    published: str
    ours: str


def differing(published: Published, ours: dict[str, str]) -> list[Condition]:
    """Conditions that differ, in the published order; then those only ours states."""
    rows = [
        Condition(what=what, published=text, ours=ours.get(what, "not recorded"))
        for what, text in published.conditions.items()
        if ours.get(what) != text
    ]
    return rows + [
        Condition(what=what, published="not stated", ours=text)
        for what, text in ours.items()
        if what not in published.conditions
    ]


def our_conditions(run: RunData) -> dict[str, str]:
    """The conditions of one of our files, under the names that the published ones use."""
    model, plan, machine = run.header["model"], run.header["plan"], run.header["machine"]
    budget, size = plan["budget_bytes"], model["size"]
    origin = "".join(f", {key} {model[key]}" for key in ("source", "revision", "sha256") if key in model)
    memory = "no limit"
    if plan["budget_method"] != "none":
        memory = f"{budget / GIB:.2f} GiB by {plan['budget_method']}; the model is {size / budget:.1f} times as large"
    return {
        "model": f"{model['filename']}, {model['architecture']}, {size / GIB:.2f} GiB, {model['layers']} layers, "
        f"{model['experts']} experts, top {model['top_k']}{origin}",
        "machine": f"{machine['cpu']}, {plan['n_threads']} threads",
        "memory": memory,
        "system": f"{machine['os']}, kernel {machine['kernel']}",
        "tokens": f"forced, the same in every arm: {plan['tokens_source']}",
        "repeats": str(plan["blocks"]),
        "before a run": "model evicted from the page cache, measured" if plan["cold"] else "page cache left as it was",
        "order": "arms in turn, forwards and backwards",
        "read-ahead": f"{machine['read_ahead_kb']} KiB",
    }


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean, sample SD, all values and the indices of outliers, which stay in; None without values."""
    if not values:
        return None
    return {
        "mean": stats.mean(values),
        "sd": stats.sample_sd(values),
        "values": list(values),
        "outliers": list(stats.outliers(values)),
    }
