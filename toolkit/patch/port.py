"""The series on another llama.cpp: each hook clean, three-way merged or at its anchors, and never in a wrong place."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from toolkit.errors import PinError
from toolkit.patch.anchors import AnchorError, Anchors, Edit, Overlap, apply_edits, present
from toolkit.patch.blobs import Blobs, crlf, is_crlf, lf
from toolkit.patch.gitrepo import Git
from toolkit.patch.moves import moved_to, upstream_changes
from toolkit.patch.patchfile import Patch
from toolkit.patch.placement import Placement, difference, function_changes, misplaced, placement
from toolkit.patch.replay import HookResult, HookStatus, add_payload, apply_hook, dry
from toolkit.patch.scope import scopes
from toolkit.patch.series import Hook, Series

PORTED = (HookStatus.CLEAN, HookStatus.THREE_WAY, HookStatus.ANCHORED)


@dataclass(frozen=True, kw_only=True)
class PortedHook:
    """What became of one hook, and what a reviewer has to look at."""

    hook: str
    status: HookStatus
    file: str  # in the target
    line: int | None = None  # there: of the first change in a function, or where that function starts
    functions: tuple[str, ...] = ()  # the hook's lines belong into these
    function_changes: tuple[str, ...] = ()  # those that differ from the pin's, as `name +added -removed`
    upstream: tuple[str, ...] = ()  # commits that changed the hook's place, where there is a history
    detail: str = ""
    diff: str = ""  # the ported patch against the series' own; empty when they do the same
    hint: str | None = None  # the next command


@dataclass(frozen=True, kw_only=True)
class Port:
    """The series as it has to be for one commit of llama.cpp."""

    commit: str
    date: str  # of the commit, YYYY-MM-DD
    payload: tuple[HookResult, ...]
    hooks: tuple[PortedHook, ...]
    overlaps: tuple[Overlap, ...]  # what this llama.cpp has of its own
    series: Series | None  # None when a hook or a payload file has no place

    @property
    def worst(self) -> HookStatus:
        order = list(HookStatus)
        found = [h.status for h in self.hooks] + [p.status for p in self.payload]
        return max(found, key=order.index)


def port(
    series: Series, anchors: Anchors, base: Git, base_commit: str, target: Git, target_commit: str, name: str
) -> Port:
    """Port the series from the pin to another commit; no tree, index or object store is changed.

    `base` and `target` are the repositories with these commits; `name` is what the user calls the target.
    Raises PinError when the series does not fit the pin itself.
    """
    with dry(target, base) as git, tempfile.TemporaryDirectory(prefix="moe-madv-") as scratch:
        pin = Blobs(git=git.with_env(GIT_INDEX_FILE=str(Path(scratch) / "pin")))
        new = Blobs(git=git.with_env(GIT_INDEX_FILE=str(Path(scratch) / "new")))
        pin.git.run("read-tree", base_commit)
        new.git.run("read-tree", target_commit)
        payload = tuple(add_payload(new.git, p) for p in series.payload)
        hooks: list[PortedHook] = []
        ported: list[Hook] = []
        for hook in series.hooks:
            attempt = _Attempt.at_pin(hook, anchors.edits.get(hook.name, ()), series, pin, new)
            result, patch = attempt.run(base_commit, target_commit)
            if patch is not None:
                ported.append(replace(hook, file=patch.file, patch=patch))
            else:
                commits = upstream_changes((target, base), base_commit, target_commit, hook, result.functions)
                result = replace(result, upstream=commits, hint=_hint(result, name))
            hooks.append(result)
        complete = all(h.status in PORTED or h.status is HookStatus.ALREADY_PRESENT for h in hooks)
        complete = complete and bool(ported) and all(p.status is HookStatus.CLEAN for p in payload)
        return Port(
            commit=target_commit,
            date=git.text("log", "-1", "--format=%cs", target_commit),
            payload=payload,
            hooks=tuple(hooks),
            overlaps=tuple(o for o in anchors.overlaps if _has(new, o)),
            series=replace(series, hooks=tuple(ported)) if complete else None,
        )


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """One hook, the pin's file before and after it (with LF), and the index it has to go into."""

    hook: Hook
    edits: tuple[Edit, ...]
    series: Series
    base: str
    base_after: str
    patch: Patch  # the hook's, as a port's is written
    pin: Placement
    new: Blobs
    reasons: list[str] = field(default_factory=list)  # why the stricter ways were not taken

    @staticmethod
    def at_pin(hook: Hook, edits: tuple[Edit, ...], series: Series, pin: Blobs, new: Blobs) -> _Attempt:
        before, tree = pin.read(hook.file) or b"", pin.git.text("write-tree")
        done = apply_hook(pin.git, hook)
        if done.status is not HookStatus.CLEAN:
            raise PinError(f"the hook does not fit the pin: {done}", where=hook.source, hint="moe-madv patch check")
        base, after = lf(before), lf(pin.read(hook.file) or b"")
        patch = pin.patch(tree, hook.file, hook, series)
        at = placement(base, after, patch)
        return _Attempt(
            hook=hook, edits=edits, series=series, base=base, base_after=after, patch=patch, pin=at, new=new
        )

    def run(self, base_commit: str, target_commit: str) -> tuple[PortedHook, Patch | None]:
        """The result, and the ported patch with the index changed, or None and the index as it was."""
        file = self.hook.file
        data = self.new.read(file)
        if data is None or (self.pin.functions and self._function_line(lf(data), file) is None):
            other = moved_to(self.new.git, base_commit, target_commit, file, self.pin.functions)
            if other is not None:
                self.reasons.append(f"moved from {file}")
                file, data = other, self.new.read(other)
        if data is None:
            self.reasons.append("upstream has no such file, and no other file defines its functions")
            return self._result(HookStatus.GONE, file, None, ""), None
        text = lf(data)
        for status, after in self._ways(file, data):
            if after is None:
                return self._result(status, file, self._function_line(text, file), text), None
            patch = self._change(file, data, after)
            found = placement(text, after, patch)
            renamed = {name: edit.scopes[-1] for edit in self.edits for name in edit.scopes}
            wrong = misplaced(self.pin, found, renamed, rewritten=status is HookStatus.ANCHORED)
            if wrong is None or (text == self.base and file == self.hook.file):
                return self._result(status, file, found.line, text, difference(self.patch, patch)), patch
            self.reasons.append(f"{status.value} refused: {wrong}")
            self.new.write(file, data)
        return self._result(HookStatus.CONFLICT, file, self._function_line(text, file), text), None

    def _ways(self, file: str, data: bytes) -> Iterator[tuple[HookStatus, str | None]]:
        """(status, the file after the hook) for each way that finds a place, the strictest first.

        None instead of a file ends the search. The index is as before between two ways.
        """
        text = lf(data)
        if file == self.hook.file:
            done = apply_hook(self.new.git, self.hook)
            after = self.new.read(file) or b""
            self.new.write(file, data)
            self.reasons.extend(filter(None, [done.detail]))
            if done.status is HookStatus.CLEAN:
                yield HookStatus.CLEAN, lf(after)
            elif done.status is HookStatus.ALREADY_PRESENT:
                yield HookStatus.ALREADY_PRESENT, None
        there = present(text, self.edits)
        if there:
            whole = there == len(self.edits)
            self.reasons.append(
                "drop the hook, upstream has the change"
                if whole
                else f"upstream has {there} of its {len(self.edits)} changes"
            )
            yield HookStatus.ALREADY_PRESENT if whole else HookStatus.CONFLICT, None
        merged = self.new.merge(self.base, self.base_after, text)
        if merged is not None and merged != text:
            yield HookStatus.THREE_WAY, merged
        if not self.edits:
            self.reasons.append("anchors.toml has no entry for it")
        elif not self._anchors_hold():
            self.reasons.append("its anchors are out of date: at the pin they do not give its patch")
        else:
            try:
                yield HookStatus.ANCHORED, apply_edits(text, file, self.edits)
            except AnchorError as e:
                self.reasons.append(str(e))

    def _anchors_hold(self) -> bool:
        """Whether the anchors give the hook's patch at the pin; otherwise they cannot be trusted elsewhere."""
        try:
            return apply_edits(self.base, self.hook.file, self.edits) == self.base_after
        except AnchorError:
            return False

    def _change(self, file: str, data: bytes, after: str) -> Patch:
        """Put the file into the index, with the line ends it had, and return the change as a patch."""
        tree = self.new.git.text("write-tree")
        self.new.write(file, crlf(after) if is_crlf(data) else after.encode("utf-8", "surrogateescape"))
        return self.new.patch(tree, file, self.hook, self.series)

    def _function_line(self, text: str, file: str) -> int | None:
        """Where the first of the hook's functions starts."""
        return next((s.first for s in scopes(text, file) if s.name in self.pin.functions), None)

    def _result(self, status: HookStatus, file: str, line: int | None, text: str, diff: str = "") -> PortedHook:
        return PortedHook(
            hook=self.hook.name,
            status=status,
            file=file,
            line=line,
            functions=self.pin.functions,
            function_changes=function_changes(self.base, self.hook.file, text, file, self.pin.functions),
            detail="; ".join(self.reasons),
            diff=diff,
        )


def _has(new: Blobs, overlap: Overlap) -> bool:
    return any(re.search(overlap.text, lf(new.read(file) or b"")) for file in overlap.files)


def _hint(result: PortedHook, name: str) -> str:
    if result.status is HookStatus.ALREADY_PRESENT:
        return f"read upstream's change; if it does the same, take hook {result.hook} out of patches/series.toml"
    place = result.file if result.line is None else f"{result.file}:{result.line}"
    return f"see {place}, add a place to hook.{result.hook} in patches/anchors.toml, then: moe-madv port {name}"
