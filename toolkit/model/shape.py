"""What a synthetic model is made of: sizes, presets, the routing to prescribe, and the limits of all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gguf import GGMLQuantizationType as GGMLType

from toolkit.errors import ModelError
from toolkit.model.blocks import BLOCK_SIZE
from toolkit.model.early import BANKS
from toolkit.model.routing import POPULARITY, RECENCY, Trace, generate, load_trace

HEAD_DIM = 128
_MAX_IDS = 1 << 16  # in the prescription: `read_header` keeps arrays up to this length
_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # llama.cpp's, src/llama-hparams.h
_MAX_WIDTH = 1 << 16  # twice as wide as any published model
_MAX_POPULARITY, _MAX_RECENCY = 10, 100
_MIN_EARLY = 0.5  # of early accuracy; a choice at random may be no better


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the model is made of; `type` is that of the routed experts, `dense` that of all other matrices."""

    layers: int
    experts: int
    top_k: int
    embd: int
    ff: int  # of one expert
    type: str
    vocab: int | None  # tokens kept of the vocabulary; None: all
    prompt: int  # positions of the prescribed token list
    decode: int
    popularity: float = POPULARITY  # of the generated routing
    recency: float = RECENCY
    shared_ff: int = 0  # of one shared expert; 0: none
    early_accuracy: float | None = None  # of the next layer's router on this layer's input; None: exact

    @property
    def arch(self) -> str:
        """llama.cpp's name of the architecture: the one of its kind with, or without, a shared expert."""
        return "qwen2moe" if self.shared_ff else "qwen3moe"

    @property
    def dense(self) -> str:
        """Type of all matrices that are not routed experts."""
        return "Q4_0"


PRESETS = {
    "tiny": Shape(layers=4, experts=16, top_k=2, embd=256, ff=256, type="Q4_0", vocab=4096, prompt=24, decode=40),
    "demo": Shape(layers=18, experts=128, top_k=8, embd=1024, ff=768, type="Q4_0", vocab=None, prompt=64, decode=128),
    "bench": Shape(layers=24, experts=128, top_k=8, embd=2048, ff=768, type="Q4_0", vocab=None, prompt=64, decode=128),
}


def routing(shape: Shape, replay: Path | None, seed: int) -> tuple[Shape, Trace]:
    """The trace to prescribe: generated, or the recorded one, whose experts, top-k and lengths replace the shape's.

    Raises ModelError if shape and trace cannot be a model, before anything large is reserved.
    """
    if replay is not None:
        trace = load_trace(replay, layers=shape.layers)
        n_decode = len(trace.experts) - trace.n_prompt
        shape = replace(shape, experts=trace.n_expert, top_k=trace.top_k, prompt=trace.n_prompt, decode=n_decode)
        _check(shape, trace.source)
        return shape, trace
    _check(shape, None)
    return shape, generate(
        layers=shape.layers,
        n_prompt=shape.prompt,
        n_decode=shape.decode,
        n_expert=shape.experts,
        top_k=shape.top_k,
        seed=seed,
        popularity=shape.popularity,
        recency=shape.recency,
    )


def _check(shape: Shape, source: str | None) -> None:
    """Raise ModelError unless the numbers can be a model; `source` names the recorded trace they come from."""
    most = {
        "layers": _MAX_LAYERS,
        "experts": _MAX_EXPERTS,
        "embd": _MAX_WIDTH,
        "ff": _MAX_WIDTH,
        "shared_ff": _MAX_WIDTH,
        "popularity": _MAX_POPULARITY,
        "recency": _MAX_RECENCY,
    }
    for name, limit in most.items():
        value = getattr(shape, name)
        if not 0 <= value <= limit:  # NaN too
            option = f"--{name.replace('_', '-')}"
            raise ModelError(f"{option} {value} is not in 0..{limit:,}", where=source, hint=f"change {option}")
    if shape.top_k > shape.experts:
        raise ModelError(f"top-k {shape.top_k} of {shape.experts} experts", where=source, hint="lower --top-k")
    block = BLOCK_SIZE[GGMLType[shape.type]]
    for option, value, unit in (("--embd", shape.embd, 2 * HEAD_DIM), ("--ff", shape.ff, block)):
        if value <= 0 or value % unit:
            raise ModelError(f"{option} {value} is not a multiple of {unit}", hint=f"try {-(-value // unit) * unit}")
    unit = BLOCK_SIZE[GGMLType.Q4_0]
    if shape.shared_ff % unit:
        raise ModelError(
            f"--shared-ff {shape.shared_ff} is not a multiple of {unit}",
            hint=f"try {-(-shape.shared_ff // unit) * unit}",
        )
    banks = 1
    if shape.early_accuracy is not None:
        banks = BANKS
        _check_early(shape, shape.early_accuracy, source)
    n_positions = shape.prompt + shape.decode
    limit = shape.embd * 3 // 4 // banks
    if n_positions > limit:
        wider = -(-n_positions * banks * 4 // (3 * 256)) * 256
        need = "a residual dimension each" if banks == 1 else f"{banks} residual dimensions each for --early-accuracy"
        raise ModelError(
            f"{n_positions:,} positions (prompt and decode) need {need}; --embd {shape.embd} leaves room for {limit:,}",
            where=source,
            hint=f"use --embd {wider} or fewer positions" if wider <= _MAX_WIDTH else "use fewer positions",
        )
    n_ids = n_positions * shape.layers * shape.top_k
    if n_ids > _MAX_IDS:
        raise ModelError(
            f"{n_ids:,} routed ids; the header holds at most {_MAX_IDS:,}",
            where=source,
            hint="use fewer layers or positions",
        )


def _check_early(shape: Shape, accuracy: float, source: str | None) -> None:
    if not _MIN_EARLY <= accuracy < 1:
        raise ModelError(
            f"--early-accuracy {accuracy} is not from {_MIN_EARLY} to less than 1",
            where=source,
            hint="leave it out for 1; real models are published with 0.8 to 0.9",
        )
    if shape.layers < 2:
        raise ModelError("--early-accuracy of one layer: there is none before it", where=source, hint="use --layers 2")
    if shape.top_k > shape.experts * _MIN_EARLY:
        raise ModelError(
            f"--early-accuracy with top-k {shape.top_k} of {shape.experts} experts: too few others to take instead",
            where=source,
            hint="lower --top-k",
        )
