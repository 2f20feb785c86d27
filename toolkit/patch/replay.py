"""Turning the series into commits in an index of its own, so that no work tree can be left halfway."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from toolkit.patch.blobs import is_crlf
from toolkit.patch.gitrepo import Git
from toolkit.patch.patchfile import hunks
from toolkit.patch.series import Hook, Payload, Series

TRAILER = "MoE-MADV-Series"  # names the digest of the series in each of its commits


class HookStatus(str, Enum):
    CLEAN = "clean"  # applies, at an offset or not, without fuzz
    THREE_WAY = "three-way"  # merged with what upstream changed since the pin
    ANCHORED = "anchored"  # written anew at its anchors
    ALREADY_PRESENT = "already-present"  # upstream has this change
    CONFLICT = "conflict"  # the file changed around the hook
    GONE = "gone"  # upstream has no such file


@dataclass(frozen=True, kw_only=True)
class HookResult:
    """What became of one hook, or of one payload file under the name `payload`."""

    name: str
    file: str
    status: HookStatus
    line: int | None = None  # in the upstream file, of the first hunk that does not fit
    detail: str = ""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{self.name}: {self.status.value}, {place}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, kw_only=True)
class Replay:
    commits: tuple[str, ...]  # one per entry that applied: the payload, then the hooks
    results: tuple[HookResult, ...]

    @property
    def clean(self) -> bool:
        return all(r.status is HookStatus.CLEAN for r in self.results)


@contextlib.contextmanager
def dry(git: Git, *others: Git) -> Iterator[Git]:
    """The same repository with new objects going to a temporary place, and with the objects of others."""
    with tempfile.TemporaryDirectory(prefix="moe-madv-") as scratch:
        # Quoted as git wants it, or a colon in the path would end it.
        places = [json.dumps(str(g.git_path("objects").resolve()), ensure_ascii=False) for g in (git, *others)]
        yield git.with_env(GIT_OBJECT_DIRECTORY=scratch, GIT_ALTERNATE_OBJECT_DIRECTORIES=os.pathsep.join(places))


def replay(series: Series, git: Git, parent: str, tree: str) -> Replay:
    """Commit the series on `parent`, from the files of `tree`, in an index of its own.

    An entry that does not apply is left out and the rest is still tried. Neither HEAD nor any file changes.
    """
    commits: list[str] = []
    results: list[HookResult] = []
    with tempfile.TemporaryDirectory(prefix="moe-madv-") as scratch:
        index = git.with_env(GIT_INDEX_FILE=str(Path(scratch) / "index"))
        index.run("read-tree", tree)
        for payload in series.payload:
            results.append(add_payload(index, payload))
        names = "\n".join(p.target for p in series.payload)
        commits.append(_commit(series, index, parent, f"moe-madv : add the {series.label} payload\n\n{names}"))
        for hook in series.hooks:
            result = apply_hook(index, hook)
            results.append(result)
            if result.status is HookStatus.CLEAN:
                message = f"{hook.patch.subject or hook.name}\n\n{hook.patch.body}".strip()
                commits.append(_commit(series, index, commits[-1], message))
    return Replay(commits=tuple(commits), results=tuple(results))


def add_payload(index: Git, payload: Payload) -> HookResult:
    """Add a file of ours to the index; a file of that name is left as it is."""
    present = index.run("cat-file", "blob", f":{payload.target}", check=False)
    if present.returncode == 0:
        same = present.stdout == payload.data
        status = HookStatus.ALREADY_PRESENT if same else HookStatus.CONFLICT
        detail = "the same file" if same else "another file of this name"
        return HookResult(name="payload", file=payload.target, status=status, detail=f"the tree has {detail}")
    blob = index.text("hash-object", "-w", "--no-filters", "--stdin", stdin=payload.data)
    index.run("update-index", "--add", "--cacheinfo", f"100644,{blob},{payload.target}")
    return HookResult(name="payload", file=payload.target, status=HookStatus.CLEAN)


def apply_hook(index: Git, hook: Hook) -> HookResult:
    """Apply a hook to the index if it fits without fuzz; otherwise the index stays as it is."""

    def result(status: HookStatus, line: int | None = None, detail: str = "") -> HookResult:
        return HookResult(name=hook.name, file=hook.file, status=status, line=line, detail=detail)

    before = index.run("cat-file", "blob", f":{hook.file}", check=False)
    if before.returncode != 0:
        return result(HookStatus.GONE, detail="upstream has no such file")
    text = hook.patch.with_crlf() if is_crlf(before.stdout) else hook.patch.text
    done = index.run("apply", "--cached", "--verbose", "-", stdin=text, check=False)
    # git reports success for a patch it skipped, so the content decides: the hook can be taken out again.
    present = index.run("apply", "--cached", "--check", "--reverse", "-", stdin=text, check=False).returncode == 0
    after = index.run("cat-file", "blob", f":{hook.file}", check=False).stdout
    said = done.stderr.decode("utf-8", "replace")
    if present and after != before.stdout:
        offsets = re.findall(r"Hunk #\d+ succeeded at .*", said)
        return result(HookStatus.CLEAN, detail="; ".join(offsets))
    if present:
        return result(HookStatus.ALREADY_PRESENT, detail="drop the hook, upstream has the change")
    at = re.search(r"patch failed: .*:(\d+)$", said, flags=re.MULTILINE)
    return result(HookStatus.CONFLICT, line=int(at[1]) if at else None, detail=_by_hunk(index, text))


def _by_hunk(index: Git, patch: bytes) -> str:
    """What each hunk alone would do: a change can be partly upstream already."""
    found = []
    for number, text in enumerate(hunks(patch), 1):
        if index.run("apply", "--cached", "--check", "-", stdin=text, check=False).returncode == 0:
            found.append(f"hunk {number} fits")
        elif index.run("apply", "--cached", "--check", "-R", "-", stdin=text, check=False).returncode == 0:
            found.append(f"hunk {number} is already present")
        else:
            found.append(f"hunk {number} does not fit")
    return ", ".join(found)


def _commit(series: Series, index: Git, parent: str, message: str) -> str:
    date = f"@{series.timestamp} +0000"
    fixed = index.with_env(
        GIT_AUTHOR_NAME=series.author,
        GIT_AUTHOR_EMAIL=series.author_email,
        GIT_AUTHOR_DATE=date,
        GIT_COMMITTER_NAME=series.author,
        GIT_COMMITTER_EMAIL=series.author_email,
        GIT_COMMITTER_DATE=date,
    )
    text = f"{message}\n\n{TRAILER}: {series.digest}\n"
    return fixed.text("commit-tree", index.text("write-tree"), "-p", parent, "-F", "-", stdin=text.encode())


def snapshot(git: Git, head: str, paths: Iterable[str]) -> str:
    """The work tree as a tree object, made in an index of its own."""
    with tempfile.TemporaryDirectory(prefix="moe-madv-") as scratch:
        index = git.with_env(GIT_INDEX_FILE=str(Path(scratch) / "index"))
        index.run("read-tree", head)
        for path in paths:
            file = git.root / path
            if file.exists() or file.is_symlink():
                index.run("add", "--force", "--", path)
            else:
                index.run("rm", "--cached", "--quiet", "--ignore-unmatch", "--", path)
        return index.text("write-tree")
