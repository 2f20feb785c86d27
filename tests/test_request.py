"""What is refused before anything is measured, each with its reason, place and next command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from gguf_builder import moe

from toolkit.cli import cli
from toolkit.errors import BenchError, ModelError, ToolkitError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    moe().write(path)
    return path


def _run(*args: Any) -> Result:
    return CliRunner().invoke(cli, ["bench", "run", *map(str, args)])


def _error(result: Result) -> ToolkitError:
    assert isinstance(result.exception, ToolkitError), result.output
    return result.exception


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    error = _error(_run(tmp_path / "gone.gguf"))
    assert isinstance(error, ModelError)
    assert "gone.gguf" in str(error)


def test_a_truncated_model_is_refused_before_anything_runs(model: Path) -> None:
    os.truncate(model, model.stat().st_size - 1)
    assert isinstance(_error(_run(model, "--dry-run")), ModelError)


def test_without_wheels_the_build_command_is_the_hint(model: Path) -> None:
    error = _error(_run(model, "--arms", "stock,hint", "-t", "1"))
    assert isinstance(error, BenchError)
    assert error.hint == "moe-madv build --backend cpu --arm both"


def test_an_unknown_arm_lists_the_known_ones(model: Path) -> None:
    error = _error(_run(model, "--arms", "stock,fast"))
    assert "fast" in error.what
    assert "stock, off, madv, hint" in error.what


def test_arms_with_the_same_name_are_refused(model: Path) -> None:
    assert "different names" in _error(_run(model, "--arms", "stock,stock")).what


def test_a_budget_below_the_always_used_weights_names_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "wide.gguf"
    moe(width=4096, ff=64).write(path)
    error = _error(_run(path, "--budget", "1MiB"))
    assert "1 MiB" in error.what
    assert error.hint is not None
    assert error.hint.startswith("use --budget")


@pytest.mark.parametrize("args", [("--budget", "1GiB", "--oversubscribe", "2"), ("-p", "0", "-n", "0")])
def test_contradictory_options_are_usage_errors(model: Path, args: tuple[str, ...]) -> None:
    assert _run(model, *args).exit_code == 2


def test_dry_run_shows_the_order_and_leaves_no_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = _run(model, "--arms", "stock,hint", "--blocks", "2", "--dry-run")
    assert result.exit_code == 0
    shown = [line for line in result.stderr.splitlines() if line.startswith("block")]
    assert shown == ["block 0: stock", "block 0: hint", "block 1: hint", "block 1: stock"]
    assert not (tmp_path / "results").exists()
