"""Results files in llama-bench's formats: its fields first, ours after, so that its tools read them.

One row per run, arm and test, as llama-bench writes one per test; a repetition is one fresh process. Its
tools tell builds apart by `build_commit` and cut all of them to the shortest, so an arm's name stands there
behind the pin, filled up to one length.
"""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from toolkit.console import GIB
from toolkit.errors import ResultsError
from toolkit.evidence import doubts
from toolkit.evidence.compare import outputs_of, tokens
from toolkit.evidence.findings import Sample, average, samples
from toolkit.evidence.llama_bench import BOOL, CONFIGURATION, FIELDS, INT, REAL, SAMPLES, TEXT, test_name
from toolkit.evidence.report import markdown_table, number
from toolkit.results import Row, RunData, facts, injected_slowdown_percent, machine_facts
from toolkit.stats import mean, outliers, sample_sd

# What every run here sets, or leaves at the default that llama-bench shows; a row's own field comes first.
_SET: Row = {
    "build_number": 0,
    "gpu_info": "",
    "backends": "CPU",
    "cpu_mask": "0x0",
    "cpu_strict": False,
    "poll": 50,
    "type_k": "f16",
    "type_v": "f16",
    "n_gpu_layers": 0,
    "n_cpu_moe": 0,
    "split_mode": "layer",
    "main_gpu": 0,
    "no_kv_offload": False,
    "flash_attn": 0,
    "devices": "auto",
    "tensor_split": "0.00",
    "tensor_buft_overrides": "none",
    "load_mode": "mmap",
    "lazy_mode": "auto",
    "embeddings": False,
    "no_op_offload": 0,
    "no_host": False,
    "repack": False,
    "fit_target": 0,
    "fit_min_ctx": 0,
}

# Ours, behind llama-bench's.
OURS: dict[str, type] = {
    "arm": TEXT,
    "run_id": TEXT,
    "label": TEXT,
    "wheel_sha256": TEXT,
    "mode": TEXT,
    "series": TEXT,
    "toolkit_version": TEXT,
    "n_samples": INT,
    "n_failed": INT,
    "n_outliers": INT,
    "outputs_equal": BOOL,
    "injected_slowdown_percent": REAL,
    "process": TEXT,
    "cold": BOOL,
    "budget_bytes": INT,
    "budget_method": TEXT,
    "machine": TEXT,
    "kernel": TEXT,
    "device": TEXT,
    "filesystem": TEXT,
    "read_ahead_kb": INT,
    "disk_mib_s": REAL,
    "p50_ms": REAL,
    "p95_ms": REAL,
    "mib_per_token": REAL,
    "read_amplification": REAL,
    "major_faults_per_token": REAL,
}


def rows(runs: Sequence[RunData]) -> list[Row]:
    """One row per run, arm and test with a finished sample; those apart from the plan are left out, as in `compare`.

    `model_size` is the size of the file (llama-bench: of its tensors), and null stands for what is not known.
    """
    commits = _commits(runs)
    found = [
        _row(run, arm, test, kept, failed, commits[run.run_id, arm])
        for run in runs
        for test in dict.fromkeys(s["test"] for s in run.samples)
        for arm in dict.fromkeys(s["arm"] for s in run.samples)
        for kept, failed in [_kept(run, arm, test)]
        if kept
    ]
    if not found:
        raise ResultsError("nothing to export: no sample is finished", where=", ".join(str(r.path) for r in runs))
    return found


def _kept(run: RunData, arm: str, test: str) -> tuple[list[Sample], list[Sample]]:
    found = samples([run], arm, test)
    kept, _, _ = doubts.planned_state([s for s in found if s.row["status"] == "ok"])
    return kept, [s for s in found if s.row["status"] == "failed"]


def _commits(runs: Sequence[RunData]) -> dict[tuple[str, str], str]:
    """`0c1e57098+hint=` by run and arm: of one length, and without a character that SQL or a shell would read."""

    def name(run: RunData, arm: str) -> str:
        slowed = "" if injected_slowdown_percent(run.header, arm) is None else "-slowed-on-purpose"
        return f"{str(run.header.get('pin', 'unknown'))[:9]}+{quote(arm, safe='')}{slowed}"

    names = {(run.run_id, arm): name(run, arm) for run in runs for arm in dict.fromkeys(s["arm"] for s in run.samples)}
    width = max((len(name) for name in names.values()), default=0)
    return {key: name.ljust(width, "=") for key, name in names.items()}


def _row(run: RunData, arm: str, test: str, kept: Sequence[Sample], failed: Sequence[Sample], commit: str) -> Row:
    header = run.header
    model, plan, machine, build = header["model"], header["plan"], machine_facts(header), header["arms"].get(arm, {})
    last = kept[-1].row
    known: Row = {
        **_SET,
        "cpu_info": machine.get("cpu") or "unknown",
        "model_filename": model.get("filename", "unknown"),
        "model_type": model.get("architecture", "unknown"),
        "model_size": model.get("size"),
        "model_n_params": model.get("n_params"),
        **{name: plan[name] for name in CONFIGURATION if plan.get(name) is not None},
        **{name: last[name] for name in CONFIGURATION if last.get(name) is not None},
        "build_commit": commit,
    }
    n = tokens(test)
    ts = [float(s.row["avg_ts"]) for s in kept]
    ns = [round(1e9 * n / speed) for speed in ts]
    sizes = re.match(r"(?:pp(\d+))?\+?(?:tg(\d+))?(?: @ d(\d+))?", test)
    n_prompt, n_gen, n_depth = (int(x) for x in sizes.groups(default="0")) if sizes else (0, 0, 0)
    measured = {
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "n_depth": n_depth,
        "test_time": str(last.get("test_time", header["created"])),
        "avg_ns": sum(ns) // len(ns),
        "stddev_ns": int(statistics.stdev(ns)) if len(ns) > 1 else 0,
        "avg_ts": mean(ts),
        "stddev_ts": sample_sd(ts) or 0.0,
    }
    faults = average(kept, "major_faults")
    ours = {
        "arm": arm,
        "run_id": run.run_id,
        "label": build.get("label"),
        "wheel_sha256": build.get("wheel_sha256"),
        "mode": build.get("mode"),
        "series": header.get("series"),
        "toolkit_version": header.get("toolkit_version"),
        "n_samples": len(ts),
        "n_failed": len(failed),
        "n_outliers": len(outliers(ts)),
        "outputs_equal": _outputs_equal(run, arm, test, kept, failed),
        "injected_slowdown_percent": injected_slowdown_percent(header, arm),
        "process": facts(run, last).get("process"),
        "cold": kept[-1].cold,
        "budget_bytes": plan.get("budget_bytes"),
        "budget_method": plan.get("budget_method"),
        "machine": machine.get("name"),
        **{name: machine.get(name) for name in ("kernel", "device", "filesystem", "read_ahead_kb")},
        **{
            name: average(kept, name)
            for name in ("disk_mib_s", "p50_ms", "p95_ms", "mib_per_token", "read_amplification")
        },
        "major_faults_per_token": None if faults is None else faults / n,
    }
    fields = {name: {**known, **measured}.get(name) for name in FIELDS}
    return {**fields, **dict(zip(SAMPLES, (ns, ts), strict=True)), **{name: ours[name] for name in OURS}}


def _outputs_equal(run: RunData, arm: str, test: str, kept: Sequence[Sample], failed: Sequence[Sample]) -> bool | None:
    baseline = next(iter(run.header["plan"].get("arms", ())), arm)
    base_kept, base_failed = _kept(run, baseline, test)
    return outputs_of(baseline, base_kept, arm, kept, [*base_failed, *failed])[0]


def to_json(table: Sequence[Row]) -> str:
    return json.dumps(table, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def to_jsonl(table: Sequence[Row]) -> str:
    return "".join(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n" for row in table)


def to_csv(table: Sequence[Row]) -> str:
    """Every value quoted, booleans as 0 and 1, no samples: as llama-bench does."""
    columns = [*FIELDS, *OURS]
    out = io.StringIO()
    out.write(",".join(columns) + "\n")
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    for row in table:
        values = (row[name] for name in columns)
        writer.writerow([int(v) if isinstance(v, bool) else "" if v is None else v for v in values])
    return out.getvalue()


def to_sql(table: Sequence[Row]) -> str:
    """llama-bench's own table, so that both fit one database, and ours beside it, joined by `build_commit`."""
    ours = {"build_commit": TEXT, "test": TEXT, **OURS}
    tests = [{**row, "test": test_name(row)} for row in table]
    parts = [_create("llama_bench", FIELDS), _create("moe_madv", ours)]
    parts += [_insert("llama_bench", list(FIELDS), row) for row in table]
    parts += [_insert("moe_madv", list(ours), row) for row in tests]
    return "BEGIN;\n" + "\n".join(parts) + "\nCOMMIT;\n"


def _create(name: str, columns: dict[str, type]) -> str:
    kinds = {TEXT: "TEXT", BOOL: "INTEGER", INT: "INTEGER", REAL: "REAL"}
    body = ",\n".join(f"  {column} {kinds[kind]}" for column, kind in columns.items())
    return f"CREATE TABLE IF NOT EXISTS {name} (\n{body}\n);\n"


def _insert(name: str, columns: Sequence[str], row: Row) -> str:
    return f"INSERT INTO {name} ({', '.join(columns)}) VALUES ({', '.join(_literal(row[c]) for c in columns)});"


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(int(value)) if isinstance(value, bool) else repr(value)


def to_markdown(table: Sequence[Row]) -> str:
    """llama-bench's columns under its names, then the arm and what it read and waited."""

    def size(row: Row) -> str:
        return "-" if row["model_size"] is None else f"{row['model_size'] / GIB:.2f} GiB"

    def params(row: Row) -> str:
        return "-" if row["model_n_params"] is None else f"{row['model_n_params'] / 1e9:.2f} B"

    columns: dict[str, Callable[[Row], str]] = {
        "model": lambda r: str(r["model_type"]),
        "size": size,
        "params": params,
        "backend": lambda r: str(r["backends"]),
        "ngl": lambda r: str(r["n_gpu_layers"]),
        "threads": lambda r: str(r["n_threads"]),
        "fa": lambda r: str(int(r["flash_attn"])),
        "lm": lambda r: str(r["load_mode"]),
        "rpk": lambda r: str(int(r["repack"])),
        "test": test_name,
        "t/s": lambda r: f"{r['avg_ts']:.2f} ± {r['stddev_ts']:.2f}",
        "arm": lambda r: str(r["arm"]),
        "runs": lambda r: str(r["n_samples"]),
        "p50 ms": lambda r: number(r["p50_ms"]),
        "p95 ms": lambda r: number(r["p95_ms"]),
        "MiB/token": lambda r: number(r["mib_per_token"]),
    }
    return markdown_table(list(columns), [[text(row) for text in columns.values()] for row in table]) + "\n"


FORMATS: dict[str, Callable[[Sequence[Row]], str]] = {
    "md": to_markdown,
    "csv": to_csv,
    "json": to_json,
    "jsonl": to_jsonl,
    "sql": to_sql,
}
