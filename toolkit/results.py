"""Results files: JSON lines, append only, one object per line, written as they come.

The first line of a file is its `run` row (the header: model, plan, machine, arms); then follow `check`
rows (is the output of an arm that of the baseline?) and `sample` rows (one per block, position, arm and
test). Fields that this version does not know are kept as they are.
"""

# History of the format, newest first:
# 1 - run, check and sample rows

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from toolkit.errors import ResultsError

FORMAT = 1

Row = dict[str, Any]

_TYPES: dict[str, dict[str, type]] = {
    "run": {
        "format": int,
        "run_id": str,
        "created": str,
        "model": dict,
        "plan": dict,
        "machine": dict,
        "arms": dict,
    },
    "check": {"run_id": str, "arm": str},
    "sample": {"run_id": str, "block": int, "position": int, "arm": str, "test": str, "status": str},
}
# Two rows with the same values here cannot both be true.
_KEYS = {"check": ("arm",), "sample": ("block", "position", "arm", "test")}

# A comparison holds these fixed; a difference in any of them can explain a difference in speed.
CHECKED = (
    "model_size",
    "model_type",  # these two are known of llama-bench's rows only
    "model_n_params",
    "tokens_sha256",
    "n_gen",
    "n_threads",
    "n_batch",
    "n_ubatch",
    "budget_bytes",
    "budget_method",
    "read_ahead_kb",
    "cold",
    "filesystem",
    "kernel",
    "process",  # a fresh one for each run, or one that all share
)


@dataclass(frozen=True, kw_only=True)
class RunData:
    """One results file as read; `unfinished` says that its last line was cut off by a kill."""

    path: Path
    header: Row
    checks: tuple[Row, ...]
    samples: tuple[Row, ...]
    unfinished: bool
    complete_bytes: int  # size of the file without its unfinished last line

    @property
    def run_id(self) -> str:
        return str(self.header["run_id"])


def read(paths: Iterable[Path]) -> list[RunData]:
    """Read results files; ResultsError names file and line of the first row that does not belong."""
    return [_read_file(path) for path in paths]


def finished(run: RunData) -> set[tuple[int, int]]:
    """(block, position) pairs that need no further run: every planned test has a row, or one failed."""
    planned = set(run.header["plan"].get("tests", ()))
    seen: dict[tuple[int, int], set[str]] = {}
    for row in run.samples:
        tests = seen.setdefault((row["block"], row["position"]), set())
        tests.update(planned if row["status"] == "failed" else {row["test"]})
    return {key for key, tests in seen.items() if planned <= tests}


class Writer:
    """Appends rows to one file; every write is on the disk before it returns.

    A new file starts with `header`. An existing one is refused unless `resume` is true and it holds the
    header's run; what a kill left behind, an unfinished line or position, is then cut off first.
    """

    def __init__(self, path: Path, header: Row, *, resume: bool = False) -> None:
        self._path = path
        self._run_id = header["run_id"]
        exists = path.exists() and path.stat().st_size > 0
        end = self._end_to_resume(resume) if exists else 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        except OSError as e:
            raise ResultsError(f"cannot write the results file: {e.strerror}", where=path) from e
        if exists:
            self._file.truncate(end)
            if not path.read_bytes().endswith(b"\n"):
                self._file.write(b"\n")
        else:
            self.write(header)

    def _end_to_resume(self, resume: bool) -> int:
        if not resume:
            raise ResultsError(
                "the results file exists; a run never overwrites rows",
                where=self._path,
                hint="choose another --out, or repeat the command that made the file",
            )
        run = _read_file(self._path)
        if run.run_id != self._run_id:
            raise ResultsError(
                f"the results file holds run {run.run_id}, not {self._run_id}",
                where=self._path,
                hint="choose another --out",
            )
        return _resume_offset(run)

    def write(self, *rows: Row) -> None:
        """Append rows in one piece (those of one position belong together) and sync them to the disk."""
        text = ""
        for row in rows:
            where = f"{self._path}: new {row.get('kind')} row"
            if row.get("run_id") != self._run_id:
                raise ResultsError(f"the row is of run {row.get('run_id')}, not {self._run_id}", where=where)
            _check_row(row, where)
            try:
                text += json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n"
            except (TypeError, ValueError) as e:
                raise ResultsError(f"the row cannot be stored as JSON: {e}", where=where) from e
        self._file.write(text.encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def facts(run: RunData, sample: Row) -> Row:
    """The checked facts of one sample, its own fields before the header's; unknown ones are absent."""
    header = run.header
    model = {"model_size": header["model"]["size"]} if "size" in header["model"] else {}
    process = {} if header.get("source") else {"process": "fresh"}  # before it was recorded, always that
    known = {**machine_facts(header), **model, **process, **header["plan"], **sample}
    return {name: known[name] for name in CHECKED if name in known}


def machine_facts(header: Row) -> Row:
    """The header's machine with its storage facts beside the others."""
    machine = header["machine"]
    return {**machine, **(machine.get("storage") or {})}


def injected_slowdown_percent(header: Row, arm: str) -> float | None:
    """By how much the spans of an arm were made longer on purpose; None for an ordinary arm."""
    percent: float | None = header["arms"].get(arm, {}).get("injected_slowdown_percent")
    return percent


def require_same_facts(labelled: Sequence[tuple[str, Row]]) -> None:
    """Refuse (label, facts) pairs that differ from the first in a checked fact known on both sides."""
    for label, row in labelled[1:]:
        first_label, first = labelled[0]
        differing = [name for name in CHECKED if name in first and name in row and first[name] != row[name]]
        if differing:
            values = ", ".join(f"{name} ({first[name]} and {row[name]})" for name in differing)
            raise ResultsError(
                f"rows that differ in {values} cannot be compared",
                where=f"{first_label} and {label}",
                hint="measure all arms again under the same conditions: moe-madv bench run",
            )


def _read_file(path: Path) -> RunData:
    try:
        data = path.read_bytes()
    except OSError as e:
        raise ResultsError(f"cannot read the results file: {e.strerror}", where=path) from e
    lines = data.splitlines(keepends=True)
    rows: list[Row] = []
    seen: set[tuple[Any, ...]] = set()
    unfinished = False
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        try:
            row = json.loads(line, parse_constant=_refuse_constant)
        except ValueError as e:
            if number == len(lines) and number > 1 and not line.endswith(b"\n"):
                unfinished = True
                break
            raise ResultsError(
                f"not a row of a results file: {e}",
                where=where,
                hint="remove the line if it is a program's stray output",
            ) from e
        _check_row(row, where)
        if (row["kind"] == "run") != (number == 1):
            raise ResultsError("the run row must be the first line, and only that", where=where)
        if rows and row["run_id"] != rows[0]["run_id"]:
            raise ResultsError(f"the row is of run {row['run_id']}, not {rows[0]['run_id']}", where=where)
        if row["kind"] in _KEYS:
            key = (row["kind"], *(row[name] for name in _KEYS[row["kind"]]))
            if key in seen:
                raise ResultsError("the row repeats " + " ".join(map(str, key)), where=where)
            seen.add(key)
        rows.append(row)
    if not rows:
        raise ResultsError("the results file is empty", where=path)
    return RunData(
        path=path,
        header=rows[0],
        checks=tuple(r for r in rows if r["kind"] == "check"),
        samples=tuple(r for r in rows if r["kind"] == "sample"),
        unfinished=unfinished,
        complete_bytes=len(data) - (len(lines[-1]) if unfinished else 0),
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_row(row: Any, where: str) -> None:
    kind = row.get("kind") if isinstance(row, dict) else None
    if kind not in _TYPES:
        raise ResultsError("not a row of a results file: no known kind", where=where)
    if kind == "run" and isinstance(row.get("format"), int) and row["format"] != FORMAT:
        raise ResultsError(
            f"results format {row['format']} is not {FORMAT}, the one this version reads",
            where=where,
            hint="update moe-madv",
        )
    for name, kind_of_value in _TYPES[kind].items():
        value = row.get(name)
        if not isinstance(value, kind_of_value) or isinstance(value, bool):
            raise ResultsError(f"the {kind} row's {name} is not {kind_of_value.__name__}: {value!r}", where=where)
    if kind == "sample":
        if row["status"] not in ("ok", "failed"):
            raise ResultsError(f"the sample row's status is not ok or failed: {row['status']}", where=where)
        speed = row.get("avg_ts")
        if row["status"] == "ok" and not (isinstance(speed, int | float) and speed > 0):
            raise ResultsError(f"the sample row's avg_ts is not above 0: {speed!r}", where=where)


def _resume_offset(run: RunData) -> int:
    """Where to cut: after the last line that is whole and whose position is finished."""
    done = finished(run)
    end = run.complete_bytes
    lines = run.path.read_bytes()[:end].splitlines(keepends=True)
    while len(lines) > 1:
        row = json.loads(lines[-1])
        if row["kind"] != "sample" or (row["block"], row["position"]) in done:
            break
        end -= len(lines.pop())
    # A kill inside the check rows leaves some of them: the run makes all of them again.
    while 1 < len(lines) <= len(run.header["arms"]) and json.loads(lines[-1])["kind"] == "check":
        end -= len(lines.pop())
    return end
