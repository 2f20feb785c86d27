"""The expert trace of a real run is the routing that the model was made with, and the tools for traces take it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from toolkit.cli import cli
from toolkit.model import trace as traces
from toolkit.model.shape import PRESETS, routing
from toolkit.model.synth import prescription

pytestmark = pytest.mark.build

N_PROMPT, N_GEN = 16, 12


def _moe_madv(*args: str | Path) -> str:
    done = CliRunner().invoke(cli, [str(a) for a in args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_trace_of_a_run_is_the_routing_of_its_model_and_can_be_replayed(
    tiny: Path, both_wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_MADV_HOME", str(both_wheels))
    out, run = tmp_path / "experts.npz", tmp_path / "run.jsonl"
    counts = ["-p", str(N_PROMPT), "-n", str(N_GEN), "-t", "2", "--blocks", "1", "--timeline"]
    _moe_madv("bench", "run", tiny, "--arms", "stock,hint", *counts, "--trace", out, "--out", run)

    # what the generator drew for this model: the end of its prompt and the start of its decode
    shape, drawn = routing(replace(PRESETS["tiny"]), None, 0)
    first = drawn.n_prompt - N_PROMPT
    wanted = np.sort(drawn.experts[first : drawn.n_prompt + N_GEN], axis=2)
    found = traces.read(out)
    assert found.records["token"].tolist() == list(prescription(tiny).tokens[first : drawn.n_prompt + N_GEN])
    assert found.records["phase"].tolist() == [0] * N_PROMPT + [1] * N_GEN
    assert found.header.blocks == tuple(range(shape.layers))
    # the last layer computes a prompt's last token only
    recorded = np.ones(wanted.shape[:2], dtype=bool)
    recorded[: N_PROMPT - 1, -1] = False
    assert np.array_equal((found.experts >= 0).all(axis=2), recorded)
    assert np.array_equal(np.sort(found.experts, axis=2)[recorded], wanted[recorded])

    told = json.loads(_moe_madv("model", "trace", out, "--json"))
    assert (told["prompt_tokens"], told["decode_tokens"], told["rows_not_recorded"]) == (N_PROMPT, N_GEN, N_PROMPT - 1)
    assert json.loads(_moe_madv("model", "evict", out, "--capacity", "30%", "--json"))
    replayed = tmp_path / "replayed.gguf"
    _moe_madv("model", "synth", replayed, "--preset", "tiny", "--replay", out)
    again = np.sort(prescription(replayed).experts, axis=2)
    assert np.array_equal(again[recorded], wanted[recorded])

    # the same file has what the picture of the layers is made of, and how long computing waited
    picture = tmp_path / "layers.svg"
    _moe_madv("bench", "plot", run, "--timeline", "--out", picture)
    assert f"{shape.layers} layers" in picture.read_text(encoding="utf-8")
    compared = json.loads(_moe_madv("bench", "compare", run, "--json"))["comparisons"]
    assert len(compared) == 2
    for c in compared:
        assert c["baseline_io_wait_ms_per_token"] >= 0
        assert c["candidate_io_wait_ms_per_token"] >= 0
