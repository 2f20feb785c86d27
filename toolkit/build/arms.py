"""An environment per arm, verified: the libraries that load there are those of the wheel."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.build import cpuflags
from toolkit.build.backends import get_backend
from toolkit.build.drivers import absent_drivers
from toolkit.build.venv import create_venv, pip_install, venv_python
from toolkit.build.wheelfile import Manifest, Wheel
from toolkit.console import note
from toolkit.errors import BuildError, CommandError, MachineError, ToolkitError
from toolkit.files import sha256_file, write_text
from toolkit.patch.upstream import locked
from toolkit.process import run

_STAMP = "moe-madv.json"
# How a process ends that meets an instruction its processor does not have; Windows says it in its own way.
_ILLEGAL_INSTRUCTION = (-getattr(signal, "SIGILL", 4), 0xC000001D)


@dataclass(frozen=True, kw_only=True)
class ArmEnv:
    """A verified environment with one arm's wheel installed."""

    python: Path  # start it with -I and a neutral working directory
    label: str
    manifest: Manifest


def arm_environment(wheel: Wheel, home: Path, *, extra: str | None = None) -> ArmEnv:
    """The environment of a wheel, made on first use and made again when it is damaged.

    With `extra`, another one, that also has what the wheel lists under this name, such as server.
    Raises MachineError when this machine lacks instructions or a driver the wheel was compiled for (checked
    before anything is loaded) and BuildError when what loads is not what the manifest says.
    """
    manifest = wheel.manifest
    if absent := cpuflags.missing_flags(manifest.cpu_flags, cpuflags.host_flags()):
        raise MachineError(
            f"this processor lacks {', '.join(absent)}, for which the wheel was compiled",
            where=wheel.path,
            hint="moe-madv build --arm both --force",
        )
    if drivers := absent_drivers(get_backend(manifest.backend)):
        raise MachineError(
            f"this machine has no {', '.join(drivers)}, without which a {manifest.backend} wheel does not load",
            where=wheel.path,
            hint="install the driver, or copy the wheel to a machine that has one",
        )
    directory = home / "arms" / "-".join(filter(None, (manifest.label, wheel.sha256[:12], extra)))
    env = ArmEnv(python=venv_python(directory), label=manifest.label, manifest=manifest)
    with locked(home / "arms"):
        if not _is_intact(directory, wheel):
            _install(directory, wheel, extra)
    return env


def _is_intact(directory: Path, wheel: Wheel) -> bool:
    """True when the stamp is of this wheel and the installed libraries still have their hashes."""
    try:
        stamp = json.loads((directory / _STAMP).read_text(encoding="utf-8"))
        folder = Path(stamp["libraries"])
        return (
            stamp["wheel"] == wheel.sha256
            and venv_python(directory).exists()
            and all(sha256_file(folder / name) == h for name, h in wheel.manifest.libraries.items())
        )
    except (OSError, ValueError, KeyError):
        return False


def _install(directory: Path, wheel: Wheel, extra: str | None) -> None:
    note(f"making the environment of {wheel.manifest.label}")
    try:
        python = create_venv(directory)
        pip_install(python, f"{wheel.path}[{extra}]" if extra else wheel.path)
        facts = _probe(python, directory, wheel)
        if problems := mismatches(facts, wheel.manifest, directory):
            raise BuildError(
                f"the environment of {wheel.manifest.label} is not what its wheel says: " + "; ".join(problems),
                where=directory,
                hint="moe-madv build --arm both --force",
            )
        folder = Path(facts["module"]).parent / "lib"
        stamp = {"wheel": wheel.sha256, "libraries": str(folder), "facts": facts}
        # Written last: an environment without it is made again.
        write_text(directory / _STAMP, json.dumps(stamp, indent=2) + "\n")
    except ToolkitError:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _probe(python: Path, directory: Path, wheel: Wheel) -> dict[str, Any]:
    """What loads in the environment. Raises MachineError when this processor stops at one of its instructions."""
    # A neutral directory and -I: a folder named llama_cpp where the user stands must not win.
    command = [str(python), "-I", str(Path(__file__).with_name("probe.py")), "binding"]
    done = run(command, cwd=directory, check=False)
    if done.returncode in _ILLEGAL_INSTRUCTION:
        built = f"for {wheel.manifest.level}" if wheel.manifest.level else "for the processor it was built on"
        raise MachineError(
            f"this processor does not have an instruction that the libraries use: the wheel was compiled {built}",
            where=wheel.path,
            hint="moe-madv build --arm both --force, or take a wheel of a lower level",
        )
    if done.returncode != 0:
        raise CommandError(
            f"the libraries do not load (exit code {done.returncode}):\n{(done.stderr + done.stdout).strip()}",
            where=shlex.join(command),
        )
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def mismatches(facts: Mapping[str, Any], manifest: Manifest, directory: Path) -> list[str]:
    """Where the probe's answer in an environment differs from the manifest."""
    root = directory.resolve()
    folder = Path(facts["module"]).parent / "lib"
    problems = []
    if not folder.resolve().is_relative_to(root):
        problems.append(f"llama_cpp was loaded from {facts['module']}")
    loaded = facts["mapped"]
    if loaded is not None:
        problems += [f"{p} was loaded" for p in loaded if Path(p).parent != folder.resolve()]
        if absent := sorted(manifest.libraries.keys() - {Path(p).name for p in loaded}):
            problems.append(f"{', '.join(absent)} was not loaded")
    problems += [
        f"{name} has another sha256"
        for name, sha256 in manifest.libraries.items()
        if not (folder / name).is_file() or sha256_file(folder / name) != sha256
    ]
    if facts["version"] != manifest.version:
        problems.append(f"version {facts['version']} is installed, not {manifest.version}")
    if facts["payload"] != manifest.payload:
        problems.append(f"payload {facts['payload']} is loaded, not {manifest.payload}")
    if facts["commit"] is not None and not manifest.commit.startswith(facts["commit"]):
        problems.append(f"the libraries are of llama.cpp {facts['commit']}, not {manifest.commit[:9]}")
    return problems + list(facts["drift"])
