"""How often a model's next router is right on this layer's input, measured on a real run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from toolkit.bench.plan import Arm, Tokens
from toolkit.errors import BenchError
from toolkit.model.early import BANKS, overlap
from toolkit.model.layout import ModelLayout, Routing
from toolkit.process import run

_WORKER = Path(__file__).with_name("early_worker.py")


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """Share of the experts a layer took that its router names on the input of the layer `distance` before it."""

    distance: int  # 0: its own input, which must give 1 or the figures mean nothing
    mean: float
    by_layer: dict[int, float]  # by the layer whose experts they are


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run showed, over its decoded tokens."""

    decode_tokens: int
    experts_match: bool | None  # every selection is the prescribed set; None: nothing is prescribed
    ahead: tuple[Ahead, ...]


def measure(layout: ModelLayout, arm: Arm, job: dict[str, Any], tokens: Tokens) -> Measured:
    """Run the tokens through the arm and apply every router to the inputs of earlier layers' expert matmuls.

    Logits are the router's matrix times the input, and its bias where it has one; a bias for selection alone is not
    in them. Layers that route by a table are left out. Raises BenchError.
    """
    scored = {layer.block for layer in layout.layers if layer.routing is Routing.SCORE}
    if not scored:
        raise BenchError(
            "no layer of this model scores experts", where=layout.shards[0].path, hint="give a Mixture-of-Experts model"
        )
    with tempfile.TemporaryDirectory(prefix="moe-madv-early-") as folder:
        job_file, out = Path(folder) / "job.json", Path(folder) / "seen.npz"
        job = {**job, "tokens": tokens.all, "n_prompt": len(tokens.depth) + len(tokens.prompt), "out": str(out)}
        job_file.write_text(json.dumps(job), encoding="utf-8")
        done = run([arm.python, "-I", _WORKER, job_file], cwd=Path(folder), env=arm.env, check=False)
        if not out.is_file() or done.returncode != 0:
            raise BenchError(f"arm {arm.name} failed: {_reason(done.stdout, done.stderr)}", where=arm.python)
        with np.load(out) as seen:
            experts, inputs, blocks = seen["experts"], seen["inputs"], seen["layers"].tolist()
    routers = _routers(layout, [block for block in blocks if block in scored])
    ahead = []
    for distance in range(min(BANKS, len(blocks))):
        by_layer = {}
        for i, block in enumerate(blocks):
            if block in routers and i >= distance:
                weight, bias = routers[block]
                by_layer[block] = overlap(inputs[:, i - distance] @ weight.T + bias, experts[:, i])
        if by_layer:
            ahead.append(Ahead(distance=distance, mean=float(np.mean([*by_layer.values()])), by_layer=by_layer))
    return Measured(
        decode_tokens=len(experts),
        experts_match=None if tokens.experts is None else _match(experts, tokens.experts[-len(experts) :]),
        ahead=tuple(ahead),
    )


def _match(experts: NDArray[np.int32], prescribed: NDArray[np.int32]) -> bool:
    return bool(np.array_equal(np.sort(experts, axis=2), np.sort(prescribed, axis=2)))


def _routers(
    layout: ModelLayout, blocks: Sequence[int]
) -> dict[int, tuple[NDArray[np.float32], NDArray[np.float32] | float]]:
    """Matrix [expert, in] and bias of each block's router."""
    found = {t.info.name: t for t in layout.tensors if t.base == "ffn_gate_inp"}

    def read(name: str) -> NDArray[np.float32]:
        tensor = found[name]
        info = tensor.info
        with layout.shards[tensor.shard].path.open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.max_nbytes if info.nbytes is None else info.nbytes)
        kind = gguf.GGMLQuantizationType(info.type_id)
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, info.shape[0] // block * nbytes)
        values: NDArray[np.float32] = gguf.quants.dequantize(rows, kind).astype(np.float32)
        return values

    routers: dict[int, tuple[NDArray[np.float32], NDArray[np.float32] | float]] = {}
    for block in blocks:
        name = f"blk.{block}.ffn_gate_inp"
        bias = read(f"{name}.bias")[0] if f"{name}.bias" in found else 0.0
        routers[block] = (read(f"{name}.weight"), bias)
    return routers


def _reason(stdout: str, stderr: str) -> str:
    try:
        row = json.loads(stdout)
        return "\n".join(filter(None, (row["reason"], row["log"].strip())))
    except (ValueError, KeyError):
        return (stderr or stdout).strip()[-2000:] or "no output"
