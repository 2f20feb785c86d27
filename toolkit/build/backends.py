"""What each backend is built with: cmake options, tools, and what its wheel contains. Facts only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.errors import BuildError


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A program needed to build, and where to get it."""

    name: str
    executables: tuple[str, ...]  # names on PATH, the first found is used
    apt: str  # package of Debian and Ubuntu
    package: str | None = None  # Python package that carries the program; None when none does
    variable: str | None = None  # environment variable that names another program, as cmake reads it
    minimum: tuple[int, ...] = ()  # lowest version that works


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute, in one wheel."""

    name: str
    label: str  # last part of the wheel's local version label
    defines: Mapping[str, str]  # cmake cache entries, the same for both arms
    tools: tuple[Tool, ...]
    libraries: tuple[str, ...]  # cmake targets whose library is in the wheel, no more and no fewer
    registers: tuple[str, ...]  # names in ggml's backend registry
    needs: tuple[str, ...]  # libraries of the system it may need beyond the C and C++ runtime


_TOOLS = (
    Tool(name="C compiler", executables=("cc", "gcc", "clang"), apt="gcc", variable="CC"),
    Tool(name="C++ compiler", executables=("c++", "g++", "clang++"), apt="g++", variable="CXX"),
    Tool(name="cmake", executables=("cmake",), apt="cmake", package="cmake", minimum=(3, 21)),
    Tool(name="ninja", executables=("ninja",), apt="ninja-build", package="ninja", minimum=(1, 5)),
    Tool(name="git", executables=("git",), apt="git"),
)

_DEFINES = {
    "LLAVA_BUILD": "OFF",
    # A wheel cannot hold links, so versioned names become copies, and a program that opens two of them
    # has two states of one library. Without versions each library is one file under one name.
    "CMAKE_PLATFORM_NO_VERSIONED_SONAME": "ON",
}

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            name="cpu",
            label="cpu",
            defines={**_DEFINES, "GGML_NATIVE": "ON"},  # an A/B runs where it was built
            tools=_TOOLS,
            libraries=("llama", "ggml", "ggml-base", "ggml-cpu"),
            registers=("CPU",),
            needs=("libgomp.so.1", "libomp.so.5"),
        ),
    )
}


def get_backend(name: str) -> Backend:
    """Raises BuildError for a name that is not in the table."""
    try:
        return BACKENDS[name]
    except KeyError:
        raise BuildError(f"unknown backend {name!r} (known: {', '.join(BACKENDS)})") from None
