"""From the names of a comparison to runtimes that can be started: which wheel, which environment, which mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.bench.plan import MODES, RPC, STOCK, Arm
from toolkit.build import wheelfile
from toolkit.build.arms import arm_environment
from toolkit.build.rpc import check_servers
from toolkit.build.wheelfile import Wheel
from toolkit.errors import BenchError, BuildError
from toolkit.patch.series import Series
from toolkit.patch.upstream import Pin

MODE_VARIABLE = "MOE_MADV_MODE"
_BUILD = "moe-madv build --backend cpu --arm both"


def arms_by_name(
    names: Sequence[str], pin: Pin, series: Series, home: Path, *, backend: str = "cpu", extra: str | None = None
) -> list[Arm]:
    """`stock` is the baseline wheel; any other name is that mode of the patched wheel of this series.

    Both are wheels of the backend for this machine, not portable ones. They must come from the same options and
    compiler, or the comparison would be of these. `extra` as in `arm_environment`.
    """
    if unknown := [name for name in names if name not in (STOCK, *MODES)]:
        raise BenchError(
            f"there is no arm {', '.join(unknown)}: arms are {', '.join((STOCK, *MODES))}",
            where="--arms",
            hint="for another wheel or environment use --arm NAME WHEEL ENV",
        )
    wheels = {"baseline": _newest(home, pin, None, backend)} if STOCK in names else {}
    if any(name != STOCK for name in names):
        wheels["patched"] = _newest(home, pin, series.digest, backend)
    if len(wheels) == 2:
        _require_same_build(wheels["baseline"], wheels["patched"])
    return [
        _arm(name, wheels["baseline"], home, None, {}, extra)
        if name == STOCK
        else _arm(name, wheels["patched"], home, name, {MODE_VARIABLE: name}, extra)
        for name in names
    ]


def rpc_arm(servers: Sequence[str], pin: Pin, series: Series, home: Path) -> Arm:
    """The patched wheel with every layer on servers, each greeted and asked for its protocol first.

    Raises MachineError for one that does not answer or speaks another version, BenchError without a wheel.
    """
    wheel = _newest(home, pin, series.digest, RPC)
    asked = check_servers(servers, wheel.manifest, wheel.path)
    endpoints = tuple(str(server.endpoint) for server in asked)
    return replace(_arm(RPC, wheel, home, "off", {MODE_VARIABLE: "off"}), rpc=endpoints)


def arm_of_wheel(name: str, path: Path, settings: Iterable[str], home: Path) -> Arm:
    """An arm of any wheel with a manifest, with KEY=VALUE settings added to its environment."""
    env: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise BenchError(f"{setting!r} is not KEY=VALUE", where=f"--arm {name}")
        env[key] = value
    wheel = wheelfile.load(path)
    patched = wheel.manifest.payload is not None
    return _arm(name, wheel, home, env.get(MODE_VARIABLE, "off") if patched else None, env)


def _arm(name: str, wheel: Wheel, home: Path, mode: str | None, env: dict[str, str], extra: str | None = None) -> Arm:
    installed = arm_environment(wheel, home, extra=extra)
    return Arm(
        name=name,
        python=installed.python,
        label=installed.label,
        wheel_sha256=wheel.sha256,
        payload=wheel.manifest.payload,
        mode=mode,
        env=env,
    )


def _newest(home: Path, pin: Pin, series: str | None, backend: str) -> Wheel:
    found: list[Wheel] = []
    for path in (home / "wheels").glob("*/*.whl"):
        try:
            wheel = wheelfile.load(path)
        except BuildError:
            continue  # unfinished, or from another version of the toolkit
        manifest = wheel.manifest
        if (manifest.pin, manifest.series, manifest.backend, manifest.level) == (pin.commit, series, backend, None):
            found.append(wheel)
    if not found:
        what = "the unpatched build" if series is None else "this series"
        raise BenchError(
            f"there is no {backend} wheel of {what} at {pin.commit[:9]}",
            where=home / "wheels",
            hint=f"moe-madv build --backend {backend} --arm both",
        )
    return max(found, key=lambda wheel: wheel.path.stat().st_mtime)


def _require_same_build(a: Wheel, b: Wheel) -> None:
    for what in ("backend", "defines", "cmake_args", "compiler", "machine_options"):
        first, second = getattr(a.manifest, what), getattr(b.manifest, what)
        if first != second:
            raise BenchError(
                f"the two wheels were built with other {what}: {first} and {second}",
                where=f"{a.path} and {b.path}",
                hint=f"{_BUILD} --force",
            )
