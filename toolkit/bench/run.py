"""The whole of `bench run`: header, checks, then one fresh process per step, every row on disk as it comes."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from toolkit import results, stats
from toolkit.bench import check, limits, machine, pagecache, plan, storage
from toolkit.bench import header as head
from toolkit.bench.launch import Outcome, job_of, launch
from toolkit.bench.plan import Arm, Conditions, Tokens
from toolkit.console import MIB, note
from toolkit.errors import BenchError, ResultsError
from toolkit.files import write_text
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
) -> None:
    """Measure all arms into the results file `out`, continuing it when it holds the same plan.

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
    if total is not None and len(done) >= total:
        note(f"{out} is complete: all {conditions.blocks} blocks are there")
        return
    write_text(out.with_name("machine.json"), json.dumps(header["machine"], indent=2) + "\n")

    with results.Writer(out, header, resume=out.exists()) as writer:
        if not checked:
            checked = _check(layout, arms, tokens, job, header["run_id"])
            writer.write(*checked)
        for row in checked:
            note(f"check  {row['arm']:<8} {row['text']}")
        if not checked[0]["outputs_equal"]:
            raise BenchError(f"the baseline's output is not usable: {checked[0]['text']}", where=paths[0])
        needed = {test: checked[0]["needed_bytes"].get(test) for test in header["plan"]["tests"]}
        compute_ms = checked[0]["decode_ms"] if checked[0]["decode_read_bytes"] == 0 else None
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
            evicted = pagecache.evict(paths) if conditions.cold else None
            with limits.memory_budget(conditions.budget_bytes, method=method) as budget:
                outcome = launch(by_name[step.arm], {**job, **_split(tokens), "tokens": tokens.all}, budget)
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
                "cold": evicted.cold if evicted else False,
                "why_warm": evicted.why_warm if evicted else "page cache left as it was",
                "resident_share": _share(evicted),
                "budget_bytes": budget.nbytes,
                "budget_method": budget.method,
                "effective_budget_bytes": outcome.effective_budget,
                "peak_memory": stat["peak_bytes"],
                "refaults": stat["refault_file_pages"],
                "read_ahead_kb": machine.facts(paths[0]).storage.read_ahead_kb,
                "disk_mib_s": disk_mib_s,
            }
            rows = _samples(common, header["plan"]["tests"], outcome, tokens, needed, compute_ms)
            writer.write(*rows)
            samples += rows
            note(f"[{step.position + 1}{'' if total is None else f'/{total}'}] {step.arm:<8} {_line(rows)}")
            on_run(samples, rows)


def _split(tokens: Tokens) -> dict[str, int]:
    return {"n_depth": len(tokens.depth), "n_prompt": len(tokens.prompt)}


def _share(evicted: pagecache.EvictResult | None) -> float | None:
    if evicted is None or evicted.resident_after is None:
        return None
    return evicted.resident_after / max(evicted.total, 1)


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


def _check(
    layout: ModelLayout, arms: Sequence[Arm], tokens: Tokens, job: dict[str, Any], run_id: str
) -> list[dict[str, Any]]:
    """Check rows of all arms; the baseline's also holds what a real run needed to read per test."""
    job = {**job, **_split(tokens)}
    with limits.memory_budget(None) as unlimited:
        note("check  expert selection of the baseline")
        blocks = [layer.block for layer in layout.layers]
        top_k = max((layer.top_k for layer in layout.layers), default=0)
        experts = check.trace_experts(arms[0], tokens, job, unlimited, blocks, top_k)
        rows = check.check_arms(arms, tokens, job, unlimited)

    first, start = len(tokens.depth), len(tokens.depth) + len(tokens.prompt)
    spans = {"pp": experts[first:start], "tg": experts[start:]}
    tests = plan.test_names(len(tokens.prompt), len(tokens.gen), len(tokens.depth))
    rows[0]["needed_bytes"] = {test: needed_bytes(layout, spans[test[:2]]) for test in tests}
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
    compute_ms: float | None,
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
                "n_prompt": 0 if is_decode else len(tokens.prompt),
                "n_gen": len(tokens.gen) if is_decode else 0,
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
                "logits_sha256": test["logits_sha256"],
                "hints": test["hints"],
                **({"timeline": test["timeline"]} if test["timeline"] else {}),
                "token_counters": test["token_counters"],
                "wire_bytes": test["wire_bytes"],
                "wire_bytes_per_token": None if test["wire_bytes"] is None else test["wire_bytes"] / n,
                "compute_ms_per_token": compute_ms if is_decode else None,
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
