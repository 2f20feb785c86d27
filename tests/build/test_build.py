"""Real wheels of both arms, made once: minutes with an empty compiler cache, half a minute with a full one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from toolkit.build import cpuflags
from toolkit.build.arms import ArmEnv, arm_environment
from toolkit.build.backends import get_backend
from toolkit.build.buildplan import Plan, plan_build
from toolkit.build.wheel import build_wheel, copy_sources, source_tree
from toolkit.build.wheelcheck import check_wheel
from toolkit.build.wheelfile import Wheel
from toolkit.cli import cli
from toolkit.config import patches_dir
from toolkit.errors import BuildError, FetchError, PatchError
from toolkit.patch.gitrepo import Git
from toolkit.patch.patching import apply
from toolkit.patch.series import load_series
from toolkit.patch.upstream import arm_tree, fetch_sdist, load_pin, tree_dir

pytestmark = pytest.mark.build


@dataclass(frozen=True, kw_only=True)
class Built:
    home: Path
    plans: dict[str, Plan]
    wheels: dict[str, Wheel]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Fetched, applied and built; stray files lie in the baseline's tree before its build."""
    home = tmp_path_factory.mktemp("home")
    pin, series = load_pin(), load_series(patches_dir())
    fetch_sdist(pin, home)
    plans = {
        "baseline": plan_build("baseline", get_backend("cpu"), pin, None, home),
        "patched": plan_build("patched", get_backend("cpu"), pin, series, home),
    }
    with pytest.raises(PatchError) as e:  # the patched tree is still a plain copy
        source_tree(plans["patched"])
    assert e.value.hint == "moe-madv patch apply"
    apply(series, arm_tree(pin, "patched", home).llama, pin.commit)
    stray = arm_tree(pin, "baseline", home).root / "llama_cpp" / "lib"
    stray.mkdir()
    (stray / "libggml-old.so").write_bytes(b"of another build")
    wheels = {arm: build_wheel(plan) for arm, plan in plans.items()}
    return Built(home=home, plans=plans, wheels=wheels)


@pytest.fixture(scope="module")
def environments(built: Built) -> dict[str, ArmEnv]:
    return {arm: arm_environment(wheel, built.home) for arm, wheel in built.wheels.items()}


def test_both_wheels_hold_one_file_per_library_and_are_sound(built: Built) -> None:
    host = cpuflags.host_flags()
    for arm, wheel in built.wheels.items():
        with zipfile.ZipFile(wheel.path) as z:
            names = [n for n in z.namelist() if ".so" in n or n.endswith(".dylib")]
            hashes = {Path(n).name: hashlib.sha256(z.read(n)).hexdigest() for n in names}
        stems = sorted(Path(n).name.split(".")[0] for n in names)
        assert stems == ["libggml", "libggml-base", "libggml-cpu", "libllama"]
        assert all(n.startswith("llama_cpp/lib/") for n in names)
        assert hashes == wheel.manifest.libraries
        report = check_wheel(wheel.path, host=host)
        assert report.problems == (), arm
        assert set(report.needs) <= {"libgomp.so.1", "libomp.so.5"}


def test_the_arms_differ_by_the_series_alone(built: Built) -> None:
    base, patched = built.wheels["baseline"].manifest, built.wheels["patched"].manifest
    assert (base.label, patched.label) == ("base.cpu", "moe1.cpu")
    assert (base.series, base.payload) == (None, None)
    assert patched.series == load_series(patches_dir()).digest
    assert patched.payload
    assert base.commit == base.pin == patched.pin != patched.commit
    for field in ("defines", "cmake_args", "compiler", "cmake", "generator", "machine_options", "cpu_flags"):
        assert getattr(base, field) == getattr(patched, field), field
    # No patch touches libggml and no path of a build directory gets into it: the same bytes.
    name = next(n for n in base.libraries if n.startswith("libggml."))
    assert base.libraries[name] == patched.libraries[name]


def test_the_trees_are_as_before(built: Built) -> None:
    for arm in ("baseline", "patched"):
        tree = arm_tree(load_pin(), arm, built.home)
        assert Git(root=tree.llama).changes() == ()
    stray = tree_dir(load_pin(), "baseline", built.home) / "llama_cpp" / "lib"
    assert [p.name for p in stray.iterdir()] == ["libggml-old.so"]
    assert not (tree_dir(load_pin(), "patched", built.home) / "llama_cpp" / "lib").exists()
    assert not any((built.home / "builds" / p.key).exists() for p in built.plans.values())


def test_a_finished_wheel_is_used_again(built: Built) -> None:
    before = {arm: w.path.stat().st_mtime_ns for arm, w in built.wheels.items()}
    again = {arm: build_wheel(plan) for arm, plan in built.plans.items()}
    assert again == built.wheels
    assert {arm: w.path.stat().st_mtime_ns for arm, w in again.items()} == before


def test_the_command_names_the_environment_it_verified(
    built: Built, environments: dict[str, ArmEnv], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_MADV_HOME", str(built.home))
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    rows = json.loads(CliRunner().invoke(cli, ["build", "--arm", "both", "--json"]).stdout)["wheels"]
    assert [(r["arm"], r["reused"], r["python"]) for r in rows] == [
        (arm, True, str(environments[arm].python)) for arm in ("baseline", "patched")
    ]


def test_changes_in_the_tree_do_not_follow_a_build(built: Built) -> None:
    plan = built.plans["baseline"]
    tree = source_tree(plan)
    stray = tree.llama / "ggml" / "src" / "ggml.c"
    text = stray.read_bytes()
    try:
        stray.write_bytes(text + b"\n// mine\n")
        with pytest.raises(FetchError, match=re.escape("ggml/src/ggml.c")):
            source_tree(plan)
        copy_sources(plan, tree)
        copied = plan.work / "src" / "vendor" / "llama.cpp"
        assert (copied / "ggml" / "src" / "ggml.c").read_bytes() == text
        assert Git(root=copied).commit() == tree.commit
        assert not (plan.work / "src" / "llama_cpp" / "lib").exists()
    finally:
        stray.write_bytes(text)
        shutil.rmtree(plan.work, ignore_errors=True)


def test_an_option_cmake_does_not_know_stops_the_build(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CMAKE_ARGS", "-DLLAMA_HIPBLAS=ON")
    plan = plan_build("baseline", get_backend("cpu"), load_pin(), None, built.home)
    assert plan.key != built.plans["baseline"].key
    with pytest.raises(BuildError, match="cmake does not know LLAMA_HIPBLAS"):
        build_wheel(plan)
    assert not plan.wheels.exists()
    assert "[2/" not in plan.log.read_text(encoding="utf-8")


def test_the_environments_load_their_own_libraries_wherever_they_are_started(
    built: Built, environments: dict[str, ArmEnv], tmp_path: Path
) -> None:
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text("raise SystemExit('the wrong one')\n", encoding="utf-8")
    question = (
        "import importlib.metadata as m, llama_cpp, json; "
        "print(json.dumps([m.version('llama_cpp_python'), llama_cpp.__file__, "
        "llama_cpp.llama_print_system_info().decode()]))"
    )
    for env in environments.values():
        answer = subprocess.run(
            [env.python, "-I", "-c", question], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        version, module, info = json.loads(answer.stdout)
        assert version == f"0.3.36+{env.label}"
        assert Path(module).is_relative_to(env.python.parents[1])
        assert ("AVX2 = 1" in info) == ("avx2" in env.manifest.cpu_flags)
    assert environments["baseline"].python != environments["patched"].python


def test_only_the_patched_arm_exports_the_payload(environments: dict[str, ArmEnv]) -> None:
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    for arm, env in environments.items():
        (library,) = env.python.parents[1].rglob("libggml-base.so")
        symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout
        assert ("ggml_moe_prefetch_version" in symbols) == (arm == "patched")


def test_a_damaged_environment_is_made_again(built: Built, environments: dict[str, ArmEnv]) -> None:
    env = environments["baseline"]
    (library,) = env.python.parents[1].rglob("libggml.so")
    library.write_bytes(library.read_bytes()[:-1])
    again = arm_environment(built.wheels["baseline"], built.home)
    assert again == env
    name_hash = hashlib.sha256(library.read_bytes()).hexdigest()
    assert name_hash == env.manifest.libraries["libggml.so"]


def test_glibc_is_what_the_linker_recorded(built: Built) -> None:
    if shutil.which("objdump") is None or os.uname().sysname != "Linux":
        pytest.skip("no objdump")
    wheel = built.wheels["baseline"]
    versions = set()
    with zipfile.ZipFile(wheel.path) as z:
        for name in (n for n in z.namelist() if n.endswith(".so")):
            path = Path(z.extract(name, built.home / "unpacked"))
            text = subprocess.run(["objdump", "-T", path], capture_output=True, text=True, check=True).stdout
            versions |= {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_(\d+\.\d+)", text)}
    assert check_wheel(wheel.path).glibc == ".".join(map(str, max(versions)))


def test_a_wheel_without_a_library_names_it(built: Built, tmp_path: Path) -> None:
    wheel = built.wheels["patched"]
    with zipfile.ZipFile(wheel.path) as z:
        entries = {n: z.read(n) for n in z.namelist() if not n.endswith("libggml-base.so")}
    broken = tmp_path / wheel.path.name
    with zipfile.ZipFile(broken, "w") as z:
        for name, data in entries.items():
            z.writestr(name, data)
    report = check_wheel(broken)
    assert not report.ok
    assert any("libggml-base.so is missing from the wheel" in p for p in report.problems)


def test_a_wheel_that_lies_about_its_payload_gets_no_environment(built: Built) -> None:
    wheel = built.wheels["baseline"]
    lying = replace(wheel, sha256="0" * 64, manifest=replace(wheel.manifest, payload="9"))
    with pytest.raises(BuildError, match="payload None is loaded, not 9"):
        arm_environment(lying, built.home)
    assert not list((built.home / "arms").glob("*-000000000000"))
