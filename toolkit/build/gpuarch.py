"""Which GPUs a wheel is compiled for: named, or those of this machine; never left to the compiler's guess."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.build.backends import Architectures, Backend
from toolkit.errors import BuildError, CommandError, MachineError
from toolkit.process import run


def for_architectures(backend: Backend, asked: Sequence[str], programs: Mapping[str, Path]) -> Backend:
    """The backend with its GPU architectures set, unless it has none.

    `programs` holds the paths of the backend's tools by name. Raises BuildError for one that is not an
    architecture, MachineError when the compiler cannot make it, or when none is named and no GPU answers.
    """
    architectures = backend.architectures
    if architectures is None:
        if asked:
            raise BuildError(
                f"the {backend.name} backend has no GPU architectures", where=f"--gpu-arch {' '.join(asked)}"
            )
        return backend
    names = tuple(part for entry in asked for part in re.split(r"[;,\s]+", entry) if part)
    names = names or _detect(backend, architectures)
    for name in names:
        if not re.fullmatch(architectures.syntax, name):
            raise BuildError(
                f"{name!r} is not a GPU architecture of the {backend.name} backend",
                where="--gpu-arch",
                hint=f"write it as {architectures.example}",
            )
    _require_known(architectures, names, programs)
    return replace(backend, defines={**backend.defines, architectures.define: ";".join(dict.fromkeys(names))})


def _detect(backend: Backend, architectures: Architectures) -> tuple[str, ...]:
    try:
        lines = run(architectures.detect).stdout.splitlines()
    except CommandError:
        lines = []
    matches = (re.fullmatch(architectures.detected, line.strip()) for line in lines)
    found = tuple(dict.fromkeys("".join(match.groups()) for match in matches if match))
    if not found:
        raise MachineError(
            f"no GPU of this machine says which architecture to build the {backend.name} backend for",
            where=" ".join(architectures.detect),
            hint=f"name the GPUs it shall run on: moe-madv build --backend {backend.name}"
            f" --gpu-arch {architectures.example}",
        )
    return found


def _require_known(architectures: Architectures, names: Sequence[str], programs: Mapping[str, Path]) -> None:
    if not architectures.known:
        return
    program, *options = architectures.known
    command = [str(programs[program]), *options]
    known = re.findall(architectures.known_line, run(command).stdout)
    unknown = [name for name in names if (m := re.fullmatch(architectures.syntax, name)) and m[1] not in known]
    if unknown:
        raise MachineError(
            f"{program} cannot make code for {', '.join(unknown)} (it knows {', '.join(known) or 'none'})",
            where=" ".join(command),
            hint=f"install a newer {program}, or put the newer one first on PATH",
        )
