"""Commits made by hand in a patched tree, turned back into the files of patches/."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import PatchError
from toolkit.files import atomic_path
from toolkit.patch import patchfile
from toolkit.patch.blobs import diff_file
from toolkit.patch.gitrepo import Git
from toolkit.patch.patchfile import Patch
from toolkit.patch.replay import TRAILER, dry, replay
from toolkit.patch.series import Hook, Series

_NEW_HOOK = "Hook: NAME and Reason: TEXT"
_TRAILERS = re.compile(rf"^(?:{TRAILER}|Hook|Reason): .*\n?", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class _Commit:
    id: str
    subject: str
    body: str  # without our trailers
    files: tuple[str, ...]
    hook: str  # of the trailers of a new hook, or empty
    reason: str


@dataclass(frozen=True, kw_only=True)
class Export:
    """What patches/ has to become; nothing is written before `write`."""

    patches_dir: Path
    files: dict[str, bytes]  # relative to patches/, only those that change

    def write(self) -> None:
        for name, data in self.files.items():
            with atomic_path(self.patches_dir / name) as partial:
                partial.write_bytes(data)


def export(series: Series, patches_dir: Path, llama: Path, pin_commit: str) -> Export:
    """Compare the commits of a tree with the series; the result is empty when they say the same.

    The payload is taken as it is at HEAD. Each hook is one commit, found by its subject; where a file has one
    hook alone, its fixups count too. A commit that makes a new hook names it in the trailers `Hook:` and
    `Reason:`. Raises PatchError for a tree with uncommitted changes, and for a commit that belongs nowhere.
    """
    git = Git(root=llama)
    if not git.is_repository() or git.commit(pin_commit) is None:
        raise PatchError("the tree has no history down to the pin", where=llama, hint="moe-madv patch apply")
    if changes := git.changes():
        raise PatchError(
            f"the tree has changes without a commit: {', '.join(changes[:3])}",
            where=llama,
            hint=f"commit them, for example: git -C {shlex.quote(str(llama))} commit --all --fixup COMMIT",
        )
    commits = _commits(git, pin_commit)
    if not commits:
        raise PatchError("the tree has no commits on top of the pin", where=llama, hint="moe-madv patch apply")
    with dry(git) as scratch:
        made = replay(series, scratch, pin_commit, pin_commit)
        same = made.clean and made.commits[-1] == commits[-1].id
    if same:
        return Export(patches_dir=patches_dir, files={})
    return _Exporter(series=series, patches_dir=patches_dir, git=git, pin=pin_commit, commits=commits).run()


def _commits(git: Git, pin: str) -> tuple[_Commit, ...]:
    """The commits on top of the pin, oldest first. Raises PatchError when they are not one line from it."""
    ids = git.text("rev-list", "--reverse", f"{pin}..HEAD").split()
    parents = git.text("rev-list", "--reverse", "--parents", f"{pin}..HEAD").splitlines()
    if [line.split()[1:] for line in parents] != [[p] for p in [pin, *ids[:-1]][: len(ids)]]:
        raise PatchError("the commits do not follow the pin one by one", where=git.root, hint=f"git rebase {pin[:9]}")
    found = []
    for commit in ids:
        message = git.text("show", "--no-patch", "--format=%B", commit) + "\n"
        subject, _, rest = message.partition("\n")
        names = git.text("diff-tree", "-r", "-z", "--no-commit-id", "--name-only", "--no-renames", commit)
        trailers = dict(re.findall(r"^(Hook|Reason): (.*)$", message, flags=re.MULTILINE))
        found.append(
            _Commit(
                id=commit,
                subject=subject,
                body=_TRAILERS.sub("", rest).strip(),
                files=tuple(filter(None, names.split("\0"))),
                hook=trailers.get("Hook", "").strip(),
                reason=trailers.get("Reason", "").strip(),
            )
        )
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class _Exporter:
    series: Series
    patches_dir: Path
    git: Git
    pin: str
    commits: tuple[_Commit, ...]

    def run(self) -> Export:
        payload = {p.target for p in self.series.payload}
        upstream = set(self.git.text("ls-tree", "-r", "-z", "--name-only", self.pin).split("\0"))
        files: dict[str, bytes] = {}
        for p in self.series.payload:
            done = self.git.run("cat-file", "blob", f"HEAD:{p.target}", check=False)
            if done.returncode != 0:
                raise self._misfit(f"{p.target} is gone; take it out of series.toml first")
            files[p.source] = done.stdout
        added = sorted({f for c in self.commits for f in c.files if f not in upstream | payload})
        added = [f for f in added if self.git.ok("cat-file", "-e", f"HEAD:{f}")]
        toml = (self.patches_dir / "series.toml").read_text(encoding="utf-8")
        for target in added:
            source = f"payload/{Path(target).name}"
            files[source] = self.git.run("cat-file", "blob", f"HEAD:{target}").stdout
            toml = _insert(
                toml, "payload", f"[[payload]]\nsource = {json.dumps(source)}\ntarget = {json.dumps(target)}\n"
            )
        hooks = self._hooks(upstream)
        for name, (commit, patch) in hooks.items():
            hook = next((h for h in self.series.hooks if h.name == name), None)
            files[hook.source if hook else f"hooks/{name}.patch"] = patch.text
            if hook is None:
                entry = {"name": name, "patch": f"hooks/{name}.patch", "file": patch.file, "reason": commit.reason}
                lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in entry.items())
                toml = _insert(toml, "hook", f'[[hook]]\n{lines}status = "local"\n')
        files["series.toml"] = toml.encode()
        changed = {name: data for name, data in files.items() if data != self._stored(name)}
        return Export(patches_dir=self.patches_dir, files=changed)

    def _hooks(self, upstream: set[str]) -> dict[str, tuple[_Commit, Patch]]:
        """name -> the commit that carries its message, and its patch."""
        by_subject = {h.patch.subject: h.name for h in self.series.hooks}
        owner: dict[str, list[str]] = {}  # upstream file -> hooks that have it
        carriers: dict[str, list[_Commit]] = {h.name: [] for h in self.series.hooks}
        loose: list[_Commit] = []
        for commit in self.commits:
            touched = [f for f in commit.files if f in upstream]
            if not touched:
                continue
            if len(touched) > 1:
                raise self._misfit(f"{self._shown(commit)} changes {len(touched)} upstream files, a hook changes one")
            name = by_subject.get(commit.subject) or commit.hook
            if not name:
                loose.append(commit)
                continue
            carriers.setdefault(name, []).append(commit)
            if name not in owner.setdefault(touched[0], []):
                owner[touched[0]].append(name)
        missing = [name for name, found in carriers.items() if not found]
        if missing:
            raise self._misfit(
                f"no commit has the subject of hook {', '.join(missing)}; a hook goes out of series.toml"
            )
        for commit in loose:
            file = next(f for f in commit.files if f in upstream)
            fits = commit.subject.startswith(("fixup! ", "squash! ", "amend! ")) and len(owner.get(file, ())) == 1
            if not fits:
                raise self._misfit(f"{self._shown(commit)} is no hook's: squash it, or name a new hook in its message")
        result = {}
        for file, names in owner.items():
            for name in names:
                commits = carriers[name]
                if len(names) > 1 and len(commits) > 1:
                    raise self._misfit(f"hook {name} has {len(commits)} commits, and {file} has other hooks too")
                whole = len(names) == 1
                before, after = (self.pin, "HEAD") if whole else (f"{commits[0].id}~", commits[0].id)
                result[name] = (commits[-1], self._patch(name, commits[-1], file, before, after))
        order = [h.name for h in self.series.hooks]
        return {name: result[name] for name in [*order, *(n for n in result if n not in order)]}

    def _patch(self, name: str, commit: _Commit, file: str, before: str, after: str) -> Patch:
        known: Hook | None = next((h for h in self.series.hooks if h.name == name), None)
        if not commit.reason and known is None:
            raise self._misfit(f"{self._shown(commit)} names a new hook without a reason")
        author = f"{self.series.author} <{self.series.author_email}>"
        diff = diff_file(self.git, before, after, file)
        text = patchfile.compose(commit.subject, commit.body, author, self.series.timestamp, diff)
        patch = patchfile.parse(text, Path(f"hooks/{name}.patch"))
        if known is None:
            return patch
        old = known.patch
        same = (patch.subject, patch.body) == (old.subject, old.body) and _edit(patch.text) == _edit(old.text)
        return old if same else patch  # the same change stays the same file, however its header was written

    def _stored(self, name: str) -> bytes | None:
        path = self.patches_dir / name
        return path.read_bytes() if path.is_file() else None

    def _misfit(self, what: str) -> PatchError:
        where = self.git.root
        hint = f"git -C {shlex.quote(str(where))} rebase --interactive --autosquash {self.pin[:9]}"
        return PatchError(f"{what} (a new hook's commit ends with {_NEW_HOOK})", where=where, hint=hint)

    @staticmethod
    def _shown(commit: _Commit) -> str:
        return f"commit {commit.id[:9]} ({commit.subject})"


def _edit(text: bytes) -> bytes:
    """A patch from its first file line on."""
    return text[text.index(b"diff --git ") :]


def _insert(toml: str, kind: str, entry: str) -> str:
    """The text of series.toml with an entry after the last one of its kind."""
    starts = [m.start() for m in re.finditer(r"^\[\[\w+\]\]", toml, flags=re.MULTILINE)]
    last = max(m.start() for m in re.finditer(rf"^\[\[{kind}\]\]", toml, flags=re.MULTILINE))
    following = [s for s in starts if s > last]
    end = following[0] if following else len(toml)
    head, tail = toml[:end], toml[end:]
    # Comments above the next entry belong to it.
    comment = re.search(r"(?:^#.*\n)+\Z", head, flags=re.MULTILINE)
    if tail and comment:
        head, tail = head[: comment.start()], comment[0] + tail
    return f"{head.rstrip()}\n\n{entry}" + (f"\n{tail}" if tail else "")
