"""What every test gets: a cache of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """MOE_MADV_HOME below tmp_path, so that no test sees or changes the user's cache."""
    path = tmp_path / "moe-madv-home"
    monkeypatch.setenv("MOE_MADV_HOME", str(path))
    return path
