"""Plans and keys, the wheel as a file, what is wrong with a wheel, and environments."""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import json
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from wheel_builder import LIBRARIES, PIN, TAGS, elf, manifest, plan, raw_wheel, series

from toolkit.build import arms, compiling, venv, wheelfile
from toolkit.build.backends import get_backend
from toolkit.build.buildplan import clean_environment, parse_cmake_args, plan_build
from toolkit.build.wheelcheck import check_wheel
from toolkit.build.wheelfile import BuildRecord, Manifest
from toolkit.cli import cli
from toolkit.errors import BuildError, CommandError


def test_label_version_and_key_name_the_arm(tmp_path: Path) -> None:
    patched, baseline = plan(tmp_path), plan(tmp_path, patched=False)
    assert (patched.label, baseline.label) == ("moe1.cpu", "base.cpu")
    assert (patched.version, baseline.version) == ("0.3.36+moe1.cpu", "0.3.36+base.cpu")
    assert patched.key.startswith("0.3.36-moe1.cpu-")
    assert patched.key != baseline.key


def test_the_key_covers_what_decides_the_bytes_and_not_the_place(tmp_path: Path) -> None:
    one = plan(tmp_path)
    compiler = replace(one.toolchain, compiler="cc 13; c++ 13; x86_64")
    backend = replace(one.backend, defines={**one.backend.defines, "GGML_NATIVE": "OFF"})
    others = [
        replace(one, series=series(b"// changed\n")),
        replace(one, pin=replace(PIN, commit="b" * 40)),
        replace(one, toolchain=compiler),
        replace(one, backend=backend),
        replace(one, cmake_args=("-DGGML_OPENMP=OFF",)),
    ]
    assert len({one.key, *(other.key for other in others)}) == 6
    assert replace(one, home=tmp_path / "other").key == one.key


def test_both_arms_get_the_same_options_but_for_their_directory(tmp_path: Path) -> None:
    patched, baseline = plan(tmp_path), plan(tmp_path, patched=False)
    shown = [" ".join(p.command).replace(p.key, "KEY") for p in (patched, baseline)]
    assert shown[0] == shown[1]
    assert "cmake.define.GGML_NATIVE=ON" in shown[0]
    for p in (patched, baseline):
        assert p.environment["CCACHE_BASEDIR"] == str(p.work)
    assert "CCACHE_BASEDIR" not in replace(patched, toolchain=replace(patched.toolchain, ccache=None)).environment


def test_an_arm_and_its_series_belong_together(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="patched arm needs a series"):
        plan_build("patched", get_backend("cpu"), PIN, None, tmp_path)
    with pytest.raises(BuildError, match="baseline arm has no series"):
        plan_build("baseline", get_backend("cpu"), PIN, series(), tmp_path)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ()),
        ("-DA=1 -DB=2", ("-DA=1", "-DB=2")),
        ("-DARCH='80;90' -DFLAGS=\"-O2 -g\"", ("-DARCH=80;90", "-DFLAGS=-O2 -g")),
    ],
)
def test_cmake_args_are_split_as_a_shell_would(value: str, expected: object) -> None:
    assert parse_cmake_args(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        '"-DGGML_CUDA=on"',  # quotes pasted into a variable
        "'-DA=1 -DB=2'",  # two options as one
        r"-DGGML_CUDA=\"on\"",  # quotes that stay part of the value
        '-DA="1',  # never closed
        "GGML_CUDA=on",  # not an option
    ],
)
def test_cmake_args_with_stray_quotes_are_refused(value: str) -> None:
    with pytest.raises(BuildError) as e:
        parse_cmake_args(value)
    assert e.value.where == value


def test_variables_that_change_a_build_unseen_are_left_out() -> None:
    environ = {
        "PATH": "/bin",
        "CC": "gcc",
        "HOME": "/root",
        "CMAKE_BUILD_PARALLEL_LEVEL": "2",
        "CFLAGS": "-O0",
        "CMAKE_GENERATOR": "Xcode",
        "GIT_DIR": "/x",
        "PYTHONPATH": "/y",
        "SKBUILD_BUILD_DIR": "/z",
    }
    assert set(clean_environment(environ)) == {"PATH", "CC", "HOME", "CMAKE_BUILD_PARALLEL_LEVEL"}


UNUSED_LOG = """\
-- Configuring done
CMake Warning:
  Manually-specified variables were not used by the project:

    LLAMA_HIPBLAS
    NO_SUCH_OPTION


-- Build files have been written to: /x
[1/79] Building
"""


def test_options_cmake_did_not_use_are_found_in_its_log() -> None:
    assert compiling.unused_defines(UNUSED_LOG.splitlines()) == ("LLAMA_HIPBLAS", "NO_SUCH_OPTION")
    assert compiling.unused_defines(["-- Configuring done", "    -- indented"]) == ()


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_the_cmake_of_this_machine_words_it_that_way(tmp_path: Path) -> None:
    text = 'cmake_minimum_required(VERSION 3.21)\nproject(x NONE)\nmessage("${USED}")\n'
    (tmp_path / "CMakeLists.txt").write_text(text, encoding="utf-8")
    command = ["cmake", "-S", str(tmp_path), "-B", str(tmp_path / "b"), "-DUSED=1", "-DUNUSED=1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", check=True)
    assert compiling.unused_defines(done.stdout.splitlines()) == ("UNUSED",)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[7/79] /usr/bin/c++ -c x.cpp", (7, 79)),
        ("[ 12%] Building CXX object x.o", None),
        ("-- [1/2] no", None),
        ("x = a[3/4]", None),
    ],
)
def test_progress_of_ninja_is_read(line: str, expected: object) -> None:
    assert compiling.position(line) == expected


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_build_is_logged_whole_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs" / "x.log"
    text = "print('configure'); print('[1/2] a'); print('[2/2] b')"
    compiling.compile_with_progress(script(text), env={}, log=log, label="x")
    assert log.read_text(encoding="utf-8").splitlines()[1:] == ["configure", "[1/2] a", "[2/2] b"]
    assert capsys.readouterr() == ("", "x: [1/2]\nx: [2/2]\n")


def test_progress_of_a_build_inside_the_build_is_not_the_builds_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "print('[1/4] a'); print('[1/2] shaders'); print('[2/2] shaders'); print('[2/4] b'); print('[4/4] c')"
    compiling.compile_with_progress(script(text), env={}, log=tmp_path / "x.log", label="x")
    assert capsys.readouterr().err == "x: [1/4]\nx: [2/4]\nx: [4/4]\n"


def test_a_failed_build_shows_its_end_and_its_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    with pytest.raises(CommandError, match="exit code 3:\nfatal: no such header") as e:
        text = "print('fatal: no such header'); raise SystemExit(3)"
        compiling.compile_with_progress(script(text), env={}, log=log, label="x")
    assert e.value.hint == f"read the whole log: {log}"


@pytest.mark.parametrize("interrupt", [signal.SIG_DFL, signal.SIG_IGN], ids=["terminal", "background"])
def test_an_unused_option_stops_the_build_before_it_compiles(
    tmp_path: Path, request: pytest.FixtureRequest, interrupt: signal.Handlers
) -> None:
    before = signal.signal(signal.SIGINT, interrupt)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    marker = tmp_path / "compiled"
    text = f"""
import time
print({UNUSED_LOG!r}, flush=True)
time.sleep(30)
open({str(marker)!r}, "w").close()
"""
    with pytest.raises(BuildError, match="LLAMA_HIPBLAS, NO_SUCH_OPTION"):
        compiling.compile_with_progress(script(text), env={}, log=tmp_path / "x.log", label="x")
    assert not marker.exists()


# -- the wheel as a file ------------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    path = wheelfile.pack(raw_wheel(tmp_path / "raw"), tmp_path / "wheels", manifest())
    record = BuildRecord(seconds=1.5, objects=None, ccache_hits=None, host_flags=("avx",))
    return wheelfile.store(path, manifest(), record).path


def edit(path: Path, remove: str = "", add: dict[str, bytes] | None = None) -> Path:
    """The wheel with entries taken out or put in and RECORD left as it was, under the same name."""
    with zipfile.ZipFile(path) as z:
        entries = {name: z.read(name) for name in z.namelist() if name != remove}
    with zipfile.ZipFile(path, "w") as z:
        for name, data in {**entries, **(add or {})}.items():
            z.writestr(name, data)
    return path


def test_a_packed_wheel_has_its_label_one_copy_of_each_library_and_a_true_record(good: Path, tmp_path: Path) -> None:
    assert good.name == f"llama_cpp_python-0.3.36+moe1.cpu-{TAGS}.whl"
    with zipfile.ZipFile(good) as z:
        names = z.namelist()
        z.extractall(tmp_path / "site")
        rows = list(csv.reader(z.read("llama_cpp_python-0.3.36+moe1.cpu.dist-info/RECORD").decode().split()))
    assert sorted(n for n in names if n.endswith(".so")) == sorted(f"llama_cpp/lib/{n}" for n in LIBRARIES)
    assert {n.split("/")[0] for n in names} == {"llama_cpp", "llama_cpp_python-0.3.36+moe1.cpu.dist-info"}
    (distribution,) = importlib.metadata.distributions(path=[str(tmp_path / "site")])
    assert distribution.version == "0.3.36+moe1.cpu"
    assert (distribution.read_text("METADATA") or "").endswith("\n\nVersion: of the text\n")
    assert [row[0] for row in rows[:-1]] == sorted(set(names) - {rows[-1][0]})
    for name, hashed, size in rows[:-1]:
        data = (tmp_path / "site" / name).read_bytes()
        text = subprocess.run(["openssl", "dgst", "-sha256", "-binary"], input=data, capture_output=True)
        assert hashed == "sha256=" + _base64url(text.stdout or hashlib.sha256(data).digest())
        assert int(size) == len(data)


def _base64url(data: bytes) -> str:
    """RFC 4648 section 5 without padding, from its table."""
    table = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    bits = "".join(f"{byte:08b}" for byte in data)
    bits += "0" * (-len(bits) % 6)
    return "".join(table[int(bits[i : i + 6], 2)] for i in range(0, len(bits), 6))


def test_the_same_contents_make_the_same_bytes(good: Path, tmp_path: Path) -> None:
    again = wheelfile.pack(raw_wheel(tmp_path / "raw"), tmp_path / "second", manifest())
    assert again.read_bytes() == good.read_bytes()


def test_a_stored_wheel_is_loaded_as_it_was(good: Path) -> None:
    wheel = wheelfile.load(good)
    assert wheel.manifest == manifest()
    assert wheel.bytes == good.stat().st_size
    assert wheel.build.host_flags == ("avx",)


def test_a_wheel_that_changed_after_its_manifest_is_not_loaded(good: Path) -> None:
    edit(good, add={"llama_cpp/extra.py": b""})
    with pytest.raises(BuildError, match="not the one its manifest describes"):
        wheelfile.load(good)
    good.with_name(good.name + ".json").unlink()
    with pytest.raises(BuildError, match="no manifest"):
        wheelfile.load(good)


def test_a_good_wheel_is_explained(good: Path) -> None:
    report = check_wheel(good, host=frozenset({"avx", "avx2"}))
    assert report.problems == ()
    assert report.ok
    assert (report.label, report.backend, report.pin) == ("moe1.cpu", "cpu", "a" * 40)
    assert report.series == "c" * 64
    assert report.needs == ("libgomp.so.1",)
    assert set(report.base) == {"libc.so.6", "libstdc++.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}


def test_a_wheel_alone_still_says_what_it_is(good: Path, tmp_path: Path) -> None:
    (tmp_path / "away").mkdir()
    alone = Path(shutil.copy(good, tmp_path / "away"))
    report = check_wheel(alone)
    assert (report.ok, report.pin) == (True, "a" * 40)


def problems(path: Path, **options: frozenset[str]) -> str:
    report = check_wheel(path, **options)
    assert report.ok == (not report.problems)
    return "\n".join(report.problems)


def test_a_missing_sibling_is_named(good: Path) -> None:
    found = problems(edit(good, remove="llama_cpp/lib/libggml-base.so"))
    assert "libggml-base.so is missing from the wheel, libggml-cpu.so needs it" in found


def test_a_changed_library_is_found_by_record_and_by_manifest(good: Path) -> None:
    found = problems(edit(good, add={"llama_cpp/lib/libggml.so": elf("libc.so.6")}))
    assert "llama_cpp/lib/libggml.so is not the file of RECORD" in found
    assert "llama_cpp/lib/libggml.so has sha256" in found
    assert "sha256 is" in found  # the manifest beside the wheel


def test_a_library_of_another_build_is_found(good: Path) -> None:
    found = problems(edit(good, add={"llama_cpp/lib/libggml-old.so": elf("libc.so.6")}))
    assert "llama_cpp/lib/libggml-old.so was not made by this build" in found
    assert "llama_cpp/lib/libggml-old.so is not in RECORD" in found


def test_a_wheel_linked_with_musl_is_found(tmp_path: Path) -> None:
    path = raw_wheel(tmp_path, {"libllama.so": elf("libc.musl-x86_64.so.1")})
    report = check_wheel(path)
    assert "needs musl: libllama.so is linked with libc.musl-x86_64.so.1" in "\n".join(report.problems)
    assert report.needs == ("libc.musl-x86_64.so.1",)
    assert not report.ok


def test_a_wheel_for_musl_systems_may_need_musl(tmp_path: Path) -> None:
    path = raw_wheel(tmp_path, {"libllama.so": elf("libc.musl-x86_64.so.1")})
    other = path.rename(tmp_path / "llama_cpp_python-0.3.36-py3-none-musllinux_1_2_x86_64.whl")
    assert "musl" not in problems(other)


def test_a_wheel_of_someone_else_has_no_manifest_and_two_copies(tmp_path: Path) -> None:
    report = check_wheel(raw_wheel(tmp_path))
    found = "\n".join(report.problems)
    assert "no manifest" in found
    assert "one library under 2 names: lib/libggml.so, llama_cpp/lib/libggml.so" in found
    assert (report.label, report.backend, report.pin) == (None, "cpu", None)


def test_a_library_the_backend_does_not_use_is_named(tmp_path: Path) -> None:
    path = wheelfile.pack(raw_wheel(tmp_path, {"libllama.so": elf("libcudart.so.12")}), tmp_path / "w", manifest())
    assert "needs libcudart.so.12 (libllama.so), which the cpu backend does not use" in problems(path)


def test_instructions_this_processor_lacks_are_named(good: Path) -> None:
    assert "lacks: avx2" in problems(good, host=frozenset({"avx"}))


def test_a_damaged_library_is_named(tmp_path: Path) -> None:
    path = raw_wheel(tmp_path, {"libllama.so": elf("libc.so.6")[:100], "libggml.so": b"text\n"})
    found = problems(path)
    assert "llama_cpp/lib/libllama.so is damaged" in found
    assert "llama_cpp/lib/libggml.so is not a shared library" in found


@pytest.mark.parametrize("name", ["x.whl", "llama_cpp_python-0.3.36-py3-none-any.whl", "numpy-2.0-py3-none-any.whl"])
def test_what_is_no_wheel_of_the_binding_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"PK\x05\x06" + bytes(18) if "numpy" in name else b"no zip")
    with pytest.raises(BuildError):
        check_wheel(path)


def test_a_damaged_entry_is_reported_and_not_a_crash(good: Path) -> None:
    with zipfile.ZipFile(good) as z:
        info = z.getinfo("llama_cpp/lib/libggml.so")
    data = bytearray(good.read_bytes())
    start = info.header_offset + 30 + len(info.filename)
    data[start : start + 8] = b"\xff" * 8  # block type 3, which DEFLATE does not have
    good.write_bytes(data)
    with pytest.raises(BuildError, match="not a wheel"):
        check_wheel(good)


@pytest.mark.parametrize(("offset", "value"), [(6, 1), (8, 99)])  # encrypted; a method that does not exist
def test_an_archive_that_cannot_be_read_is_reported(good: Path, offset: int, value: int) -> None:
    data = bytearray(good.read_bytes())
    central = data.index(b"PK\x01\x02")
    data[offset] = data[central + 2 + offset] = value
    good.write_bytes(data)
    with pytest.raises(BuildError, match="not a wheel"):
        check_wheel(good)


@pytest.mark.parametrize("text", ["[]", "7", '"x"', "null"])
def test_a_manifest_that_is_no_object_is_refused(good: Path, text: str) -> None:
    beside = wheelfile.manifest_path(good)
    beside.write_text(text, encoding="utf-8")
    with pytest.raises(BuildError, match="not a JSON object"):
        wheelfile.load(good)
    assert "unreadable manifest" in problems(good)


def test_a_manifest_of_another_format_is_refused() -> None:
    with pytest.raises(BuildError, match="format 2, this version reads 1"):
        Manifest.from_json({"format": 2}, Path("x"))
    with pytest.raises(BuildError, match="lacks arm, backend"):
        Manifest.from_json({"format": 1}, Path("x"))


# -- environments ------------------------------------------------------------------------------------------


def test_an_environment_starts_from_the_base_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", "/nonexistent")
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))
    outer = tmp_path / "outer"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", outer], check=True)
    # Made from an interpreter that lives in an environment without pip.
    text = (
        f"import sys; sys.path[:0] = {[str(Path(venv.__file__).parents[1]), *sys.path]!r}\n"
        "from pathlib import Path; from toolkit.build.venv import create_venv, pip_install\n"
        f"python = create_venv(Path({str(tmp_path / 'inner')!r})); pip_install(python, 'pip'); print(python)\n"
    )
    made = subprocess.run([outer / "bin" / "python", "-c", text], capture_output=True, text=True, check=True)
    question = "import sys, pip; print(sys.prefix, sys.base_prefix, pip.__file__)"
    answer = subprocess.run([made.stdout.strip(), "-I", "-c", question], capture_output=True, text=True, check=True)
    prefix, base, pip = answer.stdout.split()
    assert prefix == str(tmp_path / "inner")
    assert base == sys.base_prefix
    assert pip.startswith(prefix)
    assert not (tmp_path / "elsewhere").exists()


def installed(tmp_path: Path) -> tuple[Path, dict[str, object]]:
    """An environment folder with the libraries, and what the probe says when all is well."""
    lib = tmp_path / "env" / "llama_cpp" / "lib"
    lib.mkdir(parents=True)
    for name, data in LIBRARIES.items():
        (lib / name).write_bytes(data)
    facts: dict[str, object] = {
        "module": str(lib.parent / "__init__.py"),
        "mapped": [str(lib / name) for name in LIBRARIES],
        "version": "0.3.36+moe1.cpu",
        "payload": "1",
        "commit": "b" * 7,
        "drift": [],
    }
    return tmp_path / "env", facts


def test_an_environment_as_its_manifest_says_has_no_mismatch(tmp_path: Path) -> None:
    root, facts = installed(tmp_path)
    assert arms.mismatches(facts, manifest(), root) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"payload": None}, ["payload None is loaded, not 1"]),
        ({"version": "0.3.36"}, ["version 0.3.36 is installed, not 0.3.36+moe1.cpu"]),
        ({"commit": "d" * 7}, [f"the libraries are of llama.cpp ddddddd, not {'b' * 9}"]),
        ({"drift": ["llama_model_params.split_mode reads 7"]}, ["llama_model_params.split_mode reads 7"]),
    ],
)
def test_each_mismatch_of_an_environment_is_named(tmp_path: Path, changes: dict[str, object], expected: object) -> None:
    root, facts = installed(tmp_path)
    assert arms.mismatches({**facts, **changes}, manifest(), root) == expected


def test_libraries_from_elsewhere_are_a_mismatch(tmp_path: Path) -> None:
    root, facts = installed(tmp_path)
    facts["mapped"] = ["/usr/lib/libllama.so", *facts["mapped"][1:]]  # type: ignore[index]
    assert arms.mismatches(facts, manifest(), root) == ["/usr/lib/libllama.so was loaded"]
    (root / "llama_cpp" / "lib" / "libggml.so").write_bytes(b"other")
    assert "libggml.so has another sha256" in arms.mismatches(facts, manifest(), root)


def test_a_module_from_elsewhere_is_a_mismatch(tmp_path: Path) -> None:
    root, facts = installed(tmp_path)
    shadow = tmp_path / "src"
    shutil.copytree(root, shadow)
    facts["module"] = str(shadow / "llama_cpp" / "__init__.py")
    facts["mapped"] = None
    assert arms.mismatches(facts, manifest(), root) == [f"llama_cpp was loaded from {facts['module']}"]


def test_a_processor_without_the_instructions_is_refused_before_anything_is_made(good: Path, tmp_path: Path) -> None:
    wheel = wheelfile.load(good)
    wheel = replace(wheel, manifest=manifest(cpu_flags=("no_such_flag",)))
    with pytest.raises(arms.MachineError, match="lacks no_such_flag"):
        arms.arm_environment(wheel, tmp_path / "home")
    assert not (tmp_path / "home").exists()


# -- command line ------------------------------------------------------------------------------------------


def test_wheels_check_prints_the_agreed_fields(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.build.cpuflags.host_flags", lambda: None)
    done = CliRunner().invoke(cli, ["wheels", "check", str(good), "--json"])
    report = json.loads(done.stdout)
    assert done.exit_code == 0
    agreed = {key: report[key] for key in ("label", "backend", "pin", "series", "ok", "needs")}
    assert agreed == {
        "label": "moe1.cpu",
        "backend": "cpu",
        "pin": "a" * 40,
        "series": "c" * 64,
        "ok": True,
        "needs": ["libgomp.so.1"],
    }
    edit(good, remove="llama_cpp/lib/libggml.so")
    done = CliRunner().invoke(cli, ["wheels", "check", str(good)])
    assert done.exit_code == BuildError.exit_code
    assert done.stdout.splitlines()[-1] == "not ok"


def test_wheels_list_leaves_out_what_is_not_whole(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_MADV_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "wheels" / "key"
    folder.mkdir(parents=True)
    for file in good.parent.iterdir():
        shutil.copy(file, folder)
    rows = json.loads(CliRunner().invoke(cli, ["wheels", "list", "--json"]).stdout)["wheels"]
    assert [(row["label"], row["path"]) for row in rows] == [("moe1.cpu", str(folder / good.name))]
    edit(folder / good.name, remove="llama_cpp/__init__.py")
    assert json.loads(CliRunner().invoke(cli, ["wheels", "list", "--json"]).stdout) == {"wheels": []}


@pytest.mark.skipif(not all(map(shutil.which, ("cc", "c++", "git"))), reason="no compilers")
def test_a_dry_run_prints_both_commands_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("MOE_MADV_HOME", str(home))
    monkeypatch.setenv("CMAKE_ARGS", "-DCMAKE_CUDA_ARCHITECTURES='80;90' -DX='-O2 -g'")
    done = CliRunner().invoke(cli, ["build", "--arm", "both", "--dry-run", "--json"])
    plans = json.loads(done.stdout)["plans"]
    assert [p["arm"] for p in plans] == ["baseline", "patched"]
    assert [p["cmake_args"] for p in plans] == [["-DCMAKE_CUDA_ARCHITECTURES=80;90", "-DX=-O2 -g"]] * 2
    assert plans[0]["series"] is None
    assert [p.name for p in home.iterdir()] == ["CACHEDIR.TAG"]
    text = CliRunner().invoke(cli, ["build", "--arm", "baseline", "--dry-run"]).stdout
    words = shlex.split(text.splitlines()[-1])  # as a POSIX shell reads the printed line
    assert "CMAKE_ARGS='-DCMAKE_CUDA_ARCHITECTURES=80;90' '-DX=-O2 -g'" in words
    assert words[words.index("-m") + 1] == "build"
    assert words[-1] == str(home / "builds" / plans[0]["key"] / "src")
