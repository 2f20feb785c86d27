"""Under what a run was measured, as far as its file says: machine, disk, budget, model, versions, command."""

from __future__ import annotations

import shlex
from typing import Any

from toolkit.bench.limits import parse_size
from toolkit.build.backends import backend_of_label
from toolkit.console import GIB
from toolkit.evidence.report import arm_text, budget_text
from toolkit.results import RunData, machine_facts

_PROMPT = "text of "  # what bench's tokens say of their own file
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
        ("order", _order(plan)),
        ("llama.cpp", str(header.get("pin") or "")),
        ("series", str(header.get("series") or "")),
        ("toolkit", f"moe-madv {header['toolkit_version']}" if header.get("toolkit_version") else ""),
        *((f"arm {name}", _arm(name, arm)) for name, arm in header["arms"].items()),
        ("layers", _layers(header["arms"])),
        *((f"check {check['arm']}", str(check.get("text") or "")) for check in run.checks),
        ("greedy text", _greedy(run)),
        ("command", command(run)),
    ]
    return [(what, value) for what, value in pairs if value]


def command(run: RunData) -> str:
    """The command that makes this file again where model, wheels and prompt lie; empty for another program's file.

    The recorded one if there is one, else what the rows and the plan say. Time is that of the last call.
    """
    header = run.header
    if header.get("source"):
        return ""
    words = shlex.split(header["command"]) if header.get("command") else _words(run)
    minutes = run.samples[-1].get("minutes") if run.samples else None
    if "blocks" not in header["plan"] and minutes is not None and words[1] == "bench":
        words = [*_without(words, ("--hours", "--minutes")), "--minutes", f"{minutes:.10g}"]
    return shlex.join(words)


def _without(words: list[str], options: tuple[str, ...]) -> list[str]:
    """A command without these options, written `--option value` or `--option=value`."""
    values = {i + 1 for i, word in enumerate(words) if word in options}
    return [w for i, w in enumerate(words) if i not in values and w.partition("=")[0] not in options]


def _words(run: RunData) -> list[str]:
    """A command of the same plan, from all that a file without its command says."""
    header, plan = run.header, run.header["plan"]
    arms = plan.get("arms", ())
    known = {arm: header["arms"].get(arm, {}) for arm in arms}
    named = [arm for arm in arms if arm in _MODES]
    servers = [",".join(known[arm]["rpc"]) for arm in arms if known[arm].get("rpc")]
    kind = "run" if "blocks" in plan else "longrun"
    words = ["moe-madv", "bench", kind, str(header["model"].get("filename", "MODEL")), "--arms", ",".join(named)]
    for endpoints in servers:
        words += ["--rpc", endpoints]
    for arm in (arm for arm in arms if arm not in _MODES and not known[arm].get("rpc")):
        env = known[arm].get("env") or {}
        words += ["--arm", arm, "WHEEL", ",".join(f"{key}={value}" for key, value in env.items())]
    if plan.get("budget_bytes"):
        words += ["--budget", _budget(plan["budget_bytes"])]
    options = {
        "-p": "n_prompt",
        "-n": "n_gen",
        "-d": "n_depth",
        "--n-ctx": "n_ctx",
        "-t": "n_threads",
        "-b": "n_batch",
        "-ub": "n_ubatch",
        "--lazy-mode": "lazy_mode",
        "--blocks": "blocks",
    }
    for option, name in options.items():
        words += [option, str(plan[name])] if plan.get(name) is not None else []
    if plan.get("n_gpu_layers"):
        words += ["-ngl", str(plan["n_gpu_layers"])]
    backend = next((b for arm in named if (b := backend_of_label(known[arm].get("label")))), None)
    if backend and backend.name != "cpu" and not servers:
        words += ["--backend", backend.name]
    source = plan.get("tokens_source", "")
    if source.startswith(_PROMPT):
        words += ["--prompt", source.removeprefix(_PROMPT)]
    if kind == "longrun":
        spent_s = max((row.get("elapsed_s") or 0.0 for row in run.samples), default=0.0)
        words += ["--minutes", f"{spent_s / 60:.4g}"]
        pause_s = run.samples[-1].get("pause_s") if run.samples else None
        words += ["--pause", f"{pause_s:.10g}"] if pause_s else []
    words += ["--timeline"] if any(row.get("timeline") for row in run.samples) else []
    words += ["--warm"] if plan.get("cold") is False else []
    return [*words, "--out", run.path.name]


def _budget(nbytes: int) -> str:
    """GiB where a few digits say it exactly, else bytes."""
    text = f"{nbytes / GIB:.6g}GiB"
    return text if parse_size(text) == nbytes else str(nbytes)


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


def _order(plan: dict[str, Any]) -> str:
    if "blocks" not in plan:
        return ""
    process = "a fresh process per run"
    if plan.get("process") == "shared":
        process = "all in one process, warmed up before each run"
    return f"{plan['blocks']} blocks, arms interleaved, {process}"


def _tokens(plan: dict[str, Any]) -> str:
    if not plan.get("tokens_sha256"):
        return ""
    return f"{plan.get('tokens_source', 'forced')}, the same in every arm, sha256 {plan['tokens_sha256'][:12]}"


def _arm(name: str, arm: dict[str, Any]) -> str:
    env = " ".join(f"{key}={value}" for key, value in (arm.get("env") or {}).items())
    digest = arm.get("wheel_sha256")
    percent = arm.get("injected_slowdown_percent")
    parts = (
        arm.get("label"),
        f"wheel {digest[:12]}" if digest else "",
        env,
        arm_text(name, percent) if percent else "",
    )
    return ", ".join(part for part in parts if part)


def _greedy(run: RunData) -> str:
    """Whether each arm goes on from the forced tokens as the baseline does; nothing where that was not tried."""
    said = {check["arm"]: check.get("greedy_equal") for check in run.checks}
    words = {True: "as the baseline", False: "not as the baseline"}
    return ", ".join(f"{arm} {words[equal]}" for arm, equal in list(said.items())[1:] if equal is not None)


def _layers(arms: dict[str, dict[str, Any]]) -> str:
    """Where each arm's layers are; nothing when all are in the arm's own process, as usual."""
    if not any(arm.get("rpc") for arm in arms.values()):
        return ""
    places = {name: f"on {', '.join(arm['rpc'])}" if arm.get("rpc") else "local" for name, arm in arms.items()}
    return "; ".join(f"{name} {place}" for name, place in places.items())


def _joined(facts: dict[str, Any], *names: str) -> str:
    return ", ".join(str(facts[name]) for name in names if facts.get(name))


def _list(values: list[str] | None) -> str:
    return f", {', '.join(values)}" if values else ""
