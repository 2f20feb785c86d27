"""Wheels for other machines: repaired, levelled, and refused where they cannot run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from wheel_builder import LIBRARIES, PIN, TAGS, elf, manifest, plan, raw_wheel, series

from toolkit.bench.select import arms_by_name
from toolkit.build import arms, drivers, repair, wheelfile
from toolkit.build.backends import get_backend
from toolkit.build.levels import portable
from toolkit.build.wheelcheck import check_wheel
from toolkit.build.wheelfile import BuildRecord, Manifest, Wheel
from toolkit.errors import BenchError, BuildError, MachineError

BUNDLED = {"libgomp-f9a9ad78.so.1.0.0": elf("libc.so.6", soname="libgomp-f9a9ad78.so.1.0.0")}


def hashes(libraries: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in libraries.items()}


def repaired(folder: Path, bundled: dict[str, bytes], tags: str = "py3-none-manylinux_2_34_x86_64") -> Path:
    """What auditwheel makes of a stripped wheel."""
    folder.mkdir(exist_ok=True)
    clean = wheelfile.strip(raw_wheel(folder), folder / "clean")
    path = folder / f"llama_cpp_python-0.3.36-{tags}.whl"
    shutil.copy(clean, path)
    with zipfile.ZipFile(path, "a") as z:
        for name, data in bundled.items():
            z.writestr(f"llama_cpp_python.libs/{name}", data)
    return path


def portable_manifest(**changes: object) -> Manifest:
    return manifest(
        **{
            "label": "moe1.cpu.v3",
            "version": "0.3.36+moe1.cpu.v3",
            "level": "x86-64-v3",
            "bundled": hashes(BUNDLED),
            **changes,
        }
    )


def test_a_stripped_wheel_has_the_package_alone_and_a_true_record(tmp_path: Path) -> None:
    clean = wheelfile.strip(raw_wheel(tmp_path), tmp_path / "clean")
    assert clean.name == f"llama_cpp_python-0.3.36-{TAGS}.whl"
    with zipfile.ZipFile(clean) as z:
        names = z.namelist()
        record = z.read("llama_cpp_python-0.3.36.dist-info/RECORD").decode().splitlines()
    assert {name.split("/")[0] for name in names} == {"llama_cpp", "llama_cpp_python-0.3.36.dist-info"}
    assert {line.split(",")[0] for line in record} == set(names)


def test_a_repaired_wheel_keeps_what_was_put_into_it(tmp_path: Path) -> None:
    path = wheelfile.pack(repaired(tmp_path / "raw", BUNDLED), tmp_path / "w", portable_manifest())
    assert path.name == "llama_cpp_python-0.3.36+moe1.cpu.v3-py3-none-manylinux_2_34_x86_64.whl"
    assert wheelfile.read_libraries(path, wheelfile.BUNDLE_DIR) == BUNDLED
    report = check_wheel(path)
    assert report.problems == ()
    assert (report.backend, report.level) == ("cpu", "x86-64-v3")


def test_libraries_are_unpacked_as_an_installer_places_them(tmp_path: Path) -> None:
    folder = wheelfile.unpack_libraries(repaired(tmp_path / "raw", BUNDLED), tmp_path / "out")
    assert folder == tmp_path / "out" / "llama_cpp" / "lib"
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == LIBRARIES
    assert {p.name: p.read_bytes() for p in (tmp_path / "out" / "llama_cpp_python.libs").iterdir()} == BUNDLED


def test_a_bundled_library_of_another_build_is_found(tmp_path: Path) -> None:
    path = wheelfile.pack(repaired(tmp_path / "raw", BUNDLED), tmp_path / "w", portable_manifest(bundled={}))
    assert "libgomp-f9a9ad78.so.1.0.0 was not made by this build" in "\n".join(check_wheel(path).problems)


def test_a_driver_inside_a_wheel_is_found(tmp_path: Path) -> None:
    driver = {"libcuda-0123abcd.so.1": elf("libc.so.6")}
    made = portable_manifest(
        backend="cuda", label="moe1.cuda130.v3", version="0.3.36+moe1.cuda130.v3", bundled=hashes(driver)
    )
    path = wheelfile.pack(repaired(tmp_path / "raw", driver), tmp_path / "w", made)
    assert check_wheel(path).problems == (
        "carries libcuda-0123abcd.so.1, which must come with the system's driver or SDK",
    )


def test_a_gpu_wheel_may_need_its_driver_and_its_runtime(tmp_path: Path) -> None:
    libraries = {**LIBRARIES, "libggml-cuda.so": elf("libcuda.so.1", "libcudart.so.13", "libcublas.so.13")}
    made = manifest(backend="cuda", label="moe1.cuda130", version="0.3.36+moe1.cuda130", libraries=hashes(libraries))
    path = wheelfile.pack(raw_wheel(tmp_path, libraries), tmp_path / "w", made)
    report = check_wheel(path)
    assert report.problems == ()
    assert report.needs == ("libcublas.so.13", "libcuda.so.1", "libcudart.so.13", "libgomp.so.1")


def test_a_foreign_wheel_is_explained_by_its_label_and_its_libraries(tmp_path: Path) -> None:
    path = raw_wheel(tmp_path, {**LIBRARIES, "libggml-cuda.so": elf("libcudart.so.13")})
    plain = check_wheel(path)
    assert (plain.backend, plain.pin, plain.level) == ("cuda", None, None)
    other = path.rename(tmp_path / f"llama_cpp_python-0.3.36+cu121-{TAGS}.whl")
    report = check_wheel(other)
    assert (report.label, report.backend) == ("cu121", "cuda")
    assert "labelled cu121, but linked with CUDA 13" in report.problems


def test_a_label_of_a_backend_that_is_not_inside_is_found(tmp_path: Path) -> None:
    path = raw_wheel(tmp_path).rename(tmp_path / f"llama_cpp_python-0.3.36+vulkan-{TAGS}.whl")
    assert "labelled vulkan, but ggml-vulkan is not in it" in check_wheel(path).problems


def test_manifests_of_older_wheels_are_still_read() -> None:
    old = json.loads(json.dumps(manifest().__dict__, default=list))
    for name in ("level", "bundled", "rpc_protocol"):
        del old[name]
    found = Manifest.from_json(old, Path("x"))
    assert (found.level, found.bundled, found.rpc_protocol) == (None, {}, None)
    with pytest.raises(BuildError, match="`bundled` of the manifest"):
        Manifest.from_json({**old, "bundled": []}, Path("x"))


def test_the_options_of_a_level_are_part_of_the_key_and_alike_in_both_arms(tmp_path: Path) -> None:
    native = plan(tmp_path)
    levelled = replace(native, backend=portable(native.backend, "x86-64-v3", "x86_64"), level="x86-64-v3")
    assert levelled.label == "moe1.cpu.v3"
    assert levelled.key != native.key
    base = replace(levelled, arm="baseline", series=None)
    assert base.backend.defines == levelled.backend.defines
    assert base.label == "base.cpu.v3"


# -- repair ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("Linux", ["repair", "--exclude", "liba.so.*", "--exclude", "b.dll", "--wheel-dir", "out", "x.whl"]),
        ("Darwin", ["--exclude", "liba.so.*", "--exclude", "b.dll", "--wheel-dir", "out", "x.whl"]),
        ("Windows", ["repair", "--exclude", "liba.so.*;b.dll", "--wheel-dir", "out", "x.whl"]),
    ],
)
def test_each_system_has_its_repair_command(system: str, expected: list[str]) -> None:
    made = repair.REPAIRERS[system].arguments(("liba.so.*", "b.dll"), Path("x.whl"), Path("out"))
    assert [str(word) for word in made] == expected
    assert repair.with_tools(get_backend("cpu"), system).tools[-1] == repair.REPAIRERS[system].tools[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="a shell script in auditwheel's place")
def test_a_repair_that_makes_nothing_is_an_error(tmp_path: Path) -> None:
    fake = tmp_path / "auditwheel"
    fake.write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
    fake.chmod(0o755)
    programs = {"auditwheel": fake, "patchelf": fake}
    with pytest.raises(BuildError, match="auditwheel made 0 wheels"):
        repair.repair(tmp_path / "x.whl", tmp_path / "out", get_backend("cpu"), programs)


# -- machines that cannot run a wheel ----------------------------------------------------------------------


def wheel_of(path: Path, **changes: object) -> Wheel:
    record = BuildRecord(seconds=1.0, objects=None, ccache_hits=None, host_flags=())
    return Wheel(path=path, sha256="0" * 64, bytes=1, manifest=manifest(cpu_flags=(), **changes), build=record)


def test_an_illegal_instruction_is_a_sentence(tmp_path: Path) -> None:
    if sys.platform == "win32" or shutil.which("cc") is None:
        pytest.skip("needs a C compiler on a POSIX system")
    # An interpreter that meets an instruction the processor does not have.
    (tmp_path / "x.c").write_text("#include <signal.h>\nint main(void) { raise(SIGILL); }\n", encoding="utf-8")
    subprocess.run(["cc", "-o", tmp_path / "python", tmp_path / "x.c"], check=True)
    with pytest.raises(MachineError, match=r"does not have an instruction .* compiled for x86-64-v4") as e:
        arms._probe(tmp_path / "python", tmp_path, wheel_of(tmp_path / "x.whl", level="x86-64-v4"))
    assert "lower level" in (e.value.hint or "")


def test_a_gpu_wheel_without_its_driver_gets_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "_loads", lambda name: False)
    with pytest.raises(MachineError, match=r"no libcuda\.so\.1, without which a cuda\+rpc wheel"):
        arms.arm_environment(wheel_of(tmp_path / "x.whl", backend="cuda+rpc"), tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_an_absent_driver_is_replaced_by_the_stand_in_it_was_linked_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = get_backend("cuda")
    monkeypatch.setattr(drivers, "_loads", lambda name: False)
    with pytest.raises(BuildError, match=r"libcuda\.so\.1 is not here"):
        drivers.driver_environment(backend, {}, tmp_path / "drivers")
    stub = tmp_path / "libcuda.so"
    stub.write_bytes(b"stub")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/lib/x")
    env = drivers.driver_environment(backend, {"CUDA_cuda_driver_LIBRARY": str(stub)}, tmp_path / "drivers")
    assert env == {"LD_LIBRARY_PATH": f"{tmp_path / 'drivers'}{os.pathsep}/lib/x"}
    assert (tmp_path / "drivers" / "libcuda.so.1").read_bytes() == b"stub"
    monkeypatch.setattr(drivers, "_loads", lambda name: True)
    assert drivers.driver_environment(backend, {}, tmp_path / "other") == {}


def test_an_arm_is_never_a_wheel_of_another_backend_or_for_other_machines(tmp_path: Path) -> None:
    own = {"series": series().digest, "pin": PIN.commit}
    for label, changes in {
        "moe1.rpc": {"backend": "rpc"},
        "moe1.cpu.v3": {"level": "x86-64-v3"},
    }.items():
        made = manifest(label=label, version=f"0.3.36+{label}", **own, **changes)
        (tmp_path / label).mkdir()
        packed = wheelfile.pack(raw_wheel(tmp_path / label), tmp_path / "home" / "wheels" / label, made)
        wheelfile.store(packed, made, BuildRecord(seconds=1.0, objects=None, ccache_hits=None, host_flags=()))
    with pytest.raises(BenchError, match="there is no cpu wheel of this series"):
        arms_by_name(["hint"], PIN, series(), tmp_path / "home")
