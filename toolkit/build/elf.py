"""What the dynamic section of a Linux shared library says about the libraries it needs."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

# In every glibc Linux that Python itself runs on.
_BASE = re.compile(
    r"lib(c|m|dl|rt|pthread|util|resolv)\.so\.\d+|ld-linux[\w-]*\.so\.\d+|ld64\.so\.\d+"
    r"|libstdc\+\+\.so\.6|libgcc_s\.so\.1|linux-vdso\.so\.1"
)
_MUSL = re.compile(r"libc\.musl-[\w.-]+\.so\.1|ld-musl-[\w.-]+\.so\.1|libc\.so")


@dataclass(frozen=True, kw_only=True)
class SharedLibrary:
    """The linking facts of one ELF file."""

    soname: str | None
    needed: tuple[str, ...]  # DT_NEEDED, in order
    glibc: tuple[int, ...]  # highest GLIBC_x.y symbol version asked for, () when none is


def read_elf(data: bytes) -> SharedLibrary | None:
    """Parse a shared library; None for a file that is not (whole) ELF."""
    found: dict[str, list[str]] = {}
    versions: list[tuple[int, ...]] = [()]
    try:
        file = ELFFile(io.BytesIO(data))
        for segment in file.iter_segments():
            if isinstance(segment, DynamicSegment):
                for tag in segment.iter_tags():
                    # pyelftools puts the string of a tag into an attribute of the tag's name.
                    name = str(tag.entry.d_tag).removeprefix("DT_").lower()
                    if name in ("needed", "soname"):
                        found.setdefault(name, []).append(getattr(tag, name))
        for section in file.iter_sections():
            if isinstance(section, GNUVerNeedSection):
                for _, auxiliaries in section.iter_versions():
                    names = [a.name for a in auxiliaries]
                    versions += [_numbers(n) for n in names if re.fullmatch(r"GLIBC_[\d.]+", n)]
    except (ELFError, ValueError, AttributeError, UnicodeDecodeError, OSError):
        return None
    return SharedLibrary(
        soname=next(iter(found.get("soname", [])), None),
        needed=tuple(found.get("needed", [])),
        glibc=max(versions),
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.removeprefix("GLIBC_").split("."))


def is_base(soname: str) -> bool:
    """True for the C and C++ runtime of a glibc system."""
    return _BASE.fullmatch(soname) is not None


def is_musl(soname: str) -> bool:
    """True for musl's C library, which a glibc process cannot load."""
    return _MUSL.fullmatch(soname) is not None
