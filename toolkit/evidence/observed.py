"""What the machine did while an arm was measured, seen from outside the worker: one summary per arm and test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.console import MIB
from toolkit.results import Row
from toolkit.stats import mean

if TYPE_CHECKING:
    from toolkit.evidence.findings import Summary


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Over the samples of one arm in one test; None where no sample tells."""

    # means over the runs
    disk_util_percent: float | None
    disk_read_mib_s: float | None  # by everybody
    gpu_util_percent: float | None  # of the busiest GPU
    gpu_power_w: float | None
    cpu_power_w: float | None
    cpu_mhz: float | None
    # the worst of all runs
    min_available_bytes: float | None
    swap_delta_bytes: float | None  # most that was moved to swap in one run
    max_temperature_c: float | None  # hottest sensor, the disk's apart
    max_disk_temperature_c: float | None
    max_gpu_temperature_c: float | None
    max_gpu_memory_bytes: float | None


def observed_in(rows: Sequence[Row]) -> Observed | None:
    """The summary of sample rows; None when none of them was watched."""
    seen = [row["observed"] for row in rows if row.get("observed")]
    if not seen:
        return None

    def known(name: str, part: str) -> list[float]:
        return [series[part] for one in seen if (series := one.get(name))]

    def average(name: str) -> float | None:
        values = known(name, "mean")
        return mean(values) if values else None

    def most(name: str) -> float | None:
        return max(known(name, "max"), default=None)

    return Observed(
        disk_util_percent=average("disk_util_percent"),
        disk_read_mib_s=average("disk_read_mib_s"),
        gpu_util_percent=average("gpu_util_percent"),
        gpu_power_w=average("gpu_power_w"),
        cpu_power_w=average("cpu_power_w"),
        cpu_mhz=average("cpu_mhz"),
        min_available_bytes=min(known("available_bytes", "min"), default=None),
        swap_delta_bytes=max((d for one in seen if (d := one.get("swap_delta_bytes")) is not None), default=None),
        max_temperature_c=most("temperature_c"),
        max_disk_temperature_c=most("disk_temperature_c"),
        max_gpu_temperature_c=most("gpu_temperature_c"),
        max_gpu_memory_bytes=most("gpu_memory_bytes"),
    )


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.0f}"


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _signed_mib(nbytes: float) -> str:
    return f"{nbytes / MIB:+.0f}" if nbytes else "0"


_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("disk %", "disk_util_percent", _whole),
    ("disk MiB/s", "disk_read_mib_s", _whole),
    ("GPU %", "gpu_util_percent", _whole),
    ("GPU MiB", "max_gpu_memory_bytes", _mib),
    ("least free MiB", "min_available_bytes", _mib),
    ("to swap MiB", "swap_delta_bytes", _signed_mib),
    ("hottest °C", "max_temperature_c", _whole),
    ("disk °C", "max_disk_temperature_c", _whole),
    ("GPU °C", "max_gpu_temperature_c", _whole),
    ("CPU W", "cpu_power_w", _whole),
    ("GPU W", "gpu_power_w", _whole),
    ("CPU MHz", "cpu_mhz", _whole),
)


def table(summaries: Sequence[Summary]) -> tuple[list[str], list[list[str]]]:
    """Headings and a row per test and arm, as text; no rows when nothing was watched, no column that nobody knows."""
    watched: list[tuple[Summary, dict[str, Any]]] = [(s, vars(s.observed)) for s in summaries if s.observed]
    columns = [c for c in _COLUMNS if any(values[c[1]] is not None for _, values in watched)]
    rows = [
        [s.test, s.arm, *("-" if values[name] is None else text(values[name]) for _, name, text in columns)]
        for s, values in watched
    ]
    return ["test", "arm", *(heading for heading, _, _ in columns)], rows
