"""Saved ports: hooks as other commits of llama.cpp need them, one folder of patches/ports/ per range of commits.

A folder holds only the hooks that differ from the series, as patches, and port.toml with the commits they are
for. The payload and every other hook stay those of series.toml.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.errors import PatchError, PinError
from toolkit.files import atomic_path, write_text
from toolkit.patch import patchfile
from toolkit.patch.gitrepo import HEX40, Git
from toolkit.patch.port import Port
from toolkit.patch.replay import HookStatus, dry, replay
from toolkit.patch.series import Hook, Series, load_series
from toolkit.patch.target import Target
from toolkit.patch.upstream import Pin, read_toml

FOLDER = "ports"
_FILE = "port.toml"
_HEAD = """\
# Hooks as the commits below need them, each with the sha256 of the series' patch that it was made from; the
# payload and all other hooks are the series' own. Written by `moe-madv port --write`.
"""


@dataclass(frozen=True, kw_only=True)
class SavedPort:
    """One folder of patches/ports/."""

    folder: Path
    made_from: Mapping[str, str]  # hook -> hex sha256 of the series' patch at that time
    without: tuple[str, ...]  # hooks whose change these commits have themselves
    commits: Mapping[str, str]  # 40-digit id -> what it is

    def text(self) -> str:
        lines = [_HEAD, *([f"without = {json.dumps(list(self.without))}", ""] if self.without else []), "[hooks]"]
        lines += [f'{name} = "{digest}"' for name, digest in sorted(self.made_from.items())]
        lines += ["", "[commits]", *(f'"{commit}" = {json.dumps(what)}' for commit, what in self.commits.items())]
        return "\n".join(lines) + "\n"


def saved_ports(patches_dir: Path) -> tuple[SavedPort, ...]:
    """Every saved port; PinError names the file and key that cannot be used."""
    found = []
    for path in sorted((patches_dir / FOLDER).glob(f"*/{_FILE}")):
        data = read_toml(path)
        without = data.get("without", [])
        hooks, commits = data.get("hooks", {}), data.get("commits", {})
        if not isinstance(without, list) or not all(isinstance(n, str) for n in without):
            raise PinError("`without` must be a list of hook names", where=path)
        for key, table in (("hooks", hooks), ("commits", commits)):
            if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
                raise PinError(f"`{key}` must be a table of texts", where=path)
        wrong = [c for c in commits if not HEX40.fullmatch(c)]
        if wrong or not commits:
            raise PinError("`commits` must name at least one commit, in 40 hex digits", where=path)
        found.append(SavedPort(folder=path.parent, made_from=hooks, without=tuple(without), commits=commits))
    return tuple(found)


def series_for(patches_dir: Path, commit: str) -> Series:
    """The series as a commit of llama.cpp needs it: a saved port's, or series.toml as it is.

    Raises PinError when the hooks of a saved port were made from other ones than the series has now.
    """
    series = load_series(patches_dir)
    saved = next((p for p in saved_ports(patches_dir) if commit in p.commits), None)
    if saved is None:
        return series
    stale = [h.name for h in series.hooks if saved.made_from.get(h.name, _digest(h)) != _digest(h)]
    if stale:
        raise PinError(
            f"hook {', '.join(stale)} of the series has changed since it was ported",
            where=saved.folder / _FILE,
            hint=f"moe-madv port {saved.commits[commit].split(',')[0].split(' ')[-1]} --write",
        )
    return _varied(series, saved)


def write_port(patches_dir: Path, series: Series, result: Port, target: Target) -> tuple[Path, ...]:
    """Save a port: the pin of a release, and the hooks that had to change, in the folder of a port that does the same.

    Returns the files written, none when all is saved already. Raises PatchError for a port with conflicts.
    """
    if result.series is None:
        raise PatchError(f"{target.name} has hooks without a place, nothing is saved", where=target.tree.llama)
    written: list[Path] = []
    if target.pin is not None and (pinned := _write_pin(patches_dir / "upstream.toml", target.pin, result.date)):
        written.append(pinned)
    what = f"llama-cpp-python {target.name}, {result.date}" if target.pin else f"llama.cpp {target.name}, {result.date}"
    changed = {h.hook for h in result.hooks if h.status in (HookStatus.THREE_WAY, HookStatus.ANCHORED)}
    without = tuple(h.hook for h in result.hooks if h.status is HookStatus.ALREADY_PRESENT)
    saved = saved_ports(patches_dir)
    mine = next((p for p in saved if result.commit in p.commits), None)
    if mine is not None and _same(series, mine, result, target):
        return tuple(written)
    if mine is not None:
        _forget(mine, result.commit)
        written.append(mine.folder / _FILE)
    if not changed and not without:
        return tuple(written)
    for other in saved_ports(patches_dir):
        if _same(series, other, result, target):
            write_text(other.folder / _FILE, replace(other, commits={**other.commits, result.commit: what}).text())
            return (*written, other.folder / _FILE)
    hooks = {h.name: h for h in result.series.hooks if h.name in changed}
    folder = patches_dir / FOLDER / _folder_name(target, result)
    port = SavedPort(
        folder=folder,
        made_from={h.name: _digest(h) for h in series.hooks if h.name in changed},
        without=without,
        commits={result.commit: what},
    )
    for name, hook in hooks.items():
        path = folder / f"{name}.patch"
        with atomic_path(path) as partial:
            partial.write_bytes(hook.patch.text)
        written.append(path)
    write_text(folder / _FILE, port.text())
    return (*written, folder / _FILE)


def _varied(series: Series, saved: SavedPort) -> Series:
    hooks: list[Hook] = []
    for hook in series.hooks:
        if hook.name in saved.without:
            continue
        if hook.name in saved.made_from:
            path = saved.folder / f"{hook.name}.patch"
            try:
                patch = patchfile.parse(path.read_bytes(), path)
            except OSError as e:
                raise PinError(f"cannot be read: {e.strerror}", where=path) from e
            source = path.relative_to(saved.folder.parent.parent).as_posix()
            hook = replace(hook, file=patch.file, patch=patch, source=source)
        hooks.append(hook)
    return replace(series, hooks=tuple(hooks))


def _same(series: Series, saved: SavedPort, result: Port, target: Target) -> bool:
    """Whether a saved port gives the target exactly the files that the new one does."""
    assert result.series is not None
    if any(saved.made_from.get(h.name, _digest(h)) != _digest(h) for h in series.hooks):
        return False
    git = Git(root=target.tree.llama)
    with dry(git) as scratch:
        old = replay(_varied(series, saved), scratch, result.commit, result.commit)
        new = replay(result.series, scratch, result.commit, result.commit)
        trees = {scratch.text("rev-parse", f"{r.commits[-1]}^{{tree}}") for r in (old, new)}
    return old.clean and new.clean and len(trees) == 1


def _forget(saved: SavedPort, commit: str) -> None:
    left = {c: what for c, what in saved.commits.items() if c != commit}
    if left:
        write_text(saved.folder / _FILE, replace(saved, commits=left).text())
    else:
        shutil.rmtree(saved.folder)


def _write_pin(path: Path, pin: Pin, date: str) -> Path | None:
    """Add a pin at the end of upstream.toml; None when it is there. Raises PinError when another one is."""
    known = read_toml(path).get("pin", {}).get(pin.binding)
    wanted = {"sdist_sha256": pin.sdist_sha256, "commit": pin.commit}
    if known == wanted:
        return None
    if known is not None:
        raise PinError(f"{pin.binding} is pinned to other bytes: {known}", where=path)
    text = path.read_text(encoding="utf-8").rstrip("\n")
    entry = f'[pin."{pin.binding}"] # {date}\nsdist_sha256 = "{pin.sdist_sha256}"\ncommit = "{pin.commit}"\n'
    write_text(path, f"{text}\n\n{entry}")
    return path


def _folder_name(target: Target, result: Port) -> str:
    return target.name if target.pin else f"{re.sub(r'[^0-9A-Za-z.-]+', '-', target.name)[:40]}-{result.commit[:9]}"


def _digest(hook: Hook) -> str:
    return hashlib.sha256(hook.patch.text).hexdigest()
