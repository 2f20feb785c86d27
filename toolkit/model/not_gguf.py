"""Say what a file is when it is not GGUF: the first bytes of what people end up with instead of a model."""

from __future__ import annotations

import re

_OLD_MAGICS = {b"lmgg": "GGML", b"fmgg": "GGMF", b"tjgg": "GGJT", b"algg": "GGLA"}
_PAGE = re.compile(rb"\s*<(!doctype|html|head|\?xml)", re.IGNORECASE)
_LFS = re.compile(rb"version https://git-lfs\.github\.com/spec/")
_LFS_SIZE = re.compile(rb"^size (\d{1,19})\s*$", re.MULTILINE)

_DOWNLOAD = "download the file itself and run the command again"


def explain(head: bytes, size: int) -> tuple[str, str]:
    """What a file of `size` bytes that starts with `head` (up to 512 bytes) is, and the remedy."""
    if size == 0:
        return "the file is empty, not a GGUF model", _DOWNLOAD
    if _LFS.match(head):
        announced = _LFS_SIZE.search(head)
        real = f" for a file of {int(announced[1]):,} bytes" if announced else ""
        return f"this is a Git LFS pointer{real}, not the model", "run `git lfs pull` in its repository"
    if _PAGE.match(head):
        return (
            "this is a web page, not a GGUF model",
            "use the direct download link, not the page that shows it",
        )
    if head[:4] in _OLD_MAGICS:
        return (
            f"this is the older {_OLD_MAGICS[head[:4]]} format, which llama.cpp does not read any more",
            "get a GGUF version of the model, or convert the original weights with convert_hf_to_gguf.py",
        )
    if head.startswith(b"PK\x03\x04"):
        return (
            "this is a zip archive (or a PyTorch checkpoint), not a GGUF model",
            "unpack or convert it first",
        )
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < size:
        return (
            "this is a safetensors file, not a GGUF model",
            "convert it with llama.cpp's convert_hf_to_gguf.py",
        )
    if head.startswith(b"\x1f\x8b"):
        return "this is a gzip file, not a GGUF model", "unpack it first"
    if not head.strip(b"\0"):
        return "the file starts with zeros: the download reserved the space and did not fill it", _DOWNLOAD
    return f"not a GGUF file: it starts with {head[:4]!r} instead of b'GGUF'", _DOWNLOAD
