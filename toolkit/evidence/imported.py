"""Results of llama-bench (json, jsonl or csv) as arms of a comparison.

What cannot be known stays unknown: llama-bench records no outputs, tokens, reads or order, so such arms are
unpaired, their outputs are not compared and their rows are in no known order.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit import results
from toolkit.errors import ResultsError
from toolkit.evidence.llama_bench import BOOL, CONFIGURATION, FIELDS, REQUIRED, TEXT, test_name
from toolkit.results import FORMAT, Row, RunData
from toolkit.stats import MIN_VERDICT_BLOCKS

SOURCE = "llama-bench"

_BOOLS = {"0": False, "1": True, "false": False, "true": True}

# Conditions that must agree between arms unless they are what tells the arms of a file apart.
_CONDITIONS = ("n_threads", "n_batch", "n_ubatch")
_MODEL = ("model_type", "model_n_params")


def load(paths: Sequence[Path]) -> list[RunData]:
    """Results files of this toolkit and of llama-bench, each as one run.

    Raises ResultsError with file and line of the first row that is neither.
    """
    data: dict[Path, bytes] = {}
    for path in paths:
        try:
            data[path] = path.read_bytes()
        except OSError as e:
            raise ResultsError(f"cannot read the results file: {e.strerror}", where=path) from e
    stems = [path.stem for path in paths if _format(data[path]) is not None]
    runs: list[RunData] = []
    for path in paths:
        form = _format(data[path])
        if form is None:
            runs += results.read([path])
        else:
            name = path.stem if stems.count(path.stem) == 1 else f"{path.parent.name}/{path.stem}"
            runs.append(_run(path, name, data[path], form))
    return runs


def _format(data: bytes) -> str | None:
    """json, jsonl or csv of llama-bench; None for anything else, which `results.read` then judges."""
    first = data.lstrip().split(b"\n", 1)[0].strip()
    if first.startswith(b"["):
        return "json"
    if first.startswith((b"build_commit,", b'"build_commit"')):
        return "csv"
    if first.startswith(b"{") and b'"build_commit"' in first and b'"kind"' not in first:
        return "jsonl"
    return None


def _run(path: Path, name: str, data: bytes, form: str) -> RunData:
    rows, unfinished = _rows(path, data, form)
    if not rows:
        raise ResultsError("the llama-bench file holds no test", where=path)
    for key in _MODEL:
        if len({row.get(key) for row in rows} - {None}) > 1:
            raise ResultsError(
                f"the llama-bench file holds more than one model: its {key} differs",
                where=path,
                hint="write one file per model: llama-bench -m MODEL -o jsonl",
            )
    differing = [key for key in CONFIGURATION if len({str(row.get(key)) for row in rows}) > 1]
    run_id = hashlib.sha256(path.resolve().as_posix().encode() + data).hexdigest()[:12]
    arms: dict[str, Row] = {}
    tested: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        arm = _arm(name, row, differing)
        arms[arm] = {
            "label": f"{SOURCE} {row['build_commit']}",
            "wheel_sha256": None,
            "mode": None,
            "env": {},
            "config": {key: row.get(key) for key in CONFIGURATION},
        }
        tested.setdefault((arm, test_name(row)), []).append(row)
    samples = [{"run_id": run_id, **sample} for sample in _samples(tested, differing)]
    note = f"{path.name} is of llama-bench: tokens (random there), outputs, reads and order are not recorded"
    if len(samples) > len(rows):
        note += "; repetitions inside one process stand for runs, the spread between processes is not known"
    first = rows[0]
    conditions = {key: first[key] for key in _CONDITIONS if key not in differing and first.get(key) is not None}
    header = {
        "kind": "run",
        "format": FORMAT,
        "run_id": run_id,
        "created": str(min(row.get("test_time") or "unknown" for row in rows)),
        "source": SOURCE,
        "model": {"filename": Path(first["model_filename"]).name, **{key: first.get(key) for key in _MODEL}},
        "plan": {"arms": list(arms), "tests": list(dict.fromkeys(test for _, test in tested)), **conditions},
        "machine": {"cpu": first.get("cpu_info"), "gpu": first.get("gpu_info")},
        "arms": arms,
        "warnings": [note],
    }
    return RunData(
        path=path,
        header=header,
        checks=(),
        samples=tuple(samples),
        unfinished=unfinished,
        complete_bytes=len(data),
    )


def _arm(name: str, row: Row, differing: Sequence[str]) -> str:
    """The file's name, and what tells this configuration from the file's others."""
    commit = [str(row["build_commit"])] if "build_commit" in differing else []
    named = [key for key in differing if key not in ("build_commit", "build_number")]
    return ":".join([name, *commit, *(f"{key}={row.get(key)}" for key in named)])


def _samples(tested: Mapping[tuple[str, str], Sequence[Row]], differing: Sequence[str]) -> list[Row]:
    """A row per value: a process is one when there are enough of them to decide, else each of its repetitions is."""
    # The tensors' size is not the file's, which other rows hold under the same name.
    kept = [key for key in FIELDS if key != "model_size" and key not in differing]
    values = [
        (arm, test, row, speed)
        for (arm, test), found in tested.items()
        for row in found
        for speed in (() if len(found) >= MIN_VERDICT_BLOCKS else row.get("samples_ts")) or [row["avg_ts"]]
    ]
    return [
        {
            **{key: row[key] for key in kept if key in row},
            "kind": "sample",
            "block": i,  # no value shares a block with another: nothing pairs them
            "position": i,
            "arm": arm,
            "test": test,
            "status": "ok",
            "avg_ts": speed,
        }
        for i, (arm, test, row, speed) in enumerate(values)
    ]


def _rows(path: Path, data: bytes, form: str) -> tuple[list[Row], bool]:
    """Checked rows, and whether the last line was cut off."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ResultsError(f"the llama-bench file is not UTF-8 at byte {e.start}", where=path) from e
    unfinished = False
    if form == "json":
        try:
            parsed = json.loads(text, parse_constant=_refuse)
        except ValueError as e:
            raise ResultsError(
                f"not a whole JSON list: {e}",
                where=path,
                hint="remove log lines from the file; llama-bench -o jsonl also survives a crash",
            ) from e
        return [_checked(row, f"{path}: entry {i}") for i, row in enumerate(parsed, 1)], False
    if form == "csv":
        lines = list(csv.DictReader(io.StringIO(text)))
        return [_checked(_typed(row, f"{path}:{i}"), f"{path}:{i}") for i, row in enumerate(lines, 2)], False
    rows: list[Row] = []
    numbered = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    for i, line in numbered:
        try:
            row = json.loads(line, parse_constant=_refuse)
        except ValueError as e:
            if i == numbered[-1][0] and rows and not text.endswith("\n"):
                unfinished = True
                break
            raise ResultsError(
                f"not a row of llama-bench: {e}", where=f"{path}:{i}", hint="remove log lines from the file"
            ) from e
        rows.append(_checked(row, f"{path}:{i}"))
    return rows, unfinished


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _typed(row: dict[str, Any], where: str) -> Row:
    """CSV text to the types of the json form; unknown columns stay text."""
    if None in row or None in row.values():
        raise ResultsError("the line does not have the columns of the first one", where=where)
    typed: Row = {}
    for key, value in row.items():
        kind = FIELDS.get(key, TEXT)
        try:
            typed[key] = None if value == "" and kind is not TEXT else _BOOLS[value] if kind is BOOL else kind(value)
        except (KeyError, ValueError) as e:
            raise ResultsError(f"the column {key} is not {kind.__name__}: {value!r}", where=where) from e
    return typed


def _checked(row: Any, where: str) -> Row:
    if not isinstance(row, dict) or any(row.get(key) is None for key in REQUIRED):
        missing = [key for key in REQUIRED if not isinstance(row, dict) or row.get(key) is None]
        raise ResultsError(f"not a row of llama-bench: no {', '.join(missing)}", where=where)
    for key, kind in FIELDS.items():
        value = row.get(key)
        wanted = (int, float) if kind is float else (int,) if kind is BOOL else (kind,)
        if value is not None and not isinstance(value, wanted):
            raise ResultsError(f"the field {key} is not {kind.__name__}: {value!r}", where=where)
    for key in ("n_prompt", "n_gen"):
        if row[key] < 0:
            raise ResultsError(f"the field {key} is below 0: {row[key]}", where=where)
    if row["n_prompt"] + row["n_gen"] == 0:
        raise ResultsError("the row times no token: n_prompt and n_gen are 0", where=where)
    speeds = [row["avg_ts"], *(row.get("samples_ts") or ())]
    if not all(isinstance(v, int | float) and math.isfinite(v) and v > 0 for v in speeds):
        raise ResultsError(f"the row's speeds are not above 0: {speeds}", where=where)
    return row
