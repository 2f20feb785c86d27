"""A patched runtime installed from an index of our own, as a person would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from index_server import Negotiating, serving

from toolkit.build.arms import arm_environment
from toolkit.build.backends import get_backend
from toolkit.build.buildplan import plan_build
from toolkit.build.index import add_wheels
from toolkit.build.venv import create_venv
from toolkit.build.wheel import build_wheel, finished
from toolkit.build.wheelcheck import check_wheel
from toolkit.build.wheelfile import Wheel
from toolkit.config import patches_dir
from toolkit.patch.series import load_series
from toolkit.patch.upstream import load_pin

pytestmark = pytest.mark.build

QUESTION = """
import ctypes, json, llama_cpp, pathlib
base = ctypes.CDLL(str(pathlib.Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
base.ggml_moe_prefetch_version.restype = ctypes.c_char_p
print(json.dumps([llama_cpp.__file__, base.ggml_moe_prefetch_version().decode()]))
"""


@pytest.fixture(scope="module")
def patched(both_wheels: Path) -> Wheel:
    wheel = finished(plan_build("patched", get_backend("cpu"), load_pin(), load_series(patches_dir()), both_wheels))
    assert wheel is not None
    return wheel


@pytest.fixture(scope="module")
def site(both_wheels: Path, patched: Wheel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index with both arms and with everything they depend on, so that no other index is asked."""
    base = finished(plan_build("baseline", get_backend("cpu"), load_pin(), None, both_wheels))
    assert base is not None
    python = arm_environment(patched, both_wheels).python
    deps = tmp_path_factory.mktemp("deps")
    command: list[str | Path] = [
        python,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--only-binary=:all:",
        "--dest",
        deps,
        patched.path,
    ]
    subprocess.run(command, check=True, cwd=deps)
    (deps / patched.path.name).unlink()
    out = tmp_path_factory.mktemp("site")
    add_wheels(out, [base.path, patched.path], [deps])
    return out


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_an_exact_pin_gives_the_patched_runtime(site: Path, patched: Wheel, tmp_path: Path, installer: str) -> None:
    python = create_venv(tmp_path / "fresh")
    commands: dict[str, list[str | Path]] = {
        "pip": [python, "-m", "pip", "install", "--isolated", "--no-cache-dir", "--disable-pip-version-check"],
        "uv": [sys.executable, "-m", "uv", "pip", "install", "--no-config", "--no-cache", "--python", python],
    }
    # no index but ours, whatever the environment says
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))} | {"PIP_CONFIG_FILE": os.devnull}
    with serving(site, Negotiating) as (address, _):
        wanted = f"llama-cpp-python=={patched.manifest.version}"
        command = [*commands[installer], "--index-url", f"{address}/cpu", wanted]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = subprocess.run(
        [python, "-I", "-c", QUESTION], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert str(tmp_path / "fresh") in answer
    assert f'"{patched.manifest.payload}"' in answer


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="a level of x86-64")
def test_a_portable_wheel_carries_what_it_needs_and_promises_no_more(both_wheels: Path) -> None:
    plan = plan_build("baseline", get_backend("cpu"), load_pin(), None, both_wheels, level="x86-64-v3")
    wheel = build_wheel(plan)
    report = check_wheel(wheel.path)
    assert report.problems == ()
    assert report.needs == ()  # the OpenMP runtime is inside
    assert [name.split("-")[0] for name in wheel.manifest.bundled] == ["libgomp"]
    assert "manylinux_2_" in wheel.path.name
    assert not set(wheel.manifest.cpu_flags) & {"avx512f", "avx_vnni", "amx_tile"}
    assert set(wheel.manifest.cpu_flags) >= {"avx2", "fma", "f16c", "bmi2"}
    assert arm_environment(wheel, both_wheels).label == "base.cpu.v3"
