"""What every reproduced experiment starts with: a model, room for it, and arms that can run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit import config, results
from toolkit.bench import header as head
from toolkit.bench import launch, limits, machine, plan
from toolkit.bench.plan import STOCK, Arm, Conditions, Tokens
from toolkit.bench.run import run
from toolkit.bench.select import arms_by_name
from toolkit.console import GIB, byte_progress, note
from toolkit.doctor.predict import PROCESS_BYTES
from toolkit.errors import BenchError, MachineError
from toolkit.model.arch import deepseek4
from toolkit.model.layout import Access, ModelLayout, read_model
from toolkit.model.shape import routing
from toolkit.model.synth import Synth
from toolkit.model.text import shown
from toolkit.model.vocab import fetched_vocabulary
from toolkit.patch.series import load_series
from toolkit.patch.upstream import load_pin
from toolkit.process import run as run_process
from toolkit.reproduce.published import load

OVERSUBSCRIPTION = 2.2  # of the published experiment: 139.91 GiB on 64 GB
SCALE = 64  # of the model that is made when none is given
_SEED = 0
_SOURCE_KEYS = ("general.source.url", "general.source.repo_url", "general.repo_url", "general.url")  # of GGUF

# Run by an arm's own interpreter: the modes its payload knows.
_MODES = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("llama_api", sys.argv[1])
api = importlib.util.module_from_spec(spec)
spec.loader.exec_module(api)
print(json.dumps(api.Payload().modes()))
"""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a real model file comes from, as far as the caller knows; recorded, not verified."""

    source: str | None = None
    revision: str | None = None
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Options:
    """An experiment as asked for."""

    model: Path | None  # None: the scaled DeepSeek-V4-Flash is made
    scale: int
    arms: tuple[str, ...] | None  # None: those the experiment is about, as far as the wheel has them
    blocks: int
    threads: int | None
    budget: str | None  # None: model size over `oversubscribe`
    oversubscribe: float
    out: Path | None  # folder of the results files and of the report; None: results/<machine>, no report
    origin: Origin
    dry_run: bool
    command: str | None = None  # for the record


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A checked experiment: everything `measure` needs beside the tokens."""

    layout: ModelLayout
    arms: tuple[Arm, ...]
    conditions: Conditions
    facts: machine.MachineFacts
    out: Path
    stem: str  # what the names of all its files start with
    wants_report: bool
    origin: Origin
    command: str | None = None

    @property
    def report(self) -> Path | None:
        """Where the report goes; None when none was asked for."""
        return self.file(".md") if self.wants_report else None

    def file(self, ending: str) -> Path:
        """A file of this experiment; one folder can hold those of several."""
        return self.out / f"{self.stem}{ending}"

    @property
    def arm_names(self) -> list[str]:
        return [arm.name for arm in self.arms]


def prepare(options: Options, name: str, wanted: Sequence[str], needed: Sequence[str]) -> Setup | None:
    """Model, preflight and arms of experiment `name`; None after a dry run.

    The arms are `wanted` without the modes that the wheel lacks, unless the caller asked for others; those in
    `needed` must be there. Raises BenchError or MachineError when the experiment cannot run here.
    """
    if options.model is not None:
        require_file(options.model, load(name).figures.get("model"))
    names = list(options.arms or wanted)
    require_modes(names if options.arms else needed, plan.MODES, "this version of the toolkit")
    path = options.model or make_model(options.scale, write=not options.dry_run)
    if not path.exists() and options.model is None:
        return None  # dry run: said what would be made
    layout = read_model(path)
    facts = machine.facts(layout.shards[0].path)
    conditions = Conditions(
        blocks=options.blocks,
        n_batch=2048,
        n_ubatch=512,
        cold=True,
        n_threads=options.threads or facts.usable_cores,
        budget_bytes=budget_of(layout, options.budget, options.oversubscribe),
    )
    preflight(layout, conditions, facts)
    note(f"{name}: {', '.join(names)} x {options.blocks} repeats on {shown(layout.shards[0].path.name)}")
    if options.dry_run:
        return None
    arms = arms_by_name(names, load_pin(), load_series(config.patches_dir()), config.home())
    if patched := next((arm for arm in arms if arm.mode is not None), None):
        known = wheel_modes(patched)
        require_modes(names if options.arms else needed, known, f"the wheel {patched.label}")
        if lacking := [arm.name for arm in arms if arm.mode is not None and arm.mode not in known]:
            note(f"left out, the wheel {patched.label} has no such mode: {', '.join(lacking)}")
        arms = [arm for arm in arms if arm.mode is None or arm.mode in known]
    return Setup(
        layout=layout,
        arms=tuple(arms),
        conditions=conditions,
        facts=facts,
        out=options.out or Path("results") / facts.name,
        stem=f"reproduce-{name}-{Path(layout.shards[0].path.name).stem}",
        wants_report=options.out is not None,
        origin=options.origin,
        command=options.command,
    )


def measure(setup: Setup, tokens: Tokens, part: str, **changes: Any) -> results.RunData:
    """Run all arms along these tokens into a results file of the experiment, continuing what is there.

    `changes` replace conditions of this one file.
    """
    conditions = replace(setup.conditions, **changes)
    pin, series = load_pin(), load_series(config.patches_dir())
    header = head.make(
        setup.layout,
        setup.arms,
        tokens,
        conditions,
        setup.facts,
        pin=pin.commit,
        series=series.digest,
        command=setup.command,
    )
    header["plan"]["n_ctx"] = launch.job_of(setup.layout, conditions, len(tokens.all))["n_ctx"]
    header["model"] |= {key: value for key, value in asdict(setup.origin).items() if value is not None}
    path = setup.file(f"-{part}.jsonl")
    note(f"{path}: {', '.join(header['plan']['tests'])}")
    run(setup.layout, setup.arms, tokens, conditions, path, header)
    return results.read([path])[0]


def make_model(scale: int, *, write: bool) -> Path:
    """The scaled DeepSeek-V4-Flash in the cache, made if it is not there; with `write` False only told."""
    preset = f"deepseek-v4-flash 1/{scale}"
    path = config.home() / "models" / f"deepseek-v4-flash-{scale}.gguf"
    shape, trace = routing(deepseek4.flash(scale), None, _SEED)
    made = Synth(shape, trace, vocab=fetched_vocabulary(), seed=_SEED, preset=preset)
    note(f"{path}: {made.nbytes / GIB:.2f} GiB, {shape.layers} layers of {shape.experts} experts, top {shape.top_k}")
    if write:
        with byte_progress() as progress:
            task = progress.add_task(path.name, total=made.nbytes)
            made.write(path, force=False, advance=lambda n: progress.advance(task, n))
    return path


def _stated(origin: Origin, layout: ModelLayout) -> Origin:
    """The origin as given; a source that only the file itself names stands in for a missing one."""
    metadata = layout.shards[0].header.metadata
    named = next((value for key in _SOURCE_KEYS if isinstance(value := metadata.get(key), str)), None)
    return replace(origin, source=origin.source or named)


def budget_of(layout: ModelLayout, budget: str | None, oversubscribe: float) -> int:
    """Bytes of the memory budget: as given, or the size of all files over the oversubscription."""
    if budget is not None:
        return limits.parse_size(budget)
    return int(sum(shard.path.stat().st_size for shard in layout.shards) / oversubscribe)


def require_file(path: Path, published: Mapping[str, Any] | None) -> None:
    """MachineError unless there is a file; for the published one with its source and the room that it needs."""
    if path.exists():
        return
    if published is None:
        raise MachineError("there is no such model file", where=path, hint="leave --model out for the scaled model")
    folder = next(parent for parent in path.resolve().parents if parent.exists())
    size, free = published["size"], shutil.disk_usage(folder).free
    room = f"{free / GIB:.2f} GiB are free in {shown(str(folder))}"
    if free < size:
        room += f", {(size - free) / GIB:.2f} GiB too few"
    raise MachineError(
        f"there is no such model file; the published one has {size / GIB:.2f} GiB, {room}",
        where=path,
        hint=f"fetch {published['source']} at {published['revision']}, or leave --model out for the scaled model",
    )


def preflight(layout: ModelLayout, conditions: Conditions, facts: machine.MachineFacts) -> None:
    """Say what the machine will do to the experiment; MachineError with all that is missing when it cannot run."""
    where = layout.shards[0].path
    size = sum(shard.path.stat().st_size for shard in layout.shards)
    budget, available = conditions.budget_bytes or 0, limits.available_memory()
    if missing := lacking(size, layout.nbytes(Access.ALWAYS_USED) or 0, budget, available):
        raise MachineError("\n".join(["this cannot run here:", *missing[:-1]]), where=where, hint=missing[-1])
    for text in machine.warnings(facts):
        note(f"warning: {text}")
    storage = facts.storage
    note(
        f"{shown(where.name)}: {size / GIB:.2f} GiB on {storage.filesystem}, read-ahead {storage.read_ahead_kb} KiB; "
        f"budget {budget / GIB:.2f} GiB ({size / budget:.1f}x), {available.bytes / GIB:.1f} GiB available"
    )


def lacking(size: int, always: int, budget: int, available: limits.Available) -> list[str]:
    """What keeps a model of `size` bytes from running in `budget`, and at last what to do; empty when nothing does.

    `always`: bytes that every token reads. Beside them a run needs memory for the process and its context.
    """
    found = []
    least = -(-(always + max(always // 2, PROCESS_BYTES)) >> 20) << 20
    if budget > available.bytes:
        found.append(
            f"- memory: the budget is {budget / GIB:.2f} GiB, {available.bytes / GIB:.2f} GiB are available "
            f"({available.source}): {(budget - available.bytes) / GIB:.2f} GiB are missing"
        )
    if always + PROCESS_BYTES > budget:
        found.append(
            f"- budget: {budget / GIB:.2f} GiB do not hold the always used weights, {always / GIB:.2f} GiB, "
            f"and a process: {(least - budget) / GIB:.2f} GiB are missing for these and a context"
        )
    if not found:
        return []
    if least > available.bytes:
        return [*found, f"a machine with {least / GIB:.1f} GiB of memory or more, or --scale for a smaller model"]
    fits = least if always + PROCESS_BYTES > budget else available.bytes * 9 // 10 >> 20 << 20
    if size < fits:
        return [*found, f"--budget {fits >> 20}MiB and a larger model: this one fits in there"]
    return [*found, f"--budget {fits >> 20}MiB, where the model is {size / fits:.1f} times as large; or more memory"]


def wheel_modes(arm: Arm) -> list[str]:
    """Names of the modes that the arm's payload has."""
    api = Path(launch.__file__).with_name("llama_api.py")
    found: list[str] = json.loads(run_process([arm.python, "-I", "-c", _MODES, api]).stdout)
    return found


def require_modes(names: Sequence[str], known: Sequence[str], what: str) -> None:
    """BenchError unless every arm is stock or a known mode."""
    if lacking := [name for name in names if name not in (STOCK, *known)]:
        raise BenchError(
            f"{what} has no mode {', '.join(lacking)}; it has {', '.join(known)}",
            hint="moe-madv patch apply && moe-madv build --backend cpu --arm both, or other --arms",
        )
