"""The command line as a whole: help without tools, and every failure as one message."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from toolkit import cli as command_line
from toolkit import config
from toolkit.build import arms, wheel, wheelfile
from toolkit.build.wheelfile import BuildRecord, Manifest, Wheel
from toolkit.errors import MachineError, ToolkitError


def moe_madv(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolkit", *args]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, encoding="utf-8", check=False)


def test_help_needs_no_git(tmp_path: Path) -> None:
    done = moe_madv("--help", PATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "fetch" in done.stdout
    assert moe_madv("fetch", "--dry-run", PATH=str(tmp_path)).returncode == 0
    done = moe_madv("fetch", "--git", "https://example.org/x.git", PATH=str(tmp_path))
    assert done.returncode == MachineError.exit_code
    assert "git is not installed" in done.stderr


@pytest.mark.parametrize("place", ["/etc/hostname", "/proc/x", "~no-such-user-here/x"])
def test_a_home_that_cannot_be_is_one_error(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_MADV_HOME", place)
    with pytest.raises(MachineError) as e:
        config.home()
    assert e.value.where == place
    assert "MOE_MADV_HOME" in (e.value.hint or "")


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(**_: object) -> None:
        raise error

    monkeypatch.setattr(command_line.cli, "main", command)


def test_a_failure_of_the_system_names_the_file_and_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(OSError(28, "No space left on device", "/x/y"), monkeypatch)
    with pytest.raises(SystemExit) as e:
        command_line.main()
    assert e.value.code == 15
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["error: No space left on device", "  at: /x/y"]
    assert "MOE_MADV_HOME" in " ".join(lines[2:])


def test_an_interrupt_ends_with_its_own_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(KeyboardInterrupt(), monkeypatch)
    with pytest.raises(SystemExit) as e:
        command_line.main()
    assert e.value.code == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.skipif(not all(map(shutil.which, ("cc", "c++", "git"))), reason="no compilers")
def test_build_verifies_the_environment_of_a_finished_wheel_too(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / "wheels" / "key"
    folder.mkdir(parents=True)
    path = folder / "x.whl"
    path.write_bytes(b"wheel")
    values = dict.fromkeys(Manifest.__dataclass_fields__, "")
    made = wheelfile.store(
        path,
        Manifest(**{**values, "label": "base.cpu", "libraries": {}, "cpu_flags": ()}),  # type: ignore[arg-type]
        BuildRecord(seconds=60.0, objects=None, ccache_hits=None, host_flags=()),
    )
    monkeypatch.setattr(wheel, "finished", lambda plan: made)
    seen: list[tuple[Wheel, Path]] = []

    def environment(wheel: Wheel, home: Path) -> arms.ArmEnv:
        seen.append((wheel, home))
        return arms.ArmEnv(python=tmp_path / "bin" / "python", label="base.cpu", manifest=wheel.manifest)

    monkeypatch.setattr("toolkit.cli.build.arm_environment", environment)
    done = CliRunner().invoke(command_line.cli, ["build", "--arm", "baseline", "--json"])
    (row,) = json.loads(done.stdout)["wheels"]
    assert (row["reused"], row["python"]) == (True, str(tmp_path / "bin" / "python"))
    assert seen == [(made, home)]
    text = CliRunner().invoke(command_line.cli, ["build", "--arm", "baseline"]).stdout
    assert text.splitlines()[-1] == f"  verified: {tmp_path / 'bin' / 'python'}"

    def refuse(wheel: Wheel, home: Path) -> arms.ArmEnv:
        raise ToolkitError("not what its wheel says")

    monkeypatch.setattr("toolkit.cli.build.arm_environment", refuse)
    failed = CliRunner().invoke(command_line.cli, ["build", "--arm", "baseline", "--json"])
    assert isinstance(failed.exception, ToolkitError)
    assert failed.stdout == ""
