"""Whether a change is where it belongs: the functions it touches, and whether no other place looks like its own."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from toolkit.patch import patchfile
from toolkit.patch.patchfile import Patch
from toolkit.patch.scope import Scope, scope_at, scopes


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one patch changes one file."""

    removed: frozenset[str]  # names of the scopes that lose lines; empty string for outside of all
    added: frozenset[str]  # names of the scopes that get lines
    lines: Counter[str]  # the changed lines with their signs
    twins: int  # further places in these scopes that look like one the patch expects
    defined: Counter[str]  # how often each of the scopes is defined in the file before the change
    line: int | None  # of the first change inside a scope, in the file after it

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(sorted((self.added | self.removed) - {""}))


def placement(before: str, after: str, patch: Patch) -> Placement:
    """Where `patch`, which makes `after` of `before`, changes its file. Line ends do not count."""
    old, new = scopes(before, patch.file), scopes(after, patch.file)
    changes = patchfile.changes(patch.text)
    removed = frozenset(scope_at(old, c.line) for c in changes if c.sign == "-")
    added = frozenset(scope_at(new, c.line) for c in changes if c.sign == "+")
    inside = [c.line for c in changes if c.sign == "+" and scope_at(new, c.line)]
    return Placement(
        removed=removed,
        added=added,
        lines=Counter(c.sign + c.text for c in changes),
        twins=sum(_twins(before, old, start, lines) for start, lines in patchfile.preimages(patch.text)),
        defined=Counter(s.name for s in old if s.name in removed | added),
        line=next(iter(inside or [c.line for c in changes]), None),
    )


def misplaced(pin: Placement, found: Placement, renamed: Mapping[str, str], *, rewritten: bool) -> str | None:
    """Why a change must not be accepted, None when it is where the pin has it.

    `renamed` gives the name at the pin of a function that anchors.toml knows under several. A `rewritten` hook
    may have other lines, and its anchors have been counted.
    """
    for side in ("removed", "added"):
        wanted = {renamed.get(name, name) for name in getattr(pin, side)}
        seen = {renamed.get(name, name) for name in getattr(found, side)}
        if wanted != seen:
            return f"its lines would be {_names(seen)}, at the pin they are {_names(wanted)}"
    again = [name for name in found.defined if found.defined[name] > max(1, pin.defined[name])]
    if again:
        return f"{', '.join(again)} is defined more than once"
    if rewritten:
        return None
    if pin.lines != found.lines:
        return "only a part of its lines would be new"
    if found.twins:
        return f"{found.twins} other places in the same function look like its own"
    return None


def _names(names: Iterable[str]) -> str:
    return "in " + ", ".join(sorted(name or "no function" for name in names)) if names else "nowhere"


def _twins(text: str, found: tuple[Scope, ...], start: int, expected: tuple[str, ...]) -> int:
    """Places other than line `start` that have the expected lines, in the same scopes."""
    lines = text.split("\n")
    size = len(expected)

    def around(first: int) -> list[str]:
        return [scope_at(found, line) for line in range(first, first + size)]

    return sum(
        tuple(lines[i : i + size]) == expected and i + 1 != start and around(i + 1) == around(start)
        for i in range(len(lines) - size + 1)
    )


def function_changes(before: str, old_file: str, after: str, new_file: str, names: Iterable[str]) -> tuple[str, ...]:
    """For each function that differs between two files: `name +added -removed lines`."""
    bodies = [
        {s.name: text.split("\n")[s.first - 1 : s.last] for s in scopes(text, file)}
        for text, file in ((before, old_file), (after, new_file))
    ]
    found = []
    for name in names:
        if name in bodies[0] and name in bodies[1] and bodies[0][name] != bodies[1][name]:
            signs = Counter(line[0] for line in difflib.ndiff(bodies[0][name], bodies[1][name]))
            found.append(f"{name} +{signs['+']} -{signs['-']}")
    return tuple(found)


def difference(pin: Patch, ported: Patch) -> str:
    """The patches as a difference of differences; empty when only line numbers and ids are not the same."""
    return "\n".join(difflib.unified_diff(_essence(pin), _essence(ported), "the pin's", "ported", n=2, lineterm=""))


def _essence(patch: Patch) -> list[str]:
    text = patch.text[patch.text.index(b"diff --git ") :].replace(b"\r\n", b"\n").decode("utf-8", "replace")
    text = text.split("\n-- \n")[0]  # a mail's signature
    lines = [line for line in text.rstrip("\n").split("\n") if not line.startswith(("index ", "diff --git "))]
    return [re.sub(r"^@@ -\S+ \+\S+ @@.*", "@@", line) for line in lines]
