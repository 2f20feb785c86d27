"""Anchors: where a hook goes when its patch no longer fits, by text, an expected count and a function."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toolkit.errors import PinError
from toolkit.patch import patchfile
from toolkit.patch.scope import Scope, scopes
from toolkit.patch.series import Hook, Series
from toolkit.patch.upstream import read_toml

Kind = Literal["before", "after", "replace", "enter"]
_KINDS: tuple[Kind, ...] = ("before", "after", "replace", "enter")


class AnchorError(Exception):
    """An edit has no place, or more than one; the message says which text was sought where."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Whole lines to find, compared without their indentation, and what to do with them.

    `enter` needs no anchor: the text becomes the start of the function's body.
    """

    kind: Kind
    anchor: tuple[str, ...]
    text: tuple[str, ...]  # what is inserted, indented like the anchor's first line or the function's head
    count: int  # how often the anchor must be in the scope; every time it is edited


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One change of a hook: the scopes it may be in and the places there, newest first."""

    scopes: tuple[str, ...]  # names as scope.scopes gives them; empty for outside of all functions
    places: tuple[Place, ...]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A feature of upstream that does something like ours, found by its names in upstream's files."""

    name: str
    files: tuple[str, ...]
    text: str  # regular expression
    honest: str  # how a comparison with a baseline that has it stays fair


@dataclass(frozen=True, kw_only=True)
class Anchors:
    edits: dict[str, tuple[Edit, ...]]  # by hook
    overlaps: tuple[Overlap, ...]


def load_anchors(patches_dir: Path, series: Series) -> Anchors:
    """Read anchors.toml; PinError names the key that cannot be used. A hook without an entry has no edits.

    An edit without a text inserts what the hunk of the same number adds.
    """
    path = patches_dir / "anchors.toml"
    data = read_toml(path)
    hooks = {h.name for h in series.hooks}
    named = _list(data.get("hook", {}), dict, path, "hook")
    unknown = named.keys() - hooks
    if unknown:
        raise PinError(f"the series has no hook {', '.join(sorted(unknown))}", where=f"{path}: hook")
    edits = {
        hook.name: tuple(
            _edit(entry, _added(hook, i), path, f"hook.{hook.name}[{i}]")
            for i, entry in enumerate(_list(named[hook.name], list, path, f"hook.{hook.name}"))
        )
        for hook in series.hooks
        if hook.name in named
    }
    overlaps = tuple(
        _overlap(entry, path, f"overlap[{i}]")
        for i, entry in enumerate(_list(data.get("overlap", []), list, path, "overlap"))
    )
    return Anchors(edits=edits, overlaps=overlaps)


def apply_edits(text: str, file: str, edits: tuple[Edit, ...]) -> str:
    """The text with every edit made; AnchorError when one has not exactly the places it expects."""
    for edit in edits:
        text = _apply(text, file, edit)
    return text


def present(text: str, edits: tuple[Edit, ...]) -> int:
    """How many of the edits the text already has, compared line by line without indentation."""
    lines = [line.strip() for line in text.split("\n")]
    return sum(any(_find(lines, _bare(p.text), 0, len(lines)) for p in edit.places) for edit in edits)


def _apply(text: str, file: str, edit: Edit) -> str:
    lines = text.split("\n")
    found = scopes(text, file)
    scope = _scope(edit, found)
    stripped = [line.strip() for line in lines]
    if scope is None:
        taken = {n for s in found for n in range(s.first - 1, s.last)}
        stripped = ["\0" if n in taken else line for n, line in enumerate(stripped)]
    begin, end = (scope.first - 1, scope.last) if scope else (0, len(lines))
    for place in edit.places:
        if place.kind == "enter":
            if scope is None:
                raise AnchorError("a body to enter needs a function")
            _enter(lines, scope, place.text)
            return "\n".join(lines)
        at = _find(stripped, place.anchor, begin, end)
        if not at:
            continue
        if len(at) != place.count:
            raise AnchorError(f"{place.anchor[0]!r} is there {len(at)} times, expected {place.count}, {_where(scope)}")
        for first in reversed(at):
            _edit_at(lines, first, place)
        return "\n".join(lines)
    sought = " or ".join(repr(p.anchor[0]) for p in edit.places)
    raise AnchorError(f"no line {sought} {_where(scope)}")


def _scope(edit: Edit, found: tuple[Scope, ...]) -> Scope | None:
    """The one scope the edit is for, None for outside of all."""
    for name in edit.scopes:
        if name == "":
            return None
        named = [s for s in found if s.name == name]
        if len(named) > 1:
            lines = ", ".join(str(s.first) for s in named)
            raise AnchorError(f"{name} is defined {len(named)} times, at lines {lines}")
        if named:
            return named[0]
    raise AnchorError(f"no {' or '.join(edit.scopes)} in the file")


def _where(scope: Scope | None) -> str:
    return f"in {scope.name} (lines {scope.first}-{scope.last})" if scope else "outside of functions"


def _find(stripped: list[str], anchor: tuple[str, ...], begin: int, end: int) -> list[int]:
    """Indexes where the lines of the anchor start, without overlap; `stripped` has no indentation."""
    size, at, i = len(anchor), [], begin
    while i + size <= end:
        if tuple(stripped[i : i + size]) == anchor:
            at.append(i)
            i += size
        else:
            i += 1
    return at


def _edit_at(lines: list[str], first: int, place: Place) -> None:
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    new = [indent + line if line else line for line in place.text]
    size = len(place.anchor)
    start = first + size if place.kind == "after" else first
    lines[start : start + (size if place.kind == "replace" else 0)] = new


def _enter(lines: list[str], scope: Scope, text: tuple[str, ...]) -> None:
    line, column = scope.opens
    head, rest = lines[line - 1][: column + 1], lines[line - 1][column + 1 :]
    indent = lines[scope.first - 1][: len(lines[scope.first - 1]) - len(lines[scope.first - 1].lstrip())]
    new = [indent + t if t else t for t in text]
    if line == scope.last and rest.rstrip().endswith("}"):  # a body on one line
        body = rest.rstrip()[:-1].strip()
        lines[line - 1 : line] = [head, *new, *([f"{indent}    {body}"] if body else []), indent + "}"]
    elif not rest.strip():
        lines[line:line] = new
    else:
        raise AnchorError(f"the body of {scope.name} does not start on a line of its own")


def _bare(text: tuple[str, ...]) -> tuple[str, ...]:
    """The text without the blank lines around it and without indentation."""
    return tuple("\n".join(line.strip() for line in text).strip("\n").split("\n"))


def _added(hook: Hook, number: int) -> str | None:
    """The lines that one hunk of a hook's patch adds, without their common indentation; None if it removes some."""
    hunks = patchfile.hunks(hook.patch.text)
    changes = patchfile.changes(hunks[number]) if number < len(hunks) else ()
    if not changes or any(c.sign == "-" for c in changes):
        return None
    return textwrap.dedent("".join(f"{c.text}\n" for c in changes))


def _edit(entry: Any, added: str | None, path: Path, where: str) -> Edit:
    names = entry.get("scope") if isinstance(entry, dict) else None
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise PinError('`scope` must be a function\'s name, a list of them, or ""', where=f"{path}: {where}.scope")
    common = entry.get("text", added)
    places = _list(entry.get("at"), list, path, f"{where}.at")
    if not places:
        raise PinError("`at` must name at least one place", where=f"{path}: {where}.at")
    return Edit(
        scopes=tuple(names),
        places=tuple(_place(p, common, path, f"{where}.at[{i}]") for i, p in enumerate(places)),
    )


def _place(entry: Any, common: Any, path: Path, where: str) -> Place:
    kinds = [k for k in _KINDS if isinstance(entry, dict) and k in entry]
    if len(kinds) != 1:
        raise PinError(f"a place has exactly one of {', '.join(_KINDS)}", where=f"{path}: {where}")
    entry = {"text": common, **entry}
    count = entry.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise PinError("`count` must be a number from 1", where=f"{path}: {where}.count")
    text = tuple(_string(entry, "text", path, where).removesuffix("\n").split("\n"))
    if kinds[0] == "enter":
        if entry["enter"] is not True:
            raise PinError("`enter` is true or absent", where=f"{path}: {where}.enter")
        return Place(kind="enter", anchor=(), text=text, count=1)
    anchor = _string(entry, kinds[0], path, where).strip("\n").split("\n")
    return Place(kind=kinds[0], anchor=tuple(line.strip() for line in anchor), text=text, count=count)


def _overlap(entry: Any, path: Path, where: str) -> Overlap:
    name, text, honest = (_string(entry, key, path, where) for key in ("name", "text", "honest"))
    files = _list(entry.get("files"), list, path, f"{where}.files")
    try:
        re.compile(text)
    except re.error as e:
        raise PinError(f"`text` is no regular expression: {e}", where=f"{path}: {where}.text") from e
    return Overlap(name=name, files=tuple(map(str, files)), text=text, honest=honest)


def _list(value: Any, kind: type, path: Path, where: str) -> Any:
    if not isinstance(value, kind):
        raise PinError(f"`{where}` must be a {'table' if kind is dict else 'list'}", where=path)
    return value


def _string(entry: Any, key: str, path: Path, where: str) -> str:
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise PinError(f"`{key}` must be a text that is not empty", where=f"{path}: {where}.{key}")
    return value
