"""Changing settings: one by one, with consent, and only what can be put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolkit import process
from toolkit.console import note
from toolkit.doctor.finding import Finding
from toolkit.errors import CommandError


@dataclass(frozen=True, kw_only=True)
class Change:
    """One offered change and what became of it."""

    key: str
    command: str
    undo: str
    done: bool
    why: str | None  # why it was not done


def apply(findings: Sequence[Finding], consent: Callable[[Finding], bool]) -> list[Change]:
    """Run the command of every fixable finding that `consent` agrees to; a command that fails ends nothing."""
    changes = []
    for finding in findings:
        if not finding.fixable or finding.command is None or finding.undo is None:
            continue
        why = None
        if not consent(finding):
            why = "declined"
        else:
            try:
                process.run(["sh", "-c", finding.command], echo=True)
                note(f"undo: {finding.undo}")
            except CommandError as e:
                why = e.what
                note(f"not changed: {e.what}")
        changes.append(Change(key=finding.key, command=finding.command, undo=finding.undo, done=why is None, why=why))
    return changes
