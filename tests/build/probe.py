"""Scenarios inside one process of an arm, and the call that starts them from a test.

Run by the arm's interpreter with a job in JSON; prints one JSON line. Imports of the toolkit are for the test's side.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.bench.plan import Arm

ROOT = Path(__file__).parents[2]
CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_IPC_LOCK = 1, 3, 14  # linux/capability.h
_PR_CAPBSET_DROP = 24


def probe(
    arm: Arm,
    scenario: str,
    env: dict[str, str] | None = None,
    *,
    lock_limit: int | None = None,
    without: Sequence[int] = (),
    **job: Any,
) -> dict[str, Any]:
    """What the scenario prints in a process of the arm, which sees no other setting of the families that matter.

    `lock_limit`: bytes it may lock; root needs to be `without` CAP_IPC_LOCK too, or is above it.
    """
    from toolkit.bench.launch import _FOREIGN

    def restricted() -> None:
        for capability in without:
            ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        if lock_limit is not None:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (lock_limit, lock_limit))

    done = subprocess.run(
        [arm.python, "-I", __file__, scenario, json.dumps(job)],
        cwd=ROOT.parent,
        env={k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)} | arm.env | (env or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        preexec_fn=restricted if without or lock_limit is not None else None,
    )
    assert done.returncode == 0, f"{arm.name}: {scenario}: {done.returncode}\n{done.stderr[-4000:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- Inside the arm


def _api() -> Any:
    spec = importlib.util.spec_from_file_location("moe_madv_api", ROOT / "toolkit/bench/llama_api.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Inside:
    """The arm's binding, what it logs, and its payload."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.api = _api()
        self.log: list[str] = []
        self._keep = self.api.capture_log(self.log.append)
        self.payload = self.api.Payload()
        self.load_mapped = self.api.load_mapped

    def session(self, model: str | None = None) -> Any:
        if "load_mode" in self.job:  # of llama.h, instead of the session's
            self.api.load_mapped = self._load_otherwise
        sizes = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 64, "n_threads": self.job.get("n_threads", 2)}
        return self.api.Session(model or self.job["model"], **sizes, lazy_mode=self.job.get("lazy_mode"))

    def _load_otherwise(self, params: Any) -> None:
        self.load_mapped(params)
        params.load_mode = self.job["load_mode"]

    def context_of(self, session: Any) -> Any:
        """A second context of the session's model."""
        import llama_cpp

        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 256, 64, 64
        params.n_threads = params.n_threads_batch = self.job.get("n_threads", 2)
        self.api.without_flash_attention(params)
        other = object.__new__(self.api.Session)
        other.__dict__.update(session.__dict__)
        other._context = llama_cpp.llama_init_from_model(session._model, params)
        other._batch = llama_cpp.llama_batch_init(64, 0, 1)
        return other

    def decode(self, session: Any) -> str:
        """Digest of all logits of the job's prompt, 16 tokens at a time, and tokens, from an empty context."""
        self.forget(session)
        digest, position = hashlib.sha256(), 0
        prompt, tokens = self.job["prompt"], self.job["tokens"]
        for batch in [*(prompt[i : i + 16] for i in range(0, len(prompt), 16)), *([token] for token in tokens)]:
            session.decode(batch, position)
            position += len(batch)
            digest.update(session.logits().tobytes())
        return digest.hexdigest()

    def forget(self, session: Any) -> None:
        import llama_cpp

        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(session._context), True)

    def aborted(self, session: Any, tokens: list[int], n_nodes: int) -> int:
        """What llama_decode says to a batch that is given up after so many nodes of its graph."""
        import llama_cpp

        left = n_nodes

        @llama_cpp.ggml_abort_callback
        def enough(_: object) -> bool:
            nonlocal left
            left -= 1
            return left <= 0

        llama_cpp.llama_set_abort_callback(session._context, enough, None)
        try:
            session.decode(tokens, 0)
        except self.api.LlamaError as e:
            return int(str(e).split("returned ")[1].split()[0])
        finally:
            llama_cpp.llama_set_abort_callback(session._context, llama_cpp.ggml_abort_callback(), None)
        return 0

    def said(self, text: str) -> int:
        return sum(text in line for line in self.log)


def _advice(model: str, first: int, last: int) -> list[list[Any]]:
    """[page, flags] where the flags of the mapped pages [first, last) of a file change, by /proc/self/smaps."""
    pages: dict[int, str] = {}
    span = range(0)
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and "-" in fields[0] and fields[4].isdigit():
            begin, end = (int(x, 16) for x in fields[0].split("-"))
            start = int(fields[2], 16) // os.sysconf("SC_PAGESIZE")
            n = (end - begin) // os.sysconf("SC_PAGESIZE") if fields[5] == model else 0
            span = range(max(start, first), min(start + n, last))
        elif line.startswith("VmFlags:"):
            pages.update(dict.fromkeys(span, line.removeprefix("VmFlags:").strip()))
    assert len(pages) == last - first, f"{len(pages)} of {last - first} pages are mapped"
    changes: list[list[Any]] = []
    for page in sorted(pages):
        if not changes or changes[-1][1] != pages[page]:
            changes.append([page - first, pages[page]])
    return changes


def resident(path: Path, first: int, last: int) -> list[int]:
    """Pages of [first, last) of the file that are in the page cache, counted from `first`."""
    import numpy as np

    size = os.sysconf("SC_PAGESIZE")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    vector = np.zeros(last - first, np.uint8)
    length = ctypes.c_size_t((last - first) * size)
    with path.open("rb") as file:
        address = libc.mmap(None, length, 1, 1, file.fileno(), first * size)  # PROT_READ, MAP_SHARED
        assert address != ctypes.c_void_p(-1).value
        try:
            failed = libc.mincore(ctypes.c_void_p(address), length, ctypes.c_void_p(vector.ctypes.data))
        finally:
            libc.munmap(ctypes.c_void_p(address), length)
    assert failed == 0
    return [int(i) for i in np.flatnonzero(vector & 1)]


def rows(inside: Inside) -> dict[str, Any]:
    """Tokens with a table that is read by the row: advice before and after, and after each switch of the mode."""
    job = inside.job
    session = inside.session()
    advice = [_advice(job["model"], *job["pages"])]
    logits = [inside.decode(session)]
    in_memory = resident(Path(job["model"]), *job["pages"])
    counters = inside.payload.counters()
    advice.append(_advice(job["model"], *job["pages"]))
    for mode in job.get("switch", []):
        inside.payload.set_mode(mode)
        advice.append(_advice(job["model"], *job["pages"]))
        logits.append(inside.decode(session))
        advice.append(_advice(job["model"], *job["pages"]))
    return {
        "advice": advice,
        "logits": logits,
        "resident": in_memory,
        "resident_after": resident(Path(job["model"]), *job["pages"]),
        "counters": counters,
        "lazy": inside.said("lazy read enabled"),
    }


def embedded(inside: Inside) -> dict[str, Any]:
    """One batch of embeddings instead of tokens, as of an image: the table gives its first row only."""
    import llama_cpp

    job = inside.job
    session = inside.session()
    batch = llama_cpp.llama_batch_init(4, job["embd"], 1)
    batch.n_tokens = 4
    for i in range(4):
        for k in range(job["embd"]):
            batch.embd[i * job["embd"] + k] = 1.0 / (1 + i + k)
        batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = i, 1, 0, i == 3
    result = llama_cpp.llama_decode(session._context, batch)
    llama_cpp.llama_synchronize(session._context)
    return {
        "result": result,
        "logits": [hashlib.sha256(session.logits().tobytes()).hexdigest()],
        "resident": resident(Path(job["model"]), *job["pages"]),
    }


def alone(inside: Inside) -> dict[str, Any]:
    """One session: what it computes, counts and says."""
    session = inside.session()
    logits = [inside.decode(session), inside.decode(session)]
    import llama_cpp

    n_reused = llama_cpp.llama_perf_context(session._context).n_reused
    counters = inside.payload.counters()
    session.close()
    warnings = [line.strip() for line in inside.log if "ggml_moe_prefetch" in line]
    return {"logits": logits, "counters": counters, "warnings": warnings, "n_reused": n_reused}


def together(inside: Inside) -> dict[str, Any]:
    """Contexts of one model and a context of another, each on a thread of its own, all at the same time."""
    first = inside.session()
    others = [inside.context_of(first), inside.session(inside.job["other"])]
    logits: list[list[str]] = [[] for _ in range(3)]
    failures: list[BaseException] = []

    def run(session: Any, into: list[str]) -> None:
        try:
            into += [inside.decode(session) for _ in range(inside.job["rounds"])]
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=run, args=pair) for pair in zip((first, *others), logits, strict=True)]
    for thread in threads:
        thread.start()
    switch = inside.job.get("switch", [])
    while any(thread.is_alive() for thread in threads):
        for mode in switch:
            inside.payload.set_mode(mode)
            threads[0].join(0.02)
        threads[0].join(0.02)
    for failure in failures:
        raise failure
    return {"logits": logits, "counters": inside.payload.counters()}


def reloaded(inside: Inside) -> dict[str, Any]:
    """Models that go at once after an aborted decode, with reads and hints still queued, and come again."""
    job = inside.job
    returned: list[int] = []
    logits: list[str] = []
    for i in range(job["rounds"]):
        for path in (job["model"], job["other"]):
            with Path(path).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            session = inside.session(path)
            returned.append(inside.aborted(session, job["prompt"], job["n_nodes"] * (1 + i)))
            session.close()
    for path in (job["model"], job["other"]):
        session = inside.session(path)
        logits.append(inside.decode(session))
        session.close()
    return {"returned": returned, "logits": logits, "counters": inside.payload.counters()}


def resumed(inside: Inside) -> dict[str, Any]:
    """A decode that is given up at one place after another, and a whole one after each."""
    session = inside.session()
    returned, logits = [], [inside.decode(session)]
    for n_nodes in inside.job["n_nodes"]:
        inside.forget(session)
        returned.append(inside.aborted(session, inside.job["prompt"], n_nodes))
        logits.append(inside.decode(session))
    return {"returned": returned, "logits": logits, "counters": inside.payload.counters()}


SCENARIOS: dict[str, Callable[[Inside], dict[str, Any]]] = {
    f.__name__: f for f in (rows, embedded, alone, together, reloaded, resumed)
}


@contextlib.contextmanager
def _private_stdout() -> Iterator[Any]:
    private = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(private, "w", encoding="utf-8") as stream:
        yield stream


if __name__ == "__main__":
    with _private_stdout() as out:
        json.dump(SCENARIOS[sys.argv[1]](Inside(json.loads(sys.argv[2]))), out)
