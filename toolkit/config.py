"""Where things live: the patches shipped with the toolkit and the cache it works in."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from toolkit.errors import MachineError

# The format of https://bford.info/cachedir/: backup tools skip a folder with this file.
_CACHEDIR_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Made by moe-madv; safe to delete.\n"


def patches_dir() -> Path:
    """The series in use: the checkout's `patches/`, or the copy inside an installed wheel."""
    here = Path(__file__).resolve().parent
    checkout = here.parent / "patches"
    return checkout if (checkout / "series.toml").is_file() else here / "_patches"


def home() -> Path:
    """Root of downloads, trees, builds, wheels, arm environments and models (`MOE_MADV_HOME` overrides).

    Raises MachineError when it cannot be made.
    """
    override = os.environ.get("MOE_MADV_HOME")
    try:
        root = Path(override).expanduser().resolve() if override else platformdirs.user_cache_path("moe-madv")
        if not (root / "CACHEDIR.TAG").exists():
            root.mkdir(parents=True, exist_ok=True)
            (root / "CACHEDIR.TAG").write_text(_CACHEDIR_TAG, encoding="utf-8")
    except (OSError, RuntimeError) as e:  # RuntimeError: no home directory, or a loop of links
        reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        raise MachineError(
            f"the cache folder cannot be made: {reason}",
            where=override or "the user's cache folder",
            hint="export MOE_MADV_HOME=/path/to/a/folder/with/space",
        ) from e
    return root
