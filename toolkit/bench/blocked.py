"""How long a thread was blocked: on no core and not queued for one. Imports nothing of the toolkit.

Of the thread that runs the graph this is what reads cost it: its own page faults, waiting for a reader thread, and
sleeping until another compute thread has done either. Reader threads, whose waiting costs nothing, are not in it.
Linux's delay accounting (kernel.task_delayacct) counts block I/O alone, but on 6.18, beside scheduler traces, it had up
to 25 times too much of it where threads share a core, and at times a thread's first wait was as long as the uptime.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

PROC = Path("/proc")


class Moment(NamedTuple):
    """Clocks of one thread, nanoseconds."""

    wall: int
    running: int
    queued: int | None  # ready and without a core; None where the system does not tell


def now(proc: Path = PROC) -> Moment:
    """The clocks of the calling thread."""
    return Moment(time.perf_counter_ns(), time.thread_time_ns(), _queued(proc / "thread-self/schedstat"))


def _queued(schedstat: Path) -> int | None:
    """The second of the three numbers: running, queued, and how often it got a core."""
    try:
        _, queued, _ = schedstat.read_text(encoding="utf-8").split()
        return int(queued)
    except (OSError, ValueError):
        return None


def blocked_ns(before: Moment, after: Moment) -> int | None:
    """Time between two moments in which the thread was blocked; None where the system does not tell."""
    if before.queued is None or after.queued is None:
        return None
    at_work = after.running - before.running + after.queued - before.queued
    return max(0, after.wall - before.wall - at_work)


def io_wait(spans: Sequence[tuple[Moment, Moment]], *, n_gpu_layers: int, remote: bool) -> dict[str, Any]:
    """`io_wait_s`: seconds that the graph's thread was blocked in all spans, or None and `io_wait_why`."""
    blocked = [blocked_ns(before, after) for before, after in spans]
    why = None
    if remote:
        why = "its layers are on other machines"
    elif n_gpu_layers:
        why = "the thread waits for the GPU too"
    elif None in blocked:
        why = "this system does not tell how long a thread was queued (no /proc/thread-self/schedstat)"
    return {"io_wait_s": None if why else sum(ns or 0 for ns in blocked) / 1e9, "io_wait_why": why}
