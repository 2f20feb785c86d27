"""The static index: its pages, and real installs from it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from click.testing import CliRunner
from index_server import Negotiating, Plain, serving
from wheel_builder import LIBRARIES, TAGS, manifest, raw_wheel

from toolkit.build import wheelfile
from toolkit.build.index import add_wheels
from toolkit.build.wheelfile import BuildRecord
from toolkit.cli import cli
from toolkit.config import patches_dir
from toolkit.errors import BuildError
from toolkit.patch.ports import series_for
from toolkit.patch.upstream import load_pin

RECORD = BuildRecord(seconds=1.0, objects=None, ccache_hits=None, host_flags=())


def wheel(folder: Path, label: str, **changes: object) -> Path:
    made = manifest(label=label, version=f"0.3.36+{label}", **changes)
    (folder / label).mkdir(parents=True, exist_ok=True)
    packed = wheelfile.pack(raw_wheel(folder / label), folder / label / "packed", made)
    return wheelfile.store(packed, made, RECORD).path


def dependency(folder: Path, name: str = "numpy", version: str = "2.0.0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr(f"{name}/__init__.py", "")
        z.writestr(f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        z.writestr(
            f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        z.writestr(f"{name}-{version}.dist-info/RECORD", "")
    return path


class Links(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append(dict(attrs))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_each_backend_and_level_has_a_folder_with_both_arms(tmp_path: Path) -> None:
    made = [
        wheel(tmp_path / "w", "moe1.cpu"),
        wheel(tmp_path / "w", "base.cpu", arm="baseline", series=None, payload=None),
        wheel(tmp_path / "w", "moe1.cpu.v3", level="x86-64-v3"),
        wheel(tmp_path / "w", "moe1.cuda130.rpc", backend="cuda+rpc"),
    ]
    folders = add_wheels(tmp_path / "site", made)
    assert {f.name: sorted(file.version for file in f.files) for f in folders} == {
        "cpu": ["0.3.36+base.cpu", "0.3.36+moe1.cpu"],
        "cpu.v3": ["0.3.36+moe1.cpu.v3"],
        "cuda130.rpc": ["0.3.36+moe1.cuda130.rpc"],
    }
    sums = (tmp_path / "site" / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    assert {tuple(line.split("  ")) for line in sums} == {
        (sha256(path), f"{folder}/llama-cpp-python/{path.name}")
        for path, folder in zip(made, ("cpu", "cpu", "cpu.v3", "cuda130.rpc"), strict=True)
    }


def test_pages_carry_hashes_python_versions_and_metadata(tmp_path: Path) -> None:
    path = wheel(tmp_path / "w", "moe1.cpu")
    site = tmp_path / "site" / "cpu"
    add_wheels(tmp_path / "site", [path])
    assert [link["href"] for link in Links((site / "index.html").read_text(encoding="utf-8")).found] == [
        "llama-cpp-python/"
    ]
    (link,) = Links((site / "llama-cpp-python" / "index.html").read_text(encoding="utf-8")).found
    target, fragment = urldefrag(link["href"] or "")
    assert "+" not in target  # a plus sign in an address reads as a space to some servers
    stored = site / "llama-cpp-python" / unquote(target)
    assert stored.read_bytes() == path.read_bytes()
    assert fragment == f"sha256={sha256(path)}"
    with zipfile.ZipFile(path) as z:
        metadata = z.read("llama_cpp_python-0.3.36+moe1.cpu.dist-info/METADATA")
    assert stored.with_name(f"{stored.name}.metadata").read_bytes() == metadata
    digest = hashlib.sha256(metadata).hexdigest()
    assert link["data-core-metadata"] == link["data-dist-info-metadata"] == f"sha256={digest}"

    page = json.loads((site / "llama-cpp-python" / "index.json").read_text(encoding="utf-8"))
    assert (page["meta"], page["name"], page["versions"]) == (
        {"api-version": "1.1"},
        "llama-cpp-python",
        ["0.3.36+moe1.cpu"],
    )
    (file,) = page["files"]
    assert (file["filename"], unquote(file["url"]), file["hashes"]) == (path.name, path.name, {"sha256": sha256(path)})
    assert (file["size"], file["core-metadata"]) == (path.stat().st_size, {"sha256": digest})
    assert json.loads((site / "index.json").read_text(encoding="utf-8"))["projects"] == [{"name": "llama-cpp-python"}]


def test_a_second_run_adds_and_keeps(tmp_path: Path) -> None:
    add_wheels(tmp_path / "site", [wheel(tmp_path / "w", "moe1.cpu")])
    folders = add_wheels(tmp_path / "site", [wheel(tmp_path / "w", "moe1.rpc", backend="rpc")])
    assert [folder.name for folder in folders] == ["cpu", "rpc"]
    assert len((tmp_path / "site" / "SHA256SUMS").read_text(encoding="utf-8").splitlines()) == 2


def test_another_wheel_of_the_same_name_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    first, site = wheel(tmp_path / "w", "moe1.cpu"), tmp_path / "site"
    add_wheels(site, [first])
    before = {path: path.read_bytes() for path in site.rglob("*") if path.is_file()}
    other = wheel(tmp_path / "v", "moe1.cpu", compiler="cc 13")
    with pytest.raises(BuildError, match="another wheel named"):
        add_wheels(site, [wheel(tmp_path / "w", "moe1.rpc", backend="rpc"), other])
    assert {path: path.read_bytes() for path in site.rglob("*") if path.is_file()} == before
    with pytest.raises(BuildError, match="another wheel named"):
        add_wheels(tmp_path / "new", [first, other])
    assert not (tmp_path / "new").exists()


def test_a_wheel_that_is_not_sound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no manifest") as e:
        add_wheels(tmp_path / "site", [raw_wheel(tmp_path)])
    assert (e.value.hint or "").startswith("moe-madv wheels check")
    assert not (tmp_path / "site").exists()


def test_dependencies_are_served_beside_each_backend(tmp_path: Path) -> None:
    made = [wheel(tmp_path / "w", "moe1.cpu"), wheel(tmp_path / "w", "moe1.rpc", backend="rpc")]
    dependency(tmp_path / "deps")
    add_wheels(tmp_path / "site", made, [tmp_path / "deps"])
    for backend in ("cpu", "rpc"):
        listed = Links((tmp_path / "site" / backend / "index.html").read_text(encoding="utf-8")).found
        assert [link["href"] for link in listed] == ["llama-cpp-python/", "numpy/"]
    with pytest.raises(BuildError, match="no wheels there"):
        add_wheels(tmp_path / "site", made, [tmp_path])


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason=f"the wheels are {TAGS}")
@pytest.mark.parametrize("handler", [Plain, Negotiating])
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_installers_take_the_wheel_and_check_it(tmp_path: Path, installer: str, handler: type[Plain]) -> None:
    """pip and uv from a plain file server and from one that speaks PEP 691; the dependency comes from there too."""
    path = wheel(tmp_path / "w", "moe1.cpu")
    with zipfile.ZipFile(path) as z:
        needs = z.read("llama_cpp_python-0.3.36+moe1.cpu.dist-info/METADATA").decode()
    assert "Requires-Dist" not in needs
    dependency(tmp_path / "deps")
    add_wheels(tmp_path / "site", [path, wheel(tmp_path / "w", "base.cpu", series=None)], [tmp_path / "deps"])
    target = tmp_path / "installed"
    commands = {
        "pip": [sys.executable, "-m", "pip", "install", "--isolated", "--no-cache-dir", "--disable-pip-version-check"],
        "uv": [sys.executable, "-m", "uv", "pip", "install", "--no-config", "--no-cache", "--python", sys.executable],
    }
    wanted = ["llama-cpp-python==0.3.36+moe1.cpu", "numpy"]
    with serving(tmp_path / "site", handler) as (address, asked):
        command = [*commands[installer], "--target", str(target), "--index-url", f"{address}/cpu", *wanted]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))} | {
            "PIP_CONFIG_FILE": os.devnull
        }
        done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", check=False)
        assert done.returncode == 0, done.stderr
        assert sorted(p.name for p in target.glob("*.dist-info")) == [
            "llama_cpp_python-0.3.36+moe1.cpu.dist-info",
            "numpy-2.0.0.dist-info",
        ]
        assert (target / "llama_cpp" / "lib" / "libggml.so").read_bytes() == LIBRARIES["libggml.so"]
        assert any(path.endswith(".whl.metadata") for path in asked)
        assert not any("base.cpu" in path for path in asked)

        # a file that is not the one the page promises
        stored = tmp_path / "site" / "cpu" / "llama-cpp-python" / path.name
        data = stored.read_bytes()
        stored.unlink()
        stored.write_bytes(data + b"\0")
        command[command.index(str(target))] = str(tmp_path / "second")
        done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", check=False)
        assert done.returncode != 0
        assert "hash" in done.stderr.lower()
        assert not list((tmp_path / "second").glob("llama*"))


def test_the_command_takes_the_finished_wheels_and_prints_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, site = tmp_path / "home", tmp_path / "site"
    monkeypatch.setenv("MOE_MADV_HOME", str(home))
    done = CliRunner().invoke(cli, ["wheels", "index", str(site)])
    assert isinstance(done.exception, BuildError)
    assert done.exception.hint == "moe-madv build --backend cpu --arm both"

    current = {"pin": load_pin().commit, "series": series_for(patches_dir(), load_pin().commit).digest}
    arms: dict[str, dict[str, object]] = {
        "moe1.cpu": {**current},
        "base.cpu": {**current, "series": None},
        "old1.cpu": {},
    }
    for label, changes in arms.items():
        path = wheel(tmp_path / "w", label, **changes)
        (home / "wheels" / label).mkdir(parents=True)
        for file in (path, wheelfile.manifest_path(path)):
            file.rename(home / "wheels" / label / file.name)
    done = CliRunner().invoke(cli, ["wheels", "index", str(site), "--json"])
    (folder,) = json.loads(done.stdout)["folders"]
    assert folder["name"] == "cpu"
    assert [file["version"] for file in folder["files"]] == ["0.3.36+base.cpu", "0.3.36+moe1.cpu"]
    assert "built with --portable" in done.stderr
