"""Backends as data, and the report of what a machine lacks to build them."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import stat
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from toolkit.build import cpuflags, toolchain
from toolkit.build.backends import BACKENDS, backend_of_label, get_backend
from toolkit.build.gpuarch import for_architectures
from toolkit.build.levels import LEVELS, portable
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


@pytest.mark.parametrize("name", [*BACKENDS, "cuda+rpc", "vulkan+rpc", "hip+rpc", "metal+rpc"])
def test_labels_and_options_are_legal(name: str) -> None:
    backend = get_backend(name)
    for level in ("", *(f".{level.label}" for level in LEVELS.values())):
        label = backend.label.format(nvcc="130", hipcc="64") + level
        # PEP 440 local version label, and within the alphabet and the 16 characters of PEP 825.
        assert re.fullmatch(r"[a-z0-9]+(\.[a-z0-9]+)*", label)
        assert len(label) <= 16
        assert str(Version(f"0.3.36+moe1.{label}").local) == f"moe1.{label}"
    assert all(re.fullmatch(r"[A-Z0-9_]+", define) for define in backend.defines)
    assert all(value for value in backend.defines.values())
    assert all(tool.executables or tool.files for tool in backend.tools)
    assert all(tool.apt or tool.package or tool.elsewhere for tool in backend.tools)


def test_the_cpu_backend_uses_this_machine_and_one_file_per_library() -> None:
    defines = BACKENDS["cpu"].defines
    assert defines["GGML_NATIVE"] == "ON"
    assert defines["LLAVA_BUILD"] == "OFF"
    assert defines["CMAKE_PLATFORM_NO_VERSIONED_SONAME"] == "ON"


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(BuildError, match="'opencl'") as e:
        get_backend("rpc+opencl")
    assert "cpu, cuda, vulkan, metal, hip, rpc" in (e.value.hint or "")


def test_backends_join_in_one_order_and_cpu_is_in_each() -> None:
    both = get_backend("rpc+cuda")
    assert both == get_backend("cuda+rpc") == get_backend("cpu+cuda+rpc")
    assert (both.name, both.label) == ("cuda+rpc", "cuda{nvcc}.rpc")
    assert both.libraries == ("llama", "ggml", "ggml-base", "ggml-cpu", "ggml-cuda", "ggml-rpc")
    assert both.registers == ("CPU", "CUDA", "RPC")
    assert both.defines == {**BACKENDS["cpu"].defines, **BACKENDS["cuda"].defines, **BACKENDS["rpc"].defines}
    assert get_backend("cpu+rpc") == get_backend("rpc")
    assert get_backend("rpc").name == "rpc"
    assert get_backend("cpu") == BACKENDS["cpu"]


@pytest.mark.parametrize(("name", "reason"), [("cuda+hip", "one wheel"), ("cuda+metal", "no system has both")])
def test_backends_that_exclude_each_other_are_refused(name: str, reason: str) -> None:
    with pytest.raises(BuildError, match=reason):
        get_backend(name)


@pytest.mark.parametrize(
    ("name", "system", "possible"),
    [
        ("cpu", "Linux", True),
        ("rpc", "Linux", True),
        ("metal", "Darwin", True),
        ("metal+rpc", "Darwin", True),
        ("metal", "Linux", False),
        ("cpu", "Darwin", False),
        ("rpc", "Darwin", False),
        ("cuda", "Darwin", False),
    ],
)
def test_a_backend_is_refused_where_no_build_can_give_it(name: str, system: str, possible: bool) -> None:
    if possible:
        toolchain.require_system(get_backend(name), system)
        return
    with pytest.raises(MachineError, match="cannot be built on") as e:
        toolchain.require_system(get_backend(name), system)
    assert ("macOS" if name == "metal" else "metal") in (e.value.hint or "")


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("moe1.cpu", "cpu"),
        ("moe1.cuda130", "cuda"),
        ("base.cuda130.rpc.v3", "cuda+rpc"),
        ("cu124", "cuda"),
        ("rocm72", "hip"),
        ("basic", None),
        (None, None),
    ],
)
def test_a_label_tells_its_backend(label: str | None, expected: str | None) -> None:
    found = backend_of_label(label)
    assert (found.name if found else None) == expected


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


def nvcc(folder: Path, release: str, known: str) -> Path:
    """An nvcc that knows these architectures, worded as that of CUDA 13.0."""
    path = folder / "nvcc"
    path.write_text(
        f"""#!/bin/sh
case "$1" in
--list-gpu-arch) for arch in {known}; do echo "compute_$arch"; done ;;
*) echo "Copyright (c) 2005-2025 NVIDIA Corporation"
   echo "Cuda compilation tools, release {release}, V{release}.88" ;;
esac
""",
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


def test_cuda_without_its_compiler_says_what_to_install(bin_dir: Path, tmp_path: Path) -> None:
    compilers(bin_dir)
    with pytest.raises(MachineError, match=r"cannot build the cuda backend, missing: .*nvcc") as e:
        preflight(get_backend("cuda"), tmp_path, {"PATH": str(bin_dir)})
    assert "install the whole CUDA toolkit" in (e.value.hint or "")


def test_a_toolkit_with_parts_missing_names_them(
    bin_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "_PREFIXES", ())
    compilers(bin_dir)
    nvcc(bin_dir, "13.0", "90")
    with pytest.raises(MachineError, match=r"missing: .*cuBLAS, CUDA driver stub"):
        preflight(get_backend("cuda"), tmp_path, {"PATH": str(bin_dir)})
    cuda_parts(tmp_path / "elsewhere")
    environ = {"PATH": str(bin_dir), "CMAKE_ARGS": f"-DX=1 -DCUDAToolkit_ROOT={tmp_path / 'elsewhere'}"}
    assert "nvcc" in preflight(get_backend("cuda"), tmp_path, environ).programs
    cuda_parts(tmp_path)
    assert "nvcc" in preflight(get_backend("cuda"), tmp_path, {"PATH": str(bin_dir)}).programs


def cuda_parts(prefix: Path) -> None:
    """The libraries beside a bin folder, as in NVIDIA's toolkit."""
    for file in ("lib64/libcublas.so", "lib64/stubs/libcuda.so"):
        (prefix / file).parent.mkdir(parents=True, exist_ok=True)
        (prefix / file).touch()


def test_an_old_nvcc_counts_as_missing(bin_dir: Path, tmp_path: Path) -> None:
    compilers(bin_dir)
    old = nvcc(bin_dir, "11.2", "80")
    with pytest.raises(MachineError, match=re.escape(f"nvcc 11.7 or newer ({old} is 11.2)")):
        preflight(get_backend("cuda"), tmp_path, {"PATH": str(bin_dir)})


def test_the_version_of_nvcc_is_in_the_label_and_in_the_key(bin_dir: Path, tmp_path: Path) -> None:
    compilers(bin_dir)
    nvcc(bin_dir, "13.0", "90")
    cuda_parts(tmp_path)
    backend = get_backend("cuda+rpc")
    found = preflight(backend, tmp_path, {"PATH": str(bin_dir)})
    assert toolchain.label(backend, found) == "cuda130.rpc"
    assert found.compiler.endswith("; nvcc 13.0")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(["90"], "90"), (["80;90"], "80;90"), (["80", "90", "80"], "80;90"), (["90-real", "100a"], "90-real;100a")],
)
def test_gpu_architectures_become_one_define(bin_dir: Path, asked: list[str], expected: str) -> None:
    programs = {"nvcc": nvcc(bin_dir, "13.0", "80 90 100")}
    assert for_architectures(get_backend("cuda"), asked, programs).defines["CMAKE_CUDA_ARCHITECTURES"] == expected


def test_an_architecture_the_compiler_does_not_know_is_refused_before_the_build(bin_dir: Path) -> None:
    programs = {"nvcc": nvcc(bin_dir, "11.7", "70 80 86")}
    with pytest.raises(MachineError, match=r"nvcc cannot make code for 120 \(it knows 70, 80, 86\)"):
        for_architectures(get_backend("cuda"), ["120"], programs)
    with pytest.raises(BuildError, match="'native' is not a GPU architecture"):
        for_architectures(get_backend("cuda"), ["native"], programs)


def test_without_a_gpu_the_architecture_has_to_be_named(bin_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {"nvcc": nvcc(bin_dir, "13.0", "90")}
    monkeypatch.setenv("PATH", f"{bin_dir}{os.pathsep}/bin")
    with pytest.raises(MachineError, match="no GPU of this machine") as e:
        for_architectures(get_backend("cuda"), [], programs)
    assert e.value.hint == "name the GPUs it shall run on: moe-madv build --backend cuda --gpu-arch 90"
    # what nvidia-smi prints without a driver
    program(bin_dir, "nvidia-smi", "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.")
    with pytest.raises(MachineError, match="no GPU of this machine"):
        for_architectures(get_backend("cuda"), [], programs)
    program(bin_dir, "nvidia-smi", "9.0\n9.0")
    assert for_architectures(get_backend("cuda"), [], programs).defines["CMAKE_CUDA_ARCHITECTURES"] == "90"


def test_backends_without_gpu_code_take_no_architecture() -> None:
    assert for_architectures(get_backend("rpc"), [], {}) == get_backend("rpc")
    with pytest.raises(BuildError, match="the cpu backend has no GPU architectures"):
        for_architectures(get_backend("cpu"), ["90"], {})


def test_hip_takes_its_own_names() -> None:
    assert for_architectures(get_backend("hip"), ["gfx1100", "gfx90a:xnack-"], {}).defines["GPU_TARGETS"] == (
        "gfx1100;gfx90a:xnack-"
    )


def test_all_that_vulkan_lacks_is_in_one_report(bin_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_PREFIXES", ())
    compilers(bin_dir)
    sdk = tmp_path / "sdk"
    environ = {"PATH": str(bin_dir), "VULKAN_SDK": str(sdk)}
    with pytest.raises(MachineError) as e:
        preflight(get_backend("vulkan"), tmp_path, environ)
    assert "glslc, Vulkan headers, Vulkan loader, SPIR-V headers" in e.value.what
    assert "apt-get install -y cmake ninja-build glslc libvulkan-dev spirv-headers" in (e.value.hint or "")
    program(bin_dir, "glslc", "shaderc v2023.2")
    for file in (
        "include/vulkan/vulkan_core.h",
        "lib/libvulkan.so",
        "share/cmake/SPIRV-Headers/SPIRV-HeadersConfig.cmake",
    ):
        (sdk / file).parent.mkdir(parents=True, exist_ok=True)
        (sdk / file).touch()
    # the headers of Debian 12 are 1.3.239; llama.cpp needs a structure of 1.3.272
    with pytest.raises(MachineError, match="newer Vulkan headers") as e:
        preflight(get_backend("vulkan"), tmp_path, environ)
    assert "the Vulkan SDK 1.3.272 or newer, with VULKAN_SDK set" in (e.value.hint or "")
    assert "libvulkan-dev" not in (e.value.hint or "").partition("install the Vulkan SDK")[0]  # that is the old one
    header = sdk / "include/vulkan/vulkan_core.h"
    header.write_text("typedef struct VkLayerSettingEXT {\n", encoding="utf-8")
    assert preflight(get_backend("vulkan"), tmp_path, environ).install == ("cmake", "ninja")


def test_a_portable_wheel_names_its_instructions_and_says_so_in_the_label() -> None:
    backend = portable(get_backend("cpu"), "x86-64-v3", "x86_64")
    assert backend.label == "cpu.v3"
    on = {name for name, value in backend.defines.items() if value == "ON" and name.startswith("GGML_")}
    assert on == {"GGML_SSE42", "GGML_AVX", "GGML_AVX2", "GGML_BMI2", "GGML_FMA", "GGML_F16C"}
    assert backend.defines["GGML_NATIVE"] == backend.defines["GGML_AVX512"] == "OFF"
    assert portable(get_backend("cpu"), "armv8-a", "arm64").defines["GGML_CPU_ARM_ARCH"] == "armv8-a"
    # each level has what the one below has
    order = [LEVELS[name].defines for name in ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4")]
    sets = [{name for name, value in defines.items() if value == "ON"} for defines in order]
    assert sets[0] == set()
    assert all(lower < upper for lower, upper in itertools.pairwise(sets))


def test_a_level_of_another_processor_is_refused_with_those_of_this_one() -> None:
    with pytest.raises(BuildError, match="no portable level 'x86-64-v3' for aarch64") as e:
        portable(get_backend("cpu"), "x86-64-v3", "aarch64")
    assert e.value.hint == "use one of armv8-a, armv8.2-a+dotprod+fp16"


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
