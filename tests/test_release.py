"""The release script and the workflow that runs it: as far as they can be shown without a release."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from toolkit.build.backends import get_backend
from toolkit.build.levels import LEVELS

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "release"
WORKFLOW = ROOT / ".github" / "workflows" / "wheels.yml"

pytestmark = pytest.mark.skipif(sys.platform == "win32" or shutil.which("bash") is None, reason="a bash script")


def release(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([root / "scripts" / "release", *words], capture_output=True, text=True, check=False)


def steps(stderr: str) -> list[str]:
    return [line.removeprefix("+ ") for line in stderr.splitlines() if line.startswith("+ ")]


def test_a_dry_run_prints_each_step_and_takes_none(tmp_path: Path) -> None:
    out = tmp_path / "dist"
    done = release(ROOT, "--dry-run", "--pin", "0.3.99", "--out", str(out), "cpu:x86-64-v2", "cuda+rpc:x86-64-v3:90")
    assert done.returncode == 0
    assert steps(done.stderr) == [
        "make_venv ''",
        ".venv/bin/moe-madv port 0.3.99 --write",
        "set_binding 0.3.99",
        ".venv/bin/moe-madv fetch",
        ".venv/bin/moe-madv patch apply --reset",
        ".venv/bin/moe-madv build --backend cpu --portable x86-64-v2 --arm both",
        ".venv/bin/moe-madv build --backend cuda+rpc --portable x86-64-v3 --arm both --gpu-arch 90",
        f".venv/bin/moe-madv wheels index {out} --portable",
        f"verify_checksums {out}",
    ]
    assert not out.exists()
    assert "0.3.99" not in (ROOT / "patches" / "upstream.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("words", [[], ["cpu"], ["--pin"], ["--what", "cpu:x86-64"], ["a:b:c:d"]])
def test_a_call_that_makes_no_sense_shows_how_it_is_meant(words: list[str]) -> None:
    done = release(ROOT, *words)
    assert done.returncode == 2
    assert "scripts/release [--dry-run]" in done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the scripts and the pin, with a `moe-madv` that writes down its calls and makes an index."""
    root = tmp_path / "checkout"
    (root / "patches").mkdir(parents=True)
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copy(ROOT / "patches" / "upstream.toml", root / "patches")
    (root / "pyproject.toml").write_text("", encoding="utf-8")
    (root / "toolkit").mkdir()
    (root / "toolkit" / "__init__.py").touch()
    bin_dir = root / ".venv" / "bin"
    bin_dir.mkdir(parents=True)
    (bin_dir / "python").symlink_to(sys.executable)
    summed = subprocess.run(["cksum"], input=b"", capture_output=True, check=True)
    (root / ".venv" / ".installed").write_bytes(summed.stdout)
    fake = bin_dir / "moe-madv"
    fake.write_text(
        f"""#!/bin/sh
echo "$*" >>calls
[ "$1 $2" = "wheels index" ] || exit 0
mkdir -p "$3/cpu"
printf wheel >"$3/cpu/x.whl"
echo "${{DIGEST:-{hashlib.sha256(b"wheel").hexdigest()}}}  cpu/x.whl" >"$3/SHA256SUMS"
""",
        encoding="utf-8",
    )
    fake.chmod(0o755)
    return root


def test_a_release_moves_the_pin_builds_and_verifies(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = release(checkout, "--pin", "0.3.99", "cpu:x86-64-v3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "cpu/x.whl\n"
    pin = (checkout / "patches" / "upstream.toml").read_text(encoding="utf-8")
    before = (ROOT / "patches" / "upstream.toml").read_text(encoding="utf-8")
    assert pin == re.sub(r'(?m)^binding = "[^"]*"', 'binding = "0.3.99"', before)
    assert (checkout / "calls").read_text(encoding="utf-8").splitlines() == [
        "port 0.3.99 --write",
        "fetch",
        "patch apply --reset",
        "build --backend cpu --portable x86-64-v3 --arm both",
        "wheels index dist --portable",
    ]
    monkeypatch.setenv("DIGEST", "0" * 64)
    done = release(checkout, "cpu:x86-64-v3")
    assert done.returncode != 0
    assert "cpu/x.whl does not have the sha256" in done.stderr


def test_a_step_that_fails_ends_the_release(checkout: Path) -> None:
    (checkout / ".venv" / "bin" / "moe-madv").write_text('#!/bin/sh\necho "$*" >>calls\n[ "$1" != build ]\n')
    done = release(checkout, "cpu:x86-64-v3", "rpc:x86-64-v3")
    assert done.returncode != 0
    assert (checkout / "calls").read_text(encoding="utf-8").splitlines()[-1].startswith("build --backend cpu")


def shellcheck(path: Path, *options: str) -> None:
    program = shutil.which("shellcheck") or str(Path(sys.executable).with_name("shellcheck"))
    if not Path(program).exists():
        pytest.skip("no shellcheck")
    done = subprocess.run([program, *options, path], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_the_script_passes_shellcheck() -> None:
    shellcheck(SCRIPT, "--external-sources")


# -- the workflow ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    loaded = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def _steps(workflow: dict[Any, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, job in workflow["jobs"].items():
        for step in job["steps"]:
            yield name, step


def test_the_workflow_is_made_of_jobs_and_steps_that_exist(workflow: dict[Any, Any]) -> None:
    # `on` is a truth value to YAML 1.1
    assert set(workflow) == {"name", True, "permissions", "concurrency", "jobs"}
    jobs = workflow["jobs"]
    for job in jobs.values():
        assert {"runs-on", "steps"} <= set(job)
        needs = job.get("needs", [])
        assert {needs} if isinstance(needs, str) else set(needs) <= set(jobs)
    for _, step in _steps(workflow):
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])
        for script in re.findall(r"\bscripts/[\w-]+", step.get("run", "")):
            assert (ROOT / script).is_file()


def test_no_job_may_write_more_than_it_needs(workflow: dict[Any, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    allowed = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
    assert allowed == {"publish": {"pages": "write", "id-token": "write"}}


def test_every_build_of_the_matrix_is_one_the_release_script_takes(workflow: dict[Any, Any]) -> None:
    rows = workflow["jobs"]["build"]["strategy"]["matrix"]["include"]
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        name, level, *gpus = row["build"].split(":")
        backend = get_backend(name)
        assert ("Darwin" if row["os"].startswith("macos") else "Linux") in backend.systems
        assert LEVELS[level].machine == ("aarch64" if "arm" in row["os"] or "macos" in row["os"] else "x86_64")
        assert bool(gpus) == (backend.architectures is not None)
        if backend.architectures:
            assert all(re.fullmatch(backend.architectures.syntax, gpu) for gpu in gpus[0].split(","))
        assert release(ROOT, "--dry-run", row["build"]).returncode == 0
    assert {row["build"].split(":")[0] for row in rows} >= {"cpu", "rpc", "cuda", "vulkan", "metal"}


def test_commands_of_the_workflow_pass_shellcheck(workflow: dict[Any, Any], tmp_path: Path) -> None:
    rows = workflow["jobs"]["build"]["strategy"]["matrix"]["include"]
    commands = [step["run"] for _, step in _steps(workflow) if "run" in step]
    commands += [row["setup"] for row in rows if "setup" in row]
    for number, command in enumerate(commands):
        script = tmp_path / f"{number}.sh"
        script.write_text("#!/bin/bash\n" + re.sub(r"\$\{\{.*?\}\}", "value", command) + "\n", encoding="utf-8")
        shellcheck(script)


def test_actionlint_has_nothing_to_say() -> None:
    if shutil.which("actionlint") is None:
        pytest.skip("no actionlint")
    done = subprocess.run(["actionlint", WORKFLOW], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
