"""Find and cross-check all files of a split model, from any one of them or from their folder.

File names count from 1 (`NAME-00001-of-00003.gguf`), the key `split.no` counts from 0, and
`split.tensors.count` is the total over all files (llama.cpp, tools/gguf-split).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ModelError
from toolkit.model.gguf_header import GGUFHeader, read_header
from toolkit.model.text import shown

_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL | re.ASCII)
_BLOB_NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of a model; `path` is the name it was found by, links not resolved."""

    path: Path
    header: GGUFHeader


def read_shards(path: Path) -> tuple[Shard, ...]:
    """All files of the model at `path` (a GGUF file, any shard, or a folder with one model), in order.

    Raises ModelError when shards are missing or names, numbers, counts and tensors disagree.
    """
    try:
        return _read_shards(_only_model(path) if path.is_dir() else path)
    except OSError as e:
        raise ModelError(f"cannot be read: {e.strerror}", where=shown(path), hint="check name and permissions") from e


def _read_shards(path: Path) -> tuple[Shard, ...]:
    named = _SHARD_NAME.fullmatch(path.name)
    if named and not path.exists():
        _refuse_missing(_siblings(path, named))
    given = read_header(path)
    count = given.metadata.get("split.count", 1)
    if count in (0, 1) and (named is None or int(named["count"]) == 1):
        return (Shard(path=path, header=given),)
    if named is None:
        raise _nameless(path, given.metadata)
    paths = _siblings(path, named)
    if not {"split.no", "split.count"} & given.metadata.keys():
        raise ModelError(
            f"the name says shard {int(named['number'])} of {len(paths)}, the file has no split.* keys",
            where=shown(path),
            hint="rename the file if it is a whole model, or get the shards again",
        )
    _refuse_missing(paths)
    shards = tuple(Shard(path=p, header=given if p == path else read_header(p)) for p in paths)
    _cross_check(shards)
    return shards


def _only_model(folder: Path) -> Path:
    """The first present file of the only model in a folder; projector files (mmproj) are not models."""
    models: dict[str, Path] = {}
    for p in sorted(folder.glob("*.gguf")):
        named = _SHARD_NAME.fullmatch(p.name)
        if not p.name.startswith("mmproj"):
            models.setdefault(f"{named['stem']} of {named['count']}" if named else p.name, p)
    if not models:
        raise ModelError("no .gguf file in this folder", where=shown(folder), hint="name the model file")
    if len(models) > 1:
        names = "".join(f"\n    {shown(p.name)}" for p in models.values())
        raise ModelError(
            f"this folder holds {len(models)} models:{names}",
            where=shown(folder),
            hint="name one of these files",
        )
    return next(iter(models.values()))


def _siblings(path: Path, named: re.Match[str]) -> list[Path]:
    count, number = int(named["count"]), int(named["number"])
    if not 1 <= number <= count:
        raise ModelError(
            f"the name says shard {number} of {count}", where=shown(path), hint="shards are numbered from 1"
        )
    return [path.with_name(f"{named['stem']}-{i:05d}-of-{named['count']}.gguf") for i in range(1, count + 1)]


def _refuse_missing(paths: list[Path]) -> None:
    missing = [p for p in paths if not p.exists()]
    if missing:
        names = "".join(f"\n    {shown(p.name)}" for p in missing)
        raise ModelError(
            f"{len(missing)} of {len(paths)} shards are missing:{names}",
            where=shown(paths[0].parent),
            hint="download them into this folder",
        )


def _nameless(path: Path, metadata: Mapping[str, Any]) -> ModelError:
    """A shard whose name does not say which one it is: a cache blob, or a renamed file."""
    part = shown(f"split.no {metadata.get('split.no')}, split.count {metadata['split.count']}")
    if not _BLOB_NAME.fullmatch(path.name):
        return ModelError(
            f"this is part of a split model ({part}), but its name does not say which",
            where=shown(path),
            hint="name the shards as published: NAME-00001-of-0000N.gguf and so on",
        )
    snapshots = path.absolute().parent.parent / "snapshots"
    links = [p for p in sorted(snapshots.rglob("*.gguf")) if p.resolve() == path.resolve()]
    named = f"moe-madv model info '{shown(links[0])}'" if links else "give the link in snapshots/ that points here"
    return ModelError(
        f"this is a bare cache blob of a split model ({part}); its name does not lead to the others",
        where=shown(path),
        hint=named,
    )


def _cross_check(shards: tuple[Shard, ...]) -> None:
    """Compare every shard's keys with its name and with the first shard; report all disagreements at once."""
    first = shards[0].header.metadata
    problems: list[str] = []
    owner: dict[str, str] = {}
    for i, shard in enumerate(shards):
        keys, name = shard.header.metadata, shown(shard.path.name)
        for key, expected, required in (("split.no", i, True), ("split.count", len(shards), i == 0)):
            if keys.get(key, None if required else expected) != expected:
                problems.append(f"{name}: {key} is {keys.get(key, 'absent')}, its name says {expected}")
        for key in ("general.architecture", "split.tensors.count"):
            if key in keys and key in first and keys[key] != first[key]:
                problems.append(
                    f"{name}: {key} is {shown(str(keys[key]))}, in the first shard {shown(str(first[key]))}"
                )
        for tensor in shard.header.tensors:
            if tensor.name in owner:
                problems.append(f"{name}: tensor {tensor.name!r} is also in {owner[tensor.name]}")
            owner.setdefault(tensor.name, name)
    present = sum(len(s.header.tensors) for s in shards)
    total = first.get("split.tensors.count", present)
    if total != present:
        problems.append(f"split.tensors.count is {total}, the shards hold {present} tensors")
    if problems:
        raise ModelError(
            "the shards do not belong together:" + "".join(f"\n    {p}" for p in problems),
            where=shown(shards[0].path.parent),
            hint="get the shards of one model again; the names and split.* keys must agree",
        )
