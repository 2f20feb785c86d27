"""Read a file forward and never past what it holds, whatever lengths it claims."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

from toolkit.errors import ModelError
from toolkit.model.text import shown

AGAIN = "download the file again and compare its size with the publisher's"
DAMAGED = "the file is damaged or hostile; get it again from its publisher"

_BLOCK = 1 << 13  # bytes read at a time where many strings are stepped over
_MAX_NAME = 1 << 12  # bytes; ggml itself stops at 64 for tensors


class Cursor:
    """Reads forward; every length is compared with the bytes left before anything is read or reserved."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.file, self.path, self.size = file, path, size
        self.pos = 0
        self.order = "<"

    def error(self, what: str, hint: str = DAMAGED) -> ModelError:
        return ModelError(what, where=f"{shown(self.path)}, byte {self.pos:,}", hint=hint)

    def need(self, n: int, what: str) -> None:
        left = self.size - self.pos
        if n > left:
            raise self.error(
                f"the file ends inside its header: {what} needs {n:,} bytes, {left:,} are left ({n - left:,} missing)",
                AGAIN,
            )

    def take(self, n: int, what: str) -> bytes:
        self.need(n, what)
        data = self.file.read(n)
        if len(data) != n:
            raise self.error("the file became shorter while it was read", AGAIN)
        self.pos += n
        return data

    def skip(self, n: int, what: str) -> None:
        self.need(n, what)
        self.file.seek(n, os.SEEK_CUR)
        self.pos += n

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings, in blocks: vocabularies have many, and most are short."""
        length_at = struct.Struct(self.order + "Q").unpack_from
        start, block, pos = self.pos, b"", self.pos
        for _ in range(count):
            if pos + 8 > start + len(block):
                self.pos = start = pos
                self.need(8, what)
                self.file.seek(pos)
                block = self.file.read(_BLOCK)
                if len(block) < 8:
                    raise self.error("the file became shorter while it was read", AGAIN)
            (length,) = length_at(block, pos - start)
            pos += 8
            if length > self.size - pos:
                self.pos = pos
                self.need(length, what)
            pos += length
        self.file.seek(pos)
        self.pos = pos

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack(self.order + code, self.take(struct.calcsize(self.order + code), what))[0]

    def name(self, what: str) -> str:
        """A short string that must be UTF-8: a key or a tensor name."""
        length = self.scalar("Q", what)
        self.need(length, what)
        if length > _MAX_NAME:
            raise self.error(f"{what} is {length:,} bytes long; no name is longer than {_MAX_NAME:,}")
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as e:
            raise self.error(f"{what} is not UTF-8: {raw[:64]!r}") from e
