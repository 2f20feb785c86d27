"""Accepting a port: llama.cpp compiles with the series, its counters move, its outputs are those of stock."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.build.backends import get_backend
from toolkit.build.buildplan import GENERATOR, clean_environment
from toolkit.build.compiling import compile_with_progress
from toolkit.build.toolchain import Toolchain, preflight, provide
from toolkit.console import note
from toolkit.errors import BuildError, CommandError
from toolkit.files import atomic_path
from toolkit.patch.gitrepo import Git, seed
from toolkit.patch.patching import apply
from toolkit.patch.series import Series
from toolkit.patch.upstream import Tree, locked
from toolkit.process import run

TARGETS = ("ggml-base", "ggml-cpu", "llama")
# Whatever else this llama.cpp would build by default; a name it does not know is ignored.
_OFF = ("BUILD_APP", "BUILD_COMMON", "BUILD_EXAMPLES", "BUILD_SERVER", "BUILD_TESTS", "BUILD_TOOLS", "CURL", "OPENSSL")
_MOVING = ("mappings", "groups", "slices")  # counters that a decode of a MoE model in any mode but off must move


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What compiling and running a ported series gave."""

    compiled: bool
    counters_moved: bool | None  # None: not run
    outputs_equal: bool | None  # every mode against an unpatched build of the same commit, bit for bit
    log: Path  # of the compiler
    modes: tuple[str, ...] = ()  # of the payload, all of them run
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.compiled and bool(self.counters_moved) and bool(self.outputs_equal)


def accept(series: Series, tree: Tree, model: Path, home: Path) -> Acceptance:
    """Build stock and patched libraries of a tree's commit and compare a short decode of `model`.

    A stock build is made once and kept; then only what the series changes is compiled. A failing port is an
    answer, not an error. Raises MachineError for missing tools and BuildError when stock itself fails.
    """
    backend = get_backend("cpu")
    toolchain = preflight(backend, home)
    provide(backend, toolchain, home)
    compiler = hashlib.sha256(toolchain.compiler.encode()).hexdigest()[:8]
    work = home / "builds" / f"port-{tree.commit[:9]}-{compiler}"
    with locked(home / "builds"):
        builder = _Builder(work=work, toolchain=toolchain, log=home / "logs" / f"{work.name}.log")
        builder.check_out(tree)
        stock = work / "stock"
        if not stock.is_dir():
            try:
                builder.compile()
            except CommandError as e:
                raise BuildError(f"stock llama.cpp does not compile: {e.what}", where=e.where, hint=e.hint) from e
            with atomic_path(stock) as partial:
                builder.collect(partial)
        expected = builder.decode(stock, model, "stock", "off")
        apply(series, work / "src", tree.commit)
        try:
            builder.compile()
        except CommandError as e:
            problem = (e.what,)
            return Acceptance(
                compiled=False, counters_moved=None, outputs_equal=None, log=builder.log, problems=problem
            )
        patched = work / "patched"
        shutil.rmtree(patched, ignore_errors=True)
        builder.collect(patched)
        return _compare(builder, patched, model, expected)


def _compare(builder: _Builder, patched: Path, model: Path, expected: _Decode) -> Acceptance:
    problems = []
    moved = equal = True
    off = builder.decode(patched, model, "patched-off", "off")
    modes = tuple(off.payload["modes"] or ())
    if not modes:
        problems.append("the patched build has no payload")
    for mode in modes:
        found = off if mode == "off" else builder.decode(patched, model, f"patched-{mode}", mode)
        if found.logits != expected.logits:
            equal = False
            problems.append(f"mode {mode}: the logits are not those of stock")
        still = [name for name in _MOVING if not found.payload["counters"].get(name)]
        if mode != "off" and still:
            moved = False
            problems.append(f"mode {mode}: {', '.join(still)} stayed 0")
    return Acceptance(
        compiled=True,
        counters_moved=moved and len(modes) > 1,
        outputs_equal=equal and bool(modes),
        log=builder.log,
        modes=modes,
        problems=tuple(problems),
    )


@dataclass(frozen=True, kw_only=True)
class _Decode:
    logits: bytes
    payload: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Builder:
    """One build directory that first compiles stock and then, in the same sources, the series."""

    work: Path
    toolchain: Toolchain
    log: Path

    @property
    def environment(self) -> dict[str, str]:
        added = {"CC": str(self.toolchain.cc[0]), "CXX": str(self.toolchain.cxx[0])}
        if self.toolchain.ccache:
            added |= {"CCACHE_BASEDIR": str(self.work), "CCACHE_NOHASHDIR": "1"}
        return clean_environment(os.environ) | added

    def check_out(self, tree: Tree) -> None:
        """The commit of the tree, unchanged, in `src`; files that stay the same keep their dates."""
        src = self.work / "src"
        git = Git(root=src)
        if not src.is_dir() or not git.is_repository() or git.commit(tree.commit) is None:
            shutil.rmtree(src, ignore_errors=True)
            src.mkdir(parents=True)
            git = seed(src, tree.llama, tree.commit)
        git.run("checkout", "--quiet", "--force", "--detach", tree.commit)
        git.run("reset", "--quiet", "--hard")
        git.run("clean", "--quiet", "-d", "--force")

    def compile(self) -> None:
        """Raises CommandError with the last lines of the compiler."""
        build = self.work / "build"
        defines = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_MAKE_PROGRAM": str(self.toolchain.ninja),
            "BUILD_SHARED_LIBS": "ON",
            "GGML_NATIVE": "ON",
            "GGML_CCACHE": "ON" if self.toolchain.ccache else "OFF",
            **{f"LLAMA_{name}": "OFF" for name in _OFF},
        }
        configure = [str(self.toolchain.cmake), "-S", str(self.work / "src"), "-B", str(build), "-G", GENERATOR]
        options = [f"-D{name}={value}" for name, value in defines.items()]
        run([*configure, *options], env=self.environment, log=self.log.with_suffix(".cmake.log"))
        command = [str(self.toolchain.cmake), "--build", str(build), "--target", *TARGETS]
        compile_with_progress(command, env=self.environment, log=self.log, label=self.work.name)

    def collect(self, folder: Path) -> None:
        """Copy the libraries and compile the smoke program beside them."""
        folder.mkdir(parents=True)
        for library in (self.work / "build").rglob("*.so*"):
            shutil.copy2(library, folder / library.name, follow_symlinks=False)
        src = self.work / "src"
        includes = [f"-I{src / folder}" for folder in ("include", "ggml/include")]
        libraries = ["-lllama", "-lggml", "-lggml-base", "-ldl", f"-Wl,-rpath-link,{folder}"]
        source = Path(__file__).with_name("smoke.cpp")
        run([*self.toolchain.cxx, "-std=c++17", *includes, source, "-o", folder / "smoke", f"-L{folder}", *libraries])

    def decode(self, folder: Path, model: Path, name: str, mode: str) -> _Decode:
        """Run the smoke program with one build's libraries. Raises CommandError when it fails."""
        logits = self.work / f"{name}.logits"
        logits.unlink(missing_ok=True)
        note(f"decoding with {name}")
        found = run(
            [folder / "smoke", model, logits],
            cwd=self.work,
            # an abort would start a debugger on itself and wait for it
            env={"LD_LIBRARY_PATH": str(folder), "MOE_MADV_MODE": mode, "GGML_NO_BACKTRACE": "1"},
        )
        data = logits.read_bytes()
        if not data:
            raise BuildError("the smoke program wrote no logits", where=logits)
        return _Decode(logits=data, payload=json.loads(found.stdout.splitlines()[-1]))
