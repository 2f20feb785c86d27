"""The wheel as a file: relabel and strip what the build made, and the manifest that says what it is."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any

from toolkit.errors import BuildError
from toolkit.files import atomic_path, sha256_file, write_text

PACKAGE = "llama_cpp"
LIBRARY_DIR = f"{PACKAGE}/lib"
MANIFEST_NAME = "moe-madv.json"  # in the wheel's .dist-info

# 1 - first format
FORMAT = 1

_LIBRARY = re.compile(r"(?:lib)?[\w+-]+\.(?:so(?:\.\d+)*|(?:\d+\.)*dylib|dll)")
_DATE = (1980, 1, 1, 0, 0, 0)  # the same bytes make the same wheel


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a wheel is made of. Travels inside the wheel, so a copied wheel still says what it is."""

    format: int
    arm: str  # "baseline" | "patched"
    label: str  # "moe1.cpu"
    version: str  # "0.3.36+moe1.cpu"
    backend: str
    binding: str  # version of llama-cpp-python
    sdist_sha256: str
    pin: str  # commit of llama.cpp before the series
    commit: str  # commit of the llama.cpp tree that was built
    series: str | None  # digest of the series, None in a baseline
    payload: str | None  # version the payload reports, None in a baseline
    defines: Mapping[str, str]
    cmake_args: tuple[str, ...]  # options from the CMAKE_ARGS of the environment
    compiler: str
    cmake: str
    generator: str
    machine_options: tuple[str, ...]  # -march=native and the like
    cpu_flags: tuple[str, ...]  # what the processor must have, names of /proc/cpuinfo
    openmp: bool
    libraries: Mapping[str, str]  # file name in llama_cpp/lib -> sha256
    key: str

    @staticmethod
    def from_json(data: Mapping[str, Any], where: Path) -> Manifest:
        """Raises BuildError for another format or a missing field."""
        if not isinstance(data, Mapping):
            raise BuildError("the manifest is not a JSON object", where=where)
        if data.get("format") != FORMAT:
            raise BuildError(f"manifest format {data.get('format')!r}, this version reads {FORMAT}", where=where)
        names = {field.name for field in fields(Manifest)}
        if missing := sorted(names - data.keys()):
            raise BuildError(f"manifest lacks {', '.join(missing)}", where=where)
        if not isinstance(data["libraries"], Mapping):
            raise BuildError("`libraries` of the manifest is not a JSON object", where=where)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items() if name in names
        }
        return Manifest(**values)


@dataclass(frozen=True, kw_only=True)
class BuildRecord:
    """What one build cost; not part of what the wheel is."""

    seconds: float
    objects: int | None  # compiler calls that ccache saw, None without ccache
    ccache_hits: int | None
    host_flags: tuple[str, ...]  # of the processor it was built on, () where unknown


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A finished wheel with its manifest."""

    path: Path
    sha256: str
    bytes: int
    manifest: Manifest
    build: BuildRecord

    def to_json(self) -> dict[str, Any]:
        wheel = {"file": self.path.name, "sha256": self.sha256, "bytes": self.bytes}
        return {**asdict(self.manifest), "wheel": wheel, "build": asdict(self.build)}


def manifest_path(wheel: Path) -> Path:
    """The manifest file beside a wheel."""
    return wheel.with_name(f"{wheel.name}.json")


def store(path: Path, manifest: Manifest, build: BuildRecord) -> Wheel:
    """Write the manifest beside a packed wheel; from then on the wheel counts as finished."""
    wheel = Wheel(path=path, sha256=sha256_file(path), bytes=path.stat().st_size, manifest=manifest, build=build)
    write_text(manifest_path(path), json.dumps(wheel.to_json(), indent=2) + "\n")
    return wheel


def load(path: Path) -> Wheel:
    """A finished wheel; BuildError when its manifest is missing, unreadable or of another file."""
    beside = manifest_path(path)
    try:
        data = json.loads(beside.read_text(encoding="utf-8"))
        manifest = Manifest.from_json(data, beside)
        wheel = Wheel(
            path=path,
            sha256=data["wheel"]["sha256"],
            bytes=data["wheel"]["bytes"],
            manifest=manifest,
            build=BuildRecord(**{**data["build"], "host_flags": tuple(data["build"]["host_flags"])}),
        )
    except FileNotFoundError as e:
        raise BuildError("this wheel has no manifest beside it", where=path) from e
    except (ValueError, KeyError, TypeError) as e:
        raise BuildError(f"the manifest cannot be read: {e}", where=beside) from e
    actual = sha256_file(path) if path.is_file() else "absent"
    if actual != wheel.sha256:
        raise BuildError(
            f"the wheel is not the one its manifest describes: sha256 {actual}, manifest {wheel.sha256}",
            where=path,
            hint="moe-madv build --force",
        )
    return wheel


def library_name(entry: str) -> str | None:
    """File name of a shared library in a wheel, None for another entry."""
    name = PurePosixPath(entry).name
    return name if _LIBRARY.fullmatch(name) else None


def read_libraries(wheel: Path) -> dict[str, bytes]:
    """Contents of the libraries the binding loads, by file name."""
    with zipfile.ZipFile(wheel) as z:
        return {
            PurePosixPath(entry).name: z.read(entry)
            for entry in z.namelist()
            if library_name(entry) and str(PurePosixPath(entry).parent) == LIBRARY_DIR
        }


def pack(raw: Path, directory: Path, manifest: Manifest) -> Path:
    """Write the labelled wheel into `directory` and return it.

    Keeps the package and its metadata only: upstream's install rules add second copies of the libraries
    and the C headers at the top. Raises BuildError when the metadata has no version.
    """
    with zipfile.ZipFile(raw) as z:
        entries = {info.filename: z.read(info) for info in z.infolist() if not info.is_dir()}
    old_info = next((name.split("/")[0] for name in entries if name.split("/")[0].endswith(".dist-info")), None)
    if old_info is None:
        raise BuildError("the build made a wheel without metadata", where=raw)
    distribution, _, tags = raw.name.split("-", 2)
    info = f"{distribution}-{manifest.version}.dist-info"
    kept = {
        name.replace(old_info, info, 1): data
        for name, data in entries.items()
        if name.startswith((f"{PACKAGE}/", f"{old_info}/")) and name != f"{old_info}/RECORD"
    }
    metadata, replaced = re.subn(
        rb"(?m)^Version: .*?(\r?)$",
        rb"Version: " + manifest.version.encode() + rb"\1",
        kept[f"{info}/METADATA"],
        count=1,
    )
    if not replaced:
        raise BuildError("the wheel's METADATA has no Version", where=raw)
    kept[f"{info}/METADATA"] = metadata
    kept[f"{info}/{MANIFEST_NAME}"] = (json.dumps(asdict(manifest), indent=2) + "\n").encode()
    kept[f"{info}/RECORD"] = _record(kept, f"{info}/RECORD")
    target = directory / f"{distribution}-{manifest.version}-{tags}"
    with atomic_path(target) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as z:
        # The metadata comes last, as the format asks.
        for name in sorted(kept, key=lambda n: (n.startswith(info), n)):
            entry = zipfile.ZipInfo(name, _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if library_name(name) else 0o100644) << 16
            z.writestr(entry, kept[name])
    return target


def digest(data: bytes) -> str:
    """A RECORD hash: unpadded URL-safe base64 of the SHA-256."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _record(entries: Mapping[str, bytes], own_name: str) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([name, f"sha256={digest(data)}", len(data)] for name, data in sorted(entries.items()))
    writer.writerow([own_name, "", ""])
    return out.getvalue().encode()
