"""Experts read into the page cache before a run starts, inside the memory that the run will have.

The choice is static: the most used experts of each layer, by recorded or prescribed selections.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toolkit.bench.limits import Budget
from toolkit.bench.plan import Stretch
from toolkit.console import MIB
from toolkit.errors import BenchError
from toolkit.model.layout import Access, ModelLayout

_BLOCK = MIB
# Run in a process of its own, so that the pages are charged to the group of the run.
_READ = """
import json, os, sys, time
start, block = time.perf_counter(), int(sys.argv[1])
for path, offset, length in json.load(sys.stdin):
    with open(path, "rb", buffering=0) as file:
        for at in range(offset, offset + length, block):
            os.pread(file.fileno(), min(block, offset + length - at), at)
print(time.perf_counter() - start)
"""


def hottest(experts: NDArray[np.int32], per_layer: int) -> NDArray[np.int32]:
    """The most used experts, int32 [layer, per_layer], of selections [token, layer, k]; -1 is no selection."""
    n_experts = max(per_layer, int(experts.max()) + 1)
    counts = [np.bincount(ids[ids >= 0], minlength=n_experts) for ids in np.moveaxis(experts, 1, 0)]
    return np.argsort(-np.array(counts), axis=1, kind="stable")[:, :per_layer].astype(np.int32)


def stretches(layout: ModelLayout, chosen: NDArray[np.int32]) -> tuple[Stretch, ...]:
    """Where all weights of these experts, [layer, n], lie in the files: neighbours joined, in file order."""
    places = {layer.block: (ids, layer.experts) for layer, ids in zip(layout.layers, chosen, strict=True)}
    found: list[Stretch] = []
    for tensor in layout.tensors:
        if tensor.access is not Access.ROUTED or tensor.block not in places or tensor.info.nbytes is None:
            continue
        ids, n_experts = places[tensor.block]
        path, size = str(layout.shards[tensor.shard].path.resolve()), tensor.info.nbytes // n_experts
        for expert in sorted(int(i) for i in ids):
            start = tensor.info.offset + expert * size
            if found and (found[-1].path, found[-1].offset + found[-1].nbytes) == (path, start):
                found[-1] = found[-1]._replace(nbytes=found[-1].nbytes + size)
            else:
                found.append(Stretch(path, start, size))
    return tuple(found)


def prewarm(what: Sequence[Stretch], budget: Budget) -> float:
    """Read these stretches under the budget; returns the seconds it took. Raises BenchError when that fails."""
    if budget.method.startswith("systemd"):
        raise BenchError(
            "a prewarm would not be part of the memory budget: a systemd scope ends with its first process",
            hint="run as root with a writable memory group, or leave the prewarmed arms out",
        )
    argv = budget.command([sys.executable, "-I", "-S", "-c", _READ, str(_BLOCK)])
    done = subprocess.run(argv, input=json.dumps(what), capture_output=True, encoding="utf-8", check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
        raise BenchError(f"the prewarm failed: {reason[0]}", where=Path(what[0].path))
    return float(done.stdout)
