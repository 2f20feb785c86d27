"""`moe-madv wheels`: what was built, and what any wheel is."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import click

from toolkit import config
from toolkit.build import cpuflags, wheelfile
from toolkit.build.index import add_wheels
from toolkit.build.wheelcheck import WheelReport, check_wheel
from toolkit.console import MIB, note
from toolkit.errors import BuildError
from toolkit.patch.ports import series_for
from toolkit.patch.upstream import load_pin


@click.group()
def wheels() -> None:
    """List, explain and publish wheels of llama-cpp-python.

    \b
    Example:
      moe-madv wheels list
      moe-madv wheels check llama_cpp_python-0.3.36+moe1.cpu-py3-none-linux_x86_64.whl
    """


@wheels.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def list_wheels(as_json: bool) -> None:
    """List the finished wheels, one line each.

    \b
    Example:
      moe-madv wheels list --json
    """
    found = []
    for path in sorted((config.home() / "wheels").glob("*/*.whl")):
        try:
            found.append(wheelfile.load(path))
        except BuildError as e:
            note(f"left out: {e}")
    if as_json:
        click.echo(json.dumps({"wheels": [{"path": str(w.path), **w.to_json()} for w in found]}, indent=2))
        return
    if not found:
        note("no finished wheels; next: moe-madv build --backend cpu --arm both")
    for w in found:
        m = w.manifest
        click.echo(f"{m.label:12} {m.commit[:9]}  {w.bytes / MIB:5.1f} MiB  {w.sha256[:12]}  {w.path}")


@wheels.command()
@click.argument("wheel", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def check(wheel: Path, as_json: bool) -> None:
    """Explain a wheel, of this toolkit or not, without installing it; fails when something is wrong.

    \b
    Example:
      moe-madv wheels check dist/llama_cpp_python-0.3.36-py3-none-linux_x86_64.whl --json
    """
    report = check_wheel(wheel, host=cpuflags.host_flags())
    click.echo(json.dumps(asdict(report), indent=2) if as_json else _text(report))
    if not report.ok:
        sys.exit(BuildError.exit_code)


@wheels.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.argument("wheel", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--extra",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with wheels of dependencies to serve beside ours, so that no other index is needed.",
)
@click.option("--portable", is_flag=True, help="Without WHEELs: only those built with --portable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def index(directory: Path, wheel: tuple[Path, ...], extra: tuple[Path, ...], portable: bool, as_json: bool) -> None:
    """Write a static package index into DIRECTORY, one folder per backend and level, for pip and uv.

    Without WHEELs it takes the finished wheels of the pin and the series in use. Every wheel is checked first.
    Any web server can serve the folder.

    \b
    Example:
      moe-madv wheels index site
      python -m http.server --directory site &
      pip install --index-url http://127.0.0.1:8000/cpu "llama-cpp-python==0.3.36+moe1.cpu"
    """
    chosen = wheel or _current_wheels(portable)
    folders = add_wheels(directory, chosen, extra)
    if as_json:
        rows = [{"name": f.name, "path": str(f.path), "files": [asdict(file) for file in f.files]} for f in folders]
        click.echo(json.dumps({"folders": rows}, indent=2))
        return
    for folder in folders:
        for file in folder.files:
            click.echo(f"{folder.name:12} {file.sha256[:12]}  {file.bytes / MIB:6.1f} MiB  {file.name}")


def _current_wheels(portable: bool) -> tuple[Path, ...]:
    """Finished wheels of this pin, of both arms, the patched ones of this series; the newest of each name."""
    pin = load_pin()
    series = series_for(config.patches_dir(), pin.commit).digest
    newest: dict[str, wheelfile.Wheel] = {}
    for path in sorted((config.home() / "wheels").glob("*/*.whl"), key=lambda p: p.stat().st_mtime):
        try:
            found = wheelfile.load(path)
        except BuildError as e:
            note(f"left out: {e}")
            continue
        fits = found.manifest.pin == pin.commit and found.manifest.series in (None, series)
        if fits and (found.manifest.level or not portable):
            newest[path.name] = found
    if not newest:
        raise BuildError(
            f"there are no finished {'portable ' if portable else ''}wheels of this pin and series",
            where=config.home() / "wheels",
            hint="moe-madv build --backend cpu --arm both" + (" --portable LEVEL" if portable else ""),
        )
    for found in newest.values():
        if found.manifest.level is None:
            note(f"{found.path.name}: for processors such as this one; others need a wheel built with --portable")
    return tuple(found.path for found in newest.values())


def _text(report: WheelReport) -> str:
    rows = {
        "wheel": report.file,
        "label": report.label or "none",
        "backend": report.backend or "unknown",
        "flavour": _flavour(report),
        "pin": report.pin or "unknown",
        "series": report.series or ("none" if report.manifest else "unknown"),
        "payload": report.payload or ("none" if report.manifest else "unknown"),
        "needs": ", ".join(report.needs) or "nothing beyond the C and C++ runtime",
        "glibc": f"{report.glibc} or newer" if report.glibc else "unknown",
        "processor": " ".join(report.cpu_flags) or ("any" if report.manifest else "unknown"),
        "options": _options(report),
    }
    lines = [f"{name:10} {value}" for name, value in rows.items()]
    lines += [f"{'library':10} {path}  {sha256[:12]}" for path, sha256 in report.libraries.items()]
    lines += [f"problem: {problem}" for problem in report.problems]
    return "\n".join([*lines, "ok" if report.ok else "not ok"])


def _flavour(report: WheelReport) -> str:
    if report.manifest is None:
        return "unknown"
    return f"portable, from {report.level} on" if report.level else "for the machine it was built on"


def _options(report: WheelReport) -> str:
    if report.manifest is None:
        return "unknown"
    defines, args = report.manifest["defines"], report.manifest["cmake_args"]
    assert isinstance(defines, Mapping) and isinstance(args, tuple)
    return " ".join([*(f"{name}={value}" for name, value in defines.items()), *args])
