"""From what was asked for to a finished results file."""

from __future__ import annotations

import dataclasses
import glob
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit import config, results
from toolkit.bench import header as head
from toolkit.bench import limits, machine, plan
from toolkit.bench import tokens as forced
from toolkit.bench.launch import job_of
from toolkit.bench.plan import RPC, Arm, Conditions, Tokens
from toolkit.bench.run import OnRun, run
from toolkit.bench.select import arm_of_wheel, arms_by_name, rpc_arm
from toolkit.bench.shared import require_shareable
from toolkit.console import MIB, note
from toolkit.errors import BenchError, ResultsError
from toolkit.model.layout import Access, ModelLayout, read_model
from toolkit.model.synth import prescription
from toolkit.model.text import shown
from toolkit.patch.ports import series_for
from toolkit.patch.upstream import load_pin


@dataclass(frozen=True, kw_only=True)
class Request:
    """A comparison as asked for, before anything was looked at."""

    model: Path
    arms: tuple[str, ...]
    custom: tuple[tuple[str, Path, tuple[str, ...]], ...]  # name, wheel, KEY=VALUE settings
    n_prompt: int
    n_gen: int
    prompt_file: Path | None
    budget: str | None
    oversubscribe: float | None
    conditions: Conditions
    out: Path | None
    n_depth: int = 0
    sdist: str | None = None  # version of the binding; None: the pin in use
    backend: str = "cpu"  # of the wheels that arm names stand for
    rpc: tuple[str, ...] = ()  # servers of one more arm, whose layers are there
    aa: bool = False  # the first arm once more
    injected_slowdown: tuple[tuple[str, float], ...] = ()  # name of an arm, percent
    command: str | None = None  # for the record
    trace: Path | None = None  # file for the experts that each token selects


def measure(request: Request, *, dry_run: bool, on_run: OnRun = lambda *_: None) -> Path | None:
    """Resolve the request, measure, and return the results file; with `dry_run` only say what would be done."""
    layout = read_model(request.model)
    size = sum(shard.path.stat().st_size for shard in layout.shards)
    budget = None
    if request.budget is not None:
        budget = limits.parse_size(request.budget)
    elif request.oversubscribe is not None:
        budget = int(size / request.oversubscribe)
    facts = machine.facts(layout.shards[0].path)
    conditions = dataclasses.replace(
        request.conditions,
        budget_bytes=budget,
        n_threads=request.conditions.n_threads or facts.usable_cores,
    )
    pin, home = load_pin(binding=request.sdist), config.home()
    series = series_for(config.patches_dir(), pin.commit)

    for text in machine.warnings(facts):
        note(f"warning: {text}")
    always = layout.nbytes(Access.ALWAYS_USED)
    if budget is not None and always is not None and always > budget:
        raise BenchError(
            f"a budget of {budget / MIB:.0f} MiB does not even hold the always used weights, {always / MIB:.0f} MiB",
            where=layout.shards[0].path,
            hint=f"use --budget {always * 3 // 2 / MIB:.0f}MiB or more",
        )
    names = [*request.arms, *_again(request), *([RPC] if request.rpc else []), *(name for name, *_ in request.custom)]
    if len(set(names)) != len(names) or not names:
        raise BenchError(f"arms need different names: {', '.join(names) or 'none given'}")
    if unknown := [name for name, _ in request.injected_slowdown if name not in names]:
        raise BenchError(
            f"there is no arm {', '.join(unknown)} to slow down",
            where="--inject-slowdown",
            hint=f"arms of this run: {', '.join(names)}",
        )
    if conditions.one_process:
        alone = [*([RPC] if request.rpc else []), *(name for name, *_ in request.custom)]
        require_shareable(request.arms, alone, conditions)
    if budget:
        memory = f"{budget / MIB:.0f} MiB ({size / budget:.1f}x oversubscribed)"
    else:
        available = limits.available_memory()
        memory = f"none, {available.bytes / MIB:.0f} MiB available ({available.source})"
    note(
        f"{shown(layout.shards[0].path.name)}: {size / MIB:.0f} MiB, budget {memory}, "
        + f"{len(names)} arms ({', '.join(names)}) x {_extent(conditions)}, "
        + f"{conditions.n_threads} threads, read-ahead {facts.storage.read_ahead_kb} KiB"
    )
    if dry_run:
        for step in plan.order(names, conditions.blocks or 2):
            note(f"block {step.block}: {step.arm}")
        return None

    # servers are greeted before anything is installed or loaded; with them every arm is of the wheel that can use them
    distributed = [rpc_arm(request.rpc, pin, series, home, nbytes=_sent_bytes(layout))] if request.rpc else []
    named = arms_by_name(request.arms, pin, series, home, backend=RPC if request.rpc else request.backend)
    arms = [
        *named,
        *(dataclasses.replace(named[0], name=name) for name in _again(request)),
        *distributed,
        *(arm_of_wheel(name, wheel, settings, home) for name, wheel, settings in request.custom),
    ]
    slowed = dict(request.injected_slowdown)
    arms = [dataclasses.replace(arm, injected_slowdown_percent=slowed.get(arm.name, 0.0)) for arm in arms]
    tokens = _tokens(request, layout, conditions, arms[0])
    header = head.make(
        layout, arms, tokens, conditions, facts, pin=pin.commit, series=series.digest, command=request.command
    )
    out = request.out or _default_out(header)
    run(layout, arms, tokens, conditions, out, header, on_run=on_run, trace=request.trace)
    return out


def _again(request: Request) -> list[str]:
    """Name of the first arm's second copy in an A/A run."""
    return [f"{request.arms[0]}-2"] if request.aa and request.arms else []


def _sent_bytes(layout: ModelLayout) -> int:
    """Least bytes that servers need: the token embedding stays where the tokens are; 0 for unknown types."""
    return layout.nbytes(Access.ALWAYS_USED, Access.ROUTED) or 0


def _extent(conditions: Conditions) -> str:
    if conditions.blocks is not None:
        return f"{conditions.blocks} blocks"
    return f"as many blocks as {conditions.minutes:.4g} minutes hold, {conditions.pause_s:.4g} s between runs"


def _tokens(request: Request, layout: ModelLayout, conditions: Conditions, arm: Arm) -> Tokens:
    if "moe_madv.tokens" in layout.shards[0].header.metadata and request.prompt_file is None:
        found = prescription(layout.shards[0].path)
        return forced.prescribed(found, request.n_prompt, request.n_gen, request.n_depth)
    job = job_of(layout, conditions, request.n_depth + request.n_prompt + request.n_gen)
    with limits.memory_budget(None) as unlimited:
        return forced.from_text(
            arm, job, unlimited, request.n_prompt, request.n_gen, request.prompt_file, request.n_depth
        )


def _default_out(header: dict[str, Any]) -> Path:
    """results/<machine>/<date>-<model>-<arms>.jsonl: the unfinished file of the same plan, or a new one."""
    folder = Path("results") / header["machine"]["name"]
    name = f"{Path(header['model']['filename']).stem}-{'-'.join(header['plan']['arms'])}"
    for path in sorted(folder.glob(f"*-{glob.escape(name)}*.jsonl")):
        try:
            (found,) = results.read([path])
        except ResultsError:
            continue  # not ours to continue
        total = head.total_runs(header)
        if not head.differences(found.header, header) and (total is None or len(results.finished(found)) < total):
            return path
    stem = f"{header['created'][:10]}-{name}"
    names = itertools.chain([stem], (f"{stem}-{n}" for n in itertools.count(2)))
    return next(path for path in (folder / f"{name}.jsonl" for name in names) if not path.exists())
