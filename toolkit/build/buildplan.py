"""Deciding a build before it starts: options, command, environment and the key they make."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from toolkit.build import repair, toolchain
from toolkit.build.backends import Backend
from toolkit.build.gpuarch import for_architectures
from toolkit.build.levels import portable
from toolkit.build.toolchain import Toolchain
from toolkit.errors import BuildError
from toolkit.patch.series import Series
from toolkit.patch.upstream import Arm, Pin

# Part of every key: raise it when the same inputs are built in another way than before.
_RECIPE = 1
GENERATOR = "Ninja"  # of cmake

# Each would change a build without a trace in its key; CMAKE_ARGS is the one that is recorded.
IGNORED = ("ARCHFLAGS", "CFLAGS", "CPPFLAGS", "CXXFLAGS", "LDFLAGS")
_IGNORED_PREFIXES = ("CMAKE_", "GIT_", "PYTHON", "SKBUILD_")
_KEPT = ("CMAKE_BUILD_PARALLEL_LEVEL",)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides a wheel's bytes, known before anything is built."""

    arm: Arm
    backend: Backend
    pin: Pin
    series: Series | None  # None for the baseline
    toolchain: Toolchain
    cmake_args: tuple[str, ...]
    home: Path
    level: str | None = None  # instruction set of a wheel for other machines, None for this machine's own

    @property
    def label(self) -> str:
        return f"{self.series.label if self.series else 'base'}.{self.backend.label}"

    @property
    def version(self) -> str:
        return f"{self.pin.binding}+{self.label}"

    @property
    def key(self) -> str:
        """Changes with the pin, the series, the options, the compiler and the way of building."""
        parts = {
            "recipe": _RECIPE,
            "pin": asdict(self.pin),
            "series": self.series.digest if self.series else "base",
            "backend": self.backend.name,
            "defines": dict(self.backend.defines),
            "cmake_args": self.cmake_args,
            "compiler": self.toolchain.compiler,
            "generator": GENERATOR,
        }
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return f"{self.pin.binding}-{self.label}-{digest[:12]}"

    @property
    def work(self) -> Path:
        """The source copy and the build directory: `src`, `build`; removed when the wheel is done."""
        return self.home / "builds" / self.key

    @property
    def wheels(self) -> Path:
        return self.home / "wheels" / self.key

    @property
    def log(self) -> Path:
        return self.home / "logs" / f"{self.key}.log"

    @property
    def defines(self) -> dict[str, str]:
        """All options given to cmake. Paths of the build directory never reach a library (`__FILE__`)."""
        prefix_map = f"-ffile-prefix-map={self.work}=."
        return {
            **self.backend.defines,
            "CMAKE_C_FLAGS": prefix_map,
            "CMAKE_CXX_FLAGS": prefix_map,
            "CMAKE_PROJECT_llama.cpp_INCLUDE": str(self.work / "without-common.cmake"),
            # cmake also looks outside of PATH, and then calls by name what the shell does not find
            "GGML_CCACHE": "ON" if self.toolchain.ccache else "OFF",
        }

    @property
    def command(self) -> list[str]:
        """The build, as one command that can be pasted once the source copy is there."""
        settings = {
            "build-dir": str(self.work / "build"),
            "cmake.build-type": "Release",
            **{f"cmake.define.{name}": value for name, value in self.defines.items()},
        }
        return [
            *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check"),
            *(part for name, value in settings.items() for part in ("-C", f"{name}={value}")),
            *("--outdir", str(self.work / "raw"), str(self.work / "src")),
        ]

    @property
    def environment(self) -> dict[str, str]:
        """What the build adds to the environment, on top of what `clean_environment` leaves."""
        toolchain = self.toolchain
        added = {
            "CMAKE_EXECUTABLE": str(toolchain.cmake),
            "CMAKE_GENERATOR": GENERATOR,
            "CMAKE_ARGS": shlex.join(self.cmake_args),
        }
        if toolchain.ccache:
            # With both, an object of one arm is found for the other although its directory differs.
            added |= {
                "CCACHE_BASEDIR": str(self.work),
                "CCACHE_NOHASHDIR": "1",
                "CCACHE_STATSLOG": str(self.work / "ccache.log"),
            }
        return added


def plan_build(
    arm: Arm,
    backend: Backend,
    pin: Pin,
    series: Series | None,
    home: Path,
    *,
    level: str | None = None,
    gpu_arch: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> Plan:
    """Decide everything, change nothing.

    `level` makes a portable wheel, `gpu_arch` names the GPUs of a backend that compiles for some.
    Raises MachineError for what this machine lacks, BuildError for options that cannot be.
    """
    if (arm == "patched") != (series is not None):
        raise BuildError(f"the {arm} arm {'needs a' if arm == 'patched' else 'has no'} series")
    if level:
        backend = repair.with_tools(portable(backend, level))
    found = toolchain.preflight(backend, home, environ)
    backend = for_architectures(backend, gpu_arch, found.programs)
    return Plan(
        arm=arm,
        backend=replace(backend, label=toolchain.label(backend, found)),
        pin=pin,
        series=series,
        toolchain=found,
        cmake_args=parse_cmake_args(environ.get("CMAKE_ARGS", "")),
        home=home,
        level=level,
    )


def parse_cmake_args(value: str) -> tuple[str, ...]:
    """Options in CMAKE_ARGS, for both arms. Raises BuildError for quotes that would reach cmake."""
    try:
        args = tuple(shlex.split(value))
    except ValueError as e:
        raise BuildError(f"CMAKE_ARGS cannot be split into options: {e}", where=value) from e
    for arg in args:
        if not arg.startswith("-") or "'" in arg or '"' in arg or " -D" in arg or value.lstrip()[0] in "'\"":
            raise BuildError(
                "CMAKE_ARGS has quotes around options, so they would be part of a value or one option",
                where=value,
                hint="write them as CMAKE_ARGS=-DNAME=VALUE, with quotes only inside a value",
            )
    return args


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables that would change a build behind the plan's back."""
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not (name in IGNORED or name.startswith(_IGNORED_PREFIXES))
    }
