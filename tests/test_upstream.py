"""From pin to verified tree: a real index over HTTP, real sdists, real git repositories."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import os
import shutil
import ssl
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import requests
from click.testing import CliRunner
from fake_upstream import BINDING_FILES, FILES, FakeUpstream, git, pack, snapshot, write

from toolkit.cli.fetch import fetch as fetch_command
from toolkit.errors import FetchError, MachineError, PinError
from toolkit.patch import download, sdist
from toolkit.patch.gitrepo import Git
from toolkit.patch.mirror import fetch_git
from toolkit.patch.sdist import PipSettings
from toolkit.patch.upstream import Arm, Pin, arm_tree, check_complete, fetch_sdist, load_pin, locate, pristine, tree_dir


@dataclass
class Index:
    """A package index that can misbehave; `requests` holds (path, Range header) as they came."""

    files: dict[str, bytes]
    announced: str | None = None  # sha256 in the index page
    honour_range: bool = True
    drop_after: list[int] = field(default_factory=list)  # bytes to send before the line breaks, per request
    statuses: list[int] = field(default_factory=list)  # answers before the real one
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""

    @property
    def downloads(self) -> list[str | None]:
        return [r for path, r in self.requests if path.startswith("/files/")]

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        self.requests.append((handler.path, handler.headers.get("Range")))
        if handler.path == "/simple/llama-cpp-python/":
            mark = f"#sha256={self.announced}" if self.announced else ""
            links = "".join(f'<a href="/files/{name}{mark}">{name}</a>\n' for name in self.files)
            self._send(handler, 200, f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html")
            return
        if self.statuses:
            self._send(handler, self.statuses.pop(0), b"", "text/plain")
            return
        data = self.files.get(handler.path.removeprefix("/files/"))
        if data is None:
            self._send(handler, 404, b"", "text/plain")
            return
        wanted = handler.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.honour_range else 0
        if start >= len(data) > 0:
            self._send(handler, 416, b"", "text/plain")
            return
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        handler.send_header("Content-Length", str(len(data) - start))
        handler.end_headers()
        end = start + self.drop_after.pop(0) if self.drop_after else len(data)
        handler.wfile.write(data[start:end])
        handler.close_connection = True

    @staticmethod
    def _send(handler: http.server.BaseHTTPRequestHandler, status: int, body: bytes, kind: str) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


@pytest.fixture(autouse=True)
def no_pip_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "_PAUSE", 0.0)
    monkeypatch.setattr(download, "_CHUNK", 100)


@pytest.fixture
def upstream(tmp_path: Path) -> FakeUpstream:
    return FakeUpstream.create(tmp_path / "upstream")


@pytest.fixture
def archive(upstream: FakeUpstream, tmp_path: Path) -> Path:
    folder = tmp_path / "dist"
    folder.mkdir()
    return upstream.sdist(folder)[0]


@pytest.fixture
def pin(upstream: FakeUpstream, archive: Path) -> Pin:
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return Pin(binding="1.2.3", sdist_sha256=digest, commit=upstream.head)


@pytest.fixture
def index(archive: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    served = Index(files={archive.name: archive.read_bytes()})

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.answer(self)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        served.url = f"http://127.0.0.1:{server.server_port}/simple/"
        monkeypatch.setenv("PIP_INDEX_URL", served.url)
        yield served
        server.shutdown()
        thread.join()


def left_over(home: Path) -> list[str]:
    """Every file and tree below home that a failed fetch must not leave."""
    trees = home / "trees"
    found = list((home / "downloads").glob("*")) + (
        [p for d in trees.iterdir() for p in d.iterdir()] if trees.is_dir() else []
    )
    return sorted(p.name for p in found)


# The pin


def test_the_shipped_pin_is_whole() -> None:
    pin = load_pin()
    assert pin.binding == "0.3.36"
    assert pin.sdist_sha256 == "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
    assert pin.commit == "0c1e57098bba43ac29e6e3b677cdceebdd22334f"


GOOD_PIN = f'binding = "1"\n[pin."1"]\nsdist_sha256 = "{"a" * 64}"\ncommit = "{"b" * 40}"\n'


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("a" * 64, "a" * 63, 'pin."1".sdist_sha256'),
        ("a" * 64, "A" * 64, 'pin."1".sdist_sha256'),
        (f'sdist_sha256 = "{"a" * 64}"', "", 'pin."1".sdist_sha256'),
        ("b" * 40, "b" * 7, 'pin."1".commit'),
        (f'"{"b" * 40}"', "7", 'pin."1".commit'),
        ('binding = "1"', "binding = 1", "binding"),
        ('binding = "1"', "binding = ", "TOML"),
    ],
)
def test_pin_without_full_hash_or_commit_is_refused(tmp_path: Path, old: str, new: str, key: str) -> None:
    path = tmp_path / "upstream.toml"
    path.write_text(GOOD_PIN.replace(old, new), encoding="utf-8")
    with pytest.raises(PinError) as e:
        load_pin(path)
    assert key in str(e.value) and str(path) in str(e.value)


def test_version_without_a_pin_says_how_to_add_one(tmp_path: Path) -> None:
    path = tmp_path / "upstream.toml"
    path.write_text(GOOD_PIN, encoding="utf-8")
    assert load_pin(path).binding == "1"
    with pytest.raises(PinError, match=r"2\.0 is not pinned \(pinned: 1\)") as e:
        load_pin(path, binding="2.0")
    assert e.value.hint is not None
    assert all(word in e.value.hint for word in ("port 2.0 --write", 'pin."2.0"', "sdist_sha256", "commit"))


# The sdist


def test_fetch_then_again_without_a_network(pin: Pin, index: Index, home: Path, upstream: FakeUpstream) -> None:
    index.announced = pin.sdist_sha256
    tree = fetch_sdist(pin, home)
    assert tree.root == tree_dir(pin, "pristine", home)
    assert tree.commit == upstream.head
    assert snapshot(tree.llama) == snapshot(upstream.root)
    asked = len(index.requests)
    assert fetch_sdist(pin, home) == tree
    shutil.rmtree(tree.root)
    assert fetch_sdist(pin, home) == tree  # from the kept download
    assert len(index.requests) == asked


def test_announced_hash_that_is_not_the_pin(pin: Pin, index: Index, home: Path) -> None:
    index.announced = "c" * 64
    with pytest.raises(FetchError) as e:
        fetch_sdist(pin, home)
    assert "c" * 64 in str(e.value) and pin.sdist_sha256 in str(e.value)
    assert index.downloads == []
    assert left_over(home) == []


def test_other_bytes_than_the_pin(pin: Pin, index: Index, home: Path) -> None:
    name = next(iter(index.files))
    index.files[name] = b"not it"
    with pytest.raises(FetchError) as e:
        fetch_sdist(pin, home)
    assert hashlib.sha256(b"not it").hexdigest() in str(e.value) and pin.sdist_sha256 in str(e.value)
    assert left_over(home) == []


def test_broken_line_is_resumed(pin: Pin, index: Index, home: Path) -> None:
    index.drop_after = [1000, 500]
    fetch_sdist(pin, home)
    assert index.downloads == [None, "bytes=1000-", "bytes=1500-"]


def test_next_run_continues_a_partial_file(pin: Pin, index: Index, home: Path, archive: Path) -> None:
    write(home / "downloads", {archive.name + ".partial": archive.read_bytes()[:700]})
    fetch_sdist(pin, home)
    assert index.downloads == ["bytes=700-"]


def test_server_without_range_starts_again(pin: Pin, index: Index, home: Path) -> None:
    index.honour_range = False
    index.drop_after = [1000]
    fetch_sdist(pin, home)
    assert index.downloads == [None, "bytes=1000-"]
    assert (home / "downloads" / next(iter(index.files))).read_bytes() == next(iter(index.files.values()))


@pytest.mark.parametrize("size", [700, 10_000_000])
def test_partial_file_of_something_else_starts_again(
    pin: Pin, index: Index, home: Path, archive: Path, size: int
) -> None:
    write(home / "downloads", {archive.name + ".partial": b"x" * size})
    fetch_sdist(pin, home)
    assert index.downloads == [f"bytes={size}-", None]


def test_server_errors_are_retried_and_client_errors_are_not(pin: Pin, index: Index, home: Path) -> None:
    index.statuses = [403]
    with pytest.raises(FetchError, match="403"):
        fetch_sdist(pin, home)
    assert len(index.downloads) == 1
    index.statuses = [503, 500]
    fetch_sdist(pin, home)
    assert len(index.downloads) == 4


def test_lasting_server_error_ends_with_a_hint(pin: Pin, index: Index, home: Path) -> None:
    index.statuses = [503] * 9
    with pytest.raises(FetchError, match="failed 4 times") as e:
        fetch_sdist(pin, home)
    assert e.value.hint is not None


def test_damaged_kept_download_is_fetched_again(pin: Pin, index: Index, home: Path, archive: Path) -> None:
    write(home / "downloads", {archive.name: b"damaged"})
    fetch_sdist(pin, home)
    assert index.downloads == [None]


def test_find_links_and_file_index(
    pin: Pin, archive: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(archive.parent))
    fetch_sdist(pin, home)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    page = f'<a href="../../{archive.name}#sha256={pin.sdist_sha256}">{archive.name}</a>'
    write(archive.parent, {"simple/llama-cpp-python/index.html": page})
    monkeypatch.setenv("PIP_INDEX_URL", (archive.parent / "simple").as_uri())
    assert fetch_sdist(pin, tmp_path / "other").commit == pin.commit


def test_nothing_found_lists_where_it_looked(
    pin: Pin, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://me:secret@127.0.0.1:1/simple/")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(FetchError, match=r"could not read http://127\.0\.0\.1:1/simple/") as e:
        fetch_sdist(pin, home)
    assert "nowhere" in str(e.value)
    assert "secret" not in str(e.value)


def test_pip_settings_environment_beats_download_beats_global() -> None:
    settings = PipSettings.parse(
        [
            "global.index-url='http://a/simple'",
            "global.extra-index-url='http://b/simple\\nhttp://c/simple'",
            "global.find-links='/one'",
            "global.cert='/ca.pem'",
            "install.cert='/other.pem'",
            "download.index-url='http://d/simple'",
            ":env:.find-links='/two /three'",
            ":env:.default-timeout='60'",
        ]
    )
    assert settings == PipSettings(
        index_urls=("http://d/simple", "http://b/simple", "http://c/simple"),
        find_links=("/two", "/three"),
        cert="/ca.pem",
        proxy=None,
        timeout=60.0,
    )


def test_pip_settings_without_pip_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://e/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    assert PipSettings.current().index_urls == ("http://e/simple",)


# Unpacking


def tar_of(path: Path, *members: tuple[str, str, str]) -> Path:
    """members: (name, tar type, link target or content)."""
    with tarfile.open(path, "w:gz") as tar:
        for name, kind, value in members:
            info = tarfile.TarInfo(name)
            info.type = kind.encode()
            if info.isreg():
                info.size = len(value)
                tar.addfile(info, io.BytesIO(value.encode()))
            else:
                info.linkname = value
                tar.addfile(info)
    return path


REG, LINK, SYM, FIFO = (t.decode() for t in (tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE))


@pytest.mark.parametrize(
    "member",
    [
        ("../evil", REG, "x"),
        ("top/../../evil", REG, "x"),
        ("/tmp/evil", REG, "x"),
        ("top\\..\\..\\evil", REG, "x"),
        ("top/link", SYM, "../../evil"),
        ("top/link", SYM, "/etc/passwd"),
        ("top/hard", LINK, "../evil"),
        ("top/fifo", FIFO, ""),
    ],
)
def test_archive_that_leaves_its_folder_is_refused_before_writing(tmp_path: Path, member: tuple[str, str, str]) -> None:
    archive = tar_of(tmp_path / "a.tar.gz", ("top/good", REG, "x"), member)
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(FetchError, match="refusing to unpack"):
        sdist.unpack(archive, folder)
    assert list(folder.iterdir()) == []


def test_links_inside_the_archive_are_kept(tmp_path: Path) -> None:
    members = (("top/a/good", REG, "x"), ("top/b/link", SYM, "../a/good"), ("top/hard", LINK, "top/a/good"))
    folder = tmp_path / "out"
    folder.mkdir()
    top = sdist.unpack(tar_of(tmp_path / "a.tar.gz", *members), folder)
    assert (top / "b/link").is_symlink()
    assert (top / "b/link").read_text(encoding="utf-8") == (top / "hard").read_text(encoding="utf-8") == "x"


def test_truncated_archive_is_an_error(tmp_path: Path, archive: Path) -> None:
    write(tmp_path, {"short.tar.gz": archive.read_bytes()[:-2000]})
    (tmp_path / "out").mkdir()
    with pytest.raises(FetchError, match="cannot unpack"):
        sdist.unpack(tmp_path / "short.tar.gz", tmp_path / "out")


# Verifying


def offer(tree: Path, commit: str, monkeypatch: pytest.MonkeyPatch) -> Pin:
    """Pack a tree and make it the only sdist on offer."""
    archive = pack(tree, tree.parent)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(archive.parent))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return Pin(binding="1.2.3", sdist_sha256=digest, commit=commit)


def test_sdist_without_the_submodule_is_refused(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "llama_cpp_python-1.2.3"
    write(tree, BINDING_FILES)
    (tree / "vendor/llama.cpp").mkdir(parents=True)
    pin = offer(tree, "0" * 40, monkeypatch)
    with pytest.raises(FetchError, match=r"lacks vendor/llama\.cpp/CMakeLists\.txt"):
        fetch_sdist(pin, home)
    assert left_over(home) == ["llama_cpp_python-1.2.3.tar.gz"]


def test_sdist_at_another_commit_is_refused(
    upstream: FakeUpstream, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = offer(upstream.binding(tmp_path / "llama_cpp_python-1.2.3"), "0" * 40, monkeypatch)
    with pytest.raises(FetchError, match=f"is at {upstream.head}, the pin is {'0' * 40}"):
        fetch_sdist(pin, home)


def test_sdist_with_a_changed_file_is_refused(
    upstream: FakeUpstream, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = upstream.binding(tmp_path / "llama_cpp_python-1.2.3")
    write(tree, {"vendor/llama.cpp/include/llama.h": "// other\n"})
    pin = offer(tree, upstream.head, monkeypatch)
    with pytest.raises(FetchError, match=r"differ from the pinned commit: include/llama\.h"):
        fetch_sdist(pin, home)


@pytest.mark.parametrize(
    ("missing", "said"),
    [(sorted(FILES), "CMakeLists.txt"), ([f for f in FILES if f.startswith("ggml/")], "ggml/CMakeLists.txt")],
)
def test_incomplete_tree_is_told_at_once(upstream: FakeUpstream, tmp_path: Path, missing: list[str], said: str) -> None:
    tree = upstream.binding(tmp_path / "binding")
    check_complete(tree)
    for name in missing:
        (tree / "vendor/llama.cpp" / name).unlink()
    with pytest.raises(FetchError, match=f"lacks vendor/llama.cpp/{said}") as e:
        check_complete(tree)
    assert e.value.hint == "moe-madv fetch"


def test_locate_tells_a_binding_from_a_llama_tree(upstream: FakeUpstream, tmp_path: Path) -> None:
    tree = upstream.binding(tmp_path / "binding")
    assert locate(tree) == (tree, tree / "vendor/llama.cpp")
    assert locate(upstream.root) == (upstream.root, upstream.root)
    write(tmp_path / "s", {"pyproject.toml": ""})
    assert locate(tmp_path / "s")[1] == tmp_path / "s/vendor/llama.cpp"


def test_arm_trees_are_copies_and_pristine_stays_clean(pin: Pin, index: Index, home: Path) -> None:
    with pytest.raises(FetchError, match="has not been fetched") as e:
        pristine(pin, home)
    assert e.value.hint == "moe-madv fetch"
    fetch_sdist(pin, home)
    arms: tuple[Arm, ...] = ("baseline", "patched")
    for arm in arms:
        write(arm_tree(pin, arm, home).llama, {"include/llama.h": "// mine\n"})
    assert pristine(pin, home).commit == pin.commit
    assert arm_tree(pin, "patched", home).root == tree_dir(pin, "patched", home)
    with pytest.raises(FetchError, match=r"include/llama\.h") as e:
        arm_tree(pin, "baseline", home)
    assert str(tree_dir(pin, "baseline", home)) in str(e.value.hint)


def test_what_a_killed_run_left_is_removed(pin: Pin, index: Index, home: Path) -> None:
    left = tree_dir(pin, "pristine", home).parent / ".partial-killed"
    write(left, {"half/pyproject.toml": ""})
    fetch_sdist(pin, home)
    assert not left.exists()


# Git


def test_commit_behind_the_tip_then_again_without_the_remote(
    upstream: FakeUpstream, tmp_path: Path, home: Path, pin: Pin
) -> None:
    old = upstream.head
    for n in range(2):
        upstream.commit({"include/llama.h": f"// {n}\n"})
    bare = upstream.bare(tmp_path / "bare.git")
    elsewhere = Pin(binding="9", sdist_sha256="0" * 64, commit="0" * 40)
    tree = fetch_git(bare.as_uri(), old, elsewhere, home)
    assert (tree.commit, git(tree.llama, "rev-parse", "HEAD")) == (old, old)
    assert git(tree.llama, "status", "--porcelain", "--ignored") == ""
    bare.rename(tmp_path / "gone.git")
    shutil.rmtree(tree.root)
    assert fetch_git(bare.as_uri(), old, elsewhere, home) == tree


@pytest.mark.parametrize("after_another", [False, True])
def test_server_that_refuses_a_bare_commit_is_fetched_whole(
    upstream: FakeUpstream,
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    after_another: bool,
) -> None:
    old = upstream.head
    for n in range(3):
        upstream.commit({"include/llama.h": f"// {n}\n"})
    bare = upstream.bare(tmp_path / "bare.git")
    git(bare, "config", "uploadpack.allowReachableSHA1InWant", "false")
    # Protocol 2 always serves what it has; the older one asks the setting.
    for name, value in (("COUNT", "1"), ("KEY_0", "protocol.version"), ("VALUE_0", "0")):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    pin = Pin(binding="9", sdist_sha256="0" * 64, commit="0" * 40)
    if after_another:  # a shallow repository has to be deepened
        fetch_git(str(bare), "master", pin, home)
    assert fetch_git(str(bare), old, pin, home).commit == old
    assert "fetching all branches and tags" in capsys.readouterr().err


def test_branch_tag_and_short_id_give_the_full_commit(upstream: FakeUpstream, tmp_path: Path, home: Path) -> None:
    first = upstream.head
    git(upstream.root, "tag", "-a", "b1", "-m", "annotated")
    second = upstream.commit({"include/llama.h": "// 2\n"})
    third = upstream.commit({"include/llama.h": "// 3\n"})
    bare = str(upstream.bare(tmp_path / "bare.git"))
    pin = Pin(binding="9", sdist_sha256="0" * 64, commit="0" * 40)
    assert fetch_git(bare, "b1", pin, home).commit == first
    assert fetch_git(bare, "master", pin, home).commit == third
    assert fetch_git(bare, second[:8], pin, home).commit == second
    with pytest.raises(FetchError, match="no branch, tag or commit nope"):
        fetch_git(bare, "nope", pin, home)
    with pytest.raises(FetchError, match=f"no branch or tag leads to {'0' * 40}"):
        fetch_git(bare, None, pin, home)
    with pytest.raises(FetchError, match="has not been fetched"):
        pristine(pin, home)  # none of these is the pin


def test_relative_path_as_url(
    upstream: FakeUpstream, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pin = Pin(binding="9", sdist_sha256="0" * 64, commit="0" * 40)
    assert fetch_git("upstream", "master", pin, home).commit == upstream.head


def test_pinned_commit_from_git_becomes_the_pristine_tree(
    pin: Pin, index: Index, upstream: FakeUpstream, home: Path, tmp_path: Path
) -> None:
    upstream.commit({"include/llama.h": "// newer\n"})
    tree = fetch_git(str(upstream.root), None, pin, home)
    assert tree == pristine(pin, home)
    assert git(tree.llama, "rev-parse", "HEAD") == pin.commit
    assert (tree.root / "pyproject.toml").is_file()
    upstream.root.rename(tmp_path / "moved")
    assert fetch_git(str(upstream.root), None, pin, home) == tree


def test_unreachable_url_is_a_fetch_error(home: Path, pin: Pin, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="git fetch failed"):
        fetch_git((tmp_path / "none.git").as_uri(), None, pin, home)
    with pytest.raises(FetchError, match="dash"):
        fetch_git("--upload-pack=touch x", None, pin, home)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="changing owners needs root")
def test_repository_of_another_user_names_the_remedy_and_the_remedy_works(
    upstream: FakeUpstream, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = upstream.bare(tmp_path / "alien.git")
    for path in [bare, *bare.rglob("*")]:
        os.chown(path, 65534, 65534)
    monkeypatch.setenv("HOME", str(tmp_path / "empty"))
    config = tmp_path / "gitconfig"
    config.write_text("", encoding="utf-8")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    pin = Pin(binding="9", sdist_sha256="0" * 64, commit="0" * 40)
    with pytest.raises(MachineError, match="belongs to another user") as e:
        fetch_git(str(bare), "master", pin, home)
    assert e.value.hint == f"git config --global --add safe.directory {bare}"
    assert config.read_text(encoding="utf-8") == ""
    config.write_text(f"[safe]\ndirectory = {bare}\n", encoding="utf-8")
    assert fetch_git(str(bare), "master", pin, home).commit == upstream.head


def test_git_outside_a_repository_does_not_find_the_enclosing_one(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "inside").mkdir()
    inside = Git(root=tmp_path / "inside")
    assert not inside.is_repository()
    assert inside.run("rev-parse", "--git-dir", check=False).returncode != 0


# Command line


def test_fetch_command_json_and_dry_run(
    pin: Pin, index: Index, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path / "patches",
        {
            "upstream.toml": f'binding = "1.2.3"\n[pin."1.2.3"]\nsdist_sha256 = "{pin.sdist_sha256}"\n'
            f'commit = "{pin.commit}"\n'
        },
    )
    monkeypatch.setattr("toolkit.patch.upstream.patches_dir", lambda: tmp_path / "patches")
    cli = CliRunner()
    plan = json.loads(cli.invoke(fetch_command, ["--dry-run", "--json"]).stdout)
    assert (plan["present"], plan["pin"]) == (False, pin.commit)
    assert not (home / "trees").exists()
    done = json.loads(cli.invoke(fetch_command, ["--json"]).stdout)
    assert (done["commit"], done["pinned"], done["tree"]) == (pin.commit, True, plan["tree"])
    assert isinstance(cli.invoke(fetch_command, ["--sdist", "9.9"]).exception, PinError)
    assert cli.invoke(fetch_command, ["--rev", "x"]).exit_code == 2


@pytest.mark.parametrize("content", [None, b'binding = "\xff"'])
def test_pin_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "upstream.toml"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(PinError) as e:
        load_pin(path)
    assert e.value.where == str(path)


@pytest.mark.parametrize("value", ["abc", "-1", "0", "nan"])
def test_timeout_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", value)
    with pytest.raises(FetchError, match=value) as e:
        PipSettings.current()
    assert "PIP_DEFAULT_TIMEOUT" in (e.value.hint or "")


def test_trusted_host_is_the_only_one_without_a_checked_certificate() -> None:
    settings = PipSettings.parse(["global.trusted-host='mirror.test other.test:8443'"])
    with settings.session() as session:
        unverified = type(session.get_adapter("https://mirror.test/simple/"))
        assert unverified is not type(session.get_adapter("https://elsewhere.test/"))
        for url, trusted in (
            ("https://mirror.test:444/", True),
            ("https://mirror.test.evil/", False),
            ("https://other.test:8443/x", True),
            ("https://other.test/x", False),
        ):
            assert (type(session.get_adapter(url)) is unverified) == trusted, url
        assert session.verify is True


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_trusted_host_serves_with_its_own_certificate(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ("-subj", "/CN=localhost", "-days", "1")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        str(key),
        "-out",
        str(cert),
        *subject,
    ]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            Index._send(self, 200, b"hello", "text/plain")

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"https://127.0.0.1:{server.server_port}/"
        try:
            with PipSettings.parse(["global.trusted-host='127.0.0.1'"]).session() as session:
                assert session.get(url, timeout=10).content == b"hello"
            with PipSettings.parse([]).session() as session, pytest.raises(requests.exceptions.SSLError):
                session.get(url, timeout=10)
        finally:
            server.shutdown()
            thread.join()


def test_settings_without_pip_are_said_to_be_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.test/simple")
    assert PipSettings.current().index_urls == ("https://mirror.test/simple",)
    assert "only the PIP_* variables are used" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("url", ["https://[bad/x.git", "~no-such-user-here/x"])
def test_address_that_is_none_is_refused(pin: Pin, home: Path, url: str) -> None:
    with pytest.raises(FetchError):
        fetch_git(url, None, pin, home)


@pytest.mark.parametrize("rev", [None, "main"])
def test_missing_repository_is_named_in_the_words_of_git(pin: Pin, home: Path, tmp_path: Path, rev: str | None) -> None:
    url = str(tmp_path / "nonexistent")
    with pytest.raises(FetchError) as e:
        fetch_git(url, rev, pin, home)
    assert f"'{url}' does not appear to be a git repository" in e.value.what
    assert e.value.hint == f"check the address and the access to it: git ls-remote {url}"


def test_empty_address_is_a_usage_error() -> None:
    assert CliRunner().invoke(fetch_command, ["--git", ""]).exit_code == 2


def test_dry_run_shows_no_password() -> None:
    url = "https://me:secret@example.org/x.git"
    said = CliRunner().invoke(fetch_command, ["--git", url, "--dry-run"]).stdout
    assert "example.org/x.git" in said
    assert "secret" not in said
