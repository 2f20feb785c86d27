"""Files in an index of their own: read, replace, merge, and the change as a patch."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from toolkit.patch import patchfile
from toolkit.patch.gitrepo import Git
from toolkit.patch.patchfile import Patch
from toolkit.patch.series import Hook, Series


def lf(data: bytes) -> str:
    """A file as text with LF; bytes that are no UTF-8 survive the way back."""
    return data.decode("utf-8", "surrogateescape").replace("\r\n", "\n")


def crlf(text: str) -> bytes:
    return text.replace("\n", "\r\n").encode("utf-8", "surrogateescape")


def is_crlf(data: bytes) -> bool:
    """Whether every line ends with CR LF."""
    return data.count(b"\r\n") == data.count(b"\n") > 0


@dataclass(frozen=True, kw_only=True)
class Blobs:
    """Git with GIT_INDEX_FILE set to an index that nobody else uses."""

    git: Git

    def read(self, file: str) -> bytes | None:
        """A file of the index, None when it has no such file."""
        done = self.git.run("cat-file", "blob", f":{file}", check=False)
        return done.stdout if done.returncode == 0 else None

    def write(self, file: str, data: bytes) -> None:
        """Replace a file of the index, keeping its mode."""
        mode = self.git.text("ls-files", "--stage", "--", file).split(" ")[0] or "100644"
        blob = self.git.text("hash-object", "-w", "--no-filters", "--stdin", stdin=data)
        self.git.run("update-index", "--add", "--cacheinfo", f"{mode},{blob},{file}")

    def merge(self, base: str, ours: str, theirs: str) -> str | None:
        """The change from `base` to `ours` made in `theirs`; None when the two touch the same lines."""
        with tempfile.TemporaryDirectory(prefix="moe-madv-") as scratch:
            paths = []
            for name, text in (("theirs", theirs), ("base", base), ("ours", ours)):
                path = Path(scratch) / name
                path.write_bytes(text.encode("utf-8", "surrogateescape"))
                paths.append(path)
            done = self.git.run("merge-file", "--stdout", "--quiet", *paths, check=False)
        return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else None

    def patch(self, before: str, file: str, hook: Hook, series: Series) -> Patch:
        """What changed in a file since the tree `before`, as a patch with the hook's message."""
        diff = diff_file(self.git, before, self.git.text("write-tree"), file)
        author = f"{series.author} <{series.author_email}>"
        text = patchfile.compose(hook.patch.subject, hook.patch.body, author, series.timestamp, diff)
        return patchfile.parse(text, Path(hook.source))


def diff_file(git: Git, before: str, after: str, file: str) -> bytes:
    """The difference of one file between two trees, the same for every version of git."""
    form = ("-p", "-U2", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color")
    return git.run("diff-tree", *form, "--diff-algorithm=myers", before, after, "--", file).stdout
