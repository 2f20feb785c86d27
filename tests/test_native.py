"""The payload's own C++ tests: plain, and under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from toolkit.patch.upstream import load_pin, pristine
from toolkit.process import run

pytestmark = pytest.mark.native

NATIVE = Path(__file__).parent / "native"


@pytest.mark.parametrize("sanitizers", ["", "address,undefined", "thread"])
def test_payload_unit_tests(sanitizers: str, tmp_path: Path, real_home: Path) -> None:
    missing = [tool for tool in ("cmake", "ctest", "c++") if shutil.which(tool) is None]
    assert not missing, f"install {', '.join(missing)} to run the native tests"
    tree = pristine(load_pin(), real_home).llama
    build = tmp_path / "build"
    run(["cmake", "-S", NATIVE, "-B", build, f"-DLLAMA_TREE={tree}", f"-DSANITIZE={sanitizers}"])
    run(["cmake", "--build", build, "--parallel"])
    report = run(["ctest", "--test-dir", build, "--output-on-failure"]).stdout
    # ctest calls a run without tests a success
    counted = re.search(r"(\d+)% tests passed, (\d+) tests failed out of (\d+)", report)
    assert counted is not None, report
    assert counted.groups() == ("100", "0", "10")


def test_payload_compiles_for_windows(tmp_path: Path, real_home: Path) -> None:
    """There the hints are counted no-ops; the code must still be warning-free C++17."""
    compiler = shutil.which("x86_64-w64-mingw32-g++-posix")
    if compiler is None:
        pytest.skip("no MinGW-w64 compiler: apt-get install g++-mingw-w64-x86-64-posix")
    ggml = pristine(load_pin(), real_home).llama / "ggml"
    payload = NATIVE.parents[1] / "patches" / "payload"
    headers = ["-isystem", ggml / "include", "-isystem", ggml / "src", "-I", payload]
    for source in sorted(payload.glob("*.cpp")):
        target = tmp_path / f"{source.stem}.obj"
        warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wmissing-declarations", "-Werror"]
        run([compiler, "-std=c++17", *warnings, *headers, "-c", source, "-o", target])
        assert target.stat().st_size > 0
