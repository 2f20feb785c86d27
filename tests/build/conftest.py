"""Both wheels and a small model, made once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.build.backends import get_backend
from toolkit.build.buildplan import plan_build
from toolkit.build.wheel import build_wheel
from toolkit.config import patches_dir
from toolkit.model.shape import PRESETS, routing
from toolkit.model.synth import Synth
from toolkit.patch.patching import apply
from toolkit.patch.series import load_series
from toolkit.patch.upstream import arm_tree, load_pin, pristine


@pytest.fixture(scope="session")
def both_wheels(real_home: Path) -> Path:
    """A home with the wheels of both arms in it."""
    pin, series = load_pin(), load_series(patches_dir())
    apply(series, arm_tree(pin, "patched", real_home).llama, pin.commit)
    build_wheel(plan_build("baseline", get_backend("cpu"), pin, None, real_home))
    build_wheel(plan_build("patched", get_backend("cpu"), pin, series, real_home))
    return real_home


def _model(home: Path, out: Path, **changes: int) -> Path:
    vocab = pristine(load_pin(), home).llama / "models" / "ggml-vocab-qwen2.gguf"
    shape, trace = routing(replace(PRESETS["tiny"], **changes), None, 0)  # type: ignore[arg-type]
    Synth(shape, trace, vocab=vocab, seed=0, preset="tiny").write(out, force=False, advance=lambda _: None)
    return out


@pytest.fixture(scope="session")
def tiny(real_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The preset `tiny`, under a name that is hard on tools."""
    return _model(real_home, tmp_path_factory.mktemp("модель  漢字 #1%") / "-m é.gguf")


@pytest.fixture(scope="session")
def tiny_shared(real_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` with a shared expert beside the routed ones."""
    return _model(real_home, tmp_path_factory.mktemp("shared") / "shared.gguf", shared_ff=128)
