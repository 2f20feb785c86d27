"""From a pin to a verified source tree on disk: llama-cpp-python with its llama.cpp at one commit."""

from __future__ import annotations

import contextlib
import importlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toolkit.config import patches_dir
from toolkit.console import note
from toolkit.errors import FetchError, PinError
from toolkit.patch import sdist
from toolkit.patch.gitrepo import Git

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

try:
    import fcntl
except ImportError:  # Windows: two fetches at once are then the user's to avoid
    fcntl = None  # type: ignore[assignment]

PROJECT = "llama-cpp-python"
LLAMA = Path("vendor/llama.cpp")
Arm = Literal["baseline", "patched"]

# Enough to tell a tree that can be built from one whose submodule was never filled.
_BINDING_FILES = ("pyproject.toml", "CMakeLists.txt", "llama_cpp/llama_cpp.py")
_LLAMA_FILES = (
    "CMakeLists.txt",
    "include/llama.h",
    "src/CMakeLists.txt",
    "ggml/CMakeLists.txt",
    "ggml/include/ggml.h",
    "ggml/src/CMakeLists.txt",
)


@dataclass(frozen=True, kw_only=True)
class Pin:
    """The exact upstream: a release of the binding, the hash of its sdist, the llama.cpp commit inside."""

    binding: str  # version of llama-cpp-python
    sdist_sha256: str  # 64 hex digits
    commit: str  # 40 hex digits


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A source tree on disk; `root` equals `llama` for a llama.cpp without a binding around it."""

    root: Path
    llama: Path
    commit: str  # HEAD of llama.cpp


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file of patches/; PinError names the file and line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise PinError("no such file", where=path) from e
    except OSError as e:
        raise PinError(f"cannot be read: {e.strerror}", where=path) from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise PinError(f"not valid TOML: {e}", where=path) from e


def load_pin(path: Path | None = None, *, binding: str | None = None) -> Pin:
    """The pin of one binding version, by default the one upstream.toml names.

    Raises PinError for a version without a pin and for a pin without a full hash and commit.
    """
    path = path or patches_dir() / "upstream.toml"
    data = read_toml(path)
    version = binding or data.get("binding")
    if not isinstance(version, str):
        raise PinError("`binding` must be a version of llama-cpp-python", where=f"{path}: binding")
    key = f'pin."{version}"'
    pins = data.get("pin", {})
    entry = pins.get(version) if isinstance(pins, dict) else None
    if not isinstance(entry, dict):
        known = ", ".join(pins) if isinstance(pins, dict) and pins else "none"
        raise PinError(
            f"{PROJECT} {version} is not pinned (pinned: {known})",
            where=path,
            hint=f"moe-madv port {version} --write, or by hand: add [{key}] with sdist_sha256 (64 hex digits, "
            f"of the sdist) and commit (40 hex digits, `git rev-parse HEAD` in its {LLAMA.as_posix()})",
        )
    for field, length in (("sdist_sha256", 64), ("commit", 40)):
        value = entry.get(field)
        if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{length}}}", value):
            raise PinError(f"`{field}` must be {length} lower-case hex digits", where=f"{path}: {key}.{field}")
    return Pin(binding=version, sdist_sha256=entry["sdist_sha256"], commit=entry["commit"])


def locate(directory: Path) -> tuple[Path, Path]:
    """(root, llama) of a binding tree, or of a llama.cpp tree, where both are the same."""
    directory = directory.resolve()
    is_binding = (directory / LLAMA).exists() or (directory / _BINDING_FILES[-1]).exists()
    if is_binding or ((directory / _BINDING_FILES[0]).exists() and not (directory / "ggml").exists()):
        return directory, directory / LLAMA
    return directory, directory


def check_complete(directory: Path) -> None:
    """Raise FetchError at once when files are missing without which no build can work."""
    root, llama = locate(directory)
    wanted = [llama / f for f in _LLAMA_FILES]
    if root != llama:
        wanted = [root / f for f in _BINDING_FILES] + wanted
    missing = [path for path in wanted if not path.is_file()]
    if missing:
        shown = ", ".join(p.relative_to(root).as_posix() for p in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise FetchError(
            f"the source tree is not complete: it lacks {shown}{more} "
            "(a plain clone or a source archive leaves the submodule empty)",
            where=root,
            hint="moe-madv fetch",
        )


def verify(root: Path, pin: Pin) -> Tree:
    """The tree at `root` if it is complete, at the pinned commit and unchanged; FetchError otherwise."""
    check_complete(root)
    _, llama = locate(root)
    git = Git(root=llama)
    if not git.is_repository():
        raise FetchError("llama.cpp has no git repository, so its commit cannot be verified", where=llama)
    head = git.commit()
    if head != pin.commit:
        raise FetchError(f"llama.cpp is at {head}, the pin is {pin.commit}", where=llama)
    changes = git.changes()
    if changes:
        shown = ", ".join(changes[:3])
        raise FetchError(f"{len(changes)} files differ from the pinned commit: {shown}", where=llama)
    return Tree(root=root, llama=llama, commit=pin.commit)


def tree_dir(pin: Pin, name: Literal["pristine"] | Arm, home: Path) -> Path:
    """Where the tree of this name is, or will be."""
    return home / "trees" / f"{pin.binding}-{pin.commit[:9]}" / name


def pristine(pin: Pin, home: Path) -> Tree:
    """The verified upstream tree; FetchError when it was never fetched or has been changed."""
    root = tree_dir(pin, "pristine", home)
    if not root.is_dir():
        raise FetchError(f"{PROJECT} {pin.binding} has not been fetched", where=root, hint="moe-madv fetch")
    return _verify_ours(root, pin)


def arm_tree(pin: Pin, arm: Arm, home: Path) -> Tree:
    """The tree an arm is built from: made as a copy of `pristine` when absent.

    The baseline must still be at the pin; `patched` is returned as it is, see series.inspect.
    """
    root = tree_dir(pin, arm, home)
    with locked(home):
        if not root.is_dir():
            source = pristine(pin, home)
            with scratch_dir(root.parent) as scratch:
                shutil.copytree(source.root, scratch / arm, symlinks=True)
                (scratch / arm).rename(root)
        if arm == "baseline":
            return _verify_ours(root, pin)
    check_complete(root)
    llama = root / LLAMA
    return Tree(root=root, llama=llama, commit=Git(root=llama).commit() or "")


def _verify_ours(root: Path, pin: Pin) -> Tree:
    try:
        return verify(root, pin)
    except FetchError as e:
        remedy = f"delete {root} and run: moe-madv fetch"
        raise FetchError(e.what, where=e.where, hint=remedy) from e


def fetch_sdist(pin: Pin, home: Path) -> Tree:
    """The pristine tree, from the pinned sdist of the configured package index; no network when present."""
    with locked(home):
        root = tree_dir(pin, "pristine", home)
        if root.is_dir():
            return pristine(pin, home)
        with unpacked(pin, home) as binding:
            verify(binding, pin)
            binding.rename(root)
        return Tree(root=root, llama=root / LLAMA, commit=pin.commit)


@contextlib.contextmanager
def unpacked(pin: Pin, home: Path) -> Iterator[Path]:
    """The pinned sdist unpacked in a temporary place on the same filesystem as the trees."""
    archive = sdist.fetch(PROJECT, pin.binding, pin.sdist_sha256, home / "downloads")
    note(f"unpacking {archive.name}")
    with scratch_dir(tree_dir(pin, "pristine", home).parent) as scratch:
        yield sdist.unpack(archive, scratch)


@contextlib.contextmanager
def scratch_dir(parent: Path) -> Iterator[Path]:
    """A temporary directory in `parent`, removed at the end; those of killed runs are removed first.

    Call with the lock held, or another run's directory would be taken for a killed one's.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for stale in parent.glob(".partial-*"):
        shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time works below `folder`; the others wait. Does not nest."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w", encoding="utf-8") as f:
        if fcntl is not None:
            fcntl.flock(f, fcntl.LOCK_EX)
        yield
