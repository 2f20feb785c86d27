"""The header of a results file: what was compared, on what, under which conditions; and when two are the same."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from toolkit import __version__, results
from toolkit.bench import limits, machine
from toolkit.bench.plan import Arm, Conditions, Tokens
from toolkit.model.layout import ModelLayout
from toolkit.model.text import shown


def make(
    layout: ModelLayout,
    arms: Sequence[Arm],
    tokens: Tokens,
    conditions: Conditions,
    facts: machine.MachineFacts,
    *,
    pin: str,
    series: str,
    command: str | None = None,
) -> dict[str, Any]:
    first = layout.shards[0].path
    method = limits.detect().name
    return {
        "kind": "run",
        "format": results.FORMAT,
        "run_id": uuid.uuid4().hex[:12],
        "created": now(),
        "toolkit_version": __version__,
        "pin": pin,
        "series": series,
        **({} if command is None else {"command": command}),
        "model": {
            "filename": shown(first.name),
            "size": sum(shard.path.stat().st_size for shard in layout.shards),
            "architecture": layout.architecture,
            "layers": len(layout.layers),
            "experts": max((layer.experts for layer in layout.layers), default=0),
            "top_k": max((layer.top_k for layer in layout.layers), default=0),
            "routed_bytes_per_token": layout.routed_bytes_per_token,
        },
        "plan": {
            "arms": [arm.name for arm in arms],
            "tests": list(tokens.spans),
            **({} if conditions.blocks is None else {"blocks": conditions.blocks}),
            "n_prompt": len(tokens.prompt),
            "n_gen": len(tokens.gen),
            **({"n_depth": len(tokens.depth)} if tokens.depth else {}),
            **({} if conditions.n_ctx is None else {"n_ctx": conditions.n_ctx}),
            "n_threads": conditions.n_threads,
            "n_batch": conditions.n_batch,
            "n_ubatch": conditions.n_ubatch,
            "n_gpu_layers": conditions.n_gpu_layers,
            **({} if conditions.lazy_mode is None else {"lazy_mode": conditions.lazy_mode}),
            "budget_bytes": conditions.budget_bytes,
            "budget_method": "none" if conditions.budget_bytes is None else method,
            "cold": conditions.cold,
            **({"process": "shared"} if conditions.one_process else {}),
            "tokens_sha256": tokens.sha256,
            "tokens_source": tokens.source,
        },
        # read-ahead and kernel at the top too, where rows are compared
        "machine": {**dataclasses.asdict(facts), "read_ahead_kb": facts.storage.read_ahead_kb},
        "arms": {
            arm.name: {
                "label": arm.label,
                "wheel_sha256": arm.wheel_sha256,
                "payload": arm.payload,
                "mode": arm.mode,
                "env": arm.env,
                **({"config": {"prewarm_bytes": sum(s.nbytes for s in arm.prewarm)}} if arm.prewarm else {}),
                **(
                    {"rpc": list(arm.rpc), "rpc_protocol": arm.rpc_protocol, "rpc_memory_bytes": list(arm.rpc_memory)}
                    if arm.rpc
                    else {}
                ),
                **(
                    {"injected_slowdown_percent": arm.injected_slowdown_percent}
                    if arm.injected_slowdown_percent
                    else {}
                ),
            }
            for arm in arms
        },
    }


def total_runs(header: dict[str, Any]) -> int | None:
    """Planned runs; None when only the time is planned."""
    blocks = header["plan"].get("blocks")
    return None if blocks is None else int(blocks) * len(header["arms"])


# What must be the same for rows to belong together, beside model, plan and arms.
_MACHINE = ("cpu", "logical_cores", "memory_bytes", "kernel", "read_ahead_kb")
_STORAGE = ("filesystem", "device")


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What makes two headers different comparisons, such as `plan.n_gen`; run id and time do not count."""
    different = [part for part in ("pin", "series") if a.get(part) != b[part]]
    for part in ("model", "plan", "arms"):
        before, now = a.get(part, {}), b[part]
        different += [f"{part}.{key}" for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    before, now = a.get("machine", {}), b["machine"]
    different += [f"machine.{key}" for key in _MACHINE if before.get(key) != now[key]]
    before, now = before.get("storage", {}), now["storage"]
    return different + [f"machine.storage.{key}" for key in _STORAGE if before.get(key) != now[key]]


def now() -> str:
    """UTC, ISO 8601."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
