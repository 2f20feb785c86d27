"""The machine while a worker is measured: read about twice a second beside it, and summed up per test."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from toolkit.bench.sensors import Reading, Sensors, give_way
from toolkit.console import MIB

PERIOD_S = 0.5
# Of a stored series: as many as a chart can show. Longer tests are averaged, so that a row grows by 10 KB at most.
MOST_VALUES = 120

# What is counted, as what: (counter, value of one unit per second).
_RATES = {
    "disk_util_percent": ("disk_busy_ms", 0.1),
    "disk_read_mib_s": ("disk_read_bytes", 1 / MIB),
    "disk_write_mib_s": ("disk_written_bytes", 1 / MIB),
    "cpu_power_w": ("cpu_energy_uj", 1e-6),
}
# What is read as it is.
_GAUGES = (
    "cpu_mhz",
    "available_bytes",
    "swap_used_bytes",
    "temperature_c",
    "disk_temperature_c",
    "gpu_util_percent",
    "gpu_memory_bytes",
    "gpu_power_w",
    "gpu_temperature_c",
)
SERIES = (*_RATES, *_GAUGES)


class Watch:
    """Reads the sensors in a thread of its own while the context is open; `mark` tells when a test ended."""

    def __init__(self, sensors: Sensors, *, period_s: float = PERIOD_S) -> None:
        self._sensors, self._period_s = sensors, period_s
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ends: dict[str, float] = {}
        self._regular = False  # whether the last reading is one of the thread's
        self.readings: list[Reading] = []

    def __enter__(self) -> Watch:
        self._take(regular=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def mark(self, test: str) -> None:
        """A test has just ended."""
        with self._lock:
            self._take(regular=False)
            self._ends[test] = self.readings[-1].time_s

    def observed(self, test: str, seconds: float, *, series: bool = False) -> dict[str, Any] | None:
        """The summary of a test that took so long; None when it did not come to its end."""
        end_s = self._ends.get(test)
        return None if end_s is None else summarize(self.readings, end_s - seconds, end_s, series=series)

    def _run(self) -> None:
        give_way(threading.get_native_id())
        while not self._stop.wait(max(0.01, self._due_s())):
            with self._lock:
                if self._due_s() <= 0:  # no mark has come in between
                    self._take(regular=True)

    def _due_s(self) -> float:
        return self.readings[-1].time_s + self._period_s - time.monotonic()

    def _take(self, *, regular: bool) -> None:
        reading = self._sensors.read()
        # Too little is counted between two close readings to make a rate of it: the mark replaces the other.
        if self._regular and reading.time_s - self.readings[-1].time_s < self._period_s / 2:
            self.readings.pop()
        self.readings.append(reading)
        self._regular = regular


def summarize(readings: Sequence[Reading], start_s: float, end_s: float, *, series: bool = False) -> dict[str, Any]:
    """Least, mean and most of every series in a stretch of time, None where it was not read.

    A reading stands for the time since the one before it and belongs to the stretch that holds the middle of it; of a
    stretch shorter than all of them, the last one before its end is taken. With `series` the values too, in equal
    steps of `every_s` seconds.
    """
    spans = [
        i
        for i in range(1, len(readings))
        if start_s < (readings[i - 1].time_s + readings[i].time_s) / 2 <= end_s and readings[i].time_s <= end_s
    ]
    spans = spans or [i for i in range(1, len(readings)) if readings[i].time_s <= end_s][-1:]
    found: dict[str, Any] = {"readings": len(spans)}
    per_value = -(-len(spans) // MOST_VALUES)
    if series and spans:
        found["every_s"] = _short(per_value * (readings[spans[-1]].time_s - readings[spans[0] - 1].time_s) / len(spans))
    steps = [spans[i : i + per_value] for i in range(0, len(spans), per_value or 1)]
    for name in SERIES:
        values = [_mean(readings, [i], name) for i in spans]
        known = [value for value in values if value is not None]
        mean = _mean(readings, spans, name)
        found[name] = None
        if mean is not None and known:
            found[name] = {"min": _short(min(known)), "mean": _short(mean), "max": _short(max(known))}
            if series:
                averages = (_mean(readings, step, name) for step in steps)
                found[name]["values"] = [None if value is None else _short(value) for value in averages]
    swap = [readings[i].values["swap_used_bytes"] for i in spans if "swap_used_bytes" in readings[i].values]
    before = readings[spans[0] - 1].values.get("swap_used_bytes") if spans else None
    found["swap_delta_bytes"] = None if before is None or not swap else int(max(swap) - before)
    return found


def _mean(readings: Sequence[Reading], spans: Sequence[int], name: str) -> float | None:
    """Of a series over the spans that end at these readings; a rate is weighted by their lengths."""
    if name not in _RATES:
        values = [readings[i].values[name] for i in spans if name in readings[i].values]
        return sum(values) / len(values) if values else None
    counter, unit = _RATES[name]
    pairs = [(readings[i - 1], readings[i]) for i in spans]
    pairs = [(a, b) for a, b in pairs if counter in a.values and counter in b.values]
    seconds = sum(b.time_s - a.time_s for a, b in pairs)
    if seconds <= 0:
        return None
    rate = unit * sum(b.values[counter] - a.values[counter] for a, b in pairs) / seconds
    return min(rate, 100.0) if name.endswith("percent") else rate


def _short(value: float) -> float | int:
    """Four significant digits, as short in JSON as can be."""
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded.is_integer() else rounded
