"""Rules about the model, its file system and its disk."""

from __future__ import annotations

import shlex

from toolkit.bench.machine import Condition
from toolkit.bench.storage import Speed
from toolkit.console import GIB, MIB
from toolkit.doctor.finding import Finding, Severity, about, unknown, write_setting
from toolkit.doctor.observe import Measured, Settings
from toolkit.doctor.predict import Prediction

GOOD_READ_AHEAD_KB = 128  # the default of Linux; stock llama.cpp is fastest around it
# Below this share of the bytes, a figure says how fast something else is than the disk.
_FROM_DISK = 0.9
_POOR_CACHED_SHARE = 0.5


def model(seen: Settings, prediction: Prediction | None, model: str | None) -> list[Finding]:
    if prediction is None or model is None:
        return []
    run = ["moe-madv", "bench", "run", model]
    memory = f"{prediction.memory_bytes / GIB:.2f} GiB"
    what = f"{prediction.file_bytes / GIB:.2f} GiB in {memory}: {prediction.oversubscription:.2f}x oversubscribed"
    always = prediction.always_used_bytes
    if prediction.fits:
        severity, what = Severity.NOTE, f"{prediction.file_bytes / GIB:.2f} GiB fits in {memory}"
        effect = "All of it is in memory after the first use, so arms cannot differ at decode; give runs a budget."
        command = shlex.join([*run, "--oversubscribe", "2.5"])
    elif always is not None and always > prediction.memory_bytes:
        severity, command = Severity.PROBLEM, None
        effect = (
            f"Not even the always used weights ({always / GIB:.2f} GiB) stay in memory: each token reads them again, "
            "whatever the mode."
        )
    else:
        severity = Severity.OK
        effect = "Experts come from the disk while tokens wait: this is what the modes differ in."
        limited = prediction.memory_bytes < seen.available.bytes
        command = shlex.join([*run, *(["--budget", f"{prediction.memory_bytes // MIB}MiB"] if limited else [])])
    found = [Finding(key="model", severity=severity, what=what, effect=effect, command=command)]
    if seen.elsewhere:
        found.append(
            Finding(
                key="shards",
                severity=Severity.WARNING,
                what=f"parts of the model lie on {', '.join(seen.elsewhere)} too",
                effect="Each layer is as fast as the disk it lies on; the findings here are about the largest part's.",
                value=list(seen.elsewhere),
            )
        )
    return found


def filesystem(seen: Settings, said: list[Condition]) -> Finding:
    storage, text = seen.facts.storage, about(said, "filesystem")
    if storage.filesystem is None:
        return unknown("filesystem", "It decides how a file is cached and whether it can be evicted.")
    no_disk = "no disk is measured" in text
    return Finding(
        key="filesystem",
        severity=Severity.OK if not text else Severity.PROBLEM if no_disk else Severity.WARNING,
        what=f"{storage.filesystem} ({storage.mount_options})",
        effect=text or "A local file system: a file can be evicted, and reads go to the disk.",
        value=storage.filesystem,
    )


def disk(seen: Settings, said: list[Condition]) -> Finding:
    disk, text = seen.facts.storage, about(said, "disk")
    if disk.device is None:
        return unknown("disk", "Its kind decides whether many small reads are as good as few large ones.")
    kind = {True: "calls itself rotating", False: "solid state", None: "kind unknown"}[disk.rotational]
    parts = f" on {', '.join(disk.parts)}" if disk.parts else ""
    cached_loop = disk.loop_on is not None and disk.loop_direct_io is False and "may be cached" in text
    switch = f"losetup --direct-io={{}} {shlex.quote('/dev/' + disk.device)}"
    return Finding(
        key="disk",
        severity=Severity.WARNING if text else Severity.OK,
        what=f"{disk.device}{parts}, {disk.model or 'no model name'}, {kind}",
        effect=text or "Small reads at random cost about as much per byte as large ones.",
        value={"device": disk.device, "parts": list(disk.parts), "model": disk.model, "rotational": disk.rotational},
        command=switch.format("on") if cached_loop else None,
        undo=switch.format("off") if cached_loop else None,
    )


def read_ahead(seen: Settings, said: list[Condition]) -> Finding:
    now, file, text = seen.facts.storage.read_ahead_kb, seen.read_ahead_file, about(said, "read-ahead")
    if now is None:
        return unknown("read-ahead", "It decides how much one page fault reads.")
    if not text and now < GOOD_READ_AHEAD_KB:
        text = "Less than the default: stock llama.cpp faults more often, each time for less; hints are cut to it."
    wrong = bool(text) and file is not None
    return Finding(
        key="read-ahead",
        severity=Severity.WARNING if text else Severity.OK,
        what=f"{now} KiB",
        effect=text or "A page fault reads about one part of an expert, not its neighbours.",
        value=now,
        command=write_setting(GOOD_READ_AHEAD_KB, file) if wrong else None,
        undo=write_setting(now, file) if wrong else None,
    )


def disk_speed(seen: Settings, measured: Measured) -> Finding:
    speeds = measured.speeds
    effect = "Bytes per token over the random speed is the time that no mode can save."
    known = {name: speed.mib_s for name, speed in speeds.items() if speed.mib_s is not None}
    if not known:
        reasons = {speed.why for speed in speeds.values()} or {"not asked for"}
        return unknown("disk-speed", effect, "; ".join(sorted(filter(None, reasons))))
    severity, command = Severity.OK, None
    cached = [name for name, s in speeds.items() if s.from_disk is not None and s.from_disk < _FROM_DISK]
    through, past = known.get("sequential"), known.get("bypassing-8m")
    if cached:
        severity = Severity.WARNING
        effect = f"Part of what {', '.join(cached)} read did not come from the disk: the figures are too high."
    elif through and past and through < _POOR_CACHED_SHARE * past:
        severity = Severity.WARNING
        effect = "Reads through the page cache get less than half of what reads past it get; look for the reason."
        command = shlex.join(["moe-madv", "bench", "storage", str(seen.path)]) if seen.path.is_file() else None
    return Finding(
        key="disk-speed",
        severity=severity,
        what=", ".join(f"{name} {_speed(speed)}" for name, speed in speeds.items()),
        effect=effect,
        value={name: None if s.mib_s is None else round(s.mib_s, 1) for name, s in speeds.items()},
        command=command,
    )


def _speed(speed: Speed) -> str:
    return "n/a" if speed.mib_s is None else f"{speed.mib_s:.0f} MiB/s"
