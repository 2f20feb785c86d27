"""What `moe-madv port` is asked to port to: a release of the binding, or a revision of a llama.cpp repository."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import FetchError, PinError
from toolkit.patch import sdist
from toolkit.patch.download import local_path
from toolkit.patch.gitrepo import Git
from toolkit.patch.upstream import (
    LLAMA,
    PROJECT,
    Pin,
    Tree,
    check_complete,
    fetch_sdist,
    load_pin,
    locked,
    scratch_dir,
    tree_dir,
    verify,
)

_VERSION = re.compile(r"\d+\.\d+\.\d+(\.?(a|b|rc|post|dev)\d+)?")


@dataclass(frozen=True, kw_only=True)
class Target:
    """One llama.cpp on disk, and where it came from."""

    name: str  # as the user gave it
    tree: Tree
    pin: Pin | None  # of a release of the binding; None for a git revision
    repository: Git  # where its history is, if anywhere


def resolve(name: str, url: str | None, home: Path) -> Target:
    """Fetch and verify a target: a version of llama-cpp-python, or with `url` a revision of that repository.

    Raises FetchError when it cannot be had, PinError when upstream.toml is unusable.
    """
    if url is not None:
        from toolkit.patch.mirror import fetch_git  # needs git

        pin = load_pin()
        tree = fetch_git(url, name, pin, home)
        path = local_path(url)
        own = Git(root=tree.llama)
        return Target(
            name=name,
            tree=tree,
            pin=pin if tree.commit == pin.commit else None,
            repository=Git(root=path) if path is not None and path.is_dir() else own,
        )
    if not _VERSION.fullmatch(name):
        raise FetchError(
            f"{name} is no version of {PROJECT}",
            hint=f"name the repository of a revision: moe-madv port --git URL {name}",
        )
    pin, tree = fetch_release(name, home)
    return Target(name=name, tree=tree, pin=pin, repository=Git(root=tree.llama))


def fetch_release(version: str, home: Path) -> tuple[Pin, Tree]:
    """The pristine tree of any release; one without a pin is taken with the hash that the index announces.

    A tree that is there already needs no network.
    """
    try:
        pin = load_pin(binding=version)
    except PinError:
        archive, sha256 = sdist.fetch_unpinned(PROJECT, version, home / "downloads")
        known = [d for d in (home / "trees").glob(f"{version}-*/pristine") if d.is_dir()]
        if known:
            commit = Git(root=known[0] / LLAMA).commit() or ""
            pin = Pin(binding=version, sdist_sha256=sha256, commit=commit)
            return pin, verify(known[0], pin)
        with locked(home), scratch_dir(home / "trees") as scratch:
            binding = sdist.unpack(archive, scratch)
            check_complete(binding)
            git = Git(root=binding / LLAMA)
            found = git.commit() if git.is_repository() else None
            if found is None:
                raise FetchError(
                    "the sdist carries no git repository of llama.cpp, so its commit is unknown",
                    where=archive,
                    hint="moe-madv port --git URL REV",
                ) from None
            pin = Pin(binding=version, sdist_sha256=sha256, commit=found)
            verify(binding, pin)
            root = tree_dir(pin, "pristine", home)
            root.parent.mkdir(parents=True, exist_ok=True)
            binding.rename(root)
        return pin, Tree(root=root, llama=root / LLAMA, commit=pin.commit)
    return pin, fetch_sdist(pin, home)
