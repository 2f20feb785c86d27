"""One measured run, in a process of its own, inside an arm's environment.

Usage: worker.py JOB.json. Writes JSON lines to standard output: `loaded`, one `test` per finished test, `done`,
or one `error`. With `steps` in the job it measures an arm for each line of standard input, and says `step` after it.
Imports only its neighbours `llama_api.py`, `blocked.py`, `counters.py`, `slowdown.py` and `wire.py`, by path: this
environment has no toolkit.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TextIO

# Before numpy: a build for a GPU can carry a C++ runtime of its own, and mixed with the one that numpy's libraries
# bring in, llama.cpp crashes where it formats numbers.
import llama_cpp  # noqa: F401
import numpy as np


def _neighbour(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"moe_madv_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _private_stdout() -> TextIO:
    """A stream to the real standard output; file descriptor 1 goes to stderr, so no library can write between rows."""
    private = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(private, "w", encoding="utf-8")


class _Test(NamedTuple):
    name: str
    first: int  # index of its first token in the list
    position: int  # of that token in the sequence
    batches: list[list[int]]
    restart: bool  # the depth is evaluated anew before it


class Worker:
    def __init__(self, job: dict[str, Any], out: TextIO) -> None:
        self.job = job
        self.out = out
        self.blocked = _neighbour("blocked")
        self.counters = _neighbour("counters")
        self.api = _neighbour("llama_api")
        self.wire = _neighbour("wire")
        self.slowdown = _neighbour("slowdown")
        self.slowdown_percent = job.get("injected_slowdown_percent", 0.0)
        self.payload = self.api.Payload()
        self.log: list[str] = []
        self._keep = self.api.capture_log(self.log.append)

    def emit(self, event: str, **fields: Any) -> None:
        self.out.write(json.dumps({"event": event, **fields}, allow_nan=False) + "\n")
        self.out.flush()

    def run(self) -> None:
        session = self._load()
        if "text" in self.job:
            self.emit("tokens", tokens=session.tokenize(self.job["text"]))
        elif "steps" in self.job:
            for line in sys.stdin:
                self._step(session, json.loads(line))
        else:
            end = self._tests(session, self._test)
            if n_greedy := self.job.get("n_greedy", 0):
                self.emit("tokens", tokens=self._greedy(session, end, n_greedy))
        self.emit("done")
        session.close()

    def _step(self, session: Any, step: dict[str, Any]) -> None:
        """Another arm in this process: all its tests once to warm up, then measured."""
        self.payload.set_mode(step["mode"])
        self.slowdown_percent = step["injected_slowdown_percent"]
        self._tests(session, self._warm_up)
        self._tests(session, self._test)
        self.emit("step", mode=self.payload.mode())

    def _tests(self, session: Any, do: Callable[[Any, _Test], None]) -> int:
        """Do every test from an empty context on; returns the position after the last token."""
        self._start(session)
        end = 0
        for test in self._plan():
            if test.restart:
                self._start(session)
            do(session, test)
            end = test.position + sum(map(len, test.batches))
        return end

    def _start(self, session: Any) -> None:
        session.restart()
        for position, piece in self._pieces(self.job["tokens"], 0, self.job.get("n_depth", 0)):
            session.decode(piece, position)
        session.take_selected()

    def _plan(self) -> list[_Test]:
        """The tests in order. At a depth both prompt and decode start from that context alone, as in llama-bench.

        Without a depth, and where further intervals follow, decode goes on from the prompt.
        """
        tokens, depth = self.job["tokens"], self.job.get("n_depth", 0)
        alone = depth > 0 and not self.job.get("further")
        found, start = [], depth
        for n_prompt, n_gen in self._intervals(len(tokens) - depth):
            suffix, middle, end = f" @ d{start}" if start else "", start + n_prompt, start + n_prompt + n_gen
            if n_prompt:
                pieces = [piece for _, piece in self._pieces(tokens, start, middle)]
                found.append(_Test(f"pp{n_prompt}{suffix}", start, start, pieces, restart=False))
            if n_gen:
                pieces, at = [[token] for token in tokens[middle:end]], depth if alone else middle
                found.append(_Test(f"tg{n_gen}{suffix}", middle, at, pieces, restart=alone and n_prompt > 0))
            start = end
        return found

    def _greedy(self, session: Any, position: int, n: int) -> list[int]:
        """What the model itself goes on with after the forced tokens, as far as the context allows."""
        found: list[int] = []
        for i in range(min(n, self.job["n_ctx"] - position)):
            found.append(int(session.logits().argmax()))
            session.decode([found[-1]], position + i)
        return found

    def _intervals(self, n_tokens: int) -> list[tuple[int, int]]:
        """(prompt, decode) lengths in order; the first decode takes what the others leave of the tokens."""
        n_prompt, further = self.job["n_prompt"], self.job.get("further", [])
        return [(n_prompt, n_tokens - n_prompt - sum(map(sum, further))), *further]

    def _pieces(self, tokens: list[int], first: int, end: int) -> list[tuple[int, list[int]]]:
        """(position, tokens) of the batches that hold tokens[first:end]."""
        size = self.job["n_batch"]
        return [(i, tokens[i : min(i + size, end)]) for i in range(first, end, size)]

    def _load(self) -> Any:
        job = self.job
        before = self.counters.snapshot()
        session = self.api.Session(
            job["model"],
            n_ctx=job["n_ctx"],
            n_batch=job["n_batch"],
            n_ubatch=job["n_ubatch"],
            n_threads=job["n_threads"],
            n_gpu_layers=job.get("n_gpu_layers", 0),
            lazy_mode=job.get("lazy_mode"),
            trace=job.get("trace", False),
            rpc=job.get("rpc", ()),
        )
        used = self.counters.delta(before, self.counters.snapshot())
        # "CPU_Mapped model buffer size = …": where the loader put the weights
        buffers = sorted(
            {line.split(" model buffer size")[0].split()[-1] for line in self.log if " model buffer size" in line}
        )
        self.emit(
            "loaded",
            load_s=used.time_s,
            load_read_bytes=used.read_bytes,
            libraries=str(self.api.library_dir()),
            payload=self.payload.version(),
            mode=self.payload.mode(),
            buffers=buffers,
            hints=self.payload.counters(),
        )
        return session

    def _warm_up(self, session: Any, test: _Test) -> None:
        position = test.position
        for batch in test.batches:
            session.decode(batch, position)
            position += len(batch)
        session.take_selected()

    def _test(self, session: Any, test: _Test) -> None:
        """Time each batch by itself; what is done with the logits happens between the clocks."""
        index, position = test.first, test.position
        digest = hashlib.sha256()
        kept: list[np.ndarray] = []
        greedy: list[int] = []
        finite = True
        experts: list[Any] = []
        spans: list[Any] = []
        cpu_ms: list[float] = []
        waited_ns: list[int] = []
        moments: list[Any] = []  # around each batch
        layers: list[list[dict[str, Any]]] = [[]]  # sums at the start and after each batch
        rpc = self.job.get("rpc", ())
        wire_before = self.wire.wire_bytes(rpc)
        self.payload.reset()
        for batch in test.batches:
            before = self.counters.snapshot()
            moments.append([self.blocked.now()])
            cpu, start = time.process_time_ns(), time.perf_counter_ns()
            session.decode(batch, position)
            own_ns, waited = self.slowdown.end_span(start, self.slowdown_percent)
            waited_ns.append(waited)
            cpu_ms.append((time.process_time_ns() - cpu) / 1e6)
            moments[-1].append(self.blocked.now())
            spans.append((own_ns + waited, self.counters.delta(before, self.counters.snapshot())))
            if self.job.get("timeline"):
                layers.append(self.payload.layers() or [])
            position += len(batch)
            index += len(batch)

            logits = session.logits()
            digest.update(logits.tobytes())
            if self.job.get("logits_file"):
                kept.append(logits.copy())
            greedy.append(int(logits.argmax()))
            finite = finite and bool(abs(logits).max() < float("inf"))
            # a layer that computes fewer rows than the batch has (the last one) computes its last rows
            for layer, ids in session.take_selected().items():
                experts.append([layer, index - len(ids), ids.tolist()])

        wire_after = self.wire.wire_bytes(rpc)
        if kept:
            np.save(f"{self.job['logits_file']}.{test.name}.npy", np.stack(kept))

        def total(field: str) -> Any:
            values = [getattr(used, field) for _, used in spans]
            return None if None in values else sum(values)

        def each(field: str, per: float) -> Any:
            values = [getattr(used, field) for _, used in spans]
            return None if None in values else [value / per for value in values]

        self.emit(
            "test",
            test=test.name,
            n_tokens=[len(batch) for batch in test.batches],
            ns=[elapsed for elapsed, _ in spans],
            injected_ns=waited_ns if self.slowdown_percent else None,
            read_bytes=total("read_bytes"),
            major_faults=total("major_faults"),
            minor_faults=total("minor_faults"),
            cpu_s=None if total("user_s") is None else total("user_s") + total("system_s"),
            **self.blocked.io_wait(moments, n_gpu_layers=self.job.get("n_gpu_layers", 0), remote=bool(rpc)),
            logits_sha256=digest.hexdigest(),
            logits_finite=finite,
            greedy=greedy,
            hints=self.payload.counters(),
            timeline=self.payload.layers() if self.job.get("timeline") else None,
            token_counters={
                "read_bytes": each("read_bytes", 1),
                "major_faults": each("major_faults", 1),
                "cpu_ms": cpu_ms,
                "psi_io_ms": each("psi_io_some_us", 1000),
                "psi_memory_ms": each("psi_memory_some_us", 1000),
                "queued_ms": each("queued_us", 1000),
                "busy_cpus": busy_cpus([used for _, used in spans]),
                **slowest_layers(layers),
            },
            wire_bytes=None if wire_before is None or wire_after is None else wire_after - wire_before,
            experts=experts if self.job.get("trace") else None,
        )


def busy_cpus(spans: list[Any]) -> list[float] | None:
    """CPUs that ran something or waited for I/O, on average over each span; at least 1."""
    n = float(os.cpu_count() or 1)
    if any(used.idle_s is None for used in spans):
        return None
    return [round(min(n, max(1.0, n - used.idle_s / used.time_s)), 2) for used in spans]


def slowest_layers(sums: list[list[dict[str, Any]]]) -> dict[str, list[float]]:
    """Of each batch the layer that took the longest: its place and times. Empty when a batch has no layers.

    A layer's computing is added when the next one starts, so that of the last layer comes with the next batch.
    """
    found: dict[str, list[float]] = {"layer": [], "layer_ms": [], "wait_ms": [], "read_ms": []}
    for before, after in itertools.pairwise(sums):
        none = {"hint_ms": 0.0, "wait_ms": 0.0, "read_ms": 0.0, "compute_ms": 0.0}
        earlier = before + [none] * (len(after) - len(before))
        spent = [{name: b[name] - a[name] for name in none} for a, b in zip(earlier, after, strict=True)]
        times = [used["hint_ms"] + used["wait_ms"] + used["compute_ms"] for used in spent]
        if not times:
            return {}
        slowest = max(range(len(times)), key=times.__getitem__)
        found["layer"].append(slowest)
        found["layer_ms"].append(times[slowest])
        found["wait_ms"].append(spent[slowest]["wait_ms"])
        found["read_ms"].append(spent[slowest]["read_ms"])
    return found


def main() -> int:
    out = _private_stdout()
    worker = None
    try:
        worker = Worker(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), out)
        worker.run()
    except Exception as e:  # the parent turns it into a failed row with this reason
        reason = f"{type(e).__name__}: {e}"
        log = "".join(worker.log[-20:]) if worker else ""
        out.write(json.dumps({"event": "error", "reason": reason, "log": log}) + "\n")
        out.flush()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
