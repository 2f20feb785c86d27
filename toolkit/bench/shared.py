"""Arms that are modes of one patched build, measured in one process that switches between them.

What differs from process to process (where memory lies, for one) then differs no longer between arms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from toolkit.bench.launch import Outcome, Process
from toolkit.bench.limits import Budget
from toolkit.bench.plan import MODES, Arm, Conditions
from toolkit.bench.select import MODE_VARIABLE
from toolkit.errors import BenchError


def require_shareable(arms: Sequence[str], others: Sequence[str], conditions: Conditions) -> None:
    """BenchError unless all arms are modes of the patched build and need neither a cold start nor a budget.

    `others` are the names of arms with a wheel, an environment or servers of their own.
    """
    if alone := [*(name for name in arms if name not in MODES), *others]:
        raise BenchError(
            f"{', '.join(alone)} cannot share a process: only modes of the patched build switch inside one",
            where="--one-process",
            hint=f"name arms among {', '.join(MODES)}, the first being the baseline: --arms off,hint",
        )
    if conditions.cold:
        raise BenchError(
            "a cold run needs a fresh process: a mapped model cannot be evicted",
            where="--one-process",
            hint="add --warm",
        )
    if conditions.budget_bytes is not None:
        raise BenchError(
            "one process has one memory for all arms: under a budget each would start with what the last one left",
            where="--one-process",
            hint="leave out --budget and --oversubscribe, or --one-process",
        )


class SharedProcess:
    """Measures arm after arm in one process; after a failure the next one gets a new process.

    The process starts in the mode `off`, so the model is loaded in the same way whatever the arms are.
    """

    def __init__(self, arms: Sequence[Arm], job: dict[str, Any], budget: Budget) -> None:
        start = replace(arms[0], mode="off", env={**arms[0].env, MODE_VARIABLE: "off"})
        self._make = lambda: Process(start, {**job, "steps": True}, budget)
        self._process: Process | None = None

    def __enter__(self) -> SharedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.__exit__(kind, error, trace)
            self._process = None

    def measure(self, arm: Arm, on_test: Callable[[str], None]) -> Outcome:
        """One warm-up and one measured pass of the arm; BenchError when another mode than its own was in force."""
        if self._process is None:
            self._process = self._make().__enter__()
        self._process.ask({"mode": arm.mode, "injected_slowdown_percent": arm.injected_slowdown_percent})
        outcome = self._process.outcome(on_test)
        if outcome.reason is not None:
            self.__exit__(None, None, None)
        elif outcome.loaded is None or outcome.loaded["mode"] != arm.mode:
            raise BenchError(f"the shared process was not switched to the mode {arm.mode}", where=arm.python)
        return outcome
