"""Finding the programs of a build, all missing ones in one report."""

from __future__ import annotations

import itertools
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Formatter

from toolkit.build.backends import Backend, Tool
from toolkit.build.venv import create_venv, pip_install
from toolkit.console import note
from toolkit.errors import CommandError, MachineError
from toolkit.process import run

_VERSION = re.compile(r"\d+(?:\.\d+)+")
# The ways to show cmake one, such as -DCUDAToolkit_ROOT=/opt/cuda.
_PREFIX_ARGUMENT = re.compile(r"-D(?:CMAKE_PREFIX_PATH|\w+_ROOT)(?::\w+)?=([^\s;'\"]+)")
_PREFIXES = ("/usr/local", "/usr", "/opt/rocm", "/opt/homebrew")


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """The programs a build uses; those in `install` are not there yet, but at their path after `provide`."""

    cc: tuple[str, ...]  # program and the options that CC gives it
    cxx: tuple[str, ...]
    cmake: Path
    ninja: Path
    ccache: Path | None
    compiler: str  # what the compilers say they are, and the machine they compile for
    programs: Mapping[str, Path] = field(default_factory=dict)  # tool name -> program, of all that are there
    versions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of the tools that are in the label
    install: tuple[str, ...] = ()  # Python packages to install into `toolbox`


def toolbox(home: Path) -> Path:
    """The environment for build programs that the system lacks."""
    return home / "toolbox"


def preflight(backend: Backend, home: Path, environ: Mapping[str, str] = os.environ) -> Toolchain:
    """Find every tool of the backend without changing anything.

    Raises MachineError on a system where the backend cannot be built, or naming all missing tools at once
    when one of them has to come from the system.
    """
    require_system(backend, platform.system())
    path = os.pathsep.join([environ.get("PATH", ""), str(Path(sys.executable).parent), str(toolbox(home) / "bin")])
    found: dict[str, tuple[str, ...]] = {}
    missing: list[tuple[Tool, str]] = []
    for tool in backend.tools:
        if tool.files:
            file = _file(tool, environ, found.values())
            if file is None:
                missing.append((tool, tool.name))
            elif tool.contains and tool.contains not in file.read_text(encoding="utf-8", errors="replace"):
                # the package manager's is the one that is too old
                missing.append((replace(tool, apt=None), f"newer {tool.name} ({file} has no {tool.contains})"))
            continue
        command, problem = _find(tool, path, environ)
        if command is None:
            missing.append((tool, problem))
        else:
            found[tool.name] = command
    if any(tool.package is None for tool, _ in missing):
        raise MachineError(
            f"cannot build the {backend.name} backend, missing: {', '.join(text for _, text in missing)}",
            hint=_remedy([tool for tool, _ in missing], environ),
        )
    packages = tuple(tool.package for tool, _ in missing if tool.package)
    for tool, _ in missing:
        found[tool.name] = (str(toolbox(home) / "bin" / tool.executables[0]),)
    ccache = shutil.which("ccache", path=path)
    cc, cxx = found["C compiler"], found["C++ compiler"]
    labelled = {name for _, name, _, _ in Formatter().parse(backend.label) if name}
    versions = {tool.name: _version(found[tool.name][0]) for tool in backend.tools if tool.name in labelled}
    identity = [_version_line(cc), _version_line(cxx), _ask(cc, "-dumpmachine")]
    return Toolchain(
        cc=cc,
        cxx=cxx,
        cmake=Path(found["cmake"][0]),
        ninja=Path(found["ninja"][0]),
        ccache=Path(ccache) if ccache else None,
        compiler="; ".join([*identity, *(f"{name} {_dotted(version)}" for name, version in versions.items())]),
        programs={name: Path(command[0]) for name, command in found.items()},
        versions=versions,
        install=packages,
    )


def provide(backend: Backend, toolchain: Toolchain, home: Path) -> None:
    """Install what the build takes from the toolbox, unless all of it is there and runs."""
    folder = toolbox(home) / "bin"
    wanted = [t for t in backend.tools if t.package and toolchain.programs[t.name].parent == folder]
    if all(_find(tool, str(folder), {})[0] for tool in wanted):
        return
    note(f"installing {' and '.join(str(tool.package) for tool in wanted)} into {toolbox(home)}")
    python = create_venv(toolbox(home))
    pip_install(python, *(f"{tool.package}>={_dotted(tool.minimum)}" for tool in wanted))


def label(backend: Backend, toolchain: Toolchain) -> str:
    """The backend's label with the versions of its tools in it, such as cuda130."""
    digits = {name: "".join(map(str, version[:2])) for name, version in toolchain.versions.items()}
    return backend.label.format_map(digits)


def require_system(backend: Backend, system: str) -> None:
    """Raises MachineError when no build on this kind of system can give the backend."""
    if system in backend.systems:
        return
    names = {"Darwin": "macOS"}
    hint = f"run the build on {' or '.join(names.get(s, s) for s in backend.systems)}"
    if system == "Darwin":
        hint += "; here use --backend metal, which the binding switches on in every build for macOS"
    raise MachineError(f"the {backend.name} backend cannot be built on {names.get(system, system)}", hint=hint)


def _file(tool: Tool, environ: Mapping[str, str], programs: Iterable[tuple[str, ...]]) -> Path | None:
    """The first below the prefixes given in the environment, the usual ones, and those of the programs found."""
    own = environ.get(tool.variable, "") if tool.variable else ""
    given = _PREFIX_ARGUMENT.findall(environ.get("CMAKE_ARGS", ""))
    prefixes = [Path(name) for name in (own, *given, *_PREFIXES) if name]
    prefixes += [Path(program).resolve().parent.parent for program, *_ in programs]
    matches = (prefix.glob(pattern) for prefix in dict.fromkeys(prefixes) for pattern in tool.files)
    return next(itertools.chain.from_iterable(matches), None)


def _find(tool: Tool, path: str, environ: Mapping[str, str]) -> tuple[tuple[str, ...] | None, str]:
    """(command, "") or (None, what is missing). The first program on `path` that is new enough."""
    chosen = environ.get(tool.variable, "") if tool.variable else ""
    names = tool.executables
    options: tuple[str, ...] = ()
    if chosen:
        try:
            first, *rest = shlex.split(chosen)
        except ValueError:
            return None, f"{tool.name} ({tool.variable}={chosen!r} is not a command)"
        names, options = (first,), tuple(rest)
    folders = [folder for folder in path.split(os.pathsep) if folder]
    programs = [p for name in names for folder in folders if (p := shutil.which(name, path=folder))]
    if not programs:
        return None, f"{tool.name} ({tool.variable}={chosen} is not there)" if chosen else tool.name
    if not tool.minimum:
        return (programs[0], *options), ""
    versions = {program: _version(program) for program in dict.fromkeys(programs)}
    for program, version in versions.items():
        if version >= tool.minimum:
            return (program, *options), ""
    old = ", ".join(f"{program} is {_dotted(version) or 'unreadable'}" for program, version in versions.items())
    return None, f"{tool.name} {_dotted(tool.minimum)} or newer ({old})"


def _remedy(missing: list[Tool], environ: Mapping[str, str]) -> str:
    """The next command; a compiler that a variable names wrongly is not cured by an install."""
    programs = [tool for tool in missing if tool.executables]
    variables = [tool.variable for tool in programs if tool.variable and environ.get(tool.variable)]
    others = [tool for tool in missing if tool.variable not in variables]
    remedies = [f"unset {' '.join(variables)}, or name a compiler that is on PATH there"] if variables else []
    if packages := dict.fromkeys(tool.apt for tool in others if tool.apt):
        remedies.append(f"sudo apt-get install -y {' '.join(packages)}")
    if elsewhere := dict.fromkeys(tool.elsewhere for tool in others if tool.elsewhere and not tool.apt):
        remedies.append(f"install {', '.join(elsewhere)}")
    pip = " ".join(tool.package for tool in others if tool.package)
    return "; ".join(remedies) + (f"  ({pip} are also Python packages: python -m pip install {pip})" if pip else "")


def _version(program: str) -> tuple[int, ...]:
    """What `--version` says, () when the program does not run or says no version."""
    try:
        done = run([program, "--version"], check=False)
    except CommandError:
        return ()
    match = _VERSION.search(done.stdout) if done.returncode == 0 else None
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _version_line(compiler: tuple[str, ...]) -> str:
    """The compiler's own name; options that come with it are part of what it is."""
    line = _ask(compiler, "--version")
    return f"{line} ({shlex.join(compiler[1:])})" if compiler[1:] else line


def _ask(compiler: tuple[str, ...], option: str) -> str:
    """The first line a compiler answers. Raises MachineError when it fails or answers nothing."""
    try:
        lines = run([*compiler, option]).stdout.strip().splitlines()
    except CommandError as e:
        lines, problem = [], e.what
    else:
        problem = "it printed nothing"
    if not lines:
        raise MachineError(
            f"the compiler does not answer {option}: {problem}",
            where=shlex.join(compiler),
            hint="set CC and CXX to compilers that work, such as CC=gcc CXX=g++",
        )
    return lines[0]
