"""Environments of our own: always from the base interpreter, always `<env>/bin/python -m pip`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from toolkit.errors import CommandError, MachineError
from toolkit.process import run

# Set by an outer environment or by the user, these would send an install elsewhere. pip and Python both
# treat an empty value as unset.
_NEUTRAL = {"PIP_TARGET": "", "PIP_PREFIX": "", "PIP_USER": "", "PIP_REQUIRE_VIRTUALENV": "", "PYTHONPATH": ""}


def venv_python(directory: Path) -> Path:
    """The interpreter of the environment at `directory`."""
    return directory / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def create_venv(directory: Path) -> Path:
    """Make a fresh environment at `directory`, replacing what is there, and return its interpreter.

    Starts from the base interpreter, so it never sees the packages of an outer environment.
    Raises MachineError when the base interpreter can make no environment with pip.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    base = getattr(sys, "_base_executable", None) or sys.executable
    try:
        run([base, "-I", "-m", "venv", directory], env=_NEUTRAL)
    except CommandError as e:
        shutil.rmtree(directory, ignore_errors=True)
        raise MachineError(
            f"cannot make an environment with pip from {base}:\n{e.what}",
            where=directory,
            hint="sudo apt-get install -y python3-venv",
        ) from e
    return venv_python(directory)


def pip_install(python: Path, *requirements: str | Path) -> None:
    """Install into the environment of `python` from where pip is configured to look.

    Raises CommandError with pip's last lines.
    """
    options = ("--quiet", "--disable-pip-version-check", "--no-input")
    run([python, "-I", "-m", "pip", "install", *options, *requirements], cwd=python.parent, env=_NEUTRAL)
