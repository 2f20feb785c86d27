"""A static package index: folders that any web server can serve to pip and uv.

DIR/SHA256SUMS                                       of every wheel
DIR/<backend>/index.html, index.json                 projects            (PEP 503, PEP 691)
DIR/<backend>/<project>/index.html, index.json       files with sha256
DIR/<backend>/<project>/<wheel>, <wheel>.metadata    file and its METADATA (PEP 658)

A portable wheel is in the folder of its backend and level, such as cpu.v3.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import shutil
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.metadata import parse_email
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from toolkit.build.wheelcheck import check_wheel
from toolkit.errors import BuildError
from toolkit.files import atomic_path, sha256_file, write_text

_API = "1.1"


@dataclass(frozen=True, kw_only=True)
class IndexedFile:
    """What an index says about one wheel."""

    name: str
    project: str  # normalised
    version: str
    sha256: str
    bytes: int
    requires_python: str | None
    metadata_sha256: str


@dataclass(frozen=True, kw_only=True)
class Folder:
    """An index of one backend, or of one level of it: what `--index-url` names."""

    name: str
    path: Path
    files: tuple[IndexedFile, ...]


def add_wheels(directory: Path, wheels: Sequence[Path], extra: Iterable[Path] = ()) -> list[Folder]:
    """Put wheels into the index at `directory` and write its pages; `extra` are folders of wheels of dependencies.

    What is already there stays. Raises BuildError, before anything is written, for a wheel that is not sound and
    for another file under the name of one that is there: installers keep wheels by name, and would never fetch it.
    """
    placed = [(path, directory / _folder(path) / "llama-cpp-python" / path.name) for path in wheels]
    folders = sorted({target.parent.parent for _, target in placed} | {p for p in directory.glob("*") if p.is_dir()})
    others = [path for folder in extra for path in _wheels_in(folder)]
    placed += [(path, folder / _project(path) / path.name) for path in others for folder in folders]
    known: dict[Path, Path] = {}
    for path, target in placed:
        there = known.setdefault(target, path) if not target.exists() else target
        if there != path and sha256_file(there) != sha256_file(path):
            raise BuildError(
                f"the index has another wheel named {path.name}",
                where=there,
                hint="raise the label in patches/series.toml, or remove that file if nobody has installed from it",
            )
    for path, target in placed:
        _place(path, target)
    indexed = [_write_folder(folder) for folder in folders]
    sums = [f"{file.sha256}  {folder.name}/{file.project}/{file.name}\n" for folder in indexed for file in folder.files]
    write_text(directory / "SHA256SUMS", "".join(sums))
    return indexed


def _folder(wheel: Path) -> str:
    """The label of a wheel without its arm: `cuda130.v3` of moe1.cuda130.v3."""
    report = check_wheel(wheel)
    if report.manifest is None or not report.ok:
        raise BuildError(
            f"not put into an index: {'; '.join(report.problems)}",
            where=wheel,
            hint=f"moe-madv wheels check {wheel}",
        )
    # Levels are kept apart too: without a pin an installer takes the highest label, whatever the processor.
    return (report.label or "").split(".", 1)[1]


def _wheels_in(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.whl"))
    if not found:
        raise BuildError("no wheels there", where=folder, hint=f"pip download --only-binary=:all: -d {folder} WHEEL")
    return found


def _project(wheel: Path) -> str:
    try:
        return str(parse_wheel_filename(wheel.name)[0])
    except InvalidWheelFilename as e:
        raise BuildError(str(e), where=wheel) from e


def _place(wheel: Path, target: Path) -> None:
    if target.exists():
        return
    with atomic_path(target) as partial:
        try:
            os.link(wheel, partial)
        except OSError:  # another file system
            shutil.copyfile(wheel, partial)


def _write_folder(folder: Path) -> Folder:
    files = tuple(_describe(path) for path in sorted(folder.glob("*/*.whl")))
    projects = sorted({file.project for file in files})
    for project in projects:
        own = [file for file in files if file.project == project]
        write_text(folder / project / "index.html", _page([_link(file) for file in own]))
        write_text(folder / project / "index.json", _json(_project_json(project, own)))
    write_text(folder / "index.html", _page([f'<a href="{project}/">{project}</a>' for project in projects]))
    write_text(
        folder / "index.json", _json({"meta": {"api-version": _API}, "projects": [{"name": p} for p in projects]})
    )
    return Folder(name=folder.name, path=folder, files=files)


def _describe(wheel: Path) -> IndexedFile:
    """Facts of a wheel in the index; its METADATA is written beside it."""
    try:
        project, version, _, _ = parse_wheel_filename(wheel.name)
        with zipfile.ZipFile(wheel) as z:
            inside = next(n for n in z.namelist() if n.count("/") == 1 and n.endswith(".dist-info/METADATA"))
            metadata = z.read(inside)
    except (InvalidWheelFilename, zipfile.BadZipFile, StopIteration) as e:
        raise BuildError(f"not a wheel: {e or 'no METADATA'}", where=wheel) from e
    with atomic_path(wheel.with_name(f"{wheel.name}.metadata")) as partial:
        partial.write_bytes(metadata)
    return IndexedFile(
        name=wheel.name,
        project=str(project),
        version=str(version),
        sha256=sha256_file(wheel),
        bytes=wheel.stat().st_size,
        requires_python=parse_email(metadata)[0].get("requires_python"),
        metadata_sha256=hashlib.sha256(metadata).hexdigest(),
    )


def _link(file: IndexedFile) -> str:
    attributes = {"href": f"{quote(file.name)}#sha256={file.sha256}"}
    if file.requires_python:
        attributes["data-requires-python"] = file.requires_python
    # The second is the name that older installers know.
    for name in ("data-core-metadata", "data-dist-info-metadata"):
        attributes[name] = f"sha256={file.metadata_sha256}"
    shown = " ".join(f'{name}="{html.escape(value)}"' for name, value in attributes.items())
    return f"<a {shown}>{html.escape(file.name)}</a>"


def _page(links: Sequence[str]) -> str:
    head = f'<!DOCTYPE html>\n<html><head><meta name="pypi:repository-version" content="{_API}"></head><body>\n'
    return head + "".join(f"{link}<br>\n" for link in links) + "</body></html>\n"


def _project_json(project: str, files: Sequence[IndexedFile]) -> dict[str, Any]:
    return {
        "meta": {"api-version": _API},
        "name": project,
        "versions": sorted({file.version for file in files}),
        "files": [
            {
                "filename": file.name,
                "url": quote(file.name),
                "hashes": {"sha256": file.sha256},
                "size": file.bytes,
                **({"requires-python": file.requires_python} if file.requires_python else {}),
                "core-metadata": {"sha256": file.metadata_sha256},
                "dist-info-metadata": {"sha256": file.metadata_sha256},
            }
            for file in files
        ],
    }


def _json(data: object) -> str:
    return json.dumps(data, indent=1) + "\n"
