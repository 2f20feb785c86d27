"""What the disk under a file gives when it is read past the page cache."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import numpy as np

from toolkit.console import MIB

_PIECE = MIB  # about one expert matrix
_SEED = 1


def random_read_mib_s(path: Path, *, seconds: float = 1.5) -> float | None:
    """MiB/s of random 1 MiB direct reads from one thread; None where the filesystem refuses direct reads."""
    direct = getattr(os, "O_DIRECT", None)
    pieces = path.stat().st_size // _PIECE
    if direct is None or pieces == 0:
        return None
    try:
        fd = os.open(path, os.O_RDONLY | direct)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, _PIECE) as buffer:  # page-aligned, as direct reads need
            offsets = np.random.default_rng(_SEED).integers(0, pieces, size=1 << 16) * _PIECE
            start = time.perf_counter()
            done, elapsed = 0, 0.0
            while elapsed < seconds and done < len(offsets):
                os.preadv(fd, [buffer], int(offsets[done]))
                done += 1
                elapsed = time.perf_counter() - start
            return done * _PIECE / MIB / elapsed
    except OSError:
        return None
    finally:
        os.close(fd)
