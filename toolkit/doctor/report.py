"""The doctor's findings as text for people and as JSON for tools."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.console import GIB, MIB
from toolkit.doctor.finding import Finding, Severity
from toolkit.doctor.fix import Change
from toolkit.doctor.observe import Measured, Settings
from toolkit.doctor.predict import Prediction

_WIDTH = 112
_INDENT = " " * 26


@dataclass(frozen=True, kw_only=True)
class Report:
    settings: Settings
    measured: Measured
    prediction: Prediction | None
    findings: tuple[Finding, ...]
    changes: tuple[Change, ...] = ()


def as_json(report: Report) -> dict[str, Any]:
    """Sizes in bytes, speeds in MiB/s; null where the system does not tell."""
    return {
        "machine": dataclasses.asdict(report.settings.facts),
        "findings": [
            {**dataclasses.asdict(f), "severity": f.severity.value, "fixable": f.fixable} for f in report.findings
        ],
        "speeds": {name: dataclasses.asdict(speed) for name, speed in report.measured.speeds.items()},
        "memory_mib_s": report.measured.memory_mib_s,
        "model": None if report.prediction is None else dataclasses.asdict(report.prediction),
        "changes": [dataclasses.asdict(change) for change in report.changes],
    }


def as_text(report: Report) -> str:
    """Findings worst first; what is in order takes one line each."""
    lines: list[str] = []
    for finding in report.findings:
        lines += _wrapped(f"{finding.severity.value:<8}  {finding.key:<15} ", finding.what)
        if finding.severity in (Severity.OK, Severity.UNKNOWN) and finding.key != "model":
            continue
        lines += _wrapped(_INDENT, finding.effect)
        # commands stay on one line, to be copied
        if finding.command:
            lines.append(f"{_INDENT}{'change' if finding.undo else 'next'}: {finding.command}")
        if finding.undo:
            lines.append(f"{_INDENT}undo:   {finding.undo}")
    if report.prediction is not None:
        lines += ["", *_prediction(report.prediction)]
    return "\n".join(lines)


def summary(findings: Sequence[Finding]) -> str:
    """How many findings of each severity there are."""
    counts = {severity: sum(f.severity is severity for f in findings) for severity in Severity}
    return ", ".join(f"{n} {severity.value}" for severity, n in counts.items() if n)


def _prediction(p: Prediction) -> list[str]:
    def size(nbytes: int | None) -> str:
        return "unknown" if nbytes is None else f"{nbytes / MIB:.0f} MiB"

    rows = [
        ("memory", f"{p.memory_bytes / GIB:.2f} GiB for a model of {p.file_bytes / GIB:.2f} GiB"),
        ("per token", f"{size(p.always_used_bytes)} always used, {size(p.routed_bytes_per_token)} of experts"),
    ]
    if p.read_bytes_per_token is not None:
        rows.append(
            ("read per token", f"{_range(p.read_bytes_per_token[0] / MIB, p.read_bytes_per_token[1] / MIB)} MiB")
        )
    if p.compute_ms is not None:
        rows.append(("compute", f"{_range(*p.compute_ms)} ms per token"))
    if p.tokens_per_s is None:
        rows.append(("decode", "cannot be predicted: a size, the disk's or the memory's speed is unknown"))
    else:
        rows.append(("decode", f"{_range(*p.tokens_per_s)} t/s expected, the upper figure limited by {p.limit}"))
    lines = [f"{name:<15} {text}" for name, text in rows]
    for assumption in p.assumptions:
        lines += _wrapped(f"{'assumed':<15} ", assumption)
    return lines


def _range(least: float, most: float) -> str:
    return f"{least:.3g}" if f"{least:.3g}" == f"{most:.3g}" else f"{least:.3g} to {most:.3g}"


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )
