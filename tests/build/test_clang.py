"""HIP and Metal are built by clang, and for other systems: what the series touches compiles there too."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from toolkit.config import patches_dir
from toolkit.patch.patching import State, apply, inspect
from toolkit.patch.series import Series, load_series
from toolkit.patch.upstream import arm_tree, load_pin
from toolkit.process import run

pytestmark = pytest.mark.build

HERE, MAC, WINDOWS = "this system", "aarch64-macos", "x86_64-windows-gnu"
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wmissing-declarations", "-Werror")


@pytest.fixture(scope="module")
def series() -> Series:
    return load_series(patches_dir())


@pytest.fixture(scope="module")
def tree(series: Series, real_home: Path) -> Path:
    """The patched llama.cpp."""
    pin = load_pin()
    root = arm_tree(pin, "patched", real_home).llama
    apply(series, root, pin.commit)
    assert inspect(series, root, pin.commit).state is State.APPLIED
    return root


def clang(target: str, language: str) -> list[str]:
    """A clang that compiles for the target. Zig is one, with the headers of many systems."""
    if target == HERE:
        stem = {"c": "clang", "c++": "clang++"}[language]
        found = next(filter(None, map(shutil.which, [stem, *(f"{stem}-{n}" for n in range(30, 10, -1))])), None)
        if found is None:
            pytest.skip("no clang: apt-get install clang")
        return [found]
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip(f"no compiler for {target}: pip install ziglang")
    return [sys.executable, "-m", "ziglang", {"c": "cc", "c++": "c++"}[language], "-target", target]


def compile_object(tree: Path, source: Path, target: str, folder: Path, options: Sequence[str | Path]) -> bytes:
    language = "c" if source.suffix == ".c" else "c++"
    standard = {"c": "-std=gnu11", "c++": "-std=c++17"}[language]
    # as the system's own: only our lines can give warnings
    below = ("include", "src", "ggml/include", "ggml/src", "ggml/src/ggml-cpu")
    headers = [word for name in below for word in ("-isystem", tree / name)]
    out = folder / f"{source.stem}.o"
    cache = {"ZIG_GLOBAL_CACHE_DIR": str(folder / "cache"), "ZIG_LOCAL_CACHE_DIR": str(folder / "cache")}
    run([*clang(target, language), standard, "-D_GNU_SOURCE", *options, *headers, "-c", source, "-o", out], env=cache)
    return out.read_bytes()


@pytest.mark.parametrize("target", [HERE, MAC, WINDOWS])
def test_hook_sites_and_payload_compile_with_clang(target: str, series: Series, tree: Path, tmp_path: Path) -> None:
    hooked = {hook.file for hook in series.hooks if hook.file.endswith((".c", ".cpp"))}
    assert hooked >= {"src/llama-mmap.cpp", "src/llama-model-loader.cpp", "ggml/src/ggml-cpu/ggml-cpu.c"}
    for file in sorted(hooked):
        # the call is in what was compiled, for this system as for others
        assert b"ggml_moe_prefetch_" in compile_object(tree, tree / file, target, tmp_path, ["-w"]), file
    ours = [patches_dir() / payload.source for payload in series.payload if payload.source.endswith(".cpp")]
    assert ours
    for source in ours:
        assert compile_object(tree, source, target, tmp_path, [*WARNINGS, "-I", source.parent])
