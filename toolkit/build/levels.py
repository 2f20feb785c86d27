"""Instruction sets a portable wheel may use: one named level instead of what this processor happens to have."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace

from toolkit.build.backends import Backend
from toolkit.errors import BuildError

_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_X86 = ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C", "AVX512")


@dataclass(frozen=True, kw_only=True)
class Level:
    """The oldest processor a portable wheel runs on."""

    name: str  # the psABI's, or the compiler's -march
    label: str  # appended to the wheel's local version label
    machine: str  # platform.machine(), as Linux spells it
    defines: Mapping[str, str]


def _x86(name: str, label: str, *features: str) -> Level:
    """ggml compiles for exactly the features that are ON."""
    defines = {f"GGML_{feature}": "ON" if feature in features else "OFF" for feature in _X86}
    return Level(name=name, label=label, machine="x86_64", defines=defines)


def _arm(name: str, label: str) -> Level:
    return Level(name=name, label=label, machine="aarch64", defines={"GGML_CPU_ARM_ARCH": name})


LEVELS = {
    level.name: level
    for level in (
        _x86("x86-64", "v1"),
        _x86("x86-64-v2", "v2", "SSE42"),
        _x86("x86-64-v3", "v3", "SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C"),
        _x86("x86-64-v4", "v4", *_X86),
        _arm("armv8-a", "a8"),
        _arm("armv8.2-a+dotprod+fp16", "a82"),
    )
}


def portable(backend: Backend, name: str, machine: str | None = None) -> Backend:
    """The backend without this machine's own instructions. Raises BuildError for a level of another machine."""
    here = (machine or platform.machine()).lower()
    here = _MACHINES.get(here, here)
    fitting = {n: level for n, level in LEVELS.items() if level.machine == here}
    if name not in fitting:
        raise BuildError(
            f"there is no portable level {name!r} for {here}",
            where="--portable",
            hint=f"use one of {', '.join(fitting)}" if fitting else "build without --portable",
        )
    level = fitting[name]
    return replace(
        backend,
        label=f"{backend.label}.{level.label}",
        defines={**backend.defines, "GGML_NATIVE": "OFF", **level.defines},
    )
