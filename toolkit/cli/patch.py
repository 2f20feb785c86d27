"""`moe-madv patch`: the series on a source tree."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import click

from toolkit.config import home, patches_dir
from toolkit.console import note
from toolkit.errors import PatchError
from toolkit.patch import export as exporting
from toolkit.patch import patching
from toolkit.patch.knobs import load_knobs
from toolkit.patch.patching import State, TreeStatus
from toolkit.patch.ports import saved_ports, series_for
from toolkit.patch.replay import HookStatus
from toolkit.patch.series import Series, load_series
from toolkit.patch.upstream import LLAMA, arm_tree, load_pin, locate, pristine, tree_dir

_tree = click.option(
    "--tree",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A llama.cpp tree, or a binding tree with one inside; default: the toolkit's own patched tree.",
)
_sdist = click.option(
    "--sdist",
    metavar="VERSION",
    help="The pin to work with: a pinned version of llama-cpp-python; default: the one in use.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def _place(tree: Path | None, sdist: str | None) -> tuple[Path, str, Series]:
    """(llama.cpp, the commit to patch, the series for it). A tree at a commit with a saved port is patched there."""
    pin = load_pin(binding=sdist)
    if tree is None:
        return tree_dir(pin, "patched", home()) / LLAMA, pin.commit, series_for(patches_dir(), pin.commit)
    llama = locate(tree)[1]
    base = patching.base_commit(llama)
    ported = any(base in saved.commits for saved in saved_ports(patches_dir()))
    commit = base if base is not None and ported else pin.commit
    return llama, commit, series_for(patches_dir(), commit)


@click.group()
def patch() -> None:
    """Apply the series to the pinned upstream, and say what state a tree is in.

    \b
    Example:
      moe-madv patch apply
      moe-madv patch status --json
    """


@patch.command()
@_tree
@_sdist
@click.option("--reset", is_flag=True, help="Take a half-applied tree back to the pin first.")
@_json
def apply(tree: Path | None, sdist: str | None, reset: bool, as_json: bool) -> None:
    """Put the series on a tree at the pin, all of it or nothing.

    A tree that has the series is left alone. With --reset, the changes a half-applied tree loses are kept
    as a patch file; a tree with work of yours is never changed.

    \b
    Example:
      moe-madv patch apply
      moe-madv patch apply --tree ~/src/llama.cpp
    """
    pin = load_pin(binding=sdist)
    if tree is None:
        arm_tree(pin, "patched", home())
    llama, commit, series = _place(tree, sdist)
    fetched = tree_dir(pin, "pristine", home()) / LLAMA
    donor = fetched if fetched.is_dir() else None
    report = patching.apply(series, llama, commit, reset=reset, donor=donor)
    if as_json:
        click.echo(json.dumps({"llama": str(llama), **asdict(report)}, indent=2, default=str))
        return
    click.echo(f"{report.commit} {llama}")
    for result in report.hooks:
        if result.name != "payload":
            note(str(result))
    if report.kept:
        note(f"the changes taken out are kept in {report.kept}")
    note("applied" if report.changed else "already applied, nothing to do")


@patch.command()
@_tree
@_sdist
@_json
def check(tree: Path | None, sdist: str | None, as_json: bool) -> None:
    """Try the series on a tree's upstream commit without changing anything.

    Uncommitted changes to the files of the series count. Exit code 0 only when every entry is clean.

    \b
    Example:
      moe-madv patch check
      moe-madv patch check --tree ~/src/llama.cpp --json
    """
    if tree is None:
        pin = load_pin(binding=sdist)
        own = tree_dir(pin, "patched", home())
        tree = own if own.is_dir() else pristine(pin, home()).root
    llama, _, series = _place(tree, sdist)
    results = patching.check(series, llama)
    if as_json:
        click.echo(json.dumps({"llama": str(llama), "hooks": [asdict(r) for r in results]}, indent=2))
    else:
        for result in results:
            click.echo(str(result))
    failed = [r.name for r in results if r.status is not HookStatus.CLEAN]
    if failed:
        names = ", ".join(dict.fromkeys(failed))
        raise PatchError(f"{len(failed)} of {len(results)} entries are not clean: {names}", where=llama)


@patch.command()
@_tree
@_sdist
@_json
def status(tree: Path | None, sdist: str | None, as_json: bool) -> None:
    """Say whether a tree is pristine, applied, stale, half-applied, foreign, missing or unfetched.

    \b
    Example:
      moe-madv patch status
      moe-madv patch status --tree ~/src/llama.cpp --json
    """
    pin = load_pin(binding=sdist)
    own = tree_dir(pin, "patched", home()) / LLAMA
    llama, commit, series = _place(tree, sdist)
    if tree is None and not tree_dir(pin, "pristine", home()).is_dir() and not own.is_dir():
        found = TreeStatus(state=State.UNFETCHED, notes=("nothing was fetched yet",), hint="moe-madv fetch")
    elif tree is None and not own.is_dir():
        note_ = "fetched; the tree to patch does not exist yet"
        found = TreeStatus(state=State.MISSING, notes=(note_,), hint="moe-madv patch apply")
    else:
        found = patching.inspect(series, llama, commit)
    if as_json:
        facts = {"llama": str(llama), "pin": commit, "label": series.label, "series": series.digest}
        click.echo(json.dumps({**facts, **asdict(found)}, indent=2))
        return
    click.echo(f"{found.state.value} {llama}")
    for line in found.notes:
        click.echo(f"  {line}")
    if found.hint:
        note(f"next: {found.hint}")


@patch.command()
@_tree
@_sdist
@click.option("--dry-run", is_flag=True, help="Name the files that would change; write nothing. Exit code 12 if any.")
@_json
def export(tree: Path | None, sdist: str | None, dry_run: bool, as_json: bool) -> None:
    """Turn the commits of a patched tree back into the series.

    Edit the tree, commit (`git commit --fixup` for a hook), and export: payload files are taken as they are,
    each hook's patch is written anew. Right after `moe-madv patch apply` nothing changes.

    \b
    Example:
      moe-madv patch export
      moe-madv patch export --dry-run
    """
    llama, commit, series = _place(tree, sdist)
    found = exporting.export(series, patches_dir(), llama, commit)
    names = sorted(found.files)
    if not dry_run:
        found.write()
    if as_json:
        click.echo(json.dumps({"llama": str(llama), "changed": names, "written": not dry_run}, indent=2))
    else:
        for name in names:
            click.echo(str(patches_dir() / name))
        note("the series is what the tree has" if not names else "would change" if dry_run else "written")
    if dry_run and names:
        raise PatchError(
            f"the series is not what the tree has: {len(names)} files differ", hint="moe-madv patch export"
        )


@patch.command(name="list")
@click.option("--knobs", is_flag=True, help="List the payload's settings instead.")
@_json
def list_(knobs: bool, as_json: bool) -> None:
    """List the entries of the series with the reason each hook exists, or the settings of the payload.

    \b
    Example:
      moe-madv patch list
      moe-madv patch list --knobs
      moe-madv patch list --json
    """
    if knobs:
        found = load_knobs(patches_dir())
        if as_json:
            click.echo(json.dumps([dataclasses.asdict(knob) for knob in found], indent=2))
            return
        for knob in found:
            click.echo(f"{knob.variable}  {knob.name} [{knob.unit}], default {knob.default}\n         {knob.effect}")
        return
    series = load_series(patches_dir())
    if as_json:
        payload = [
            {
                "source": p.source,
                "target": p.target,
                "bytes": len(p.data),
                "sha256": hashlib.sha256(p.data).hexdigest(),
            }
            for p in series.payload
        ]
        hooks = [
            {"hook": h.name, "patch": h.source, "file": h.file, "reason": h.reason, "status": h.status}
            for h in series.hooks
        ]
        facts = {"label": series.label, "series": series.digest, "payload": payload, "hooks": hooks}
        click.echo(json.dumps(facts, indent=2))
        return
    click.echo(f"series {series.label} {series.digest}")
    for p in series.payload:
        click.echo(f"payload  {p.target} ({len(p.data)} bytes)")
    for h in series.hooks:
        click.echo(f"hook     {h.name}: {h.file} ({h.status})\n         {h.reason}")
