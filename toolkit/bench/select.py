"""From the names of a comparison to runtimes that can be started: which wheel, which environment, which mode."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.bench.plan import MODES, RPC, STOCK, Arm
from toolkit.build import wheelfile
from toolkit.build.arms import arm_environment
from toolkit.build.backends import build_command, get_backend
from toolkit.build.rpc import check_servers, require_room
from toolkit.build.wheelfile import Wheel
from toolkit.errors import BenchError, BuildError
from toolkit.patch.series import Series
from toolkit.patch.upstream import Pin

MODE_VARIABLE = "MOE_MADV_MODE"


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
    wanted: dict[str, str | None] = {"baseline": None} if STOCK in names else {}
    if any(name != STOCK for name in names):
        wanted["patched"] = series.digest
    wheels = _wheels(wanted, home, pin, backend)
    if len(wheels) == 2:
        _require_same_build(wheels["baseline"], wheels["patched"])
    return [
        _arm(name, wheels["baseline"], home, None, {}, extra)
        if name == STOCK
        else _arm(name, wheels["patched"], home, name, {MODE_VARIABLE: name}, extra)
        for name in names
    ]


def rpc_arm(servers: Sequence[str], pin: Pin, series: Series, home: Path, *, nbytes: int) -> Arm:
    """The patched wheel with every layer, `nbytes` in all, on servers: each greeted and asked for its protocol first.

    Raises MachineError for one that does not answer or speaks another version, and when all of them together have
    too little memory; BenchError without a wheel.
    """
    wheel = _wheels({"patched": series.digest}, home, pin, RPC)["patched"]
    asked = check_servers(servers, wheel.manifest, wheel.path)
    require_room(asked, nbytes)
    return replace(
        _arm(RPC, wheel, home, "off", {MODE_VARIABLE: "off"}),
        rpc=tuple(str(server.endpoint) for server in asked),
        rpc_protocol=wheel.manifest.rpc_protocol,
        rpc_memory=tuple(sum(device.total for device in server.devices) for server in asked),
    )


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


def device_settings(backend: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the user has set to choose among the backend's devices: part of an arm, so it is recorded with it."""
    return {name: environ[name] for name in get_backend(backend).selects if name in environ}


def _arm(name: str, wheel: Wheel, home: Path, mode: str | None, env: dict[str, str], extra: str | None = None) -> Arm:
    installed = arm_environment(wheel, home, extra=extra)
    return Arm(
        name=name,
        python=installed.python,
        label=installed.label,
        wheel_sha256=wheel.sha256,
        payload=wheel.manifest.payload,
        mode=mode,
        env=device_settings(wheel.manifest.backend) | env,
    )


def _wheels(wanted: Mapping[str, str | None], home: Path, pin: Pin, backend: str) -> dict[str, Wheel]:
    """The newest wheel of each arm, baseline or patched, with this series. Raises BenchError for all that lack."""
    found = {arm: _newest(home, pin, series, backend) for arm, series in wanted.items()}
    if missing := [arm for arm, wheel in found.items() if wheel is None]:
        what = " and ".join({"baseline": "the unpatched build", "patched": "this series"}[arm] for arm in missing)
        raise BenchError(
            f"there is no {backend} wheel of {what} at {pin.commit[:9]}",
            where=home / "wheels",
            hint=build_command(backend, missing[0] if len(missing) == 1 else "both"),
        )
    return {arm: wheel for arm, wheel in found.items() if wheel is not None}


def _newest(home: Path, pin: Pin, series: str | None, backend: str) -> Wheel | None:
    found: list[Wheel] = []
    for path in (home / "wheels").glob("*/*.whl"):
        try:
            wheel = wheelfile.load(path)
        except BuildError:
            continue  # unfinished, or from another version of the toolkit
        manifest = wheel.manifest
        if (manifest.pin, manifest.series, manifest.backend, manifest.level) == (pin.commit, series, backend, None):
            found.append(wheel)
    return max(found, key=lambda wheel: wheel.path.stat().st_mtime, default=None)


def _require_same_build(a: Wheel, b: Wheel) -> None:
    for what in ("backend", "defines", "cmake_args", "compiler", "machine_options"):
        first, second = getattr(a.manifest, what), getattr(b.manifest, what)
        if first != second:
            raise BenchError(
                f"the two wheels were built with other {what}: {first} and {second}",
                where=f"{a.path} and {b.path}",
                hint=f"{build_command(a.manifest.backend)} --force",
            )
