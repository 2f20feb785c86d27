"""From rows to the numbers of an experiment: one entry for each process, ratios over pairs, what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit import stats
from toolkit.console import GIB
from toolkit.evidence.compare import compare
from toolkit.reproduce.published import Published
from toolkit.results import Row, RunData


@dataclass(frozen=True, kw_only=True)
class Process:
    """One finished process: load, then the prompt, then decoded tokens; None for a part that was not asked for."""

    block: int
    wall_s: float  # load and both tests, without the start of the interpreter
    prompt_ts: float | None
    gen_ts: float | None
    mib_per_token: float | None  # of the decoded ones, of the prompt when nothing was decoded
    io_share: float | None  # of the time of both tests, in which some task of the machine waited for the disk
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
                io_share=io_share(rows),
                hints={key: sum(c.get(key, 0) for c in counters) for key in {key for c in counters for key in c}},
            )
        )
    return found


def io_share(rows: Sequence[Row]) -> float | None:
    """Part of the time of these rows in which some task waited for the disk (the kernel's pressure counter)."""
    waited = [ms for row in rows if (ms := (row.get("token_counters") or {}).get("psi_io_ms")) is not None]
    if not rows or len(waited) < len(rows):
        return None
    return sum(map(sum, waited)) / (sum(row["avg_ns"] for row in rows) / 1e6)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The machine while rows were measured; None where it does not tell."""

    min_available_bytes: float | None
    swap_delta_bytes: float | None
    max_temperature_c: float | None


def memory(rows: Sequence[Row]) -> Memory:
    """Of all these rows together."""
    seen = [row["observed"] for row in rows if row.get("observed")]

    def extreme(pick: Callable[..., float], series: str, which: str) -> float | None:
        return pick((x[series][which] for x in seen if x.get(series)), default=None)

    return Memory(
        min_available_bytes=extreme(min, "available_bytes", "min"),
        swap_delta_bytes=max((x["swap_delta_bytes"] for x in seen if x["swap_delta_bytes"] is not None), default=None),
        max_temperature_c=extreme(max, "temperature_c", "max"),
    )


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
    """Failed processes by file, arm and reason."""
    found: dict[tuple[str, str, str], set[int]] = {}
    for run in runs:
        for row in (r for r in run.samples if r["status"] == "failed"):
            reason = (row.get("reason") or "no reason given").splitlines()[0]
            found.setdefault((run.path.name, row["arm"], reason), set()).add(row["position"])
    return [f"{file}: {arm}, {count(len(at), 'run')}: {reason}" for (file, arm, reason), at in found.items()]


def count(n: int, what: str) -> str:
    """`1 run`, `3 runs`."""
    return f"{n} {what}{'' if n == 1 else 's'}"


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
        "repeats": str(plan.get("blocks") or 1 + max((row["block"] for row in run.samples), default=-1)),
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
