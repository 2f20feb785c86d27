"""Early routing in a real run of the unpatched wheel: routing exactly as prescribed, early as wrong as asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.bench.early import measure
from toolkit.bench.launch import job_of
from toolkit.bench.plan import Arm, Conditions
from toolkit.bench.select import arms_by_name
from toolkit.bench.tokens import prescribed
from toolkit.build.backends import get_backend
from toolkit.build.buildplan import plan_build
from toolkit.build.wheel import build_wheel
from toolkit.config import patches_dir
from toolkit.errors import BenchError
from toolkit.model.arch import deepseek4
from toolkit.model.early import overlap
from toolkit.model.layout import Routing, read_model
from toolkit.model.shape import PRESETS, Shape, routing
from toolkit.model.synth import Synth, prescription
from toolkit.patch.series import load_series
from toolkit.patch.upstream import load_pin, pristine

pytestmark = pytest.mark.build

CONDITIONS = Conditions(blocks=1, n_batch=16, n_ubatch=16, cold=False, n_threads=2)
TINY = PRESETS["tiny"]
SHAPES = {
    "exact": TINY,
    "hard": replace(TINY, layers=8, early_accuracy=0.8),
    "shared": replace(TINY, layers=8, early_accuracy=0.8, shared_ff=128),
    "deepseek4": replace(deepseek4.flash(1800), vocab=4096, layers=8, prompt=24, decode=40, early_accuracy=0.8),
}


@pytest.fixture(scope="module")
def stock(real_home: Path) -> Arm:
    build_wheel(plan_build("baseline", get_backend("cpu"), load_pin(), None, real_home))
    return arms_by_name(["stock"], load_pin(), load_series(patches_dir()), real_home)[0]


def _synth(shape: Shape, real_home: Path, out: Path) -> Synth:
    vocab = pristine(load_pin(), real_home).llama / "models" / "ggml-vocab-qwen2.gguf"
    made = Synth(*routing(shape, None, 0), vocab=vocab, seed=0, preset="test")
    made.write(out, force=False, advance=lambda _: None)
    return made


@pytest.mark.parametrize("name", SHAPES)
def test_a_real_run_shows_the_accuracy_that_was_prescribed(
    name: str, stock: Arm, real_home: Path, tmp_path: Path
) -> None:
    out = tmp_path / "m.gguf"
    made = _synth(SHAPES[name], real_home, out)
    layout = read_model(out)
    found = measure(layout, stock, job_of(layout, CONDITIONS, 64), prescribed(prescription(out), 24, 40))
    assert (found.decode_tokens, found.experts_match) == (40, True)
    scored = [i for i, layer in enumerate(layout.layers) if layer.routing is Routing.SCORE]
    for ahead in found.ahead:
        d = ahead.distance
        expected = {
            i: 1.0
            if d == 0 or made.early is None
            else overlap(made.early.logits[d - 1][24:, i], made.trace.experts[24:, i])
            for i in scored
            if i >= d
        }
        assert ahead.by_layer == pytest.approx(expected, abs=0.02)  # a near tie of early logits can fall either way
    assert len(found.ahead) == 3
    assert (found.ahead[1].mean < 0.9) == (name != "exact")


def test_a_model_that_cannot_be_loaded_says_so(stock: Arm, tmp_path: Path, real_home: Path) -> None:
    out = tmp_path / "m.gguf"
    _synth(TINY, real_home, out)
    layout, tokens = read_model(out), prescribed(prescription(out), 8, 4)
    job = job_of(layout, CONDITIONS, 16) | {"model": str(tmp_path / "gone.gguf")}
    with pytest.raises(BenchError, match=r"could not load .*gone\.gguf"):
        measure(layout, stock, job, tokens)
