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
    assert counted.groups() == ("100", "0", "4")
