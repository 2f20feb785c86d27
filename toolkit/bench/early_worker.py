"""What each layer's router saw and chose, token by token. Runs inside an arm's environment.

Usage: early_worker.py JOB.json. Writes the arrays to the job's `out` (.npz), and one JSON line to standard output:
`{}`, or `reason` and `log`. Imports only its neighbour `llama_api.py`, by path: this environment has no toolkit.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import llama_cpp  # noqa: F401 - before numpy, as in worker.py
import numpy as np

_EXPERT_MATMUL = re.compile(rb"^ffn_moe_(?:gate_up|gate|up)-(\d+)$")  # build_moe_ffn in llama-graph.cpp


def _api() -> ModuleType:
    spec = importlib.util.spec_from_file_location("moe_madv_llama_api", Path(__file__).with_name("llama_api.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _session(api: ModuleType, job: dict[str, Any]) -> Any:
    class Session(api.Session):  # type: ignore[name-defined]
        """Keeps the input of each layer's expert matmuls too: the second source of the first of them."""

        inputs: dict[int, np.ndarray]

        def _on_node(self, pointer: int, ask: bool, user: object) -> bool:
            tensor = ctypes.cast(pointer, ctypes.POINTER(api._Tensor)).contents
            found = _EXPERT_MATMUL.match(tensor.name)
            if found is None:
                return bool(super()._on_node(pointer, ask, user))
            layer = int(found.group(1))
            if not ask and layer not in self.inputs:
                source = ctypes.cast(tensor.src[1], ctypes.POINTER(api._Tensor)).contents
                rows = np.empty(source.ne[2] * source.ne[1] * source.ne[0], dtype=np.float32)
                self._get(tensor.src[1], rows.ctypes.data, 0, rows.nbytes)
                self.inputs[layer] = rows.reshape(source.ne[2], source.ne[1], source.ne[0])[:, 0]
            return True

    session = Session(
        job["model"],
        n_ctx=job["n_ctx"],
        n_batch=job["n_batch"],
        n_ubatch=job["n_ubatch"],
        n_threads=job["n_threads"],
        trace=True,
    )
    session.inputs = {}
    return session


def main() -> int:
    log: list[str] = []
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # no library can write between rows
    try:
        job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        api = _api()
        keep = api.capture_log(log.append)
        session = _session(api, job)
        prompt, gen = job["tokens"][: job["n_prompt"]], job["tokens"][job["n_prompt"] :]
        for i in range(0, len(prompt), job["n_batch"]):
            session.decode(prompt[i : i + job["n_batch"]], i)
        session.take_selected()
        inputs, experts = [], []
        for i, token in enumerate(gen):
            session.inputs.clear()
            session.decode([token], len(prompt) + i)
            chosen = session.take_selected()
            layers = sorted(chosen)
            experts.append([chosen[layer][0] for layer in layers])
            inputs.append([session.inputs[layer][0] for layer in layers])
        np.savez(job["out"], experts=np.array(experts), inputs=np.array(inputs), layers=np.array(layers))
        session.close()
        del keep
    except Exception as e:  # the parent turns it into an error with this reason
        out.write(json.dumps({"reason": f"{type(e).__name__}: {e}", "log": "".join(log[-20:])}) + "\n")
        out.flush()
        return 1
    out.write("{}\n")
    out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
