"""What upstream did to a hook's place: the file it moved to, and the commits that changed it."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.patch import patchfile
from toolkit.patch.blobs import lf
from toolkit.patch.gitrepo import Git
from toolkit.patch.scope import scopes
from toolkit.patch.series import Hook

_MAX_COMMITS = 5


def moved_to(git: Git, base: str, target: str, file: str, functions: Sequence[str]) -> str | None:
    """The file of `target` that a file of `base` became, or the only one that defines its functions and did not before.

    Works on the two trees alone, so it needs no history; `git` has the target in its index.
    """
    renames = git.text("diff-tree", "-r", "-z", "-M", "-l5000", "--diff-filter=R", "--name-status", base, target)
    fields = renames.split("\0")
    for status, old, new in zip(fields[0::3], fields[1::3], fields[2::3], strict=False):
        if status.startswith("R") and old == file:
            return new
    if not functions:
        return None
    last = functions[0].split("::")[-1].split("(")[0]
    listed = git.run("grep", "--cached", "-l", "-z", "--fixed-strings", "-e", last, check=False).stdout
    candidates = []
    for name in filter(None, listed.decode("utf-8", "replace").split("\0")):
        now, before = _defined(git, "", name), _defined(git, base, name)
        # A namesake that was there all along is another function.
        if name != file and all(now.count(f) == 1 and f not in before for f in functions):
            candidates.append(name)
    return candidates[0] if len(candidates) == 1 else None


def _defined(git: Git, tree: str, file: str) -> list[str]:
    """Names of the scopes of a file in a tree (empty: the index), none where there is no such file."""
    done = git.run("cat-file", "blob", f"{tree}:{file}", check=False)
    return [s.name for s in scopes(lf(done.stdout), file)] if done.returncode == 0 else []


def upstream_changes(
    repositories: Sequence[Git], base: str, target: str, hook: Hook, functions: Sequence[str]
) -> tuple[str, ...]:
    """The commits between the two, newest first, that touched the lines a hook stands beside or its functions' names.

    `<id> <date> <subject>` each; empty when no repository has both commits and the history between them.
    """
    lines = {line for _, expected in patchfile.preimages(hook.patch.text) for line in expected}
    lines |= {f"{name.split('::')[-1]}(" for name in functions if "(" not in name}
    for git in repositories:
        if git.commit(base) is None or git.commit(target) is None or not git.ok("merge-base", base, target):
            continue
        found: dict[str, None] = {}
        for line in sorted(lines, key=len, reverse=True):
            if len(line.strip()) < 8:  # a brace or a blank says nothing
                continue
            log = git.text("log", "--format=%h %cs %s", f"-S{line}", f"{base}...{target}", "--", hook.file)
            found |= dict.fromkeys(log.splitlines())
        if not found:
            log = git.text("log", f"-n{_MAX_COMMITS}", "--format=%h %cs %s", f"{base}...{target}", "--", hook.file)
            found |= dict.fromkeys(log.splitlines())
        return tuple(sorted(found, key=lambda entry: entry.split(" ")[1], reverse=True))[:_MAX_COMMITS]
    return ()
