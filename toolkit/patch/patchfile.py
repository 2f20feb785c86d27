"""Reading a patch in mailbox format: its message, the one file it changes, and its text made applicable."""

from __future__ import annotations

import datetime
import email
import email.policy
import email.utils
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import PinError

_SECTION = re.compile(rb"diff --git a/(.+) b/(.+)")
_START = re.compile(rb"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")
_HUNK = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_BINARY = re.compile(rb"GIT binary patch|Binary files (?:a/)?(.+?) and .+ differ")
_NOT_AN_EDIT = re.compile(rb"(new file|deleted file|old|new) mode |(rename|copy) (from|to) ")
_NUMBERING = re.compile(r"^(\[[^\]]*\]\s*)+")


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One patch that edits one existing text file."""

    subject: str
    body: str
    file: str  # path from the root of llama.cpp, with forward slashes
    text: bytes  # normalised, see `normalise`

    def with_crlf(self) -> bytes:
        """The text with CR LF at the end of each hunk line, for a target stored that way."""
        return b"".join(
            line.rstrip(b"\r\n") + b"\r\n" if in_hunk and not line.startswith(b"\\") else line
            for line, in_hunk in _lines(self.text)
        )


def parse(data: bytes, where: Path) -> Patch:
    """Parse and check a patch; PinError names the file when it cannot be one of the series."""
    try:
        text = normalise(data)
    except ValueError as e:
        raise PinError(f"the patch is corrupt: {e}", where=where) from e
    files = []
    for line, in_hunk in _lines(text):
        if in_hunk:
            continue
        if section := _SECTION.match(line):
            files.append(section[2].rstrip(b"\n").decode("utf-8", "replace"))
        elif binary := _BINARY.match(line):
            name = files[-1] if files else (binary[1] or b"a file").decode("utf-8", "replace")
            raise PinError(
                f"the patch has a binary section for {name}",
                where=where,
                hint=f"leave that file out when exporting: git format-patch … -- ':!{name}'",
            )
        elif _NOT_AN_EDIT.match(line):
            raise PinError(
                f"the patch does more than edit lines of {files[-1] if files else 'a file'}: "
                f"{line.decode('utf-8', 'replace').strip()}",
                where=where,
                hint="new files belong into payload/",
            )
    if len(files) != 1:
        found = ", ".join(files) or "none in git's format (`diff --git a/… b/…`)"
        raise PinError(f"a hook changes exactly one file, this patch changes {found}", where=where)
    if not any(in_hunk for _, in_hunk in _lines(text)):
        raise PinError("the patch has no hunk", where=where)
    subject, body = _message(text)
    return Patch(subject=subject, body=body, file=files[0], text=text)


def normalise(data: bytes) -> bytes:
    """Undo what checkouts and editors do to a patch file.

    A CR that a conversion added to every line goes away; a CR that belongs to a hunk line stays. A blank
    context line that lost its one space gets it back.
    """
    lines = data.split(b"\n")
    header = next((line for line in lines if line.startswith((b"diff --git ", b"--- ", b"@@ "))), b"")
    if header.endswith(b"\r"):
        lines = [line.removesuffix(b"\r") for line in lines]
    text = b"\n".join(lines).removesuffix(b"\n") + b"\n"
    return b"".join(b" \n" if in_hunk and line == b"\n" else line for line, in_hunk in _lines(text))


def hunks(text: bytes) -> list[bytes]:
    """The patch split into patches of one hunk each."""
    header, *parts = re.split(rb"^(?=@@ )", text[text.index(b"diff --git ") :], flags=re.MULTILINE)
    return [header + part for part in parts]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One added or removed line of a patch."""

    sign: str  # "+" | "-"
    line: int  # in the file after the patch for "+", before it for "-"; from 1
    text: str  # without the sign and the newline


def changes(text: bytes) -> tuple[Change, ...]:
    """Every added and removed line with the place where it is."""
    found = []
    old = new = 0
    for line, in_hunk in _lines(text):
        shown = line[1:].rstrip(b"\r\n").decode("utf-8", "replace")
        if start := None if in_hunk else _START.match(line):
            old, new = int(start[1]), int(start[2])
        elif in_hunk and line[:1] == b"-":
            found.append(Change(sign="-", line=old, text=shown))
            old += 1
        elif in_hunk and line[:1] == b"+":
            found.append(Change(sign="+", line=new, text=shown))
            new += 1
        elif in_hunk and line[:1] != b"\\":
            old, new = old + 1, new + 1
    return tuple(found)


def preimages(text: bytes) -> list[tuple[int, tuple[str, ...]]]:
    """For each hunk, its first line in the file before the patch, and the lines it expects there."""
    found: list[tuple[int, list[str]]] = []
    for line, in_hunk in _lines(text):
        start = None if in_hunk else _START.match(line)
        if start:
            found.append((int(start[1]), []))
        elif in_hunk and line[:1] in (b" ", b"-"):
            found[-1][1].append(line[1:].rstrip(b"\r\n").decode("utf-8", "replace"))
    return [(first, tuple(lines)) for first, lines in found]


def compose(subject: str, body: str, author: str, timestamp: int, diff: bytes) -> bytes:
    """A patch in mailbox format that depends on nothing else: no commit id, no version of git."""
    date = email.utils.format_datetime(datetime.datetime.fromtimestamp(timestamp, datetime.timezone.utc))
    date = date.replace(", 0", ", ")  # git writes the day without a zero
    head = textwrap.fill(
        f"Subject: {subject}", width=78, subsequent_indent=" ", break_long_words=False, break_on_hyphens=False
    )
    lines = [f"From {'0' * 40} Mon Sep 17 00:00:00 2001", f"From: {author}", f"Date: {date}", head, "", body, "", ""]
    message = "\n".join(lines if body else lines[:-2])
    return message.encode() + diff


def _lines(text: bytes) -> list[tuple[bytes, bool]]:
    """Each line with its newline, and whether it is a line of a hunk, by the counts in the hunk's header.

    Raises ValueError when a hunk does not have the lines its header promises.
    """
    old = new = 0
    result: list[tuple[bytes, bool]] = []
    for number, bare in enumerate(text.split(b"\n")[:-1], 1):
        line = bare + b"\n"
        in_hunk = old > 0 or new > 0 or (line[:1] == b"\\" and bool(result) and result[-1][1])
        if in_hunk:
            mark = line[:1]
            if mark not in b" \n+-\\":
                raise ValueError(f"line {number} does not belong into a hunk")
            old -= mark in b" -\n"
            new -= mark in b" +\n"
        elif hunk := _HUNK.match(line):
            old, new = (1 if n is None else int(n) for n in hunk.groups())
        result.append((line, in_hunk))
    if old > 0 or new > 0:
        raise ValueError("the last hunk ends early")
    return result


def _message(text: bytes) -> tuple[str, str]:
    """Subject without `[PATCH n/m]`, and the body up to the `---` line."""
    head = re.split(rb"^(?:---\s*$|diff --git )", text, maxsplit=1, flags=re.MULTILINE)[0]
    head = re.sub(rb"\AFrom [0-9a-f]+ .*\n", b"", head)
    message = email.message_from_bytes(head, policy=email.policy.default)
    subject = _NUMBERING.sub("", " ".join(str(message.get("Subject", "")).split()))
    payload = message.get_payload(decode=True)
    body = payload.decode("utf-8", "replace") if isinstance(payload, bytes) else ""
    return subject, body.strip() if subject else ""
