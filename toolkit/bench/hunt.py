"""`bench storage`: read a file in ways that tell the suspects of a slow disk apart, within a time."""

from __future__ import annotations

import dataclasses
import json
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toolkit import __version__
from toolkit.bench import counters, disk, header, machine, storage
from toolkit.bench.disk import MEMORY_FILESYSTEMS, Storage, storage_of
from toolkit.bench.suspects import Judgement, Stretch, judge
from toolkit.console import GIB, MIB, note
from toolkit.errors import BenchError
from toolkit.files import write_text
from toolkit.model.text import shown

FORMAT = 1
_BLOCK = 8 * MIB
_LEAST_BYTES = 64 * MIB
_PAIRS = 6
_PAIR_BYTES = 64 * MIB  # one side of a pair, at most
_PLACES = 16  # of a file that is too small for places of 1 GiB
# Shares of the time: cached or not, the other device; both passes over the file get the rest.
_CACHED_SHARE, _DEVICES_SHARE = 0.2, 0.2


@dataclass(frozen=True, kw_only=True)
class Hunt:
    """What was measured, complete or not."""

    file: Path
    other: Path | None
    file_bytes: int
    portion_bytes: int  # from the start of the file
    minutes: float
    facts: machine.MachineFacts
    other_storage: Storage | None
    direct: bool  # whether reads can bypass the page cache here
    no_direct: str | None
    no_other: str | None  # why two devices are not compared
    state: Literal["running", "complete", "interrupted", "failed"]
    failure: str | None = None  # of a read
    stretches: tuple[Stretch, ...]

    @property
    def judgements(self) -> list[Judgement]:
        return judge(self.stretches, no_other=self.no_other)


@dataclass(frozen=True, kw_only=True)
class _Planned:
    part: Literal["cached-or-not", "devices", "trace"]
    block: int
    file: int
    direct: bool
    offset: int
    nbytes: int
    until_s: float  # no reading after this time since the beginning


def prepare(file: Path, other: Path | None, *, minutes: float, portion: int | None = None) -> Hunt:
    """Look at the files without reading them; BenchError when they can tell nothing about a disk."""
    size = _usable_size(file)
    facts = machine.facts(file)
    if facts.storage.filesystem in MEMORY_FILESYSTEMS:
        raise BenchError(
            f"the file is on {facts.storage.filesystem}: there is no disk to look at",
            where=shown(file),
            hint="name a file on the disk in question",
        )
    other_storage, no_other = None, "no file on another device was given: add --other FILE"
    if other is not None:
        _usable_size(other)
        other_storage = storage_of(other)
        same = other.stat().st_dev == file.stat().st_dev or (
            other_storage.device is not None and other_storage.device == facts.storage.device
        )
        no_other = f"both files are on the same device ({facts.storage.device or 'unnamed'})" if same else ""
    no_direct = None
    try:
        with storage.opened(file, direct=True) as fd:
            storage.read_at(fd, [0], _BLOCK)
    except BenchError as e:
        no_direct = e.what
    except OSError as e:
        no_direct = f"a direct read failed: {e.strerror}"
    return Hunt(
        file=file,
        other=other,
        file_bytes=size,
        portion_bytes=max(min(portion or size, size), _LEAST_BYTES),
        minutes=minutes,
        facts=facts,
        other_storage=other_storage,
        direct=no_direct is None,
        no_direct=no_direct,
        no_other=no_other or None,
        state="running",
        stretches=(),
    )


def run(hunt: Hunt, out: Path | None) -> Hunt:
    """Measure and return what was found, also when interrupted or refused a read; `out` is rewritten as it comes.

    A file that cannot be written is a failure at the start and a remark later: nothing measured is lost.
    """
    if out is not None:
        write_text(out, to_json(hunt))
    start, unsaved = time.perf_counter(), False
    state: Literal["complete", "interrupted", "failed"] = "complete"
    failure = None
    try:
        for planned in _plan(hunt):
            if time.perf_counter() - start >= planned.until_s:
                continue
            stretch = _measure(hunt, planned, start)
            hunt = dataclasses.replace(hunt, stretches=(*hunt.stretches, stretch))
            unsaved = not _saved(hunt, out, unsaved)
            note(_line(hunt, stretch))
    except KeyboardInterrupt:
        state = "interrupted"
    except BenchError as e:
        state, failure = "failed", e.what
    hunt = dataclasses.replace(hunt, state=state, failure=failure)
    _saved(hunt, out, unsaved)
    return hunt


def to_json(hunt: Hunt) -> str:
    """Sizes in bytes, times in seconds; names of files without their folders."""
    data: dict[str, Any] = {
        "kind": "storage",
        "format": FORMAT,
        "created": header.now(),
        "toolkit_version": __version__,
        "state": hunt.state,
        "failure": hunt.failure,
        "file": shown(hunt.file.name),
        "other": None if hunt.other is None else shown(hunt.other.name),
        "file_bytes": hunt.file_bytes,
        "portion_bytes": hunt.portion_bytes,
        "minutes": hunt.minutes,
        "direct": hunt.direct,
        "no_direct": hunt.no_direct,
        "machine": dataclasses.asdict(hunt.facts),
        "other_storage": None if hunt.other_storage is None else dataclasses.asdict(hunt.other_storage),
        "suspects": [{**dataclasses.asdict(j), "verdict": j.verdict.value} for j in hunt.judgements],
        "stretches": [{**dataclasses.asdict(s), "mib_s": round(s.mib_s, 2)} for s in hunt.stretches],
    }
    return json.dumps(data, indent=1) + "\n"


def _usable_size(file: Path) -> int:
    try:
        found = file.stat()
    except OSError as e:
        raise BenchError(f"cannot look at the file: {e.strerror}", where=shown(file)) from e
    if not stat.S_ISREG(found.st_mode):
        raise BenchError("not a regular file", where=shown(file), hint="name a large file on the disk in question")
    if found.st_size < _LEAST_BYTES:
        raise BenchError(
            f"{found.st_size} bytes are too few to tell anything about a disk",
            where=shown(file),
            hint=f"name a file of {_LEAST_BYTES // MIB} MiB or more, a model for example",
        )
    return found.st_size


# --- What is read


def _plan(hunt: Hunt) -> Iterator[_Planned]:
    """All stretches in order; what does not fit in the time is skipped when its turn comes."""
    total = 60 * hunt.minutes
    end = 0.0
    if hunt.direct:
        end += _CACHED_SHARE * total
        length = _whole_blocks(min(_PAIR_BYTES, hunt.portion_bytes // (2 * _PAIRS)))
        for i in range(_PAIRS):
            # Two neighbouring places, so that the second reading is not of what the first just fetched.
            first, second = 2 * i * length, (2 * i + 1) * length
            for direct, offset in _alternating(i, (True, first), (False, second)):
                yield _Planned(
                    part="cached-or-not", block=i, file=0, direct=direct, offset=offset, nbytes=length, until_s=end
                )
    if hunt.other is not None and hunt.no_other is None:
        end += _DEVICES_SHARE * total
        common = min(hunt.portion_bytes, hunt.other.stat().st_size)
        length = _whole_blocks(min(_PAIR_BYTES, common // _PAIRS))
        for i in range(_PAIRS):
            for file in _alternating(i, 0, 1):
                yield _Planned(
                    part="devices",
                    block=i,
                    file=file,
                    direct=hunt.direct,
                    offset=i * length,
                    nbytes=length,
                    until_s=end,
                )
    place = GIB if hunt.portion_bytes >= 4 * GIB else _whole_blocks(hunt.portion_bytes // _PLACES)
    for number, until in ((1, (end + total) / 2), (2, total)):
        for offset in range(0, hunt.portion_bytes, place):
            length = min(place, hunt.portion_bytes - offset)
            if length < min(place, _BLOCK):
                continue  # less than one read says nothing
            yield _Planned(
                part="trace", block=number, file=0, direct=hunt.direct, offset=offset, nbytes=length, until_s=until
            )


def _whole_blocks(nbytes: int) -> int:
    """A length in MiB, in whole read blocks where there is room for one."""
    unit = _BLOCK if nbytes >= _BLOCK else MIB
    return nbytes // unit * unit


def _alternating(i: int, a: Any, b: Any) -> tuple[Any, Any]:
    """A B, B A, A B, …: what changes over time falls on both alike."""
    return (b, a) if i % 2 else (a, b)


# --- One stretch


def _measure(hunt: Hunt, planned: _Planned, start: float) -> Stretch:
    other = planned.file == 1
    path = hunt.other if other and hunt.other is not None else hunt.file
    place = hunt.other_storage if other and hunt.other_storage is not None else hunt.facts.storage
    block = min(_BLOCK, planned.nbytes)
    try:
        with storage.opened(path, direct=planned.direct) as fd:
            if not planned.direct:
                storage.drop(fd, planned.offset, planned.nbytes)
            mine, everybodys = counters.snapshot().read_bytes, _device_bytes(place)
            began = time.perf_counter() - start
            offsets = range(planned.offset, planned.offset + planned.nbytes, block)
            found = storage.read_at(fd, offsets, block, seconds=max(0.0, planned.until_s - began))
            now, after = counters.snapshot(), _device_bytes(place)
            if not planned.direct:
                storage.drop(fd, planned.offset, planned.nbytes)
    except OSError as e:
        raise BenchError(f"reading failed: {e.strerror}", where=shown(path)) from e
    if not found.nbytes:
        raise BenchError("the file became shorter while it was read", where=shown(path))
    read = None if mine is None or now.read_bytes is None else now.read_bytes - mine
    others = None
    if everybodys is not None and after is not None:
        others = max(0, after - everybodys - (found.nbytes if read is None else read))
    return Stretch(
        part=planned.part,
        block=planned.block,
        file=planned.file,
        direct=planned.direct,
        start_s=began,
        offset=planned.offset,
        nbytes=found.nbytes,
        seconds=found.seconds,
        slowest_read_s=found.slowest_s,
        read_block=block,
        from_disk=None if read is None else min(1.0, read / found.nbytes),
        others_bytes=others,
        disk_c=disk.temperature_c(place),
        machine_c=now.temperature_c,
    )


def _device_bytes(place: Storage) -> int | None:
    return None if place.device is None else disk.bytes_read(place.device)


def _saved(hunt: Hunt, out: Path | None, failed_before: bool) -> bool:
    if out is None:
        return True
    try:
        write_text(out, to_json(hunt))
    except OSError as e:
        if not failed_before:
            note(f"warning: cannot write {shown(out)}: {e.strerror}; measuring goes on")
        return False
    return True


def _line(hunt: Hunt, s: Stretch) -> str:
    how = "past the cache" if s.direct else "through the cache"
    what = {"cached-or-not": f"pair {s.block + 1}", "devices": f"device pair {s.block + 1}", "trace": f"pass {s.block}"}
    name = (hunt.other if s.file and hunt.other else hunt.file).name
    heat = f", {s.disk_c:.0f} °C" if s.disk_c is not None else ""
    return f"{what[s.part]:<13} {shown(name)} at {s.offset / GIB:6.2f} GiB {how}: {s.mib_s:.0f} MiB/s{heat}"
