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
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from toolkit.errors import BuildError
from toolkit.files import atomic_path, sha256_file, write_text

PACKAGE = "llama_cpp"
LIBRARY_DIR = f"{PACKAGE}/lib"
BUNDLE_DIR = "llama_cpp_python.libs"  # where auditwheel puts copies of the system's libraries
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
    # Absent in manifests of wheels made before these existed.
    level: str | None = None  # instruction set of a portable wheel, None when built for its own machine
    bundled: Mapping[str, str] = field(default_factory=dict)  # libraries of the system inside: file name -> sha256
    rpc_protocol: str | None = None  # version that clients and servers of this wheel speak, "7.0.0"

    @staticmethod
    def from_json(data: Mapping[str, Any], where: Path) -> Manifest:
        """Raises BuildError for another format or a missing field."""
        if not isinstance(data, Mapping):
            raise BuildError("the manifest is not a JSON object", where=where)
        if data.get("format") != FORMAT:
            raise BuildError(f"manifest format {data.get('format')!r}, this version reads {FORMAT}", where=where)
        names = {f.name for f in fields(Manifest)}
        required = {f.name for f in fields(Manifest) if f.default is MISSING and f.default_factory is MISSING}
        if missing := sorted(required - data.keys()):
            raise BuildError(f"manifest lacks {', '.join(missing)}", where=where)
        for name in ("libraries", "bundled"):
            if not isinstance(data.get(name, {}), Mapping):
                raise BuildError(f"`{name}` of the manifest is not a JSON object", where=where)
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


def read_libraries(wheel: Path, folder: str = LIBRARY_DIR) -> dict[str, bytes]:
    """Contents of the libraries in a folder of the wheel, by file name."""
    with zipfile.ZipFile(wheel) as z:
        return {
            PurePosixPath(entry).name: z.read(entry)
            for entry in z.namelist()
            if library_name(entry) and str(PurePosixPath(entry).parent) == folder
        }


def unpack_libraries(wheel: Path, target: Path) -> Path:
    """Write the wheel's libraries below `target` as an installer would; returns the folder the binding loads from."""
    for folder in (LIBRARY_DIR, BUNDLE_DIR):
        for name, data in read_libraries(wheel, folder).items():
            path = target / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return target / LIBRARY_DIR


def strip(raw: Path, directory: Path) -> Path:
    """A copy of a built wheel in `directory` without what upstream's install rules add at the top.

    These are second copies of the libraries, and the C headers. Raises BuildError when it has no metadata.
    """
    entries, info = _package(raw)
    return _write(directory / raw.name, entries, info)


def pack(raw: Path, directory: Path, manifest: Manifest) -> Path:
    """Write the labelled wheel, stripped, into `directory` and return it.

    Raises BuildError when the metadata has no version.
    """
    entries, old_info = _package(raw)
    distribution, _, tags = raw.name.split("-", 2)
    info = f"{distribution}-{manifest.version}.dist-info"
    kept = {name.replace(old_info, info, 1): data for name, data in entries.items()}
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
    return _write(directory / f"{distribution}-{manifest.version}-{tags}", kept, info)


def _package(wheel: Path) -> tuple[dict[str, bytes], str]:
    """(entries without RECORD, name of the .dist-info folder) of the package in a wheel."""
    with zipfile.ZipFile(wheel) as z:
        entries = {info.filename: z.read(info) for info in z.infolist() if not info.is_dir()}
    info = next((name.split("/")[0] for name in entries if name.split("/")[0].endswith(".dist-info")), None)
    if info is None:
        raise BuildError("the build made a wheel without metadata", where=wheel)
    folders = (f"{PACKAGE}/", f"{BUNDLE_DIR}/", f"{info}/")
    return {n: data for n, data in entries.items() if n.startswith(folders) and n != f"{info}/RECORD"}, info


def _write(target: Path, entries: Mapping[str, bytes], info: str) -> Path:
    """A wheel of these entries and their RECORD; the same entries make the same bytes."""
    whole = {**entries, f"{info}/RECORD": _record(entries, f"{info}/RECORD")}
    with atomic_path(target) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as z:
        # The metadata comes last, as the format asks.
        for name in sorted(whole, key=lambda n: (n.startswith(info), n)):
            entry = zipfile.ZipInfo(name, _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if library_name(name) else 0o100644) << 16
            z.writestr(entry, whole[name])
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
