"""Instruction sets: what a library was compiled for, and what this processor has."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from toolkit.process import run

# Macros that gcc and clang predefine for an enabled instruction set, and the flag the Linux kernel reports
# for it in /proc/cpuinfo (arch/x86/include/asm/cpufeatures.h, arch/arm64/kernel/cpuinfo.c).
_FLAG_OF_MACRO = {
    "__SSE3__": "pni",
    "__SSSE3__": "ssse3",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__POPCNT__": "popcnt",
    "__LZCNT__": "abm",
    "__MOVBE__": "movbe",
    "__BMI__": "bmi1",
    "__BMI2__": "bmi2",
    "__ADX__": "adx",
    "__AVX__": "avx",
    "__AVX2__": "avx2",
    "__FMA__": "fma",
    "__F16C__": "f16c",
    "__AVXVNNI__": "avx_vnni",
    "__AVX512F__": "avx512f",
    "__AVX512CD__": "avx512cd",
    "__AVX512BW__": "avx512bw",
    "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl",
    "__AVX512IFMA__": "avx512ifma",
    "__AVX512VBMI__": "avx512vbmi",
    "__AVX512VBMI2__": "avx512_vbmi2",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512BITALG__": "avx512_bitalg",
    "__AVX512VPOPCNTDQ__": "avx512_vpopcntdq",
    "__AVX512BF16__": "avx512_bf16",
    "__AVX512FP16__": "avx512_fp16",
    "__AMX_TILE__": "amx_tile",
    "__AMX_INT8__": "amx_int8",
    "__AMX_BF16__": "amx_bf16",
    "__GFNI__": "gfni",
    "__VAES__": "vaes",
    "__VPCLMULQDQ__": "vpclmulqdq",
    "__ARM_FEATURE_DOTPROD": "asimddp",
    "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp",
    "__ARM_FEATURE_MATMUL_INT8": "i8mm",
    "__ARM_FEATURE_BF16_VECTOR_ARITHMETIC": "bf16",
    "__ARM_FEATURE_SVE": "sve",
    "__ARM_FEATURE_SVE2": "sve2",
}


def machine_options(arguments: Iterable[str]) -> tuple[str, ...]:
    """The options of one compile command that choose instruction sets, such as -march=native."""
    return tuple(a for a in arguments if a.startswith("-m") and not a.startswith("-mtune="))


def compiled_for(compiler: Sequence[str | Path], options: Sequence[str]) -> tuple[str, ...]:
    """Flags a processor must have for code compiled with these options, named as in /proc/cpuinfo."""
    macros = run([*compiler, *options, "-dM", "-E", "-x", "c", os.devnull]).stdout
    defined = {line.split()[1] for line in macros.splitlines() if line.startswith("#define ")}
    return tuple(sorted(flag for macro, flag in _FLAG_OF_MACRO.items() if macro in defined))


def host_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str] | None:
    """Flags of this processor, or None where the system does not list them."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(match[1].split()) if match else None


def missing_flags(needed: Iterable[str], host: frozenset[str] | None) -> tuple[str, ...]:
    """What `needed` has and the host has not; nothing when the host is unknown."""
    return () if host is None else tuple(flag for flag in needed if flag not in host)
