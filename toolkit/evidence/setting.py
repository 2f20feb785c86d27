"""Under what a run was measured, as far as its file says: machine, disk, budget, model, versions, command."""

from __future__ import annotations

import shlex
from typing import Any

from toolkit.console import GIB
from toolkit.evidence.report import budget_text
from toolkit.results import RunData, machine_facts

_MODES = ("stock", "off", "madv", "hint", "overlap", "cache")


def rows(run: RunData) -> list[tuple[str, str]]:
    """(what, value) pairs; what the file does not say is left out."""
    header = run.header
    model, plan, machine = header["model"], header["plan"], machine_facts(header)
    pairs = [
        ("measured", f"{header['created']}, run {run.run_id}"),
        ("model", _model(model)),
        ("machine", _joined(machine, "name", "cpu", "gpu")),
        ("cores", _cores(machine)),
        ("memory", f"{machine['memory_bytes'] / GIB:.1f} GiB" if machine.get("memory_bytes") else ""),
        ("system", _joined(machine, "os", "kernel") + _list(machine.get("virtualization"))),
        ("huge pages", _joined(machine, "transparent_hugepages")),
        ("governor", _joined(machine, "governor")),
        ("disk", _disk(machine)),
        ("disk speed", _disk_speed(run)),
        ("read-ahead", f"{machine['read_ahead_kb']} KiB" if machine.get("read_ahead_kb") is not None else ""),
        ("memory budget", "" if header.get("source") else budget_text(plan)),
        ("page cache", {True: "model evicted before each run", False: "left as it was"}.get(plan.get("cold"), "")),
        ("tokens", _tokens(plan)),
        ("batch", ", ".join(f"{name} {plan[name]}" for name in ("n_batch", "n_ubatch", "n_threads") if name in plan)),
        ("order", f"{plan['blocks']} blocks, arms interleaved, a fresh process per run" if "blocks" in plan else ""),
        ("llama.cpp", str(header.get("pin") or "")),
        ("series", str(header.get("series") or "")),
        ("toolkit", f"moe-madv {header['toolkit_version']}" if header.get("toolkit_version") else ""),
        *((f"arm {name}", _arm(arm)) for name, arm in header["arms"].items()),
        ("command", command(header)),
    ]
    return [(what, value) for what, value in pairs if value]


def command(header: dict[str, Any]) -> str:
    """The recorded command, or one that makes this plan; empty for another program's file."""
    if header.get("command"):
        return str(header["command"])
    if header.get("source"):
        return ""
    plan = header["plan"]
    arms = plan.get("arms", ())
    named = [arm for arm in arms if arm in _MODES]
    words = ["moe-madv", "bench", "run", str(header["model"].get("filename", "MODEL")), "--arms", ",".join(named)]
    for arm in (arm for arm in arms if arm not in _MODES):
        env = header["arms"].get(arm, {}).get("env") or {}
        words += ["--arm", arm, "WHEEL", ",".join(f"{key}={value}" for key, value in env.items())]
    if plan.get("budget_bytes"):
        words += ["--budget", f"{plan['budget_bytes'] / GIB:.6g}GiB"]
    options = {
        "-p": "n_prompt",
        "-n": "n_gen",
        "-t": "n_threads",
        "-b": "n_batch",
        "-ub": "n_ubatch",
        "--blocks": "blocks",
    }
    for option, name in options.items():
        words += [option, str(plan[name])] if plan.get(name) is not None else []
    return shlex.join([*words, *(["--warm"] if plan.get("cold") is False else [])])


def _model(model: dict[str, Any]) -> str:
    size = f"{model['size'] / GIB:.2f} GiB" if model.get("size") else ""
    parts = [str(model.get("filename", "")), size, str(model.get("architecture") or model.get("model_type") or "")]
    if model.get("experts"):
        parts.append(f"{model.get('layers')} layers, {model['experts']} experts, {model.get('top_k')} used")
    return ", ".join(part for part in parts if part)


def _cores(machine: dict[str, Any]) -> str:
    if not machine.get("logical_cores"):
        return ""
    nodes = f", {machine['numa_nodes']} NUMA nodes" if (machine.get("numa_nodes") or 1) > 1 else ""
    return f"{machine['logical_cores']}, usable {machine.get('usable_cores', '-')}{nodes}"


def _disk(machine: dict[str, Any]) -> str:
    # Virtual disks often call themselves rotational, so that flag is not shown.
    words = _joined(machine, "device", "model", "filesystem", "mount_options")
    return words + (f", a file on {machine['loop_on']}" if machine.get("loop_on") else "")


def _disk_speed(run: RunData) -> str:
    speeds = {row["disk_mib_s"] for row in run.samples if row.get("disk_mib_s")}
    return f"{sum(speeds) / len(speeds):.0f} MiB/s, random reads" if speeds else ""


def _tokens(plan: dict[str, Any]) -> str:
    if not plan.get("tokens_sha256"):
        return ""
    return f"{plan.get('tokens_source', 'forced')}, the same in every arm, sha256 {plan['tokens_sha256'][:12]}"


def _arm(arm: dict[str, Any]) -> str:
    env = " ".join(f"{key}={value}" for key, value in (arm.get("env") or {}).items())
    digest = arm.get("wheel_sha256")
    return ", ".join(part for part in (arm.get("label"), f"wheel {digest[:12]}" if digest else "", env) if part)


def _joined(facts: dict[str, Any], *names: str) -> str:
    return ", ".join(str(facts[name]) for name in names if facts.get(name))


def _list(values: list[str] | None) -> str:
    return f", {', '.join(values)}" if values else ""
