"""Explaining a wheel: what it is, what it needs, and what is wrong with it."""

from __future__ import annotations

import csv
import hashlib
import json
import lzma
import platform
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path, PurePosixPath

from packaging.utils import parse_wheel_filename

from toolkit.build import cpuflags, elf
from toolkit.build.backends import BACKENDS, Backend, backend_of_label, get_backend
from toolkit.build.wheelfile import (
    BUNDLE_DIR,
    LIBRARY_DIR,
    MANIFEST_NAME,
    Manifest,
    digest,
    library_name,
    manifest_path,
)
from toolkit.errors import BuildError
from toolkit.files import sha256_file

# What zipfile raises for a damaged, an encrypted or an oddly compressed archive; a wrong name is a ValueError.
_DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError, ValueError)
_OURS = ("libllama", "libggml", "libmtmd")


@dataclass(frozen=True, kw_only=True)
class WheelReport:
    """What could be found out about one wheel; `ok` when `problems` is empty."""

    file: str
    label: str | None  # local version label, such as "moe1.cpu"
    backend: str | None
    binding: str | None
    pin: str | None  # llama.cpp commit before the series; None without a manifest
    commit: str | None
    series: str | None  # digest of the series, None in a baseline
    payload: str | None
    sha256: str
    ok: bool
    needs: tuple[str, ...]  # libraries the system has to add to the C and C++ runtime
    base: tuple[str, ...]  # libraries of the C and C++ runtime it uses
    glibc: str | None  # oldest glibc that can load it
    cpu_flags: tuple[str, ...]
    level: str | None  # instruction set of a portable wheel
    libraries: Mapping[str, str]  # path in the wheel -> sha256
    manifest: Mapping[str, object] | None
    problems: tuple[str, ...]


def check_wheel(path: Path, *, host: frozenset[str] | None = None) -> WheelReport:
    """Read a wheel without installing it; `host` is the processor's flags, None where unknown.

    Raises BuildError when the file is not a wheel at all; everything else is in `problems`.
    """
    if not path.is_file():
        raise BuildError("no such file", where=path, hint="moe-madv wheels list")
    try:
        name, version, _, tags = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as z:
            names = [i.filename for i in z.infolist() if not i.is_dir()]
            entries = {entry: z.read(entry) for entry in names}
    except _DAMAGE as e:
        raise BuildError(f"not a wheel: {e}", where=path) from e
    if name != "llama-cpp-python":
        raise BuildError(f"a wheel of {name}, not of llama-cpp-python", where=path)

    problems = [f"{entry} is in the archive twice" for entry in sorted({n for n in names if names.count(n) > 1})]
    problems += _record_problems(entries)
    libraries = {entry: data for entry, data in entries.items() if library_name(entry)}
    hashes = {entry: hashlib.sha256(data).hexdigest() for entry, data in sorted(libraries.items())}
    problems += _copies(hashes)
    manifest, found = _manifest(path, entries)
    problems += found
    if manifest:
        problems += _manifest_problems(manifest, str(version), hashes)
    label = version.local
    backend, found = _backend(manifest, label, libraries)
    problems += found
    needs, base, glibc, found = _linking(libraries, backend, {str(tag.platform) for tag in tags})
    problems += found
    problems += _cuda_problems(label, needs)
    if manifest and (absent := cpuflags.missing_flags(manifest.cpu_flags, host)):
        problems.append(f"compiled for instructions this processor lacks: {', '.join(absent)}")
    return WheelReport(
        file=path.name,
        label=label,
        backend=backend.name if backend else None,
        binding=version.public,
        pin=manifest.pin if manifest else None,
        commit=manifest.commit if manifest else None,
        series=manifest.series if manifest else None,
        payload=manifest.payload if manifest else None,
        sha256=sha256_file(path),
        ok=not problems,
        needs=needs,
        base=base,
        glibc=".".join(map(str, glibc)) or None,
        cpu_flags=manifest.cpu_flags if manifest else (),
        level=manifest.level if manifest else None,
        libraries=hashes,
        manifest=asdict(manifest) if manifest else None,
        problems=tuple(problems),
    )


def _record_problems(entries: Mapping[str, bytes]) -> list[str]:
    record = next((n for n in entries if n.endswith(".dist-info/RECORD") and n.count("/") == 1), None)
    if record is None:
        return ["no RECORD"]
    rows = {row[0]: row[1:] for row in csv.reader(entries[record].decode("utf-8", "replace").splitlines()) if row}
    wrong = [
        f"{name} is not the file of RECORD"
        for name, data in sorted(entries.items())
        if name in rows and rows[name][0] and rows[name][0] != f"sha256={digest(data)}"
    ]
    extra = [f"{name} is not in RECORD" for name in sorted(entries) if name not in rows]
    gone = [f"{name} is in RECORD, not in the wheel" for name in sorted(rows) if name not in entries]
    return wrong + extra + gone


def _copies(hashes: Mapping[str, str]) -> list[str]:
    """Two files of one library: whichever is opened second has a state of its own."""
    by_hash: dict[str, list[str]] = {}
    for entry, sha256 in hashes.items():
        by_hash.setdefault(sha256, []).append(entry)
    return [f"one library under {len(e)} names: {', '.join(e)}" for e in by_hash.values() if len(e) > 1]


def _manifest(path: Path, entries: Mapping[str, bytes]) -> tuple[Manifest | None, list[str]]:
    """The manifest inside, which the one beside the wheel must repeat."""
    inside = next((n for n in entries if n.endswith(f".dist-info/{MANIFEST_NAME}")), None)
    if inside is None:
        return None, ["no manifest: pin, series and build options are unknown"]
    try:
        manifest = Manifest.from_json(json.loads(entries[inside]), path)
        beside = manifest_path(path)
        if not beside.is_file():
            return manifest, []
        outer = json.loads(beside.read_text(encoding="utf-8"))
        same = Manifest.from_json(outer, beside) == manifest
        sha256 = outer.get("wheel", {}).get("sha256")
    except (ValueError, AttributeError) as e:
        return None, [f"unreadable manifest: {e}"]
    except BuildError as e:
        return None, [f"unreadable manifest: {e.what}"]
    problems = [] if same else [f"{beside.name} is the manifest of another wheel"]
    if sha256 != (actual := sha256_file(path)):
        problems.append(f"sha256 is {actual}, {beside.name} says {sha256}")
    return manifest, problems


def _manifest_problems(manifest: Manifest, version: str, hashes: Mapping[str, str]) -> list[str]:
    problems = []
    if manifest.version != version:
        problems.append(f"named {version}, its manifest says {manifest.version}")
    listed = {f"{LIBRARY_DIR}/{name}": sha256 for name, sha256 in manifest.libraries.items()}
    listed |= {f"{BUNDLE_DIR}/{name}": sha256 for name, sha256 in manifest.bundled.items()}
    problems += [f"{e} is gone" for e in sorted(listed.keys() - hashes.keys())]
    problems += [f"{e} was not made by this build" for e in sorted(hashes.keys() - listed.keys())]
    problems += [
        f"{e} has sha256 {hashes[e][:12]}…, the manifest says {listed[e][:12]}…"
        for e in sorted(listed.keys() & hashes.keys())
        if listed[e] != hashes[e]
    ]
    return problems


def _backend(
    manifest: Manifest | None, label: str | None, libraries: Mapping[str, bytes]
) -> tuple[Backend | None, list[str]]:
    """The backend by manifest, else by label, else by the libraries; a label that names another is a problem."""
    stems = {re.split(r"[.]", PurePosixPath(entry).name)[0].removeprefix("lib") for entry in libraries}
    inside = [part for part in BACKENDS if f"ggml-{part}" in stems]
    labelled = backend_of_label(label)
    try:
        found = get_backend(manifest.backend) if manifest else labelled or get_backend("+".join(inside))
    except BuildError:
        return None, [f"built for {manifest.backend}, which this version does not know"] if manifest else []
    # A library that is not there is reported by who needs it, or by the manifest; this is for neither.
    absent = [] if manifest else [part for part in found.libraries if inside and part not in stems]
    return found, [f"labelled {label}, but {part} is not in it" for part in absent if labelled]


def _cuda_problems(label: str | None, needs: tuple[str, ...]) -> list[str]:
    """A label of one CUDA version on libraries linked with another."""
    named = re.search(r"(?:^|\.)cu(?:da)?(\d{2})\d", label or "")
    linked = {m[1] for soname in needs if (m := re.fullmatch(r"lib(?:cudart|cublas)\.so\.(\d+)", soname))}
    if not named or linked <= {named[1]}:
        return []
    return [f"labelled {label}, but linked with CUDA {', '.join(sorted(linked - {named[1]}))}"]


def _linking(
    libraries: Mapping[str, bytes], backend: Backend | None, platforms: set[str]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...], list[str]]:
    """(needs, base, glibc, problems) from the dynamic sections; libraries that are not ELF are not read."""
    present = {PurePosixPath(entry).name for entry in libraries}
    needs: dict[str, str] = {}  # soname -> the library that asks for it
    glibc: tuple[int, ...] = ()
    problems = []
    for entry, data in sorted(libraries.items()):
        if not data.startswith(b"\x7fELF"):
            if re.search(r"\.so(\.\d+)*$", entry):
                problems.append(f"{entry} is not a shared library")
            continue
        linked = elf.read_elf(data)
        if linked is None:
            problems.append(f"{entry} is damaged: its dynamic section cannot be read")
            continue
        glibc = max(glibc, linked.glibc)
        for soname in linked.needed:
            if soname not in present:
                needs.setdefault(soname, PurePosixPath(entry).name)
    excludes = backend.excludes if backend else ()
    for name in sorted(present):
        # auditwheel puts a hash between the name and the version: libcuda-1f2e3d4c.so.1
        if any(fnmatch(re.sub(r"-[0-9a-f]{8}(?=\.)", "", name), pattern) for pattern in excludes):
            problems.append(f"carries {name}, which must come with the system's driver or SDK")
    outside = tuple(sorted(n for n in needs if not elf.is_base(n)))
    for soname in outside:
        user = needs[soname]
        if elf.is_musl(soname):
            if not any(p.startswith("musllinux") for p in platforms):
                problems.append(f"needs musl: {user} is linked with {soname}, which no glibc system has")
        elif soname.startswith(_OURS):
            problems.append(f"{soname} is missing from the wheel, {user} needs it")
        elif backend and not any(fnmatch(soname, pattern) for pattern in backend.needs):
            problems.append(f"needs {soname} ({user}), which the {backend.name} backend does not use")
    if problem := _glibc_problem(glibc, platforms):
        problems.append(problem)
    return outside, tuple(sorted(set(needs) - set(outside))), glibc, problems


def _glibc_problem(glibc: tuple[int, ...], platforms: set[str]) -> str | None:
    """A tag that promises more systems than can load the wheel, or a system older than it needs."""
    needed = ".".join(map(str, glibc))
    promised = [m for p in platforms if (m := re.match(r"manylinux_(\d+)_(\d+)_", p))]
    if promised and glibc > min((int(m[1]), int(m[2])) for m in promised):
        return f"needs glibc {needed}, its name promises {promised[0][0].rstrip('_')}"
    kind, version = platform.libc_ver()
    if kind == "glibc" and glibc > tuple(int(part) for part in version.split(".")):
        return f"needs glibc {needed}, this system has {version}"
    return None
