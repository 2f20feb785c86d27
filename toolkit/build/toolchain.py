"""Finding the programs of a build, all missing ones in one report."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.build.backends import Backend, Tool
from toolkit.build.venv import create_venv, pip_install
from toolkit.console import note
from toolkit.errors import MachineError
from toolkit.process import run

_VERSION = re.compile(r"\d+(?:\.\d+)+")


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """The programs a build uses; those in `install` are not there yet, but at their path after `provide`."""

    cc: Path
    cxx: Path
    cmake: Path
    make: Path  # ninja or make
    ccache: Path | None
    compiler: str  # what both compilers say they are, and the machine they compile for
    install: tuple[str, ...] = ()  # Python packages to install into `toolbox`

    @property
    def generator(self) -> str:
        """The cmake generator that drives `make`."""
        return "Ninja" if self.make.stem == "ninja" else "Unix Makefiles"


def toolbox(home: Path) -> Path:
    """The environment for build programs that the system lacks."""
    return home / "toolbox"


def preflight(backend: Backend, home: Path, environ: Mapping[str, str] = os.environ) -> Toolchain:
    """Find every tool of the backend without changing anything.

    Raises MachineError naming all missing tools at once when one of them has to come from the system.
    """
    path = os.pathsep.join([environ.get("PATH", ""), str(Path(sys.executable).parent), str(toolbox(home) / "bin")])
    found: dict[str, Path] = {}
    missing: list[tuple[Tool, str]] = []
    for tool in backend.tools:
        program, problem = _find(tool, path, environ)
        if program is None:
            missing.append((tool, problem))
        else:
            found[tool.name] = program
    if any(tool.package is None for tool, _ in missing):
        apt = " ".join(dict.fromkeys(tool.apt for tool, _ in missing))
        pip = " ".join(tool.package for tool, _ in missing if tool.package)
        raise MachineError(
            f"cannot build the {backend.name} backend, missing: {', '.join(text for _, text in missing)}",
            hint=f"sudo apt-get install -y {apt}"
            + (f"  ({pip} are also Python packages: python -m pip install {pip})" if pip else ""),
        )
    packages = [tool.package for tool, _ in missing if tool.package]
    for package, (tool, _) in zip(packages, missing, strict=True):
        found[tool.name] = toolbox(home) / "bin" / package
    ccache = shutil.which("ccache", path=path)
    return Toolchain(
        cc=found["C compiler"],
        cxx=found["C++ compiler"],
        cmake=found["cmake"],
        make=found["ninja or make"],
        ccache=Path(ccache) if ccache else None,
        compiler=_identify(found["C compiler"], found["C++ compiler"]),
        install=tuple(packages),
    )


def provide(toolchain: Toolchain, home: Path) -> None:
    """Install the programs that preflight found missing and the package index has."""
    if toolchain.install:
        note(f"installing {' and '.join(toolchain.install)} into {toolbox(home)}")
        python = create_venv(toolbox(home))
        pip_install(python, *toolchain.install)


def _find(tool: Tool, path: str, environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """(program, "") or (None, what is missing)."""
    chosen = environ.get(tool.variable, "") if tool.variable else ""
    names = (shlex.split(chosen)[0],) if chosen else tool.executables
    program = next((Path(p) for p in (shutil.which(name, path=path) for name in names) if p), None)
    if program is None:
        return None, f"{tool.name} ({tool.variable}={chosen} is not there)" if chosen else tool.name
    if tool.minimum:
        match = _VERSION.search(run([program, "--version"], check=False).stdout)
        version = tuple(int(part) for part in match[0].split(".")) if match else ()
        if version < tool.minimum:
            wanted = ".".join(map(str, tool.minimum))
            return None, f"{tool.name} {wanted} or newer ({program} is {match[0] if match else 'unreadable'})"
    return program, ""


def _identify(cc: Path, cxx: Path) -> str:
    names = [run([program, "--version"]).stdout.splitlines()[0] for program in (cc, cxx)]
    return "; ".join([*names, run([cc, "-dumpmachine"]).stdout.strip()])
