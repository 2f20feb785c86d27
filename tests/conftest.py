"""What every test gets: a cache of its own. What compiling tests share: the user's, so that nothing is built twice."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from toolkit import config

# In the background of a script a process ignores interrupts, and so would every child that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before any test redirects it.
_REAL_HOME = config.home()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """MOE_MADV_HOME below tmp_path, so that no test sees or changes the user's cache."""
    path = tmp_path / "moe-madv-home"
    monkeypatch.setenv("MOE_MADV_HOME", str(path))
    return path


@pytest.fixture(scope="session")
def real_home() -> Path:
    """The user's cache, with the pinned sources in it."""
    from toolkit.patch.upstream import fetch_sdist, load_pin

    fetch_sdist(load_pin(), _REAL_HOME)
    return _REAL_HOME
