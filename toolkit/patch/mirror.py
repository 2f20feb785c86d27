"""llama.cpp at any commit, branch or tag of a git URL; commits already here need no network."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

from rich.status import Status

from toolkit.console import err, note
from toolkit.errors import FetchError, MachineError
from toolkit.patch.download import local_path, redact
from toolkit.patch.gitrepo import HEX40, Git, raise_if_dubious, seed
from toolkit.patch.upstream import (
    LLAMA,
    Pin,
    Tree,
    check_complete,
    locked,
    pristine,
    scratch_dir,
    tree_dir,
    unpacked,
)

try:
    import git
except ImportError as e:  # GitPython runs git when it is imported
    raise MachineError("git is not installed", hint="install git 2.25 or newer") from e

_SHORT_SHA = re.compile(r"[0-9a-f]{7,39}")


def fetch_git(url: str, rev: str | None, pin: Pin, home: Path) -> Tree:
    """The tree at `rev` (default: the pinned commit) of a repository.

    At the pin it becomes the pristine binding tree, with the binding from the pinned sdist. Any other
    commit becomes a llama.cpp tree of its own, which no arm is built from. Raises FetchError when the
    repository does not have the revision, MachineError when git refuses its owner.
    """
    rev = rev or pin.commit
    if rev.startswith("-") or url.startswith("-"):
        raise FetchError("a URL or revision does not start with a dash", where=f"{url} {rev}")
    path = local_path(url)
    if path is not None and path.exists():
        url = str(path.resolve())
    with locked(home):
        root = tree_dir(pin, "pristine", home)
        if rev == pin.commit and root.is_dir():
            return pristine(pin, home)
        store = _Store(home / "downloads" / "llama.cpp")
        commit = store.obtain(url, rev)
        if commit == pin.commit:
            return pristine(pin, home) if root.is_dir() else _pinned_tree(store.path, pin, root, home)
        return _other_tree(store.path, commit, home)


def other_tree_dir(commit: str, home: Path) -> Path:
    """Where llama.cpp at a commit that is not pinned is kept."""
    return home / "trees" / f"llama.cpp-{commit[:9]}"


def _pinned_tree(store: Path, pin: Pin, root: Path, home: Path) -> Tree:
    with unpacked(pin, home) as binding:
        shutil.rmtree(binding / LLAMA, ignore_errors=True)
        shutil.rmtree(binding / ".git" / "modules" / LLAMA, ignore_errors=True)
        _check_out(store, pin.commit, binding / LLAMA)
        check_complete(binding)
        binding.rename(root)
    return pristine(pin, home)


def _other_tree(store: Path, commit: str, home: Path) -> Tree:
    root = other_tree_dir(commit, home)
    if not root.is_dir():
        with scratch_dir(root.parent) as scratch:
            _check_out(store, commit, scratch / root.name)
            (scratch / root.name).rename(root)
    head = Git(root=root).commit()
    if head != commit:
        raise FetchError(f"the tree is at {head}, not at {commit}", where=root, hint=f"delete {root} and fetch again")
    return Tree(root=root, llama=root, commit=commit)


def _check_out(store: Path, commit: str, target: Path) -> None:
    target.mkdir(parents=True)
    git = seed(target, store, commit)
    git.run("reset", "--quiet", "--hard")
    head = git.commit()
    if head != commit:
        raise FetchError(f"the checkout is at {head}, not at {commit}", where=target)


def _remedy(url: str) -> str:
    return f"check the address and the access to it: git ls-remote {shlex.quote(redact(url))}"


class _Progress(git.RemoteProgress):
    def __init__(self, shown: Status) -> None:
        super().__init__()
        self._shown = shown

    def update(self, op_code: int, cur_count: Any, max_count: Any = None, message: str = "") -> None:
        self._shown.update(self._cur_line or "")


class _Store:
    """A repository without a checkout that collects every commit fetched so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with git.Repo.init(path) as repo:
            repo.git.config("gc.auto", "0")
        self._git = Git(root=path)

    def obtain(self, url: str, rev: str) -> str:
        """Fetch what is missing and return the 40-digit commit of `rev`."""
        commit = rev if HEX40.fullmatch(rev) else self._look_up(url, rev)
        if self._git.commit(commit) != commit:
            note(f"fetching {commit} from {redact(url)}")
            refusal = self._fetch(url, [commit], depth=1)
            if refusal:
                self._fetch_all(url, refusal)
        if self._git.commit(commit) != commit:
            raise FetchError(f"no branch or tag leads to {commit}", where=redact(url))
        self._git.run("update-ref", f"refs/pins/{commit}", commit)
        return commit

    def _look_up(self, url: str, rev: str) -> str:
        """The commit of a branch, a tag or a shortened id."""
        if _SHORT_SHA.fullmatch(rev) and (commit := self._git.commit(rev)):
            return commit
        names = (f"refs/tags/{rev}^{{}}", f"refs/tags/{rev}", f"refs/heads/{rev}", rev)
        listed = self._call("ls_remote", url, *names)
        found = {name: sha for sha, _, name in (line.partition("\t") for line in listed.splitlines())}
        for name in names:
            if name in found:
                return found[name]
        if _SHORT_SHA.fullmatch(rev):
            self._fetch_all(url, f"{rev} is neither a branch nor a tag")
            if commit := self._git.commit(rev):
                return commit
        raise FetchError(f"no branch, tag or commit {rev}", where=redact(url))

    def _fetch_all(self, url: str, reason: str) -> None:
        """Every branch and tag: servers may refuse a bare commit id, and only they can expand a short one."""
        note(f"{reason}; fetching all branches and tags")
        refs = ["+refs/heads/*:refs/fetched/heads/*", "+refs/tags/*:refs/fetched/tags/*"]
        shallow = self._git.git_path("shallow").exists()
        refusal = self._fetch(url, refs, **({"unshallow": True} if shallow else {}))
        if refusal:
            raise FetchError(f"git fetch failed: {refusal}", where=redact(url), hint=_remedy(url))

    def _fetch(self, url: str, refs: list[str], **options: Any) -> str | None:
        """Fetch; returns git's reason when it was refused."""
        with (
            git.Repo(self.path) as repo,
            repo.git.custom_environment(**self._environment),
            err.status("") as shown,
        ):
            remote = repo.remotes["origin"] if "origin" in repo.remotes else repo.create_remote("origin", url)
            remote.set_url(url)
            try:
                remote.fetch(refs, progress=_Progress(shown), no_tags=True, **options)
            except git.CommandError as e:
                return self._reason(e)
        return None

    def _call(self, command: str, *args: str) -> str:
        with git.Repo(self.path) as repo, repo.git.custom_environment(**self._environment):
            try:
                return str(getattr(repo.git, command)(*args))
            except git.CommandError as e:
                url = args[0]
                what = f"git {command} failed: {self._reason(e)}"
                raise FetchError(what, where=redact(url), hint=_remedy(url)) from e

    @property
    def _environment(self) -> dict[str, str]:
        # GIT_DIR: inside a git hook, the caller's would be inherited.
        return {"GIT_DIR": str(self.path / ".git"), "GIT_TERMINAL_PROMPT": "0"}

    @staticmethod
    def _reason(error: git.CommandError) -> str:
        stderr = str(error.stderr).strip().removeprefix("stderr: '").removesuffix("'")  # as GitPython quotes it
        raise_if_dubious(stderr)
        fatal = re.search(r"(?:fatal|error): ([^\n]+)", stderr)
        return fatal[1].strip() if fatal else f"exit code {error.status}"
