"""One worker process from start to end: its job, its budget, its rows, and why it failed if it did."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from toolkit.bench.limits import Budget
from toolkit.bench.plan import Arm, Conditions
from toolkit.build.backends import Backend, backend_of_label, build_command, get_backend
from toolkit.build.rpc import Endpoint, ask
from toolkit.errors import BenchError, MachineError
from toolkit.model.layout import ModelLayout

_WORKER = Path(__file__).with_name("worker.py")
# Settings of these families change what an arm does, so an arm gets only its own.
_FOREIGN = ("PYTHON", "MOE_MADV_", "LLAMA_", "GGML_", "OMP_", "GOMP_", "KMP_", "CUDA_")
# When llama.cpp aborts it would start a debugger on itself, wait for it, and push its reason out of the log's tail.
_OWN = {"GGML_NO_BACKTRACE": "1"}
_LOST = "Remote RPC server crashed"  # how llama.cpp aborts when a server is gone, ggml-rpc.cpp
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
        "lazy_mode": conditions.lazy_mode,
        "timeline": conditions.timeline,
    }


def launch(arm: Arm, job: dict[str, Any], budget: Budget, on_test: Callable[[str], None] = lambda _: None) -> Outcome:
    """Run a job in the arm's environment under the budget and collect its rows; never raises for a failed worker.

    Raises BenchError when the arm is not what it claims to be (other mode or payload, weights not mapped) or runs
    under another limit than asked for: a row of such a run would be filed under the wrong name.
    """
    with Process(arm, job, budget) as process:
        return process.outcome(on_test)


class Process:
    """A worker with a job; leaving the context ends it."""

    def __init__(self, arm: Arm, job: dict[str, Any], budget: Budget) -> None:
        self._arm = arm
        self._job = {**job, "rpc": list(arm.rpc)}
        self._budget = budget
        self._loaded: dict[str, Any] | None = None
        self._effective: int | None = None

    def __enter__(self) -> Process:
        env = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)} | _OWN | self._arm.env
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moe-madv-")))
            self._log_file, job_file = folder / "log", folder / "job.json"
            job_file.write_text(json.dumps(self._job), encoding="utf-8")
            argv = self._budget.command([self._arm.python, "-I", _WORKER, job_file])
            with self._log_file.open("wb") as log:
                # a neutral folder: a llama_cpp directory where the user stands must not be imported
                self._process = subprocess.Popen(
                    argv, cwd=folder, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
                )
            self._folder = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._folder.close()

    def ask(self, step: dict[str, Any]) -> None:
        """Have a job with steps do one more; `outcome` then has its rows, or why it could not."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(step).encode() + b"\n")
            self._process.stdin.flush()

    def outcome(self, on_test: Callable[[str], None] = lambda _: None) -> Outcome:
        """What the worker says until a step or all is done; raises as `launch` does."""
        tests: list[dict[str, Any]] = []
        tokens: tuple[int, ...] = ()
        reason: str | None = None
        done = False
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                row = json.loads(line)
                event = row.pop("event")
            except (ValueError, KeyError, AttributeError):
                reason = f"said what is no row: {line[:200]!r}"
                break
            if event == "loaded":
                self._require(row)
            elif event == "test":
                tests.append(row)
                on_test(row["test"])
            elif event == "tokens":
                tokens = tuple(row["tokens"])
            elif event == "error":
                reason = row["reason"] + (f"\n{row['log'].strip()}" if row["log"].strip() else "")
            elif event == "step":
                self._loaded = {**(self._loaded or {}), "mode": row["mode"]}
                done = True
                break
            elif event == "done":
                done = True
        if not done:
            code = self._end()
            reason = reason or _reason(self._arm, code, self._budget, self._log_file)
        return Outcome(
            loaded=self._loaded,
            tests=tuple(tests),
            tokens=tokens,
            effective_budget=self._effective,
            reason=None if done else reason,
        )

    def _require(self, loaded: dict[str, Any]) -> None:
        self._loaded = loaded
        self._effective = self._budget.effective(self._process.pid) if self._budget.method != "none" else None
        _require_arm(self._arm, self._job, loaded)
        _require_budget(self._arm, self._budget, self._effective)

    def _end(self) -> int:
        self._process.kill()
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return code


def _require_arm(arm: Arm, job: dict[str, Any], loaded: dict[str, Any]) -> None:
    for what, wanted in (("payload", arm.payload), ("mode", arm.mode)):
        if loaded[what] != wanted:
            raise BenchError(
                f"arm {arm.name} runs with {what} {loaded[what]}, not {wanted}",
                where=loaded["libraries"],
                hint=f"build its wheel again: {_build_command(arm)} --force",
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
            hint=_without_gpu(arm),
        )


def _backend(arm: Arm) -> Backend:
    return backend_of_label(arm.label) or get_backend("cpu")


def _build_command(arm: Arm) -> str:
    return build_command(_backend(arm).name, "patched" if arm.payload else "baseline")


def _without_gpu(arm: Arm) -> str:
    backend = _backend(arm)
    if not backend.selects:
        return f"use wheels of a GPU backend on a machine that has one, as --backend cuda: {build_command('cuda')}"
    return f"see that a driver for {backend.name} answers here, and choose one of its devices: {backend.selects[0]}=0"


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


def _reason(arm: Arm, code: int, budget: Budget, log_file: Path) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        if -code == signal.SIGKILL and budget.stat().get("oom_kills"):
            return f"killed by the memory budget of {budget.nbytes} bytes ({name})"
        reason = f"ended by {name}"
    else:
        reason = f"ended with exit code {code} before its last row"
    tail = log_file.read_bytes()[-_LOG_TAIL:].decode("utf-8", "replace").strip()
    if arm.rpc and _LOST in tail:
        reason = f"{_gone(arm.rpc)} ({reason})"
    return f"{reason}\n{tail}" if tail else reason


def _gone(endpoints: Sequence[str]) -> str:
    """Which servers went away, asked after the fact; one that was restarted in the meantime answers again."""
    gone = []
    for endpoint in endpoints:
        try:
            ask(Endpoint.parse(endpoint))
        except MachineError:
            gone.append(endpoint)
    if not gone:
        return f"the connection to one of {', '.join(endpoints)} broke"
    return f"no RPC server answers any more at {' and '.join(gone)}; what it said last is why"
