"""What the documents say must be what the files say."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from toolkit.cli import cli
from toolkit.evidence.results_page import reads_page, results_page, with_block

ROOT = Path(__file__).parent.parent


def _tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in listed.stdout.splitlines()]


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    assert with_block(ROOT / "README.md") == (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_results_page_is_that_of_the_stored_files(tmp_path: Path) -> None:
    """Of the files in git: a run of the reader's own adds nothing to the page by itself."""
    for path in _tracked("results/*/*"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    assert results_page(tmp_path / "results") == (ROOT / "results" / "README.md").read_text(encoding="utf-8")


def test_the_pages_of_the_ways_to_read_are_those_of_the_stored_files() -> None:
    folders = sorted((ROOT / "results").glob("*/reads"))
    assert folders
    for folder in folders:
        assert reads_page(folder) == (folder / "README.md").read_text(encoding="utf-8")


def _commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    with click.Context(group) as ctx:
        found: list[tuple[str, ...]] = []
        for name in group.list_commands(ctx):
            command = group.get_command(ctx, name)
            found.append((*path, name))
            if isinstance(command, click.Group):
                found += _commands(command, (*path, name))
    return found


@pytest.mark.parametrize("path", _commands(cli), ids=" ".join)
def test_every_command_has_an_example_that_names_it(path: tuple[str, ...]) -> None:
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    help_text = command.help or ""
    assert "Example:" in help_text
    assert f"moe-madv {' '.join(path)}" in help_text


def test_commands_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    known = {" ".join(path) for path in _commands(cli)}
    named = set(
        re.findall(r"`moe-madv ((?:[a-z]+)(?: (?:list|apply|check|status|info|synth|run|compare|plot))?)", text)
    )
    assert named
    assert named <= known


def test_no_machine_path_or_registry_host_is_in_the_tree() -> None:
    pattern = re.compile(r"/(?:work|farm|root|home/[a-z]+)/|https?://[a-z.]*(?:pypi|npmjs|debian)[a-z]*\.")
    found = []
    for path in _tracked():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}:{n}" for n, line in enumerate(lines, 1) if pattern.search(line)]
    # this file holds the pattern itself
    assert [f for f in found if not f.startswith("tests/test_readme.py")] == []
