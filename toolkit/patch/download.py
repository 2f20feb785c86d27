"""Downloads that resume, and that leave a file only when its hash is the expected one."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from urllib.parse import SplitResult, urlsplit, urlunsplit
from urllib.request import url2pathname

import requests

from toolkit.console import byte_progress, note
from toolkit.errors import FetchError
from toolkit.files import sha256_file

_ATTEMPTS = 4
_PAUSE = 0.5  # seconds before the first retry; doubled for each further one
_CHUNK = 1 << 16  # a broken line loses less than one chunk


class _Retryable(Exception):
    """The server or the line failed; the bytes so far are kept and the request is repeated."""


def redact(url: str) -> str:
    """The URL without user name, password and query, fit for a message."""
    parts = _split(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def local_path(url: str) -> Path | None:
    """The path of a `file:` URL or of a plain path, None for anything else."""
    parts = _split(url)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    if len(parts.scheme) > 1:  # one letter is a Windows drive
        return None
    try:
        return Path(url).expanduser()
    except RuntimeError as e:
        raise FetchError(f"no such home directory: {e}", where=url) from e


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as e:
        # The URL itself may hold a password, so it is not shown.
        raise FetchError(f"not a URL: {e}", hint="check --git, or the index settings: pip config list") from e


def download(url: str, target: Path, *, sha256: str, session: requests.Session, timeout: float) -> None:
    """Make `target` the file with this hash: kept if it is there, resumed from `target`.partial if not.

    Repeats on connection errors and 5xx only. Raises FetchError with both hashes when the bytes are not
    the expected ones; nothing is kept then.
    """
    if target.is_file() and sha256_file(target) == sha256:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            resumed = _receive(url, partial, session, timeout)
        except _Retryable as e:
            if attempt == _ATTEMPTS:
                raise FetchError(
                    f"download failed {attempt} times: {e}",
                    where=redact(url),
                    hint="run the same command again; it continues where this one stopped",
                ) from e
            note(f"{e}; trying again")
            time.sleep(_PAUSE * 2 ** (attempt - 1))
            continue
        found = sha256_file(partial)
        if found == sha256:
            partial.replace(target)
            return
        partial.unlink()
        if not resumed:
            hashes = f"  expected sha256 {sha256}\n  received sha256 {found}"
            raise FetchError(f"{target.name} is not the pinned file\n{hashes}", where=redact(url))
        note("the resumed file is not the expected one; starting again")
    raise FetchError(f"no attempt gave {target.name} with sha256 {sha256}", where=redact(url))


def _receive(url: str, partial: Path, session: requests.Session, timeout: float) -> bool:
    """Append the rest of `url` to `partial`; True when bytes of an earlier run were kept."""
    source = local_path(url)
    if source is not None:
        if not source.is_file():
            raise FetchError("no such file", where=source)
        shutil.copyfile(source, partial)
        return False
    have = partial.stat().st_size if partial.exists() else 0
    # `identity`: the hash is of the file, not of its transfer encoding.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        with session.get(url, headers=headers, stream=True, timeout=timeout) as response:
            if response.status_code == requests.codes.requested_range_not_satisfiable and have:
                return True  # already whole, or not ours: the hash decides
            if response.status_code >= 500:
                raise _Retryable(f"the server answered {response.status_code}")
            if not response.ok:
                raise FetchError(f"the server answered {response.status_code} {response.reason}", where=redact(url))
            resumed = response.status_code == requests.codes.partial_content and _starts_at(response, have)
            _save(response, partial, have if resumed else 0)
            return resumed and have > 0
    except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as e:
        raise _Retryable(f"connection failed ({type(e).__name__})") from e
    except requests.RequestException as e:
        raise FetchError(f"cannot download: {type(e).__name__}", where=redact(url)) from e


def _starts_at(response: requests.Response, offset: int) -> bool:
    return response.headers.get("Content-Range", "").startswith(f"bytes {offset}-")


def _save(response: requests.Response, partial: Path, offset: int) -> None:
    length = response.headers.get("Content-Length")
    total = offset + int(length) if length else None
    with partial.open("ab" if offset else "wb") as f, byte_progress() as progress:
        task = progress.add_task(partial.name.removesuffix(".partial"), total=total, completed=offset)
        for chunk in response.iter_content(_CHUNK):
            f.write(chunk)
            progress.advance(task, len(chunk))
        size = f.tell()
    if total is not None and size < total:
        raise _Retryable(f"the connection ended after {size} of {total} bytes")
