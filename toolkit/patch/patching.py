"""The series on a llama.cpp tree: as commits, all or none, with the same ids on every machine."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from toolkit.console import note
from toolkit.errors import FetchError, PatchError
from toolkit.patch.gitrepo import Git, seed
from toolkit.patch.replay import TRAILER, HookResult, HookStatus, dry, replay, snapshot
from toolkit.patch.series import Series
from toolkit.patch.upstream import check_complete, locked

_OWN_FOLDER = "moe-madv"  # in the git directory: our lock, and what --reset took out
_LOCK_TRIES, _LOCK_PAUSE = 20, 0.1  # seconds
_MAX_COMMITS = 64  # more of ours on top of a pin than any series has
# What git leaves when a command of the user stopped halfway; only `am` can be from applying a series.
_AM_STATE = "rebase-apply"
_OTHER_STATES = ("rebase-merge", "MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD")


class State(str, Enum):
    PRISTINE = "pristine"  # the pinned commit, unchanged
    APPLIED = "applied"  # the pinned commit with exactly this series
    STALE = "stale"  # the pinned commit with another version of the series
    HALF_APPLIED = "half-applied"  # stopped halfway, or files of the series were changed
    FOREIGN = "foreign"  # another commit, or changes that are not ours
    MISSING = "missing"  # no complete llama.cpp there
    UNFETCHED = "unfetched"  # nothing was fetched yet


@dataclass(frozen=True, kw_only=True)
class TreeStatus:
    """What a tree is, from its commits and files; no stamp file is kept that could be wrong."""

    state: State
    head: str | None = None  # commit checked out
    base: str | None = None  # first commit at or below HEAD that is not ours
    digest: str | None = None  # of the series in the tree's commits
    changes: tuple[str, ...] = ()  # paths that differ from HEAD
    notes: tuple[str, ...] = ()  # what was found, in sentences
    hint: str | None = None  # the next command


@dataclass(frozen=True, kw_only=True)
class ApplyReport:
    before: State
    commit: str  # HEAD afterwards
    digest: str
    changed: bool  # False when the series was already there
    hooks: tuple[HookResult, ...]
    kept: Path | None = None  # a patch with the changes that --reset took out of the tree


def inspect(series: Series, llama: Path, pin_commit: str) -> TreeStatus:
    """Tell the state of a llama.cpp tree without changing it."""
    if not llama.is_dir():
        return TreeStatus(state=State.MISSING, notes=(f"no directory {llama}",), hint="moe-madv fetch")
    git = Git(root=llama)
    is_repository = git.is_repository()
    states = (_AM_STATE, *_OTHER_STATES) if is_repository else ()
    stopped = [name for name in states if git.git_path(name).exists()]
    notes = [f"git left {name} behind: a command stopped halfway" for name in stopped]
    try:
        check_complete(llama)
    except FetchError as e:
        return TreeStatus(state=State.MISSING, notes=(*notes, e.what), hint=e.hint)
    if not is_repository:
        found = "the tree has no git repository of its own, so its commit is unknown"
        hint = "moe-madv fetch, then the same command again"
        return TreeStatus(state=State.FOREIGN, notes=(found,), hint=hint)

    head, base, ours, digest = _history(git)
    changes = git.changes()
    own_files = series.files | _changed_files(git, base, head)
    notes += _describe_changes(git, series, changes)

    def status(state: State, hint: str | None) -> TreeStatus:
        return TreeStatus(
            state=state, head=head, base=base, digest=digest, changes=changes, notes=tuple(notes), hint=hint
        )

    if base != pin_commit:
        notes.insert(0, f"it is based on commit {base}, the pin is {pin_commit}")
        return status(State.FOREIGN, f"moe-madv patch check --tree {shlex.quote(str(llama))}")
    if any(path not in own_files for path in changes) or any(name != _AM_STATE for name in stopped):
        return status(State.FOREIGN, f"move aside or undo what is yours: git -C {llama} status")
    with dry(git) as scratch:
        expected = replay(series, scratch, pin_commit, pin_commit)
    if head in expected.commits[:-1]:
        notes.append(f"only {len(ours)} of the {len(series.hooks) + 1} commits of the series are there")
    if stopped or changes or head in expected.commits[:-1]:
        return status(State.HALF_APPLIED, "moe-madv patch apply --reset")
    if not ours:
        return status(State.PRISTINE, "moe-madv patch apply")
    if expected.clean and head == expected.commits[-1]:
        return status(State.APPLIED, None)
    notes.append(f"the tree has series {digest}, this one is {series.digest}")
    return status(State.STALE, "moe-madv patch apply")


def base_commit(llama: Path) -> str | None:
    """The commit of upstream a tree stands on, under commits of ours; None without a repository of its own."""
    git = Git(root=llama)
    return _history(git)[1] if llama.is_dir() and git.is_repository() else None


def check(series: Series, llama: Path) -> tuple[HookResult, ...]:
    """Try every entry on the tree's upstream commit, uncommitted changes included; nothing is changed."""
    git = Git(root=llama)
    check_complete(llama)
    if not git.is_repository():
        raise PatchError("the tree has no git repository of its own", where=llama, hint="moe-madv fetch")
    head, base, _, _ = _history(git)
    if head is None or base is None:
        raise PatchError("the tree has no commit", where=llama)
    with dry(git) as scratch:
        changed = series.files.intersection(git.changes())
        tree = snapshot(scratch, head, changed) if changed else base
        return replay(series, scratch, base, tree).results


def apply(
    series: Series, llama: Path, pin_commit: str, *, reset: bool = False, donor: Path | None = None
) -> ApplyReport:
    """Put the series on a tree at the pin: one commit for the payload, one for each hook.

    A tree that has it is left alone, one with another version of it is moved over. With `reset` a
    half-applied tree is taken back first, and what is lost by that is kept as a patch in its git
    directory. `donor` is a tree with the pinned commit, for a tree without git. Raises PatchError and
    leaves the tree exactly as it was when a hook does not apply or the tree is not ours to change.
    """
    with _repository(llama, pin_commit, donor) as git:
        status = inspect(series, llama, pin_commit)
        refused = status.state in (State.FOREIGN, State.MISSING)
        if refused or (status.state is State.HALF_APPLIED and not reset):
            named = [] if status.state is State.MISSING else [f"the tree is {status.state.value}"]
            what = "; ".join([*named, *status.notes])
            raise PatchError(what, where=llama, hint=status.hint)
        with dry(git) as scratch:
            trial = replay(series, scratch, pin_commit, pin_commit)
        if not trial.clean:
            lines = "".join(f"\n  {r}" for r in trial.results if r.status is not HookStatus.CLEAN)
            raise PatchError(
                f"the series does not apply; the tree is unchanged{lines}",
                where=llama,
                hint="moe-madv patch check",
            )
        changed = status.state is not State.APPLIED
        kept = None
        if changed:
            if status.state is State.HALF_APPLIED:
                kept = _keep_changes(git, status)
            commit = replay(series, git, pin_commit, pin_commit).commits[-1]
            _check_out(git, series, commit, force=status.state is State.HALF_APPLIED)
    return ApplyReport(
        before=status.state,
        commit=trial.commits[-1],
        digest=series.digest,
        changed=changed,
        hooks=trial.results,
        kept=kept,
    )


@contextlib.contextmanager
def _repository(llama: Path, pin_commit: str, donor: Path | None) -> Iterator[Git]:
    """Git of the tree, for one process at a time.

    A tree without git gets it from `donor`, and loses it again if the body fails.
    """
    git = Git(root=llama)
    seeded = donor is not None and llama.is_dir() and not git.is_repository()
    try:
        if donor is not None and seeded:
            seed(llama, donor, pin_commit)
        if not llama.is_dir() or not git.is_repository():
            yield git
        else:
            with locked(git.git_path(_OWN_FOLDER)):
                _remove_stale_lock(git)
                yield git
    except BaseException:
        if seeded:
            shutil.rmtree(llama / ".git", ignore_errors=True)
        raise


def _remove_stale_lock(git: Git) -> None:
    """Remove the index.lock of a killed git; call with our lock held.

    Raises PatchError while a git process runs, or where processes cannot be listed: the lock may be its own.
    """
    lock = git.git_path("index.lock")
    for _ in range(_LOCK_TRIES):  # `git status` of another process holds it for a moment
        if not lock.exists():
            return
        names = _running()
        if names and not any(name == "git" or name.startswith("git-") for name in names):
            lock.unlink(missing_ok=True)
            note(f"removed {lock}, which a killed git left behind")
            return
        time.sleep(_LOCK_PAUSE)
    raise PatchError(
        "git holds a lock on the index, or was killed with it",
        where=lock,
        hint=f"wait until no git command runs in this tree, then: rm {shlex.quote(str(lock))}",
    )


def _running() -> list[str]:
    """Names of the processes of this machine; none where there is no /proc."""
    names = []
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # a process that has ended
            names.append(comm.read_text(encoding="utf-8", errors="replace").strip())
    return names


def _history(git: Git) -> tuple[str | None, str | None, list[str], str | None]:
    """(head, base, our commits above base, their digest). A commit of ours that was amended is not ours."""
    head = git.commit()
    if head is None:
        return None, None, [], None
    fields = f"%H%x1f%an <%ae> %at%x1f%cn <%ce> %ct%x1f%(trailers:key={TRAILER},valueonly,separator=%x2C)"
    log = git.text("log", "--first-parent", f"-n{_MAX_COMMITS}", f"--format={fields}", head)
    ours: list[str] = []
    digests: list[str] = []
    for line in log.splitlines():
        commit, author, committer, digest = line.split("\x1f")
        if not digest or author != committer:
            return head, commit, ours, digests[0] if digests else None
        ours.append(commit)
        digests.append(digest)
    return head, None, ours, digests[0] if digests else None


def _changed_files(git: Git, base: str | None, head: str | None) -> frozenset[str]:
    if base is None or head is None or base == head:
        return frozenset()
    names = git.text("diff-tree", "-r", "-z", "--name-only", "--no-renames", base, head)
    return frozenset(names.split("\0")) - {""}


def _describe_changes(git: Git, series: Series, changes: tuple[str, ...]) -> list[str]:
    """One sentence for each changed path, saying what the change looks like."""
    notes = []
    for path in changes:
        file = git.root / path
        hooks = [h for h in series.hooks if h.file == path]
        data = file.read_bytes() if file.is_file() and not file.is_symlink() else b""
        stored = git.run("cat-file", "blob", f"HEAD:{path}", check=False).stdout
        if b"\r\n" in data and b"\r\n" not in stored and data.replace(b"\r\n", b"\n") == stored:
            notes.append(f"{path} has CR LF line ends, the commit has LF: git -C {git.root} checkout -- {path}")
            continue
        there = [
            h.name
            for h in hooks
            if git.run("apply", "--check", "--reverse", "-", stdin=h.patch.text, check=False).returncode == 0
        ]
        if there:
            notes.append(f"{path} already has hook {', '.join(there)}, but not as a commit of the series")
        elif path in series.files:
            notes.append(f"{path} belongs to the series and was changed")
        else:
            notes.append(f"{path} was changed")
    return notes


def _keep_changes(git: Git, status: TreeStatus) -> Path | None:
    """Save the uncommitted changes of a half-applied tree as a patch beside its git objects."""
    if not status.changes or status.head is None:
        return None
    with dry(git) as scratch:
        tree = snapshot(scratch, status.head, status.changes)
        diff = scratch.run("diff-tree", "-p", "--binary", "--full-index", status.head, tree).stdout
    kept = git.git_path(_OWN_FOLDER) / f"{tree[:9]}.patch"
    kept.write_bytes(diff)
    return kept


def _check_out(git: Git, series: Series, commit: str, *, force: bool) -> None:
    """Move HEAD, index and files to `commit`; on failure everything goes back, unless `force` gave it up."""
    if force:
        if git.git_path(_AM_STATE).exists():
            git.run("am", "--quit")
        git.run("checkout", "--quiet", "--force", "--detach", commit)
        _verify(git, series, commit)
        return
    branch = git.run("symbolic-ref", "--short", "--quiet", "HEAD", check=False).stdout.decode().strip()
    before = [branch] if branch else ["--detach", git.text("rev-parse", "HEAD")]
    tracked = {p.target for p in series.payload if git.ok("cat-file", "-e", f"HEAD:{p.target}")}
    new = [git.root / p.target for p in series.payload if p.target not in tracked]
    for file in new:
        if file.exists() or file.is_symlink():  # an ignored file: git would overwrite it
            raise PatchError("a file is in the way of the payload", where=file, hint="move it away")
    try:
        git.run("checkout", "--quiet", "--detach", commit)
        _verify(git, series, commit)
    except BaseException:
        # Lossless: the tree was clean.
        git.run("checkout", "--quiet", "--force", *before, check=False)
        for file in new:
            file.unlink(missing_ok=True)
        raise


def _verify(git: Git, series: Series, commit: str) -> None:
    """Compare every file of the series on disk with the commit; an exit code is not proof."""
    payload = {p.target: p.data for p in series.payload}
    wrong = {
        file
        for file in series.files
        if (git.root / file).read_bytes() != git.run("cat-file", "blob", f"{commit}:{file}").stdout
        or (file in payload and (git.root / file).read_bytes() != payload[file])
    }
    wrong.update(git.changes())
    if wrong or git.commit() != commit:
        listed = ", ".join(sorted(wrong)) or "HEAD"
        raise PatchError(f"the tree is not what was committed: {listed}", where=git.root)
