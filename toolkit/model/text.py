"""Names for people: file and tensor names come from outside and may hold anything."""

from __future__ import annotations

import unicodedata
from pathlib import Path


def shown(name: str | Path) -> str:
    """The name for a terminal: undecodable bytes as `\\xNN`, control characters escaped, all else kept."""
    return "".join(_escaped(c) for c in str(name))


def _escaped(char: str) -> str:
    if 0xDC80 <= ord(char) <= 0xDCFF:  # how Python carries a byte of a file name that is not UTF-8
        return f"\\x{ord(char) - 0xDC00:02x}"
    return repr(char)[1:-1] if unicodedata.category(char) in ("Cc", "Cs") else char
