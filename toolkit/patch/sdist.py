"""Finding a source distribution where pip would look for it, and unpacking it safely."""

from __future__ import annotations

import ast
import math
import os
import re
import sys
import tarfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pypi_simple
import requests
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from urllib3.exceptions import InsecureRequestWarning

from toolkit.console import note
from toolkit.errors import FetchError
from toolkit.files import sha256_file
from toolkit.patch.download import download, local_path, redact
from toolkit.process import run

_PIP_TIMEOUT = 15.0  # seconds, pip's own default


@dataclass(frozen=True, kw_only=True)
class PipSettings:
    """The part of pip's configuration that says where packages come from."""

    index_urls: tuple[str, ...]
    find_links: tuple[str, ...]
    cert: str | None
    proxy: str | None
    timeout: float  # seconds without a byte
    trusted_hosts: tuple[str, ...] = ()  # host or host:port whose certificate is not checked

    @staticmethod
    def parse(lines: Iterable[str]) -> PipSettings:
        """Read the output of `pip config list`: `section.key='value'`, section `:env:` for the environment.

        As for `pip download`: the environment beats [download], which beats [global].
        """
        values: dict[str, str] = {}
        parsed = [m.groups() for line in lines if (m := re.fullmatch(r"(global|download|:env:)\.([\w-]+)=(.+)", line))]
        for section in ("global", "download", ":env:"):
            values |= {key: str(ast.literal_eval(text)) for s, key, text in parsed if s == section}
        no_index = values.get("no-index", "").lower() in ("1", "true", "yes", "on")
        index_url = values.get("index-url") or values.get("pypi-url") or pypi_simple.PYPI_SIMPLE_ENDPOINT
        return PipSettings(
            index_urls=() if no_index else (index_url, *values.get("extra-index-url", "").split()),
            find_links=tuple(values.get("find-links", "").split()),
            cert=values.get("cert"),
            proxy=values.get("proxy"),
            timeout=_seconds(values.get("timeout") or values.get("default-timeout") or str(_PIP_TIMEOUT)),
            trusted_hosts=tuple(values.get("trusted-host", "").split()),
        )

    @staticmethod
    def current() -> PipSettings:
        """The settings of this interpreter's pip, or only the PIP_* variables where pip is absent."""
        listed = run([sys.executable, "-m", "pip", "config", "list"], check=False)
        if listed.returncode == 0:
            return PipSettings.parse(listed.stdout.splitlines())
        note("pip cannot be asked for its settings; only the PIP_* variables are used")
        return PipSettings.parse(_environment(os.environ))

    def session(self) -> requests.Session:
        session = requests.Session()
        if self.cert:
            session.verify = self.cert
        if self.proxy:
            session.proxies = {"http": self.proxy, "https": self.proxy}
        for host in self.trusted_hosts:
            # As in pip, a host without a port is trusted on every port.
            for end in ("/",) if re.search(r":\d+$", host) else ("/", ":"):
                session.mount(f"https://{host}{end}", _Unverified())
        return session


class _Unverified(requests.adapters.HTTPAdapter):
    """A connection to a host the user trusts without a certificate that can be checked."""

    def send(self, request: requests.PreparedRequest, *args: Any, **options: Any) -> requests.Response:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InsecureRequestWarning)
            return super().send(request, *args, **{**options, "verify": False})


def _seconds(value: str) -> float:
    """Raises FetchError for what is not a positive number."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise FetchError(
            f"pip's timeout is {value!r}, which is not a number of seconds",
            hint="correct PIP_TIMEOUT, PIP_DEFAULT_TIMEOUT or the file that `pip config debug` names",
        )
    return seconds


def _environment(environ: Mapping[str, str]) -> list[str]:
    return [
        f":env:.{name[4:].lower().replace('_', '-')}={value!r}"
        for name, value in environ.items()
        if name.startswith("PIP_") and value
    ]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One file on offer: where, and the hash its index announces, if any."""

    filename: str
    url: str
    sha256: str | None


def fetch(project: str, version: str, sha256: str, folder: Path) -> Path:
    """The sdist with this hash in `folder`, downloaded from the places pip is configured to use.

    Raises FetchError with both hashes when only other files are on offer, or lists where it looked.
    """
    for present in folder.glob("*.tar.gz"):
        if _is_sdist(present.name, project, version):
            if sha256_file(present) == sha256:
                return present
            present.unlink()
    settings = PipSettings.current()
    problems: list[str] = []
    announced: list[str] = []
    with settings.session() as session:
        for candidate in _candidates(settings, session, project, version, problems):
            if candidate.sha256 in (None, sha256):
                target = folder / candidate.filename
                download(candidate.url, target, sha256=sha256, session=session, timeout=settings.timeout)
                return target
            announced.append(f"\n  announced sha256 {candidate.sha256} at {redact(candidate.url)}")
    if announced:
        hashes = "".join([f"\n  expected sha256  {sha256}", *announced])
        raise FetchError(f"{project} {version} is on offer, but not the pinned file{hashes}")
    raise FetchError(
        f"no sdist of {project} {version} found:" + "".join(f"\n  {p}" for p in problems),
        hint="check the index settings: pip config list",
    )


def fetch_unpinned(project: str, version: str, folder: Path) -> tuple[Path, str]:
    """(path, sha256) of the sdist of a version that has no pin: the hash is the one its index announces.

    One that is in `folder` is taken as it is. Raises FetchError when no place offers it with a hash.
    """
    for present in folder.glob("*.tar.gz"):
        if _is_sdist(present.name, project, version):
            return present, sha256_file(present)
    settings = PipSettings.current()
    problems: list[str] = []
    with settings.session() as session:
        for candidate in _candidates(settings, session, project, version, problems):
            path = local_path(candidate.url)
            sha256 = candidate.sha256 or (sha256_file(path) if path is not None else None)
            if sha256 is not None:
                return fetch(project, version, sha256, folder), sha256
            problems.append(f"no hash announced at {redact(candidate.url)}")
    raise FetchError(
        f"no sdist of {project} {version} found:" + "".join(f"\n  {p}" for p in problems),
        hint="check the version, and the index settings: pip config list",
    )


def newest(project: str) -> str:
    """The newest released version, pre-releases aside, that any place pip looks at has an sdist of."""
    settings = PipSettings.current()
    problems: list[str] = []
    name = canonicalize_name(project)
    found: list[Version] = []
    with settings.session() as session:
        for candidate in _offered(settings, session, name, problems):
            try:
                _, version, kind = pypi_simple.parse_filename(candidate.filename, project)
            except pypi_simple.UnparsableFilenameError:
                continue
            if kind == "sdist" and _is_sdist(candidate.filename, project, version):
                found.append(Version(version))
    released = [v for v in found if not v.is_prerelease]
    if not released:
        raise FetchError(
            f"no sdist of {project} found:" + "".join(f"\n  {p}" for p in problems),
            hint="check the index settings: pip config list",
        )
    return str(max(released))


def _is_sdist(filename: str, project: str, version: str) -> bool:
    try:
        name, found, kind = pypi_simple.parse_filename(filename, project)
        return (
            kind == "sdist"
            and filename.endswith(".tar.gz")
            and canonicalize_name(name) == canonicalize_name(project)
            and Version(found) == Version(version)
        )
    except (pypi_simple.UnparsableFilenameError, InvalidVersion):
        return False


def _candidates(
    settings: PipSettings, session: requests.Session, project: str, version: str, problems: list[str]
) -> Iterator[Candidate]:
    """Every matching file, place by place; a place that cannot be read is added to `problems`."""
    for candidate in _offered(settings, session, canonicalize_name(project), problems):
        if _is_sdist(candidate.filename, project, version):
            yield candidate


def _offered(settings: PipSettings, session: requests.Session, name: str, problems: list[str]) -> Iterator[Candidate]:
    """Every file of a project, place by place."""
    places = [(place, False) for place in settings.find_links] + [(url, True) for url in settings.index_urls]
    for place, is_index in places:
        before = "looked in" if is_index else "looked at"
        try:
            yield from _listing(place, is_index, session, name, settings.timeout)
        except (requests.RequestException, OSError, pypi_simple.UnsupportedContentTypeError) as e:
            problems.append(f"could not read {redact(place)}: {type(e).__name__}")
        else:
            problems.append(f"{before} {redact(place)}")


def _listing(
    place: str, is_index: bool, session: requests.Session, project: str, timeout: float
) -> Iterator[Candidate]:
    path = local_path(place)
    if path is not None:
        page_path = path / project / "index.html" if is_index else path
        if page_path.is_dir():
            for file in sorted(page_path.iterdir()):
                yield Candidate(filename=file.name, url=file.resolve().as_uri(), sha256=None)
            return
        if not page_path.exists():
            return
        page = pypi_simple.ProjectPage.from_html(project, page_path.read_bytes(), base_url=page_path.resolve().as_uri())
    elif is_index:
        try:
            client = pypi_simple.PyPISimple(place, session=session)
            page = client.get_project_page(project, timeout=timeout)
        except pypi_simple.NoSuchProjectError:
            return
    else:
        response = session.get(place, timeout=timeout)
        response.raise_for_status()
        page = pypi_simple.ProjectPage.from_html(project, response.content, base_url=response.url)
    for package in page.packages:
        yield Candidate(filename=package.filename, url=package.url, sha256=package.digests.get("sha256"))


def unpack(archive: Path, folder: Path) -> Path:
    """Extract into the empty `folder` and return the archive's single top directory.

    Raises FetchError for a broken archive, and before writing when a member would leave the folder.
    """
    try:
        with tarfile.open(archive) as tar:
            members = tar.getmembers()
            for member in members:
                _refuse_escape(member, archive)
            if hasattr(tarfile, "data_filter"):
                tar.extractall(folder, members, filter="data")
            else:
                # Unpacked by root, files must not belong to the packager: git would refuse the tree.
                for member in members if hasattr(os, "getuid") else ():
                    member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
                tar.extractall(folder, members)
    except (tarfile.TarError, EOFError) as e:
        raise FetchError(f"cannot unpack: {e}", where=archive) from e
    tops = sorted(folder.iterdir())
    if len(tops) != 1 or not tops[0].is_dir():
        raise FetchError("an sdist holds exactly one top directory", where=archive)
    return tops[0]


def _refuse_escape(member: tarfile.TarInfo, archive: Path) -> None:
    """Allow files, directories and links whose names and targets stay inside the archive's top directory."""
    name = PurePosixPath(member.name)
    paths = [name]
    if member.issym():
        paths.append(name.parent / member.linkname)
    elif member.islnk():
        paths.append(PurePosixPath(member.linkname))
    elif not (member.isreg() or member.isdir()):
        raise FetchError(f"refusing to unpack the special file {member.name}", where=archive)
    for path in paths:
        depth = 0
        for part in path.parts:
            depth += -1 if part == ".." else 1
            if path.is_absolute() or depth < 1 or "\\" in part:
                raise FetchError(f"refusing to unpack {member.name}: it leaves the archive", where=archive)
