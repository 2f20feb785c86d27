"""One wheel of one arm: from a verified tree to a labelled file with its manifest."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.build import cpuflags, wheelfile
from toolkit.build.buildplan import GENERATOR, IGNORED, Plan, clean_environment
from toolkit.build.compiling import compile_with_progress
from toolkit.build.drivers import driver_environment
from toolkit.build.repair import repair
from toolkit.build.toolchain import provide
from toolkit.build.wheelfile import BuildRecord, Manifest, Wheel
from toolkit.console import note
from toolkit.errors import BuildError, PatchError
from toolkit.patch.gitrepo import Git, seed
from toolkit.patch.patching import State, inspect
from toolkit.patch.upstream import LLAMA, Tree, arm_tree, check_complete, locked
from toolkit.process import run

# The binding forces llama.cpp's `common` on, two fifths of the compile time, and never ships it. A normal
# variable in llama.cpp's own scope wins over the forced cache entry.
_WITHOUT_COMMON = "set(LLAMA_BUILD_COMMON OFF)\n"


def finished(plan: Plan) -> Wheel | None:
    """The wheel of an earlier build with the same key, if it is whole."""
    for path in sorted(plan.wheels.glob("*.whl")):
        try:
            return wheelfile.load(path)
        except BuildError as e:
            note(f"building again: {e.what}")
    return None


def build_wheel(plan: Plan, *, force: bool = False) -> Wheel:
    """The wheel of a plan: the finished one, or a build of minutes that continues an interrupted one.

    Raises BuildError, CommandError or FetchError; the source tree is only read, never built in.
    """
    with locked(plan.home / "builds"):
        if not force and (wheel := finished(plan)):
            return wheel
        if force:
            shutil.rmtree(plan.work, ignore_errors=True)
        started = time.monotonic()
        if ignored := [name for name in IGNORED if os.environ.get(name)]:
            note(f"ignoring {', '.join(ignored)}: put options for both arms into CMAKE_ARGS")
        tree = source_tree(plan)
        provide(plan.backend, plan.toolchain, plan.home)
        copy_sources(plan, tree)
        raw = _compile(plan)
        if plan.level:
            clean = wheelfile.strip(raw, plan.work / "clean")
            shutil.rmtree(plan.work / "repaired", ignore_errors=True)
            raw = repair(clean, plan.work / "repaired", plan.backend, plan.toolchain.programs)
        manifest = _describe(plan, tree, raw)
        path = wheelfile.pack(raw, plan.wheels, manifest)
        hits, objects = _ccache_hits(plan)
        record = BuildRecord(
            seconds=round(time.monotonic() - started, 1),
            objects=objects,
            ccache_hits=hits,
            host_flags=tuple(sorted(cpuflags.host_flags() or ())),
        )
        wheel = wheelfile.store(path, manifest, record)
        shutil.rmtree(plan.work)
        return wheel


def source_tree(plan: Plan) -> Tree:
    """The tree of the plan's arm, made when absent. Raises FetchError or PatchError with the next command."""
    tree = arm_tree(plan.pin, plan.arm, plan.home)
    if plan.series:
        status = inspect(plan.series, tree.llama, plan.pin.commit)
        if status.state is not State.APPLIED:
            raise PatchError(
                "; ".join([f"the patched tree is {status.state.value}", *status.notes]),
                where=tree.llama,
                hint=status.hint or "moe-madv patch apply",
            )
    return tree


def copy_sources(plan: Plan, tree: Tree) -> None:
    """Copy what the build reads. llama.cpp comes from its commit, so stray files cannot follow it.

    The binding's install rules write libraries into its own llama_cpp/lib: that must be neither the tree's
    nor one that another build has filled.
    """
    check_complete(tree.root)
    src = plan.work / "src"
    git = Git(root=src / LLAMA)
    if (src / LLAMA / ".git").exists() and git.commit() == tree.commit and not git.changes():
        shutil.rmtree(src / wheelfile.LIBRARY_DIR, ignore_errors=True)
        return
    shutil.rmtree(src, ignore_errors=True)
    shutil.copytree(
        tree.root,
        src,
        ignore=lambda folder, _: (
            {
                tree.root: {".git", "vendor"},
                tree.root / wheelfile.PACKAGE: {"lib"},
            }.get(Path(folder), set())
            | {"__pycache__"}
        ),
    )
    (src / LLAMA).mkdir(parents=True)
    seed(src / LLAMA, tree.llama, tree.commit).run("reset", "--hard", "--quiet")


def _compile(plan: Plan) -> Path:
    shutil.rmtree(plan.work / "raw", ignore_errors=True)
    (plan.work / "ccache.log").unlink(missing_ok=True)
    (plan.work / "without-common.cmake").write_text(_WITHOUT_COMMON, encoding="utf-8")
    environment = clean_environment(os.environ) | plan.environment
    tools = dict.fromkeys(str(p.parent) for p in (plan.toolchain.cmake, plan.toolchain.ninja))
    environment["PATH"] = os.pathsep.join([environment.get("PATH", ""), *tools])
    compile_with_progress(plan.command, env=environment, log=plan.log, label=plan.label)
    wheels = list((plan.work / "raw").glob("*.whl"))
    if len(wheels) != 1:
        raise BuildError(f"the build made {len(wheels)} wheels instead of one", where=plan.log)
    return wheels[0]


def _describe(plan: Plan, tree: Tree, raw: Path) -> Manifest:
    """Ask the new libraries what they are, and refuse a build that is not the one planned."""
    libraries = wheelfile.read_libraries(raw)
    unpacked = plan.work / "libraries"
    shutil.rmtree(unpacked, ignore_errors=True)
    folder = wheelfile.unpack_libraries(raw, unpacked)
    probe = Path(__file__).with_name("probe.py")
    env = driver_environment(plan.backend, _cmake_cache(plan), plan.work / "drivers")
    facts = json.loads(run([sys.executable, "-I", probe, "libraries", folder], cwd=folder, env=env).stdout)
    if problems := _unplanned(plan, tree, sorted(libraries), facts):
        raise BuildError("the build is not what was planned: " + "; ".join(problems), where=plan.log)
    arguments = _compile_arguments(plan)
    options = cpuflags.machine_options(arguments)
    return Manifest(
        format=wheelfile.FORMAT,
        arm=plan.arm,
        label=plan.label,
        version=plan.version,
        backend=plan.backend.name,
        binding=plan.pin.binding,
        sdist_sha256=plan.pin.sdist_sha256,
        pin=plan.pin.commit,
        commit=tree.commit,
        series=plan.series.digest if plan.series else None,
        payload=facts["payload"],
        defines=dict(plan.backend.defines),
        cmake_args=plan.cmake_args,
        compiler=plan.toolchain.compiler,
        cmake=_cmake_version(plan),
        generator=GENERATOR,
        machine_options=options,
        cpu_flags=cpuflags.compiled_for(plan.toolchain.cc, options),
        openmp="-DGGML_USE_OPENMP" in arguments,
        libraries=_hashes(libraries),
        key=plan.key,
        level=plan.level,
        bundled=_hashes(wheelfile.read_libraries(raw, wheelfile.BUNDLE_DIR)),
        rpc_protocol=_rpc_protocol(plan) if "ggml-rpc" in plan.backend.libraries else None,
    )


def _hashes(libraries: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in sorted(libraries.items())}


def _rpc_protocol(plan: Plan) -> str:
    """The version in the header: no library says it without a connection."""
    header = plan.work / "src" / LLAMA / "ggml" / "include" / "ggml-rpc.h"
    text = header.read_text(encoding="utf-8")
    found = dict(re.findall(r"#define RPC_PROTO_(MAJOR|MINOR|PATCH)_VERSION\s+(\d+)", text))
    return ".".join(found.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))


def _unplanned(plan: Plan, tree: Tree, files: list[str], facts: Mapping[str, Any]) -> list[str]:
    problems = []
    made = sorted(name.split(".")[0].removeprefix("lib") for name in files)
    if made != sorted(plan.backend.libraries):
        problems.append(
            f"libraries {', '.join(files)}, the {plan.backend.name} backend has {', '.join(plan.backend.libraries)}"
        )
    if absent := sorted(set(plan.backend.registers) - set(facts["registers"])):
        problems.append(f"{', '.join(absent)} does not register as a backend")
    if facts["commit"] is not None and not tree.commit.startswith(facts["commit"]):
        problems.append(f"the libraries were made from {facts['commit']}, the tree is at {tree.commit}")
    if (plan.arm == "patched") != (facts["payload"] is not None):
        problems.append(f"the {plan.arm} arm has payload {facts['payload'] or 'none'}")
    return problems


def _compile_arguments(plan: Plan) -> list[str]:
    """Arguments of the compiler for the CPU backend's main file, where instruction sets matter."""
    path = plan.work / "build" / "compile_commands.json"
    commands = json.loads(path.read_text(encoding="utf-8"))
    for entry in commands:
        if entry["file"].endswith("ggml-cpu/ggml-cpu.c"):
            return shlex.split(entry["command"])
    raise BuildError("the build has no ggml-cpu.c", where=path)


def _cmake_version(plan: Plan) -> str:
    """From the build's cache: the cmake that really ran."""
    cache = _cmake_cache(plan)
    return ".".join(cache.get(f"CMAKE_CACHE_{part}_VERSION", "?") for part in ("MAJOR", "MINOR", "PATCH"))


def _cmake_cache(plan: Plan) -> dict[str, str]:
    """Entries of the build's cache, without their types."""
    lines = (plan.work / "build" / "CMakeCache.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("=", 1) for line in lines if "=" in line and not line.startswith(("#", "//")))
    return {name.split(":")[0]: value for name, value in pairs}


def _ccache_hits(plan: Plan) -> tuple[int | None, int | None]:
    """(hits, compiler calls) of this build; (None, None) without ccache."""
    path = plan.work / "ccache.log"
    if not path.is_file():
        return None, None
    results = path.read_text(encoding="utf-8").split()
    hits = results.count("direct_cache_hit") + results.count("preprocessed_cache_hit")
    return hits, hits + results.count("cache_miss")
