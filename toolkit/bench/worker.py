"""One measured run, in a process of its own, inside an arm's environment.

Usage: worker.py JOB.json. Writes JSON lines to standard output: `loaded`, one `test` per finished test, `done`,
or one `error`. Imports only its neighbours `llama_api.py`, `counters.py` and `wire.py`, by path: this environment has
no toolkit.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

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


class Worker:
    def __init__(self, job: dict[str, Any], out: TextIO) -> None:
        self.job = job
        self.out = out
        self.counters = _neighbour("counters")
        self.api = _neighbour("llama_api")
        self.wire = _neighbour("wire")
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
        else:
            tokens, n_prompt = self.job["tokens"], self.job["n_prompt"]
            if n_prompt:
                pieces = [
                    tokens[i : min(i + self.job["n_batch"], n_prompt)] for i in range(0, n_prompt, self.job["n_batch"])
                ]
                self._test(session, f"pp{n_prompt}", pieces, 0)
            if n_gen := len(tokens) - n_prompt:
                self._test(session, f"tg{n_gen}", [[token] for token in tokens[n_prompt:]], n_prompt)
        self.emit("done")
        session.close()

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

    def _test(self, session: Any, test: str, batches: list[list[int]], position: int) -> None:
        """Time each batch by itself; what is done with the logits happens between the clocks."""
        digest = hashlib.sha256()
        kept: list[np.ndarray] = []
        greedy: list[int] = []
        finite = True
        experts: list[Any] = []
        spans: list[Any] = []
        rpc = self.job.get("rpc", ())
        wire_before = self.wire.wire_bytes(rpc)
        self.payload.reset()
        for batch in batches:
            before = self.counters.snapshot()
            start = time.perf_counter_ns()
            session.decode(batch, position)
            elapsed = time.perf_counter_ns() - start
            spans.append((elapsed, self.counters.delta(before, self.counters.snapshot())))
            position += len(batch)

            logits = session.logits()
            digest.update(logits.tobytes())
            if self.job.get("logits_file"):
                kept.append(logits.copy())
            greedy.append(int(logits.argmax()))
            finite = finite and bool(abs(logits).max() < float("inf"))
            # a layer that computes fewer rows than the batch has (the last one) computes its last rows
            for layer, ids in session.take_selected().items():
                experts.append([layer, position - len(ids), ids.tolist()])

        wire_after = self.wire.wire_bytes(rpc)
        if kept:
            np.save(f"{self.job['logits_file']}.{test}.npy", np.stack(kept))

        def total(field: str) -> Any:
            values = [getattr(used, field) for _, used in spans]
            return None if None in values else sum(values)

        self.emit(
            "test",
            test=test,
            n_tokens=[len(batch) for batch in batches],
            ns=[elapsed for elapsed, _ in spans],
            read_bytes=total("read_bytes"),
            major_faults=total("major_faults"),
            minor_faults=total("minor_faults"),
            cpu_s=None if total("user_s") is None else total("user_s") + total("system_s"),
            logits_sha256=digest.hexdigest(),
            logits_finite=finite,
            greedy=greedy,
            hints=self.payload.counters(),
            timeline=self.payload.layers() if self.job.get("timeline") else None,
            wire_bytes=None if wire_before is None or wire_after is None else wire_after - wire_before,
            experts=experts if self.job.get("trace") else None,
        )


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
