"""Experts read before a run: which they are, where they lie, and that their pages are in memory afterwards."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_synth import write_vocabulary

from toolkit.bench import limits, pagecache, prewarm
from toolkit.bench.plan import Stretch
from toolkit.errors import BenchError
from toolkit.model.arch.deepseek4 import flash
from toolkit.model.gguf_header import read_header
from toolkit.model.layout import ModelLayout, read_model
from toolkit.model.shape import routing
from toolkit.model.synth import Synth


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> ModelLayout:
    """Six layers of 256 experts, each of them three matrices of 32 by 256."""
    folder = tmp_path_factory.mktemp("model")
    shape, trace = routing(replace(flash(1834), ff=32, shared_ff=32), None, 0)
    synth = Synth(shape, trace, vocab=write_vocabulary(folder / "v.gguf"), seed=0, preset="deepseek-v4-flash")
    synth.write(folder / "m.gguf", force=False, advance=lambda _: None)
    return read_model(folder / "m.gguf")


def test_the_most_used_experts_of_each_layer() -> None:
    # tokens x 2 layers x top 2; layer 0 takes 7 three times and 1 twice, layer 1 takes 0 twice and the rest once
    experts = np.array([[[7, 1], [0, 5]], [[7, 2], [0, 4]], [[7, 1], [3, -1]]], dtype=np.int32)
    assert prewarm.hottest(experts, 2).tolist() == [[7, 1], [0, 3]]
    # no more used than there are: the first of those never taken
    assert prewarm.hottest(experts[:1], 3).tolist() == [[1, 7, 0], [0, 5, 1]]


def test_neighbouring_experts_are_one_stretch(layout: ModelLayout) -> None:
    chosen = np.tile(np.array([5, 4, 200], dtype=np.int32), (len(layout.layers), 1))
    found = prewarm.stretches(layout, chosen)
    # of each of three matrices in six layers: experts 4 and 5 together, and 200
    assert len(found) == 2 * 3 * 6
    # MXFP4: 17 bytes for 32 weights
    expert = 32 * 256 // 32 * 17
    assert [s.nbytes for s in found[:2]] == [2 * expert, expert]
    assert sum(s.nbytes for s in found) == 3 * sum(layer.bytes_per_expert or 0 for layer in layout.layers)
    gate = next(t for t in read_header(layout.shards[0].path).tensors if t.name == "blk.0.ffn_gate_exps.weight")
    starts = {s.offset for s in found}
    assert {gate.offset + 4 * expert, gate.offset + 200 * expert} <= starts


def test_what_was_read_is_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(8 << 20))
    with path.open("rb") as f:
        os.fsync(f.fileno())
    if not pagecache.evict([path]).cold:
        pytest.skip("this file system keeps its pages")
    with limits.memory_budget(None) as unlimited:
        seconds = prewarm.prewarm([Stretch(str(path), 0, 2 << 20), Stretch(str(path), 4 << 20, 1 << 20)], unlimited)
    assert seconds > 0
    assert (pagecache.residency(path).resident or 0) >= 3 << 20


def test_a_prewarm_that_fails_says_why(tmp_path: Path) -> None:
    with limits.memory_budget(None) as unlimited, pytest.raises(BenchError, match="No such file or directory"):
        prewarm.prewarm([Stretch(str(tmp_path / "gone"), 0, 1)], unlimited)
