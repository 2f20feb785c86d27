"""`moe-madv wheels`: what was built, and what any wheel is."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from toolkit import config
from toolkit.build import cpuflags, wheelfile
from toolkit.build.wheelcheck import WheelReport, check_wheel
from toolkit.console import MIB, note
from toolkit.errors import BuildError


@click.group()
def wheels() -> None:
    """List and explain wheels of llama-cpp-python.

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


def _text(report: WheelReport) -> str:
    rows = {
        "wheel": report.file,
        "label": report.label or "none",
        "backend": report.backend or "unknown",
        "pin": report.pin or "unknown",
        "series": report.series or ("none" if report.manifest else "unknown"),
        "payload": report.payload or ("none" if report.manifest else "unknown"),
        "needs": ", ".join(report.needs) or "nothing beyond the C and C++ runtime",
        "glibc": f"{report.glibc} or newer" if report.glibc else "unknown",
        "processor": " ".join(report.cpu_flags) or "unknown",
    }
    lines = [f"{name:10} {value}" for name, value in rows.items()]
    lines += [f"{'library':10} {path}  {sha256[:12]}" for path, sha256 in report.libraries.items()]
    lines += [f"problem: {problem}" for problem in report.problems]
    return "\n".join([*lines, "ok" if report.ok else "not ok"])
