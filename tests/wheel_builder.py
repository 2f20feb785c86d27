"""Wheels made by hand: small ELF files, what a build leaves, its manifest and its plan."""

from __future__ import annotations

import hashlib
import struct
import zipfile
from pathlib import Path

from toolkit.build.backends import get_backend
from toolkit.build.buildplan import Plan
from toolkit.build.toolchain import Toolchain
from toolkit.build.wheelfile import Manifest
from toolkit.patch.series import Hook, Payload, Series
from toolkit.patch.upstream import Pin

PIN = Pin(binding="0.3.36", sdist_sha256="5" * 64, commit="a" * 40)
TAGS = "py3-none-linux_x86_64"


def series(data: bytes = b"// payload\n") -> Series:
    hooks: tuple[Hook, ...] = ()
    payload = (Payload(source="p.cpp", target="ggml/src/p.cpp", data=data),)
    return Series(label="moe1", author="A", author_email="a@b", timestamp=0, payload=payload, hooks=hooks)


def plan(home: Path, patched: bool = True) -> Plan:
    bin_dir = Path("/usr/bin")
    return Plan(
        arm="patched" if patched else "baseline",
        backend=get_backend("cpu"),
        pin=PIN,
        series=series() if patched else None,
        toolchain=Toolchain(
            cc=(str(bin_dir / "cc"),),
            cxx=(str(bin_dir / "c++"),),
            cmake=bin_dir / "cmake",
            ninja=bin_dir / "ninja",
            ccache=bin_dir / "ccache",
            compiler="cc 12; c++ 12; x86_64",
        ),
        cmake_args=(),
        home=home,
    )


def elf(*needed: str, soname: str = "") -> bytes:
    """A 64-bit shared library that is only a dynamic section: enough to ask what it needs."""
    strings = b"\0"
    dynamic = b""
    for tag, text in [(1, n) for n in needed] + ([(14, soname)] if soname else []):
        dynamic += struct.pack("<QQ", tag, len(strings))
        strings += text.encode() + b"\0"
    start = 64 + 2 * 56  # header and two program headers
    dynamic += struct.pack("<QQ", 5, start) + struct.pack("<QQ", 10, len(strings))
    dynamic += struct.pack("<QQ", 0, 0)
    size = start + len(strings) + len(dynamic)
    header = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, size, size, 4096)
    at = start + len(strings)
    dyn = struct.pack("<IIQQQQQQ", 2, 6, at, at, at, len(dynamic), len(dynamic), 8)
    return header + load + dyn + strings + dynamic


LIBRARIES = {
    "libllama.so": elf("libggml.so", "libc.so.6", soname="libllama.so"),
    "libggml.so": elf("libggml-base.so", "libggml-cpu.so"),
    "libggml-base.so": elf("libgomp.so.1", "libstdc++.so.6", "libm.so.6"),
    "libggml-cpu.so": elf("libggml-base.so", "libgomp.so.1", "ld-linux-x86-64.so.2"),
}


def manifest(**changes: object) -> Manifest:
    values = {
        "format": 1,
        "arm": "patched",
        "label": "moe1.cpu",
        "version": "0.3.36+moe1.cpu",
        "backend": "cpu",
        "binding": "0.3.36",
        "sdist_sha256": "5" * 64,
        "pin": "a" * 40,
        "commit": "b" * 40,
        "series": "c" * 64,
        "payload": "1",
        "defines": {"GGML_NATIVE": "ON"},
        "cmake_args": (),
        "compiler": "cc 12",
        "cmake": "3.25.1",
        "generator": "Ninja",
        "machine_options": ("-march=native",),
        "cpu_flags": ("avx", "avx2"),
        "openmp": True,
        "libraries": {name: hashlib.sha256(data).hexdigest() for name, data in LIBRARIES.items()},
        "key": "0.3.36-moe1.cpu-0",
    }
    return Manifest(**{**values, **changes})  # type: ignore[arg-type]


def raw_wheel(folder: Path, libraries: dict[str, bytes] = LIBRARIES) -> Path:
    """What the binding's build makes: the package, and upstream's own install rules at the top."""
    path = folder / f"llama_cpp_python-0.3.36-{TAGS}.whl"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("include/llama.h", "int x;\n")
        for name, data in libraries.items():
            z.writestr(f"lib/{name}", data)
            z.writestr(f"llama_cpp/lib/{name}", data)
        z.writestr("llama_cpp/__init__.py", "__version__ = '0.3.36'\n")
        info = "llama_cpp_python-0.3.36.dist-info"
        metadata = "Metadata-Version: 2.2\nName: llama_cpp_python\nVersion: 0.3.36\n\nVersion: of the text\n"
        z.writestr(f"{info}/METADATA", metadata)
        z.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {TAGS}\n")
        z.writestr(f"{info}/RECORD", "llama_cpp/__init__.py,sha256=wrong,1\n")
    return path
