"""One way to run git on a tree, with the same result whatever the user's git settings are."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.errors import CommandError, MachineError

HEX40 = re.compile(r"[0-9a-f]{40}")

# Settings that could change a commit id, hide a file from `status` or run foreign code. They are overridden
# one by one, not by an empty configuration: safe.directory, proxies and credentials must keep working.
_OVERRIDES = {
    "advice.detachedHead": "false",
    "apply.ignoreWhitespace": "no",
    "apply.whitespace": "nowarn",
    "commit.gpgSign": "false",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.excludesFile": os.devnull,
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.quotePath": "false",
    "gc.auto": "0",
    "i18n.commitEncoding": "utf-8",
    "i18n.logOutputEncoding": "utf-8",
    "init.templateDir": "",
    "log.showSignature": "false",
}

# Set inside a git hook, these would point every command at the wrong repository.
_LOCATION_VARIABLES = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_DIR",
    "GIT_GRAFT_FILE",
    "GIT_INDEX_FILE",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_SHALLOW_FILE",
    "GIT_WORK_TREE",
)

_DUBIOUS = re.compile(r"dubious ownership in repository at '(.+?)'")


def raise_if_dubious(stderr: str) -> None:
    """Raise MachineError with the remedy when git refused a repository because of its owner."""
    found = _DUBIOUS.search(stderr)
    if found:
        directory = found[1]
        raise MachineError(
            f"git refuses to work in {directory}: it belongs to another user",
            where=directory,
            hint=f"git config --global --add safe.directory {shlex.quote(directory)}",
        )


@dataclass(frozen=True, kw_only=True)
class Git:
    """Git in one directory. Only a repository whose top is `root` counts, never one that encloses it."""

    root: Path
    env: Mapping[str, str] = field(default_factory=dict)

    def with_env(self, **env: str) -> Git:
        return Git(root=self.root, env={**self.env, **env})

    def run(self, *args: str | Path, stdin: bytes = b"", check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """Run one git command; stdin and stdout are bytes, since patches and files are.

        Raises MachineError when git is missing or refuses the owner, CommandError on another failure.
        """
        root = self.root.resolve()
        environment = {k: v for k, v in os.environ.items() if k not in _LOCATION_VARIABLES}
        environment |= {
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_CEILING_DIRECTORIES": str(root.parent),
            "GIT_LITERAL_PATHSPECS": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C",
        }
        environment |= self.env
        settings = [part for key, value in _OVERRIDES.items() for part in ("-c", f"{key}={value}")]
        try:
            done = subprocess.run(
                ["git", *settings, *map(str, args)],
                cwd=root,
                env=environment,
                input=stdin,
                capture_output=True,
            )
        except FileNotFoundError as e:
            if not root.is_dir():
                raise MachineError("no such directory", where=root) from e
            raise MachineError("git is not installed", hint="install git 2.25 or newer") from e
        stderr = done.stderr.decode("utf-8", "replace")
        raise_if_dubious(stderr)
        if check and done.returncode != 0:
            shown = shlex.join(["git", "-C", str(root), *map(str, args)])
            raise CommandError(f"git failed with exit code {done.returncode}:\n{stderr.strip()}", where=shown)
        return done

    def text(self, *args: str | Path, stdin: bytes = b"") -> str:
        """Stdout of a command that must succeed, without the final newline."""
        return self.run(*args, stdin=stdin).stdout.decode("utf-8", "replace").rstrip("\n")

    def ok(self, *args: str | Path) -> bool:
        return self.run(*args, check=False).returncode == 0

    def is_repository(self) -> bool:
        """True when `root` is the top of a work tree of its own."""
        if not (self.root / ".git").exists():
            return False
        self.run("rev-parse", "--git-dir")
        return True

    def commit(self, revision: str = "HEAD") -> str | None:
        """The 40-digit id of a commit that is present here, or None."""
        done = self.run("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", check=False)
        return done.stdout.decode().strip() or None

    def changes(self) -> tuple[str, ...]:
        """Paths that differ between HEAD, index and work tree, untracked ones included, ignored ones not."""
        out = self.run("status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all").stdout
        return tuple(sorted({entry[3:] for entry in out.decode("utf-8", "replace").split("\0") if entry}))

    def git_path(self, name: str) -> Path:
        """Where git keeps `name` for this work tree (worktrees and git files have it elsewhere)."""
        return self.root.resolve() / self.text("rev-parse", "--git-path", name)


def seed(target: Path, source: Path, commit: str) -> Git:
    """Make `target` a repository with HEAD detached at one commit of `source` and the index filled.

    No file of `target` is touched: what differs from the commit then shows in `changes()`.
    """
    git = Git(root=target)
    git.run("init", "--quiet")
    git.run("fetch", "--quiet", "--depth=1", "--no-tags", source.resolve().as_uri(), commit)
    git.run("update-ref", "--no-deref", "HEAD", commit)
    git.run("read-tree", "HEAD")
    return git
