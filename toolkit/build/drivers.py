"""Libraries that come with a device's driver: a build machine may lack them, and then nothing of the wheel loads."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from toolkit.build.backends import Backend
from toolkit.errors import BuildError


def absent_drivers(backend: Backend) -> tuple[str, ...]:
    """Driver libraries of the backend that this machine cannot load."""
    return tuple(name for name in backend.drivers if not _loads(name))


def driver_environment(backend: Backend, cmake_cache: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Variables with which the built libraries load here, for asking them what they are.

    In place of an absent driver they get the stand-in they were linked with, put into `folder` under the
    driver's name. Raises BuildError when cmake has found none.
    """
    absent = absent_drivers(backend)
    if not absent:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    for name in absent:
        stub = Path(cmake_cache.get(backend.drivers[name], ""))
        if not stub.is_file():
            raise BuildError(f"{name} is not here, nor a stand-in for it", where=backend.drivers[name])
        shutil.copyfile(stub, folder / name)
    return {"LD_LIBRARY_PATH": os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep)}


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
