"""The whole of `bench run`: header, checks, then a process per step or one for all, every row on disk as it comes."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from toolkit import results, stats
from toolkit.bench import check, limits, machine, pagecache, plan, sensors, storage
from toolkit.bench import header as head
from toolkit.bench.disk import storage_of
from toolkit.bench.launch import Outcome, job_of, launch
from toolkit.bench.limits import Budget
from toolkit.bench.plan import Arm, Conditions, Tokens
from toolkit.bench.prewarm import prewarm
from toolkit.bench.sampler import Watch
from toolkit.bench.shared import SharedProcess
from toolkit.console import MIB, note
from toolkit.errors import BenchError, ResultsError
from toolkit.files import write_text
from toolkit.model import trace as traces
from toolkit.model.layout import ModelLayout, needed_bytes

# Called after every run with all samples of the file so far, and those of this run.
OnRun = Callable[[Sequence[results.Row], Sequence[results.Row]], None]


def run(
    layout: ModelLayout,
    arms: Sequence[Arm],
    tokens: Tokens,
    conditions: Conditions,
    out: Path,
    header: dict[str, Any],
    *,
    on_run: OnRun = lambda *_: None,
    trace: Path | None = None,
) -> None:
    """Measure all arms into the results file `out`, continuing it when it holds the same plan.

    With `trace`, the experts that the baseline's tokens select are written there, before anything is timed.
    Raises BenchError when outputs cannot be checked or a budget is not enforced, ResultsError when `out` holds
    another run.
    """
    paths = [shard.path for shard in layout.shards]
    method = limits.detect()
    if conditions.budget_bytes is not None:
        if method.name == "none":
            note(f"warning: no memory budget is possible here ({method.why}); rows say so")
        else:
            limits.prove_enforced(method)
    job = job_of(layout, conditions, len(tokens.all))
    found = _found(out, header)
    header = found.header if found else header
    done = results.finished(found) if found else set()
    samples = [row for row in found.samples if (row["block"], row["position"]) in done] if found else []
    # a kill inside the check rows leaves some of them: all are made again then
    checked = list(found.checks) if found and len(found.checks) == len(arms) else []
    total = head.total_runs(header)
    if trace is not None and trace.exists() and not checked:
        raise BenchError("the file exists", where=trace, hint="give another name, or remove it")
    untraced = trace is not None and not trace.exists()
    if total is not None and len(done) >= total and not untraced:
        note(f"{out} is complete: all {conditions.blocks} blocks are there")
        return
    write_text(out.with_name("machine.json"), json.dumps(header["machine"], indent=2) + "\n")

    place = storage_of(paths[0])
    work = {**job, **_split(tokens), "tokens": tokens.all}
    with (
        results.Writer(out, header, resume=out.exists()) as writer,
        sensors.sensors(place) as sensed,
        _measuring(arms, work, conditions) as measure,
    ):
        if not checked or untraced:
            experts = _selected(layout, arms[0], tokens, job)
        if not checked:
            checked = _check(layout, arms, tokens, job, experts, header["run_id"])
            writer.write(*checked)
        if trace is not None and untraced:
            _write_trace(trace, layout, experts, tokens)
        for row in checked:
            note(f"check  {row['arm']:<8} {row['text']}")
        if not checked[0]["outputs_equal"]:
            raise BenchError(f"the baseline's output is not usable: {checked[0]['text']}", where=paths[0])
        needed = {test: checked[0]["needed_bytes"].get(test) for test in header["plan"]["tests"]}
        compute_ms = {test: check.compute_ms(checked[0], test) for test in needed}
        disk_mib_s = storage.random_read_mib_s(paths[0])

        by_name = {arm.name: arm for arm in arms}
        # a number of blocks is reached by repeating the command, a time by adding up what its calls took
        earlier_s = max((row.get("elapsed_s") or 0.0 for row in samples), default=0.0)
        started = time.monotonic()
        names = list(by_name)
        steps = plan.endless(names) if conditions.blocks is None else plan.order(names, conditions.blocks)
        for n, step in enumerate(s for s in steps if (s.block, s.position) not in done):
            here_s = time.monotonic() - started
            elapsed = (here_s if total is not None else earlier_s + here_s) / 60
            new_block = step.position % len(arms) == 0 and step.block >= stats.MIN_VERDICT_BLOCKS
            if conditions.minutes is not None and new_block and elapsed >= conditions.minutes:
                more = "" if total is not None else " with more time"
                note(f"stopped after {elapsed:.1f} minutes and {step.block} blocks; the same command{more} continues")
                break
            if n > 0:
                time.sleep(conditions.pause_s)
            cache = _cache_state(paths, conditions)
            power_before = sensors.power_mode()
            with limits.memory_budget(conditions.budget_bytes, method=method) as budget, Watch(sensed) as watch:
                warmed = by_name[step.arm].prewarm
                prewarm_s = prewarm(warmed, budget) if warmed else None
                outcome = measure(by_name[step.arm], budget, watch.mark)
                stat = budget.stat()
            common = {
                "kind": "sample",
                "run_id": header["run_id"],
                "block": step.block,
                "position": step.position,
                "arm": step.arm,
                "test_time": head.now(),
                "model_filename": header["model"]["filename"],
                "model_size": header["model"]["size"],
                "n_threads": conditions.n_threads,
                "n_batch": conditions.n_batch,
                "n_ubatch": conditions.n_ubatch,
                "n_depth": len(tokens.depth),
                "elapsed_s": earlier_s + time.monotonic() - started,
                "process": "shared" if conditions.one_process else "fresh",
                **_injected(by_name[step.arm]),
                **cache,
                **({} if prewarm_s is None else {"prewarm_s": prewarm_s}),
                "budget_bytes": budget.nbytes,
                "budget_method": budget.method,
                "effective_budget_bytes": outcome.effective_budget,
                "peak_memory": stat["peak_bytes"],
                "refaults": stat["refault_file_pages"],
                "read_ahead_kb": machine.facts(paths[0]).storage.read_ahead_kb,
                "disk_mib_s": disk_mib_s,
                "power_before": power_before,
                "power_after": sensors.power_mode(),
                "minutes": conditions.minutes,
                "pause_s": conditions.pause_s,
            }
            rows = _samples(common, header["plan"]["tests"], outcome, tokens, needed, compute_ms)
            for row in rows:
                row["observed"] = watch.observed(row["test"], row.get("avg_ns", 0) / 1e9, series=conditions.series)
            writer.write(*rows)
            samples += rows
            note(f"[{step.position + 1}{'' if total is None else f'/{total}'}] {step.arm:<8} {_line(rows)}")
            on_run(samples, rows)


def _split(tokens: Tokens) -> dict[str, Any]:
    further = [[len(prompt), len(gen)] for prompt, gen in tokens.further]
    return {"n_depth": len(tokens.depth), "n_prompt": len(tokens.prompt), "further": further}


@contextlib.contextmanager
def _measuring(
    arms: Sequence[Arm], work: dict[str, Any], conditions: Conditions
) -> Iterator[Callable[[Arm, Budget, Callable[[str], None]], Outcome]]:
    """What measures one arm once; it is called with the arm, its budget, and whom to tell of each finished test."""
    if conditions.one_process:
        with limits.memory_budget(None) as unlimited, SharedProcess(arms, work, unlimited) as shared:
            yield lambda arm, _, on_test: shared.measure(arm, on_test)
    else:
        yield lambda arm, budget, on_test: launch(arm, {**work, **_injected(arm)}, budget, on_test)


def _injected(arm: Arm) -> dict[str, float]:
    percent = arm.injected_slowdown_percent
    return {"injected_slowdown_percent": percent} if percent else {}


def _cache_state(paths: Sequence[Path], conditions: Conditions) -> dict[str, Any]:
    """How much of the model is in the page cache as a run begins, evicted first if that is planned.

    The first run after somebody else dropped the cache is cold, whatever was planned; not so in a shared process,
    which warms up before it measures.
    """
    if conditions.cold:
        evicted = pagecache.evict(paths)
        after = evicted.resident_after
        share = None if after is None else after / max(evicted.total, 1)
        return {"cold": evicted.cold, "why_warm": evicted.why_warm, "resident_share": share}
    share = pagecache.residency(*paths).fraction
    cold = share is not None and share <= pagecache.COLD_SHARE and not conditions.one_process
    return {"cold": cold, "why_warm": None if cold else "page cache left as it was", "resident_share": share}


def _found(out: Path, header: dict[str, Any]) -> results.RunData | None:
    """What `out` holds of this plan already."""
    if not out.exists() or out.stat().st_size == 0:
        return None
    (found,) = results.read([out])
    if different := head.differences(found.header, header):
        raise ResultsError(
            f"the file holds a run with another {', '.join(different)}",
            where=out,
            hint="choose another --out, or repeat the command that made the file",
        )
    total = head.total_runs(header)
    note(f"continuing {out}: {len(results.finished(found))}{'' if total is None else f' of {total}'} runs are there")
    return found


def _selected(layout: ModelLayout, arm: Arm, tokens: Tokens, job: dict[str, Any]) -> np.ndarray:
    """Expert ids [token, decode layer, k] of a run of its own: watching a graph makes it slower."""
    note("check  expert selection of the baseline")
    blocks = [layer.block for layer in layout.layers]
    top_k = max((layer.top_k for layer in layout.layers), default=0)
    with limits.memory_budget(None) as unlimited:
        return check.trace_experts(arm, tokens, {**job, **_split(tokens)}, unlimited, blocks, top_k)


def _write_trace(path: Path, layout: ModelLayout, experts: np.ndarray, tokens: Tokens) -> None:
    """The tokens of the first prompt and decode: a trace has one of each, and what is before them is not watched."""
    first, n_prompt = len(tokens.depth), len(tokens.prompt)
    last = first + n_prompt + len(tokens.gen)
    found = traces.of_run(layout, experts[first:last], tokens.all[first:last], n_prompt=n_prompt, where=path)
    traces.write(found, path)
    note(f"wrote {path}")


def _check(
    layout: ModelLayout,
    arms: Sequence[Arm],
    tokens: Tokens,
    job: dict[str, Any],
    experts: np.ndarray,
    run_id: str,
) -> list[dict[str, Any]]:
    """Check rows of all arms; the baseline's also holds what a run with these experts needed to read per test."""
    with limits.memory_budget(None) as unlimited:
        rows = check.check_arms(arms, tokens, {**job, **_split(tokens)}, unlimited)

    rows[0]["needed_bytes"] = {
        test: needed_bytes(layout, experts[span.first : span.end]) for test, span in tokens.spans.items()
    }
    if tokens.experts is not None:
        rows[0]["experts_match"] = check.matches_prescription(experts, tokens.experts)
        same = "the prescribed ones" if rows[0]["experts_match"] else "NOT the prescribed ones"
        rows[0]["text"] = f"experts selected are {same}"
    else:
        rows[0]["text"] = "baseline"
    return [{"kind": "check", "run_id": run_id, **row} for row in rows]


def _samples(
    common: dict[str, Any],
    planned: Sequence[str],
    outcome: Outcome,
    tokens: Tokens,
    needed: dict[str, int | None],
    compute_ms: dict[str, float | None],
) -> list[dict[str, Any]]:
    rows = []
    for test in outcome.tests:
        is_decode = test["test"].startswith("tg")
        n = sum(test["n_tokens"])
        ns = test["ns"]
        token_ms = [x / 1e6 for x in ns]
        per_token = [1e9 * k / x for k, x in zip(test["n_tokens"], ns, strict=True)]
        read, want = test["read_bytes"], needed[test["test"]]
        failed = outcome.reason if outcome.reason else None if test["logits_finite"] else "logits are not finite"
        rows.append(
            common
            | {
                "test": test["test"],
                "status": "failed" if failed else "ok",
                "reason": failed,
                "n_prompt": 0 if is_decode else n,
                "n_gen": n if is_decode else 0,
                "n_depth": tokens.spans[test["test"]].depth,
                "avg_ns": sum(ns),
                "avg_ts": 1e9 * n / sum(ns),
                "stddev_ts": statistics.stdev(per_token) if len(per_token) > 1 else 0.0,
                "samples_ns": [sum(ns)],
                "token_ms": token_ms,
                "p50_ms": float(np.percentile(token_ms, 50)) if is_decode else None,
                "p95_ms": float(np.percentile(token_ms, 95)) if is_decode else None,
                "read_bytes": read,
                "mib_per_token": None if read is None else read / MIB / n,
                "needed_bytes": want,
                "read_amplification": read / want if read is not None and want else None,
                "major_faults": test["major_faults"],
                "minor_faults": test["minor_faults"],
                "cpu_s": test["cpu_s"],
                "io_wait_s": test.get("io_wait_s"),
                "io_wait_why": test.get("io_wait_why"),
                **({"injected_ns": test["injected_ns"]} if test.get("injected_ns") else {}),
                "logits_sha256": test["logits_sha256"],
                "hints": test["hints"],
                **({"timeline": test["timeline"]} if test["timeline"] else {}),
                "token_counters": test["token_counters"],
                "wire_bytes": test["wire_bytes"],
                "wire_bytes_per_token": None if test["wire_bytes"] is None else test["wire_bytes"] / n,
                "compute_ms_per_token": compute_ms[test["test"]],
                "load_s": outcome.loaded["load_s"] if outcome.loaded else None,
                "load_read_bytes": outcome.loaded["load_read_bytes"] if outcome.loaded else None,
                "load_hints": outcome.loaded["hints"] if outcome.loaded else None,
                "buffers": outcome.loaded["buffers"] if outcome.loaded else None,
            }
        )
    missing = [name for name in planned if name not in {row["test"] for row in rows}]
    reason = outcome.reason or "the worker left the test out"
    rows += [common | {"test": name, "status": "failed", "reason": reason} for name in missing]
    return rows


def _line(rows: Sequence[dict[str, Any]]) -> str:
    parts = []
    for row in rows:
        if row["status"] == "ok":
            mib = "" if row["mib_per_token"] is None else f", {row['mib_per_token']:.0f} MiB/token"
            parts.append(f"{row['test']} {row['avg_ts']:.2f} t/s{mib}")
        else:
            parts.append(f"{row['test']} failed: {row['reason'].splitlines()[0]}")
    return " · ".join(parts)
