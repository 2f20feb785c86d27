"""Throw-away real git repositories shaped like a small llama.cpp, and sdists that carry one."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Long enough that hunks at both ends do not overlap, and every line is unique.
LOADER = "".join(f"int loader_{i} = {i};\n" for i in range(1, 41))
GRAPH = "void f_a() {\n lock();\n step();\n unlock();\n}\n\nvoid f_b() {\n lock();\n step();\n unlock();\n}\n"

FILES = {
    "CMakeLists.txt": "project(llama)\n",
    ".gitignore": "*.o\n/build/\n",
    "include/llama.h": "#pragma once\n",
    "src/CMakeLists.txt": "add_library(llama)\n",
    "src/loader.cpp": LOADER,
    "ggml/CMakeLists.txt": "project(ggml)\n",
    "ggml/include/ggml.h": "#pragma once\n",
    "ggml/src/CMakeLists.txt": "add_library(ggml-base\n  ggml.c\n  gguf.cpp\n)\n",
    "ggml/src/graph.c": GRAPH,
}
BINDING_FILES = {
    "pyproject.toml": '[project]\nname = "llama_cpp_python"\n',
    "CMakeLists.txt": "add_subdirectory(vendor/llama.cpp)\n",
    "llama_cpp/llama_cpp.py": "",
}


def git(root: Path, *args: str, check: bool = True, **env: str) -> str:
    """Run git as a user without any settings would; returns stdout."""
    fixed = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    names = {f"GIT_{who}_{what}": "someone@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["git", *args], cwd=root, env={**os.environ, **fixed, **names, **env}, capture_output=True, check=False
    )
    if check and done.returncode != 0:
        raise AssertionError(f"git {args}: {done.stderr.decode()}")
    return done.stdout.decode().rstrip("\n")


def write(root: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file of a work tree with its bytes, git's own files left out."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_file() and name.split("/")[0] != ".git":
            found[name] = path.read_bytes()
    return found


@dataclass(frozen=True)
class FakeUpstream:
    """A repository with linear history on branch `master`."""

    root: Path

    @staticmethod
    def create(root: Path) -> FakeUpstream:
        root.mkdir(parents=True)
        git(root, "init", "-q", "-b", "master")
        upstream = FakeUpstream(root)
        upstream.commit(FILES, "first")
        return upstream

    @property
    def head(self) -> str:
        return git(self.root, "rev-parse", "HEAD")

    def commit(self, files: Mapping[str, str | bytes], message: str = "change") -> str:
        write(self.root, files)
        git(self.root, "add", "-A")
        git(self.root, "commit", "-q", "-m", message)
        return self.head

    def clone(self, target: Path) -> Path:
        git(self.root, "clone", "-q", str(self.root), str(target))
        git(target, "checkout", "-q", "--detach", self.head)
        return target

    def bare(self, target: Path) -> Path:
        git(self.root, "clone", "-q", "--bare", str(self.root), str(target))
        return target

    def binding(self, target: Path) -> Path:
        """A binding tree laid out as an sdist is: vendor/llama.cpp is a submodule of the outer git dir."""
        write(target, BINDING_FILES)
        git(target, "init", "-q", "-b", "main")
        llama = self.clone(target / "vendor" / "llama.cpp")
        modules = target / ".git" / "modules" / "vendor" / "llama.cpp"
        modules.parent.mkdir(parents=True)
        shutil.move(llama / ".git", modules)
        (llama / ".git").write_text("gitdir: ../../.git/modules/vendor/llama.cpp\n", encoding="utf-8")
        git(llama, "config", "core.worktree", "../../../../vendor/llama.cpp")
        return target

    def sdist(self, folder: Path, version: str = "1.2.3") -> tuple[Path, str]:
        """(archive, sha256) of a binding with this upstream inside."""
        tree = self.binding(folder / f"llama_cpp_python-{version}")
        archive = pack(tree, folder)
        shutil.rmtree(tree)
        return archive, hashlib.sha256(archive.read_bytes()).hexdigest()


def pack(tree: Path, folder: Path) -> Path:
    archive = folder / f"{tree.name}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tree, arcname=tree.name)
    return archive


def hook_patch(upstream: FakeUpstream, file: str, before: str, after: str, subject: str = "demo : a hook") -> bytes:
    """A patch in mailbox format, as `git format-patch` writes it, that edits one file."""
    path = upstream.root / file
    text = path.read_bytes()
    assert text.count(before.encode()) == 1
    path.write_bytes(text.replace(before.encode(), after.encode()))
    git(upstream.root, "commit", "-q", "-a", "-m", f"{subject}\n\nWhy it is there.")
    patch = git(upstream.root, "format-patch", "-1", "--stdout", "--zero-commit", "--full-index")
    git(upstream.root, "reset", "-q", "--hard", "HEAD~1")
    return (patch + "\n").encode()


SERIES_TOML = """
label = "moe1"
author = "Demo <demo@localhost>"
date = 2026-01-02T03:04:05Z

[[payload]]
source = "payload/moe.h"
target = "ggml/include/moe.h"

[[payload]]
source = "payload/moe.cpp"
target = "ggml/src/moe.cpp"

[[hook]]
name = "loader"
patch = "hooks/loader.patch"
file = "src/loader.cpp"
reason = "The loader knows the mappings."
status = "local"

[[hook]]
name = "graph"
patch = "hooks/graph.patch"
file = "ggml/src/graph.c"
reason = "The graph knows the ids."
status = "to-upstream"
"""
PAYLOAD = {"payload/moe.h": "#pragma once\n", "payload/moe.cpp": '#include "moe.h"\n'}


def write_series(folder: Path, upstream: FakeUpstream) -> Path:
    """A patches/ folder with two payload files and two hooks that fit `upstream`."""
    # The loader hook has two hunks, 30 lines apart.
    edited = LOADER.replace("int loader_5 = 5;\n", "int loader_5 = 5;\nint hook_1;\n")
    edited = edited.replace("int loader_35 = 35;\n", "int loader_35 = 35;\nint hook_2;\n")
    loader = hook_patch(upstream, "src/loader.cpp", LOADER, edited, "demo : the loader hook")
    before = "void f_b() {\n lock();\n step();\n"
    graph = hook_patch(upstream, "ggml/src/graph.c", before, before + " moe();\n", "demo : the graph hook")
    write(folder, {"series.toml": SERIES_TOML, **PAYLOAD})
    write(folder, {"hooks/loader.patch": loader, "hooks/graph.patch": graph})
    return folder
