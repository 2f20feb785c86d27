"""`moe-madv build`: llama-cpp-python wheels of both arms."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click

from toolkit import config
from toolkit.build import wheel
from toolkit.build.arms import arm_environment
from toolkit.build.backends import BACKENDS, get_backend
from toolkit.build.buildplan import Plan, plan_build
from toolkit.build.drivers import absent_drivers
from toolkit.build.levels import LEVELS
from toolkit.build.wheelfile import Wheel
from toolkit.console import MIB, note
from toolkit.patch.ports import series_for
from toolkit.patch.upstream import load_pin, tree_dir


@click.command()
@click.option(
    "--backend",
    default="cpu",
    show_default=True,
    metavar="NAME[+NAME]",
    help=f"One of {', '.join(BACKENDS)}, or several in one wheel, such as cuda+rpc.",
)
@click.option("--arm", type=click.Choice(["baseline", "patched", "both"]), default="both", show_default=True)
@click.option(
    "--portable",
    "level",
    metavar="LEVEL",
    help=f"A wheel for other machines: from this processor level on ({', '.join(LEVELS)}), with its libraries inside.",
)
@click.option(
    "--gpu-arch",
    "--cuda-arch",
    "gpu_arch",
    multiple=True,
    metavar="ARCH",
    help="GPU to compile for (90, gfx1100); again for more. Default: those of this machine.",
)
@click.option("--sdist", metavar="VERSION", help="Another pinned llama-cpp-python than the one in use.")
@click.option("--force", is_flag=True, help="Build again although a finished wheel is there.")
@click.option("--dry-run", is_flag=True, help="Print key, options and commands; build nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def build(
    backend: str,
    arm: str,
    level: str | None,
    gpu_arch: tuple[str, ...],
    sdist: str | None,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Build the wheel of one arm, or of both with the same options.

    What the backend needs and this machine lacks is said before anything is compiled. Without --portable a
    wheel uses all instructions of this processor and is for this machine alone.

    Options for cmake beyond the backend's own come from CMAKE_ARGS and go to both arms. A finished wheel
    with the same key (pin, series, options, compiler) is used again. Each wheel is installed into an
    environment of its own, where what loads is compared with the manifest.

    \b
    Example:
      moe-madv build --backend cpu --arm both
      moe-madv build --arm patched --dry-run
      moe-madv build --backend cuda+rpc --cuda-arch 90 --portable x86-64-v3
    """
    home, pin = config.home(), load_pin(binding=sdist)
    series = series_for(config.patches_dir(), pin.commit) if arm != "baseline" else None
    arms = ("baseline", "patched") if arm == "both" else (arm,)
    asked = get_backend(backend)
    plans = [
        plan_build(
            a,  # type: ignore[arg-type]
            asked,
            pin,
            series if a == "patched" else None,
            home,
            level=level,
            gpu_arch=gpu_arch,
        )
        for a in arms
    ]
    if dry_run:
        for plan in plans:
            if tree_dir(plan.pin, plan.arm, home).is_dir():
                wheel.source_tree(plan)  # a tree that is not the planned one is reported before a build
        shown = [_plan_json(plan) for plan in plans]
        click.echo(json.dumps({"plans": shown}, indent=2) if as_json else "\n\n".join(map(_plan_text, plans)))
        return
    wheels: list[tuple[Wheel, Path | None, bool]] = []
    missing = absent_drivers(asked)
    for plan in plans:
        reused = not force and wheel.finished(plan) is not None
        note(f"{plan.label}: {'already built' if reused else f'building, log in {plan.log}'}")
        made = wheel.build_wheel(plan, force=force)
        wheels.append((made, None if missing else arm_environment(made, home).python, reused))
    if missing:
        note(f"not installed here: this machine has no {', '.join(missing)}; copy the wheels to one that has")
    if as_json:
        rows = [
            {"path": str(w.path), "python": str(p) if p else None, "reused": r, **w.to_json()} for w, p, r in wheels
        ]
        click.echo(json.dumps({"wheels": rows}, indent=2))
    else:
        click.echo("\n".join(_summary(*made) for made in wheels))


def _summary(w: Wheel, python: Path | None, reused: bool) -> str:
    took = f"{w.build.seconds:.0f} s" + (" (earlier)" if reused else "")
    if w.build.objects is not None:
        took += f", ccache {w.build.ccache_hits}/{w.build.objects}"
    return f"{w.path}\n  {w.bytes / MIB:.1f} MiB  {took}  sha256 {w.sha256}\n  verified: {python or 'no'}"


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "arm": plan.arm,
        "label": plan.label,
        "backend": plan.backend.name,
        "level": plan.level,
        "version": plan.version,
        "key": plan.key,
        "pin": plan.pin.commit,
        "series": plan.series.digest if plan.series else None,
        "tree": str(tree_dir(plan.pin, plan.arm, plan.home)),
        "wheels": str(plan.wheels),
        "finished": wheel.finished(plan) is not None,
        "compiler": plan.toolchain.compiler,
        "install": list(plan.toolchain.install),
        "defines": plan.defines,
        "cmake_args": list(plan.cmake_args),
        "environment": plan.environment,
        "command": plan.command,
    }


def _plan_text(plan: Plan) -> str:
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in plan.environment.items())
    lines = [
        f"# {plan.version}  key {plan.key}",
        f"# wheel: {plan.wheels}" + ("  (finished, would be used)" if wheel.finished(plan) else ""),
        f"# compiler: {plan.toolchain.compiler}",
    ]
    if plan.toolchain.install:
        lines.append(f"# from the package index first: {' '.join(plan.toolchain.install)}")
    lines.append(f"# source: {tree_dir(plan.pin, plan.arm, plan.home)}, copied to {plan.work / 'src'}")
    return "\n".join([*lines, f"{settings} {shlex.join(plan.command)}"])
