"""Tokenizer metadata of a GGUF vocabulary file: read it, shorten it, write it into another file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from toolkit import config
from toolkit.errors import ModelError
from toolkit.model.cursor import Cursor
from toolkit.model.gguf_header import read_header
from toolkit.patch.upstream import load_pin, pristine

_TOKENS, _TYPES, _MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"
_WIDTH = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_INT32, _STRING, _ARRAY = 5, 8, 9


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A byte-pair vocabulary; token strings are in the form the file has them, ids are list positions."""

    tokens: list[bytes]
    types: list[int]
    merges: list[bytes]  # "left right"
    scalars: dict[str, Any]  # the other tokenizer.* keys: model, pre, special ids, chat template

    @property
    def normal(self) -> list[int]:
        """Ids of ordinary text tokens."""
        return [i for i, kind in enumerate(self.types) if kind == TokenType.NORMAL]

    def shortened(self, n: int) -> Vocabulary:
        """The first `n` tokens and all control tokens, with the merges that stay among them.

        A BPE vocabulary lists a merged token after its parts, so any text can still be encoded.
        """
        kept = [i for i, kind in enumerate(self.types) if i < n or kind == TokenType.CONTROL]
        new_id = {old: new for new, old in enumerate(kept)}
        tokens = [self.tokens[i] for i in kept]
        known = set(tokens)
        scalars = {
            key: new_id.get(value) if key.endswith("_token_id") else value for key, value in self.scalars.items()
        }
        return replace(
            self,
            tokens=tokens,
            types=[self.types[i] for i in kept],
            merges=[m for m in self.merges if {*m.split(b" "), m.replace(b" ", b"")} <= known],
            scalars={key: value for key, value in scalars.items() if value is not None},
        )

    def write(self, writer: GGUFWriter) -> None:
        """Add the tokenizer keys to a GGUF file in the making."""
        for key, value in self.scalars.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            else:
                writer.add_string(key, value)
        writer.add_array(_TOKENS, self.tokens)
        writer.add_array(_TYPES, self.types)
        writer.add_array(_MERGES, self.merges)


def read_vocabulary(path: Path) -> Vocabulary:
    """Read the byte-pair vocabulary of a GGUF file; raises ModelError if it has none."""
    header = read_header(path)
    scalars = {
        key: value
        for key, value in header.metadata.items()
        if key.startswith("tokenizer.") and isinstance(value, (bool, int, str))
    }
    if scalars.get("tokenizer.ggml.model") != "gpt2" or header.endianness != "little":
        raise ModelError(
            "not a byte-pair (gpt2) vocabulary",
            where=path,
            hint="give llama.cpp's models/ggml-vocab-qwen2.gguf",
        )
    with path.open("rb") as file:
        arrays = _arrays(Cursor(file, path, header.file_size))
    if not arrays.keys() >= {_TOKENS, _TYPES, _MERGES} or len(arrays[_TOKENS]) != len(arrays[_TYPES]):
        raise ModelError(f"{_TOKENS}, {_TYPES} or {_MERGES} is missing or too short", where=path)
    return Vocabulary(tokens=arrays[_TOKENS], types=arrays[_TYPES], merges=arrays[_MERGES], scalars=scalars)


def fetched_vocabulary() -> Path:
    """The vocabulary that comes with the fetched llama.cpp; raises FetchError if nothing was fetched."""
    return pristine(load_pin(), config.home()).llama / "models" / "ggml-vocab-qwen2.gguf"


def _arrays(cur: Cursor) -> dict[str, list[Any]]:
    """The tokenizer's arrays, which `read_header` steps over; the header has been checked by then."""
    cur.skip(16, "the header")
    found: dict[str, list[Any]] = {}
    for _ in range(cur.scalar("Q", "the key count")):
        key = cur.name("a key")
        kind, count = cur.scalar("I", key), 1
        if kind == _ARRAY:
            kind, count = cur.scalar("I", key), cur.scalar("Q", key)
        if kind == _STRING:
            strings = [cur.take(cur.scalar("Q", key), key) for _ in range(count)]
            if key in (_TOKENS, _MERGES):
                found[key] = strings
        elif key == _TYPES and kind == _INT32:
            raw = cur.take(4 * count, key)
            found[key] = [int.from_bytes(raw[i : i + 4], "little", signed=True) for i in range(0, 4 * count, 4)]
        else:
            cur.skip(_WIDTH[kind] * count, key)
    return found
