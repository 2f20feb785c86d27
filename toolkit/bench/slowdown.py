"""A slowdown of known size, put on an arm to see whether a comparison finds it. Imports nothing of the toolkit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


def end_span(start_ns: int, percent: float, clock: Callable[[], int] = time.perf_counter_ns) -> tuple[int, int]:
    """End a span that began at `start_ns` later by `percent` of its time; returns that time and the wait, nanoseconds.

    The wait keeps a core busy, because a sleep can end later by more than a short token takes.
    """
    end = now = clock()
    until = end + math.ceil((end - start_ns) * percent / 100)
    while now < until:
        now = clock()
    return end - start_ns, now - end
