"""Rules about processor, kernel, surroundings and neighbours."""

from __future__ import annotations

import shlex

from toolkit.bench.machine import Condition
from toolkit.doctor.finding import Finding, Severity, about, unknown, write_setting
from toolkit.doctor.observe import Measured, Settings

# Reads by others from here on take a visible part of any disk.
HEAVY_MIB_S = 10.0


def governor(seen: Settings, said: list[Condition]) -> Finding:
    now, text = seen.facts.governor, about(said, "governor")
    if now is None:
        return unknown("governor", "It decides how fast the clock follows the load.")
    pattern = shlex.quote(str(seen.root / "sys/devices/system/cpu")) + "/cpu[0-9]*/cpufreq/scaling_governor"

    def switch(governor: str) -> str:
        return shlex.join(["sh", "-c", f'for f in {pattern}; do echo {governor} > "$f"; done'])

    alike = "," not in now  # several at once could not be put back by one word
    return Finding(
        key="governor",
        severity=Severity.WARNING if text else Severity.OK,
        what=now,
        effect=text or "The clock does not wait for load.",
        value=now,
        command=switch("performance") if text else None,
        undo=switch(now) if text and alike else None,
    )


def power(seen: Settings) -> Finding:
    power = seen.power
    if power.profile is None and power.on_battery is None:
        return unknown("power-mode", "It limits the clock under load, and with it compute.")
    supply = None if power.on_battery is None else "on battery" if power.on_battery else "plugged in"
    slow = power.profile not in (None, "performance")
    choice = slow and "performance" in power.profiles
    file = seen.root / "sys/firmware/acpi/platform_profile"
    effects = [
        *(["On battery the clock is limited and changes with the charge: plug it in."] if power.on_battery else []),
        *([f"The firmware's profile is {power.profile}: it limits the clock under load."] if slow else []),
    ]
    return Finding(
        key="power-mode",
        severity=Severity.WARNING if effects else Severity.OK,
        what=", ".join(filter(None, [power.profile, supply])),
        effect=" ".join(effects) or "Nothing limits the clock.",
        value={"profile": power.profile, "on_battery": power.on_battery},
        command=write_setting("performance", file) if choice else None,
        undo=write_setting(power.profile, file) if choice else None,
    )


def cores(seen: Settings, said: list[Condition]) -> Finding:
    facts, text = seen.facts, about(said, "cores")
    return Finding(
        key="cores",
        severity=Severity.NOTE if text else Severity.OK,
        what=f"{facts.usable_cores} of {facts.logical_cores}, {facts.cpu}",
        effect=text or "As many threads as cores by default; state another number with -t.",
        value=facts.usable_cores,
    )


def numa(seen: Settings, said: list[Condition], model: str | None) -> Finding:
    facts, text = seen.facts, about(said, "numa")
    balancing = bool(text) and bool(seen.numa_balancing)
    file = seen.root / "proc/sys/kernel/numa_balancing"
    if balancing:
        text += " Automatic balancing moves pages while a run is measured."
    interleaved = shlex.join(["numactl", "--interleave=all", "moe-madv", "bench", "run", model or "MODEL"])
    command = write_setting(0, file) if balancing else interleaved if text else None
    return Finding(
        key="numa",
        severity=Severity.WARNING if text else Severity.OK,
        what=f"{facts.numa_nodes} node{'s' if facts.numa_nodes > 1 else ''}, policy {facts.numa_policy or 'unknown'}",
        effect=text or "All memory is equally near.",
        value={"nodes": facts.numa_nodes, "policy": facts.numa_policy, "balancing": seen.numa_balancing},
        command=command,
        undo=write_setting(seen.numa_balancing, file) if balancing else None,
    )


_FEATURES = {
    "populate-read": "MADV_POPULATE_READ reads a range and maps it in one call.",
    "io-uring": "io_uring keeps many reads under way from one thread.",
    "cachestat": "cachestat(2) counts resident pages without a mapping; without it, mincore(2) does, more slowly.",
    "psi": "Pressure figures say how long a run waited for the disk; without them that column is empty.",
    "join-wait": "Times in the run queue tell waiting for reads from waiting for a core; without them it is n/a.",
}


def kernel(seen: Settings) -> list[Finding]:
    found = []
    for name, feature in seen.kernel.items():
        command = undo = None
        if feature.works is None:
            found.append(unknown(name, _FEATURES[name], feature.why))
            continue
        switch = seen.root / "proc/sys/kernel/io_uring_disabled"
        if name == "io-uring" and not feature.works and (seen.io_uring_disabled or 0) > 0:
            command, undo = write_setting(0, switch), write_setting(seen.io_uring_disabled, switch)
        found.append(
            Finding(
                key=name,
                severity=Severity.OK if feature.works else Severity.NOTE,
                what="works" if feature.works else f"does not work: {feature.why}",
                effect=_FEATURES[name],
                value=feature.works,
                command=command,
                undo=undo,
            )
        )
    return found


def virtualization(seen: Settings, said: list[Condition]) -> Finding:
    kinds, text = seen.facts.virtualization, about(said, "virtualization")
    wsl = any(kind.startswith("wsl") for kind in kinds)
    return Finding(
        key="virtualization",
        severity=Severity.OK if not text else Severity.WARNING if wsl else Severity.NOTE,
        what=", ".join(kinds) or "none seen",
        effect=text or "Disk and cores are this system's own.",
        value=list(kinds),
    )


def others(measured: Measured) -> list[Finding]:
    activity = measured.activity
    if activity is None:
        return []
    readers = [p for p in activity.readers if (p.read_mib_s or 0) >= HEAVY_MIB_S]
    rate = activity.device_mib_s
    # A device counter decides where there is one: readers of other disks take nothing from this one.
    heavy = rate >= HEAVY_MIB_S if rate is not None else bool(readers)
    who = ", ".join(f"{p.name} ({p.pid}) {p.read_mib_s:.0f} MiB/s" for p in readers) or "nobody visible from here"
    amount = "an unknown amount" if rate is None else f"{rate:.0f} MiB/s"
    first = activity.inference[0].pid if activity.inference else None
    return [
        Finding(
            key="other-readers",
            severity=Severity.WARNING if heavy else Severity.OK,
            what=f"{amount} by others: {who}" if heavy else f"{amount} by others",
            effect="They take the disk's time and the page cache: a run gets what is left, and another one other parts."
            if heavy
            else "The disk is free.",
            value={"device_mib_s": rate, "processes": [{"pid": p.pid, "name": p.name} for p in readers]},
            command=f"tail --pid={readers[0].pid} -f /dev/null" if heavy and readers else None,
        ),
        Finding(
            key="other-inference",
            severity=Severity.OK if first is None else Severity.WARNING,
            what=", ".join(f"{p.name} ({p.pid})" for p in activity.inference) or "none seen",
            effect="Memory, cores and disk are the run's alone."
            if first is None
            else "A second inference process takes memory, cores and disk; a model that it maps cannot be evicted.",
            value=[{"pid": p.pid, "name": p.name} for p in activity.inference],
            command=None if first is None else f"kill {' '.join(str(p.pid) for p in activity.inference)}",
        ),
    ]
