"""Rules about memory: how much there is, who limits it, and how it is given out."""

from __future__ import annotations

import shlex

from toolkit.bench.machine import Condition
from toolkit.console import GIB, MIB
from toolkit.doctor.finding import Finding, Severity, about, unknown, write_setting
from toolkit.doctor.observe import Settings
from toolkit.doctor.predict import Prediction


def page_size(seen: Settings) -> Finding:
    size = seen.facts.page_size
    large = size > 16384
    return Finding(
        key="page-size",
        severity=Severity.NOTE if large else Severity.OK,
        what=f"{size // 1024} KiB",
        effect="The ends of an expert share pages with its neighbours, which are read and kept with it."
        if large
        else "Little is lost at the ends of an expert.",
        value=size,
    )


def memory(seen: Settings) -> Finding:
    total, available = seen.facts.memory_bytes, seen.available
    limited = "limit" in available.source
    return Finding(
        key="memory",
        severity=Severity.NOTE if limited else Severity.OK,
        what=f"{available.bytes / GIB:.2f} of {total / GIB:.2f} GiB available ({available.source})",
        effect="A group above this process limits its memory and its page cache: runs have less than the machine."
        if limited
        else "What processes leave free holds the part of the model that need not be read again.",
        value={"total": total, "available": available.bytes, "source": available.source},
    )


def budget(seen: Settings) -> Finding:
    method, refused = seen.budget, seen.budget_refused
    good = method.name != "none" and refused is None
    return Finding(
        key="memory-budget",
        severity=Severity.OK if good else Severity.WARNING,
        what=f"{method.name}, enforced" if good else refused or f"not possible: {method.why}",
        effect="A run can be given less memory than there is, and the kernel holds it to that."
        if good
        else "Runs use all the memory there is: a model that fits is never read, and other processes decide the rest.",
        value=method.name if good else None,
    )


def swap(seen: Settings, said: list[Condition]) -> Finding:
    text, swaps = about(said, "swap"), seen.swaps
    # Without room for what is swapped out, switching it off ends processes.
    room = sum(s.used_bytes for s in swaps) * 2 < seen.available.bytes
    off = "; ".join(shlex.join(["swapoff", s.file]) for s in swaps)
    back = "; ".join(
        shlex.join(["swapon", *(["-p", str(s.priority)] if s.priority >= 0 else []), s.file]) for s in swaps
    )
    budgets = seen.budget.name != "none" and seen.budget_refused is None
    return Finding(
        key="swap",
        severity=Severity.OK if not text else Severity.NOTE if budgets else Severity.WARNING,
        what=f"{seen.facts.swap_bytes / GIB:.1f} GiB" if text else "none",
        effect=f"{text}{' Runs with a budget get none of it.' if budgets else ''}"
        if text
        else "Memory that a run loses was dropped, not moved: reading it again counts as reading.",
        value=seen.facts.swap_bytes,
        command=off if text and room and swaps else None,
        undo=back if text and room and swaps else None,
    )


def huge_pages(seen: Settings) -> Finding:
    now = seen.facts.transparent_hugepages
    file = seen.root / "sys/kernel/mm/transparent_hugepage/enabled"
    if now is None:
        return unknown("huge-pages", "They change how fast memory of the process itself fills a budget.")
    always = now == "always"
    return Finding(
        key="huge-pages",
        severity=Severity.NOTE if always else Severity.OK,
        what=now,
        effect="Buffers take memory in steps of 2 MiB, used or not, and a budget is full sooner; the mapped model does "
        "not change."
        if always
        else "The mapped model is read and dropped page by page, buffers take what they use.",
        value=now,
        command=write_setting("madvise", file) if always else None,
        undo=write_setting(now, file) if always else None,
    )


def lock_limit(seen: Settings, said: list[Condition], prediction: Prediction | None) -> Finding:
    limit, text = seen.facts.memlock_bytes, about(said, "lock-limit")
    wanted = prediction.always_used_bytes if prediction else None
    short = limit is not None and wanted is not None and wanted > limit
    if short and wanted is not None:
        text += f" The always used weights of this model are {wanted / MIB:.0f} MiB."
    return Finding(
        key="lock-limit",
        severity=Severity.WARNING if short else Severity.NOTE if text else Severity.OK,
        what="none" if limit is None else f"{limit / MIB:.2f} MiB",
        effect=text or "Any part of the model may be locked in memory.",
        value=limit,
        # of the shell it is typed in, so nothing to undo and nothing that could be done from here
        command="sudo prlimit --memlock=unlimited --pid $$" if text else None,
    )
