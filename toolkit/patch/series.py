"""The series as data: our label, our payload files and the hooks that call them, checked when read."""

from __future__ import annotations

import datetime
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from toolkit.errors import PinError
from toolkit.patch import patchfile
from toolkit.patch.patchfile import Patch
from toolkit.patch.upstream import read_toml

_LABEL = re.compile(r"[a-z][a-z0-9]*")  # becomes part of a wheel's local version
_AUTHOR = re.compile(r"([^<>\n]+) <([^<>\s]+)>")


@dataclass(frozen=True, kw_only=True)
class Payload:
    """One whole file of ours."""

    source: str  # relative to patches/
    target: str  # relative to the root of llama.cpp
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Hook:
    """One small change to one upstream file."""

    name: str
    file: str  # the upstream file, relative to the root of llama.cpp
    reason: str  # why the hook exists
    status: str  # "to-upstream" | "local"
    source: str  # the patch file, relative to patches/
    patch: Patch


@dataclass(frozen=True, kw_only=True)
class Series:
    """Everything that is added to upstream, in the order of its commits."""

    label: str
    author: str
    author_email: str
    timestamp: int  # author and committer date of every commit, seconds since 1970, UTC
    payload: tuple[Payload, ...]
    hooks: tuple[Hook, ...]

    @property
    def digest(self) -> str:
        """Hex sha256 over label, targets and bytes, in order: the same on every machine."""
        digest = hashlib.sha256()
        parts = [self.label.encode()]
        for payload in self.payload:
            parts += [b"payload", payload.target.encode(), payload.data]
        for hook in self.hooks:
            parts += [b"hook", hook.file.encode(), hook.patch.text]
        for part in parts:
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.hexdigest()

    @property
    def files(self) -> frozenset[str]:
        """Every path of llama.cpp the series adds or changes."""
        return frozenset(p.target for p in self.payload) | frozenset(h.file for h in self.hooks)


def load_series(patches_dir: Path) -> Series:
    """Read series.toml and every file it names; PinError names the file and key that cannot be used."""
    path = patches_dir / "series.toml"
    data = read_toml(path)
    label = _string(data, "label", path, "label")
    if not _LABEL.fullmatch(label):
        raise PinError("`label` must be lower-case letters and digits", where=f"{path}: label")
    author = _AUTHOR.fullmatch(_string(data, "author", path, "author"))
    if not author:
        raise PinError("`author` must read `Name <address>`", where=f"{path}: author")
    date = data.get("date")
    if not isinstance(date, datetime.datetime) or date.tzinfo is None:
        raise PinError("`date` must be a date and time with its offset", where=f"{path}: date")
    series = Series(
        label=label,
        author=author[1],
        author_email=author[2],
        timestamp=int(date.timestamp()),
        payload=tuple(_payload(entry, path, where) for entry, where in _entries(data, "payload", path)),
        hooks=tuple(_hook(entry, path, where) for entry, where in _entries(data, "hook", path)),
    )
    for what, names in (
        ("target", [p.target for p in series.payload] + sorted({h.file for h in series.hooks})),
        ("hook name", [h.name for h in series.hooks]),
    ):
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise PinError(f"{what} used twice: {', '.join(sorted(repeated))}", where=path)
    return series


def _entries(data: dict[str, Any], key: str, path: Path) -> list[tuple[dict[str, Any], str]]:
    entries = data.get(key)
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
        raise PinError(f"the series needs at least one [[{key}]]", where=path)
    return [(entry, f"{key}[{i}]") for i, entry in enumerate(entries)]


def _payload(entry: dict[str, Any], path: Path, where: str) -> Payload:
    source = _string(entry, "source", path, f"{where}.source")
    return Payload(
        source=source,
        target=_target(entry, "target", path, f"{where}.target"),
        data=_read(path, source, f"{where}.source"),
    )


def _hook(entry: dict[str, Any], path: Path, where: str) -> Hook:
    source = _string(entry, "patch", path, f"{where}.patch")
    file = _target(entry, "file", path, f"{where}.file")
    patch = patchfile.parse(_read(path, source, f"{where}.patch"), path.parent / source)
    if patch.file != file:
        raise PinError(f"the patch changes {patch.file}, the series says {file}", where=f"{path}: {where}.file")
    status = _string(entry, "status", path, f"{where}.status")
    if status not in ("to-upstream", "local"):
        raise PinError("`status` must be to-upstream or local", where=f"{path}: {where}.status")
    return Hook(
        name=_string(entry, "name", path, f"{where}.name"),
        file=file,
        reason=_string(entry, "reason", path, f"{where}.reason"),
        status=status,
        source=source,
        patch=patch,
    )


def _string(entry: dict[str, Any], key: str, path: Path, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value.strip():
        raise PinError(f"`{key}` must be a text that is not empty", where=f"{path}: {where}")
    return value


def _target(entry: dict[str, Any], key: str, path: Path, where: str) -> str:
    value = _string(entry, key, path, where)
    parts = PurePosixPath(value).parts
    if value != "/".join(parts) or ".." in parts or parts[0] in ("/", ".git") or "\\" in value:
        raise PinError(f"`{key}` must be a plain path below the root of llama.cpp", where=f"{path}: {where}")
    return value


def _read(path: Path, source: str, where: str) -> bytes:
    try:
        return (path.parent / source).read_bytes()
    except OSError as e:
        raise PinError(f"cannot read {path.parent / source}: {e.strerror}", where=f"{path}: {where}") from e
