"""Writing files so that a partial one never looks complete."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_CHUNK = 1 << 20


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `target`; rename it into place on success, delete it on any error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(target)
    except BaseException:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)
        raise


def write_text(target: Path, text: str) -> None:
    """Write UTF-8 with the newlines as given, atomically."""
    with atomic_path(target) as partial, partial.open("w", encoding="utf-8", newline="") as f:
        f.write(text)


def sha256_file(path: Path) -> str:
    """Hex digest of a file, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
