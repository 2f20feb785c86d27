"""The one shape in which the doctor says something."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from toolkit.bench.machine import Condition


class Severity(str, Enum):
    """How much a finding matters, worst first."""

    PROBLEM = "problem"  # no result can be believed, or none can be made
    WARNING = "warning"  # results change
    NOTE = "note"  # results may change, or have to be read with it in mind
    OK = "ok"
    UNKNOWN = "n/a"  # this system does not tell


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing about the machine, what it does to a result, and what changes it."""

    key: str
    severity: Severity
    what: str  # what was found
    effect: str  # what it does to a result
    value: Any = None  # the same for tools
    command: str | None = None  # for a shell; changes it, or is the next thing to do
    undo: str | None = None  # puts back what the command changed; only such commands are ever run for the user

    @property
    def fixable(self) -> bool:
        return self.undo is not None and self.severity in (Severity.PROBLEM, Severity.WARNING)


def unknown(key: str, effect: str, why: str | None = None) -> Finding:
    """A finding about something that this system does not tell."""
    what = f"n/a ({why})" if why else "n/a: this system does not tell"
    return Finding(key=key, severity=Severity.UNKNOWN, what=what, effect=effect)


def about(said: Iterable[Condition], topic: str) -> str:
    """All that was said about a topic; empty when nothing changes results there."""
    return " ".join(condition.text for condition in said if condition.topic == topic)


def write_setting(value: object, file: object) -> str:
    """A command that writes a kernel setting, as root."""
    return shlex.join(["sh", "-c", f"echo {value} > {shlex.quote(str(file))}"])
