"""One worker process from start to end: its job, its budget, its rows, and why it failed if it did."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.bench.limits import Budget
from toolkit.bench.plan import Arm, Conditions
from toolkit.errors import BenchError
from toolkit.model.layout import ModelLayout

_WORKER = Path(__file__).with_name("worker.py")
# Settings of these families change what an arm does, so an arm gets only its own.
_FOREIGN = ("PYTHON", "MOE_MADV_", "LLAMA_", "GGML_", "OMP_", "GOMP_", "KMP_", "CUDA_")
_LOG_TAIL = 2000


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one worker said. `reason` is None when it came to its end."""

    loaded: dict[str, Any] | None
    tests: tuple[dict[str, Any], ...]
    tokens: tuple[int, ...]  # of a tokenize job
    effective_budget: int | None
    reason: str | None


def job_of(layout: ModelLayout, conditions: Conditions, n_tokens: int) -> dict[str, Any]:
    """The worker's settings that do not depend on arm or tokens; BenchError when the context is too small."""
    needed = max(256, -(-n_tokens // 256) * 256)
    if conditions.n_ctx is not None and conditions.n_ctx < n_tokens:
        raise BenchError(
            f"a context of {conditions.n_ctx} tokens does not hold the {n_tokens} of the tests",
            hint=f"use --n-ctx {needed} or more, or leave it out",
        )
    return {
        "model": str(layout.shards[0].path.resolve()),
        "n_ctx": conditions.n_ctx or needed,
        "n_batch": conditions.n_batch,
        "n_ubatch": conditions.n_ubatch,
        "n_threads": conditions.n_threads,
        "n_gpu_layers": conditions.n_gpu_layers,
        "timeline": conditions.timeline,
    }


def launch(arm: Arm, job: dict[str, Any], budget: Budget, on_test: Callable[[str], None] = lambda _: None) -> Outcome:
    """Run a job in the arm's environment under the budget and collect its rows; never raises for a failed worker.

    Raises BenchError when the arm is not what it claims to be (other mode or payload, weights not mapped) or runs
    under another limit than asked for: a row of such a run would be filed under the wrong name.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)} | arm.env
    job = {**job, "rpc": list(arm.rpc)}
    loaded: dict[str, Any] | None = None
    tests: list[dict[str, Any]] = []
    tokens: tuple[int, ...] = ()
    effective: int | None = None
    reason: str | None = None
    done = False

    with tempfile.TemporaryDirectory(prefix="moe-madv-") as folder:
        job_file, log_file = Path(folder) / "job.json", Path(folder) / "log"
        job_file.write_text(json.dumps(job), encoding="utf-8")
        argv = budget.command([arm.python, "-I", _WORKER, job_file])
        with log_file.open("wb") as log:
            # a neutral folder: a llama_cpp directory where the user stands must not be imported
            process = subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                try:
                    row = json.loads(line)
                    event = row.pop("event")
                except (ValueError, KeyError, AttributeError):
                    reason = f"said what is no row: {line[:200]!r}"
                    break
                if event == "loaded":
                    loaded = row
                    effective = budget.effective(process.pid) if budget.method != "none" else None
                    _require_arm(arm, job, row)
                    _require_budget(arm, budget, effective)
                elif event == "test":
                    tests.append(row)
                    on_test(row["test"])
                elif event == "tokens":
                    tokens = tuple(row["tokens"])
                elif event == "error":
                    reason = row["reason"] + (f"\n{row['log'].strip()}" if row["log"].strip() else "")
                elif event == "done":
                    done = True
        finally:
            process.kill()
            code = process.wait()
            process.stdout.close()
        if not done and reason is None:
            reason = _reason(code, budget, log_file)
    return Outcome(
        loaded=loaded,
        tests=tuple(tests),
        tokens=tokens,
        effective_budget=effective,
        reason=None if done else reason,
    )


def _require_arm(arm: Arm, job: dict[str, Any], loaded: dict[str, Any]) -> None:
    for what, wanted in (("payload", arm.payload), ("mode", arm.mode)):
        if loaded[what] != wanted:
            raise BenchError(
                f"arm {arm.name} runs with {what} {loaded[what]}, not {wanted}",
                where=loaded["libraries"],
                hint="build its wheel again: moe-madv build --backend cpu --arm both",
            )
    # a server's buffer is named RPC0[HOST:PORT]
    remote = [name for name in loaded["buffers"] if any(name.endswith(f"[{endpoint}]") for endpoint in arm.rpc)]
    if idle := [endpoint for endpoint in arm.rpc if not any(name.endswith(f"[{endpoint}]") for name in remote)]:
        raise BenchError(
            f"arm {arm.name} put no weights on {', '.join(idle)}",
            where=loaded["libraries"],
            hint="name fewer servers, or look whether they have memory: moe-madv rpc check HOST:PORT",
        )
    on_gpu = job.get("n_gpu_layers", 0) > 0  # then only the experts have to be mapped
    mapped = [name for name in loaded["buffers"] if name.endswith("_Mapped")]
    unmapped = [name for name in loaded["buffers"] if name not in (*mapped, *remote)]
    if (unmapped and not on_gpu) or not (mapped or remote):
        raise BenchError(
            f"arm {arm.name} has weights in {', '.join(unmapped) or 'no known buffer'}, outside of the file mapping",
            where=loaded["libraries"],
            hint="use a wheel whose CPU backend neither repacks nor copies weights",
        )
    if on_gpu and not unmapped:
        raise BenchError(
            f"arm {arm.name} put no layer on a GPU",
            where=loaded["libraries"],
            hint="use a wheel of a GPU backend on a machine that has one: moe-madv build --backend cuda --arm both",
        )


def _require_budget(arm: Arm, budget: Budget, effective: int | None) -> None:
    """The limit of the group that the worker is really in; the kernel rounds it down to pages."""
    if budget.nbytes is None:
        return
    if effective is None or abs(effective - budget.nbytes) > budget.nbytes // 100:
        found = "no limit" if effective is None else f"a limit of {effective} bytes"
        raise BenchError(
            f"arm {arm.name} runs with {found} instead of {budget.nbytes} bytes ({budget.method})",
            where=budget.group,
            hint="leave other memory limits (a container's, a session's) above the budget, or lower --budget",
        )


def _reason(code: int, budget: Budget, log_file: Path) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        if -code == signal.SIGKILL and budget.stat().get("oom_kills"):
            return f"killed by the memory budget of {budget.nbytes} bytes ({name})"
        reason = f"ended by {name}"
    else:
        reason = f"ended with exit code {code} before its last row"
    tail = log_file.read_bytes()[-_LOG_TAIL:].decode("utf-8", "replace").strip()
    return f"{reason}\n{tail}" if tail else reason
