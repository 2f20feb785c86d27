"""Backends as data, and the report of what a machine lacks to build them."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from pathlib import Path

import pytest

from toolkit.build import cpuflags, toolchain
from toolkit.build.backends import BACKENDS, Backend, get_backend
from toolkit.build.toolchain import preflight
from toolkit.errors import BuildError, MachineError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the programs are shell scripts")


@pytest.fixture
def bin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the whole PATH; the interpreter's own folder does not count either."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    return folder


def program(folder: Path, name: str, says: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def compilers(folder: Path) -> None:
    for name in ("cc", "c++", "git"):
        program(folder, name, f"{name} 1.2.3")


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=lambda b: b.name)
def test_labels_and_options_are_legal(backend: Backend) -> None:
    # PEP 440 local version segment, also within the alphabet of PEP 825.
    assert re.fullmatch(r"[a-z0-9]{1,10}", backend.label)
    assert all(re.fullmatch(r"[A-Z0-9_]+", name) for name in backend.defines)
    assert all(value for value in backend.defines.values())


def test_the_cpu_backend_uses_this_machine_and_one_file_per_library() -> None:
    defines = BACKENDS["cpu"].defines
    assert defines["GGML_NATIVE"] == "ON"
    assert defines["LLAVA_BUILD"] == "OFF"
    assert defines["CMAKE_PLATFORM_NO_VERSIONED_SONAME"] == "ON"


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(BuildError, match=r"'hip'.*known: cpu"):
        get_backend("hip")


def test_all_missing_tools_are_in_one_report(bin_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(MachineError) as e:
        preflight(get_backend("cpu"), tmp_path, {"PATH": str(bin_dir)})
    for name in ("C compiler", "C++ compiler", "cmake", "ninja", "git"):
        assert name in e.value.what
    assert "apt-get install -y gcc g++ cmake ninja-build git" in (e.value.hint or "")
    assert "pip install cmake ninja" in (e.value.hint or "")


def test_cmake_and_ninja_alone_are_taken_from_the_package_index(bin_dir: Path, tmp_path: Path) -> None:
    compilers(bin_dir)
    found = preflight(get_backend("cpu"), tmp_path, {"PATH": str(bin_dir)})
    assert found.install == ("cmake", "ninja")
    assert found.cmake == tmp_path / "toolbox" / "bin" / "cmake"
    assert found.ninja == tmp_path / "toolbox" / "bin" / "ninja"
    assert not (tmp_path / "toolbox").exists()


def test_a_cmake_that_is_too_old_counts_as_missing(bin_dir: Path, tmp_path: Path) -> None:
    compilers(bin_dir)
    program(bin_dir, "ninja", "1.13.2")
    old = program(bin_dir, "cmake", "cmake version 3.18.4")
    assert preflight(get_backend("cpu"), tmp_path, {"PATH": str(bin_dir)}).install == ("cmake",)
    (bin_dir / "git").unlink()
    with pytest.raises(MachineError, match=re.escape(f"cmake 3.21 or newer ({old} is 3.18.4)")):
        preflight(get_backend("cpu"), tmp_path, {"PATH": str(bin_dir)})


def test_what_is_there_is_used_and_identified(bin_dir: Path, tmp_path: Path) -> None:
    compilers(bin_dir)
    program(bin_dir, "cmake", "cmake version 3.21.0")
    program(bin_dir, "ninja", "1.13.2")
    program(bin_dir, "ccache", "ccache version 4.7")
    found = preflight(get_backend("cpu"), tmp_path, {"PATH": str(bin_dir)})
    assert found.install == ()
    assert found.cmake == bin_dir / "cmake"
    assert found.ccache == bin_dir / "ccache"
    assert found.ninja == bin_dir / "ninja"
    assert found.compiler == "cc 1.2.3; c++ 1.2.3; cc 1.2.3"  # the script answers -dumpmachine alike


def test_cc_of_the_environment_is_followed(bin_dir: Path, tmp_path: Path) -> None:
    compilers(bin_dir)
    mine = program(bin_dir, "mycc", "mycc 9")
    found = preflight(get_backend("cpu"), tmp_path, {"PATH": str(bin_dir), "CC": "mycc -m64"})
    assert found.cc == (str(mine), "-m64")
    assert found.compiler == "mycc 9 (-m64); c++ 1.2.3; mycc 9"
    with pytest.raises(MachineError, match="CC=gone is not there"):
        preflight(get_backend("cpu"), tmp_path, {"PATH": str(bin_dir), "CC": "gone"})


def test_an_earlier_toolbox_is_found_again(bin_dir: Path, tmp_path: Path) -> None:
    compilers(bin_dir)
    toolbox = toolchain.toolbox(tmp_path) / "bin"
    toolbox.mkdir(parents=True)
    program(toolbox, "cmake", "cmake version 4.4.5")
    program(toolbox, "ninja", "1.13.2")
    found = preflight(get_backend("cpu"), tmp_path, {"PATH": str(bin_dir)})
    assert (found.install, found.cmake) == ((), toolbox / "cmake")
    toolchain.provide(get_backend("cpu"), found, tmp_path)  # nothing to install: the programs stay
    assert sorted(p.name for p in toolbox.iterdir()) == ["cmake", "ninja"]


def test_a_second_arm_uses_what_the_first_installed(bin_dir: Path, tmp_path: Path) -> None:
    compilers(bin_dir)
    second = preflight(get_backend("cpu"), tmp_path, {"PATH": str(bin_dir)})
    assert second.install == ("cmake", "ninja")
    toolbox = toolchain.toolbox(tmp_path) / "bin"
    toolbox.mkdir(parents=True)
    program(toolbox, "cmake", "cmake version 4.4.5")
    program(toolbox, "ninja", "1.13.2")
    toolchain.provide(get_backend("cpu"), second, tmp_path)
    assert sorted(p.name for p in toolbox.iterdir()) == ["cmake", "ninja"]


def test_make_alone_is_not_enough(bin_dir: Path, tmp_path: Path) -> None:
    compilers(bin_dir)
    program(bin_dir, "cmake", "cmake version 3.25.1")
    program(bin_dir, "make", "GNU Make 4.3")
    assert preflight(get_backend("cpu"), tmp_path, {"PATH": str(bin_dir)}).install == ("ninja",)


def test_an_old_or_broken_program_does_not_hide_a_good_one(bin_dir: Path, tmp_path: Path) -> None:
    compilers(bin_dir)
    later = tmp_path / "later"
    later.mkdir()
    program(bin_dir, "cmake", "cmake version 3.18.4")
    program(bin_dir, "ninja", "").write_text("#!/nonexistent/python\n", encoding="utf-8")
    good = program(later, "cmake", "cmake version 3.25.1"), program(later, "ninja", "1.11.1")
    found = preflight(get_backend("cpu"), tmp_path, {"PATH": f"{bin_dir}{os.pathsep}{later}"})
    assert (found.cmake, found.ninja, found.install) == (*good, ())


def test_a_launcher_and_its_compiler_are_one_command(bin_dir: Path, tmp_path: Path) -> None:
    compilers(bin_dir)
    launcher = bin_dir / "launcher"
    launcher.write_text('#!/bin/sh\nexec "$@"\n', encoding="utf-8")
    launcher.chmod(0o755)
    found = preflight(get_backend("cpu"), tmp_path, {"PATH": str(bin_dir), "CC": f"launcher {bin_dir / 'cc'}"})
    assert found.cc == (str(launcher), str(bin_dir / "cc"))
    assert found.compiler == f"cc 1.2.3 ({bin_dir / 'cc'}); c++ 1.2.3; cc 1.2.3"


@pytest.mark.parametrize("value", [" ", 'cc "'])
def test_a_cc_that_is_no_command_is_refused(bin_dir: Path, tmp_path: Path, value: str) -> None:
    compilers(bin_dir)
    with pytest.raises(MachineError, match="is not a command") as e:
        preflight(get_backend("cpu"), tmp_path, {"PATH": str(bin_dir), "CC": value})
    assert (e.value.hint or "").startswith("unset CC")
    assert "gcc" not in (e.value.hint or "")


@pytest.mark.parametrize(("body", "said"), [("true", "printed nothing"), ("exit 3", "exit code 3")])
def test_a_compiler_that_does_not_answer_is_refused(bin_dir: Path, tmp_path: Path, body: str, said: str) -> None:
    compilers(bin_dir)
    program(bin_dir, "cc", "").write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    with pytest.raises(MachineError, match=said) as e:
        preflight(get_backend("cpu"), tmp_path, {"PATH": str(bin_dir)})
    assert e.value.where == str(bin_dir / "cc")
    assert "CC=gcc" in (e.value.hint or "")


def test_processor_flags_are_read_and_compared(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu sse2 avx avx2\n\nprocessor\t: 1\n", encoding="utf-8")
    host = cpuflags.host_flags(cpuinfo)
    assert host == {"fpu", "sse2", "avx", "avx2"}
    assert cpuflags.missing_flags(("avx2", "avx512f"), host) == ("avx512f",)
    assert cpuflags.missing_flags(("avx512f",), None) == ()
    assert cpuflags.host_flags(tmp_path / "none") is None


def test_only_options_for_instruction_sets_are_taken_from_a_command() -> None:
    command = ["cc", "-O3", "-march=native", "-mtune=native", "-mavx2", "-Wmissing", "-c", "x.c"]
    assert cpuflags.machine_options(command) == ("-march=native", "-mavx2")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="options of x86")
def test_the_compiler_says_which_flags_an_option_means() -> None:
    plain = cpuflags.compiled_for(["cc"], ["-march=x86-64"])
    assert plain == ()
    # The x86-64 psABI defines level 3 as these, on top of level 2 (popcnt, sse3, sse4.1, sse4.2, ssse3).
    assert set(cpuflags.compiled_for(["cc"], ["-march=x86-64-v3"])) == {
        *("pni", "ssse3", "sse4_1", "sse4_2", "popcnt"),
        *("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"),
    }
