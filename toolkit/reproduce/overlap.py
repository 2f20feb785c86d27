"""The layer read overlap experiment: prefill with the next layer read ahead, on, off, off, on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit import stats
from toolkit.console import MIB
from toolkit.evidence import timeline
from toolkit.evidence.findings import samples
from toolkit.evidence.report import markdown_table, number
from toolkit.reproduce import balance, positions, rows, tables
from toolkit.reproduce.balance import Balance
from toolkit.reproduce.published import Published, load
from toolkit.reproduce.setup import Options, measure, prepare
from toolkit.results import Row, RunData

NAME = "overlap"
ON = "overlap"
N_GEN = 8
# What stands for the time a computing thread waited for reads: the kernel's own count before the payload's.
IO_WAIT, PAYLOAD_WAIT = "the time in which the thread that runs the graph was blocked", "the payload's counter"

# Of `timeline.Layer`: field, heading, unit.
_LAYER_FIGURES = (
    ("bytes", "MiB", 1 / MIB),
    ("wait_ms", "wait ms", 1),
    ("read_ms", "read ms", 1),
    ("compute_ms", "rest ms", 1),
)


@dataclass(frozen=True, kw_only=True)
class ArmTimes:
    """Prefill of one arm: throughput and waits of each process, in run order; layers as means over processes."""

    arm: str
    prompt_ts: list[float]
    waits_s: list[float] | None  # None: nothing counted them
    waits_of: str | None  # what counted
    hook_s: list[float] | None  # inside the payload, asking for reads
    layers: list[timeline.Layer]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured, beside what was published."""

    published: Published
    run: RunData
    batch: int
    balance: Balance | None  # None: the batch was given
    times: list[ArmTimes]
    ratios: list[rows.RatioRow]
    outputs_equal: bool | None  # logits of every position, bit for bit
    text_equal: bool | None  # what the model went on with by itself
    conditions: list[rows.Condition]
    failures: list[str]
    path: Path | None


def reproduce(options: Options, *, off: str, n_prompt: int | None, batch: int | None) -> Report | None:
    """Run on, off, off, on (two repeats), or continue; None after a dry run. `off` is the arm without overlap.

    `batch` None finds the one that takes as long to read as to compute; `n_prompt` None is one batch.
    """
    setup = prepare(options, NAME, (ON, off), (ON, off))
    if setup is None:
        return None
    pool = positions.prescribed(setup) or positions.of_text(setup, "note")
    found = balance.find(setup, pool, off) if batch is None else None
    batch = batch or (found.best.batch if found else balance.FIRST)
    n_prompt = n_prompt or batch
    run = measure(
        setup,
        pool.take(0, n_prompt, N_GEN),
        f"{off}-pp{n_prompt}-b{batch}",
        n_batch=batch,
        n_ubatch=batch,
        timeline=True,
    )
    published = load(NAME)
    same_text = [check.get("greedy_equal") for check in run.checks]
    ours = rows.our_conditions(run) | {
        "program": "llama.cpp",
        "order": order(run),
        "prompt": f"{n_prompt} tokens in batches of {batch}",
    }
    return Report(
        published=published,
        run=run,
        batch=batch,
        balance=found,
        times=[times(run, arm) for arm in setup.arm_names],
        ratios=[
            rows.ratio([run], ON, off, "prompt t/s", "prompt_ts", published=published.figures["prefill"]["ratio"]),
            rows.ratio([run], ON, off, "decode t/s", "gen_ts"),
        ],
        outputs_equal=rows.outputs_equal([run], ON, off),
        text_equal=None if None in same_text or not same_text else all(same_text),
        conditions=rows.differing(published, ours),
        failures=rows.failures([run]),
        path=setup.report,
    )


def order(run: RunData) -> str:
    """The order that really ran, in the published words."""
    first = {row["position"]: row["arm"] for row in run.samples}
    return ", ".join("on" if first[position] == ON else "off" for position in sorted(first))


def times(run: RunData, arm: str) -> ArmTimes:
    """Of the prompt alone."""
    found = [s for test in run.header["plan"]["tests"] if test.startswith("pp") for s in samples([run], arm, test)]
    ok = [s for s in found if s.row["status"] == "ok"]
    waits = [_wait(s.row) for s in ok]
    counted = {of for _, of in waits}
    hook = [ns for s in ok if (ns := (s.row.get("hints") or {}).get("hint_ns")) is not None]
    return ArmTimes(
        arm=arm,
        prompt_ts=[s.row["avg_ts"] for s in ok],
        waits_s=[seconds for seconds, _ in waits] if len(counted) == 1 and None not in counted else None,
        waits_of=counted.pop() if len(counted) == 1 else None,
        hook_s=[ns / 1e9 for ns in hook] if len(hook) == len(ok) else None,
        layers=timeline.layers(ok),
    )


def _wait(row: Row) -> tuple[float, str | None]:
    if row.get("io_wait_s") is not None:
        return float(row["io_wait_s"]), IO_WAIT
    ns = (row.get("hints") or {}).get("wait_ns")
    return (0.0, None) if ns is None else (ns / 1e9, PAYLOAD_WAIT)


def as_json(report: Report) -> dict[str, Any]:
    """Everything, for tools."""
    return {
        "experiment": NAME,
        "published": report.published.as_json(),
        "batch": report.batch,
        "balance": None if report.balance is None else {**asdict(report.balance), "found": report.balance.found},
        "ours": [asdict(t) for t in report.times],
        "order": order(report.run),
        "ratios": [asdict(r) for r in report.ratios],
        "outputs_equal": report.outputs_equal,
        "text_equal": report.text_equal,
        "conditions": [asdict(c) for c in report.conditions],
        "failures": report.failures,
        "files": [str(report.run.path)],
    }


def as_text(report: Report) -> str:
    """Markdown: ratio, waits, layers, equality, what differs."""
    figures = report.published.figures["prefill"]
    said = {True: "equal", False: "DIFFERENT", None: "unknown"}
    equality = [
        ["logits", said[figures["logits_equal"]], said[report.outputs_equal]],
        ["text", said[figures["text_equal"]], said[report.text_equal]],
    ]
    sections = [
        ("Ratios", tables.ratio_table(report.ratios)),
        ("Time spent waiting for reads, prompt", _waits(report.times, figures)),
        ("Outputs", markdown_table(["output", "published", "ours"], equality)),
    ]
    if report.balance is not None:
        sections.insert(0, ("Batch", _balance(report.balance)))
    if any(t.layers for t in report.times):
        sections.append(("Layers, prompt, mean of all processes", _layers(report.times)))
    return tables.page(report.published, sections, report.conditions, report.failures, [report.run])


def _balance(found: Balance) -> str:
    body = [
        [str(t.batch), f"{t.read_bytes / MIB:.0f}", number(t.read_s), number(t.compute_s), f"{100 * t.apart:.0f} %"]
        for t in found.tried
    ]
    best = found.best
    verdict = (
        f"A batch of {best.batch} tokens takes as long to read, at {found.disk_mib_s:.0f} MiB/s, as to compute in "
        f"memory, within {100 * best.apart:.0f} %."
        if found.found
        else f"No batch balances within {100 * balance.TOLERANCE:.0f} %; {best.batch} tokens come closest, at "
        f"{found.disk_mib_s:.0f} MiB/s."
    )
    return f"{markdown_table(['batch', 'MiB to read', 'read s', 'compute s', 'apart'], body)}\n\n{verdict}"


def _waits(found: Sequence[ArmTimes], figures: dict[str, Any]) -> str:
    body = []
    for t in found:
        total = "n/a" if t.waits_s is None else number(stats.mean(t.waits_s)) if t.waits_s else "-"
        body.append(
            [
                t.arm,
                tables.listed(t.prompt_ts),
                number(figures["join_on_s" if t.arm == ON else "join_off_s"]),
                total,
                "n/a" if t.waits_s is None else tables.listed(t.waits_s),
                "n/a" if t.hook_s is None else tables.listed(t.hook_s),
            ]
        )
    headings = ["arm", "prompt t/s, in order", "joins, s, published", "waits, s, mean", "each", "in the hook, s"]
    counted = " / ".join(dict.fromkeys(f"{t.waits_of}" for t in found if t.waits_of))
    return markdown_table(headings, body) + (f"\n\nWaits are {counted}." if counted else "")


def _layers(found: Sequence[ArmTimes]) -> str:
    """Each figure of both arms beside each other, then sums; figures that are 0 throughout are left out."""
    known = [t for t in found if t.layers]
    fields = [
        (name, words, unit)
        for name, words, unit in _LAYER_FIGURES
        if any(getattr(layer, name) for t in known for layer in t.layers)
    ]
    headings = ["layer", *(f"{words}, {t.arm}" for _, words, _ in fields for t in known)]
    by_layer = {t.arm: {layer.layer: layer for layer in t.layers} for t in known}
    body = []
    for n in sorted({n for layers in by_layer.values() for n in layers}):
        cells = [(by_layer[t.arm].get(n), name, unit) for name, _, unit in fields for t in known]
        body.append([str(n), *("-" if x is None else number(getattr(x, name) * unit) for x, name, unit in cells)])
    sums = [number(sum(getattr(x, name) for x in t.layers) * unit) for name, _, unit in fields for t in known]
    table = markdown_table(headings, [*body, ["all", *sums]])
    return (
        f"{table}\n\nMiB are those asked for when the layer itself began; what was asked for before is not in them. "
        "The rest is computing, and waiting for pages that were not there yet; the last layer's is not known."
    )
