"""A DeepSeek-V4-shaped model in both arms: prescribed routing, equal bits, hash layers announced before they run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from toolkit import results
from toolkit.bench.plan import MODES, STOCK
from toolkit.cli import cli
from toolkit.model.arch.deepseek4 import HASH_LAYERS, flash
from toolkit.model.layout import Routing, read_model
from toolkit.model.shape import routing
from toolkit.model.synth import Synth
from toolkit.patch.upstream import load_pin, pristine

pytestmark = pytest.mark.build

ARMS = (STOCK, *MODES)


@pytest.fixture(scope="module")
def flash_small(real_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest scale, its experts narrowed once more: 6 layers of 256 experts in 30 MB."""
    vocab = pristine(load_pin(), real_home).llama / "models" / "ggml-vocab-qwen2.gguf"
    shape, trace = routing(replace(flash(1834), ff=32, shared_ff=32), None, 0)
    out = tmp_path_factory.mktemp("deepseek") / "small.gguf"
    Synth(shape, trace, vocab=vocab, seed=0, preset="deepseek-v4-flash").write(out, force=False, advance=lambda _: None)
    return out


def _run(model: Path, home: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> results.RunData:
    monkeypatch.setenv("MOE_MADV_HOME", str(home))
    args = ["bench", "run", str(model), "--arms", ",".join(ARMS), "-t", "1", "--blocks", "1", "--out", str(out)]
    done = CliRunner().invoke(cli, [*args, *options, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["comparisons"]
    (run,) = results.read([out])
    return run


def test_every_arm_computes_the_same_and_hash_layers_are_announced(
    flash_small: Path, both_wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(flash_small, both_wheels, tmp_path / "run.jsonl", monkeypatch, "-p", "16", "-n", "8")
    assert run.header["model"]["architecture"] == "deepseek4"
    assert run.checks[0]["experts_match"] is True
    assert {c["arm"]: c["outputs_equal"] for c in run.checks} == dict.fromkeys(ARMS, True)
    decode = {s["arm"]: s for s in run.samples if s["test"] == "tg8"}
    assert {s["status"] for s in run.samples} == {"ok"}
    assert len({s["logits_sha256"] for s in decode.values()}) == 1

    layers = read_model(flash_small).layers
    assert [layer.routing for layer in layers] == [Routing.TABLE] * HASH_LAYERS + [Routing.SCORE] * 3
    hints = {arm: row["hints"] for arm, row in decode.items()}
    # every layer of every token is announced, so the hash layers are; those before their graph runs
    assert hints["madv"]["groups"] == 3 * 8 * 6
    assert hints["madv"]["slices"] == 3 * 8 * 6 * 6
    for arm in ("hint", "overlap", "cache"):
        assert hints[arm]["groups"] == 8 * 6, arm
    for arm in ("overlap", "cache"):
        assert hints[arm]["groups_early"] == 8 * HASH_LAYERS, arm
    for arm in set(MODES) - {"off"}:
        assert hints[arm]["errors"] == hints[arm]["unmapped"] == hints[arm]["ids_ignored"] == 0, arm
    assert set(hints["off"].values()) == {0}


def test_a_sequence_long_enough_for_both_compressions(
    flash_small: Path, both_wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """192 positions: keys compressed by 4 and, past position 128, by 128."""
    run = _run(flash_small, both_wheels, tmp_path / "run.jsonl", monkeypatch, "-p", "64", "-n", "128")
    assert run.checks[0]["experts_match"] is True
    assert {s["status"] for s in run.samples} == {"ok"}
    assert len({s["logits_sha256"] for s in run.samples if s["test"] == "tg128"}) == 1


def _reproduce(home: Path, monkeypatch: pytest.MonkeyPatch, *args: str | Path) -> Any:
    monkeypatch.setenv("MOE_MADV_HOME", str(home))
    # the budget of a test is about the command, not about memory: a process alone needs 200 MiB
    done = CliRunner().invoke(
        cli, ["reproduce", *map(str, args), "--budget", "1GiB", "-t", "1", "--json"], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_moe_madv_is_reproduced_and_a_second_call_measures_nothing(
    flash_small: Path, both_wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    args: list[str | Path] = [
        "moe-madv",
        "--model",
        flash_small,
        "--arms",
        "off,madv",
        "--repeats",
        "1",
        "--matrix",
        "--out",
        out,
    ]
    found = _reproduce(both_wheels, monkeypatch, *args, "--source", "a test", "--revision", "1")
    files = sorted(path.name for path in out.glob("*.jsonl"))
    assert files == ["decode-json.jsonl", "decode-plain.jsonl", "prefill-code.jsonl", "prefill-note.jsonl"]
    runs = results.read(sorted(out.glob("*.jsonl")))
    # two prompts of a suite are different tokens, and every one takes its prescribed experts
    assert len({run.header["plan"]["tokens_sha256"] for run in runs}) == 4
    assert [run.checks[0]["experts_match"] for run in runs] == [True] * 4
    assert {run.header["model"]["source"] for run in runs} == {"a test"}
    assert {(len(x["processes"]), x["arm"]) for x in found["ours"]} == {(1, "off"), (1, "madv")}
    assert {r["n_pairs"] for r in found["ratios"]} == {2}
    assert all(r["ratio"] > 0 for r in found["ratios"])
    assert found["failures"] == []

    before = {path: path.read_bytes() for path in out.glob("*.jsonl")}
    again = _reproduce(both_wheels, monkeypatch, *args, "--source", "a test", "--revision", "1")
    assert {path: path.read_bytes() for path in out.glob("*.jsonl")} == before
    assert again["ratios"] == found["ratios"]


def test_context_grows_in_fresh_processes_and_in_one_session(
    flash_small: Path, both_wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args: list[str | Path] = [
        "context",
        "--model",
        flash_small,
        "--lengths",
        "64,128,256",
        "--repeats",
        "2",
        "--out",
        tmp_path / "out",
    ]
    found = _reproduce(both_wheels, monkeypatch, *args)
    assert [(x["length"], len(x["decode"]["values"])) for x in found["fresh"]] == [(64, 2), (128, 2), (256, 2)]
    assert [x["length"] for x in found["session"]] == [64, 128, 192, 256]
    assert [x["decode"] is not None for x in found["session"]] == [False, False, False, True]
    assert found["memory"]["min_available_bytes"] > 0
    # past the end of its list the model goes on from the beginning, with the experts that belong to each token
    assert [run.checks[0]["experts_match"] for run in results.read(map(Path, found["files"]))] == [True] * 4


def test_overlap_runs_on_off_off_on(
    flash_small: Path, both_wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _reproduce(
        both_wheels, monkeypatch, "overlap", "--model", flash_small, "-p", "64", "--out", tmp_path / "out"
    )
    assert found["order"] == "on, off, off, on"
    assert (found["outputs_equal"], found["text_equal"]) == (True, True)
    assert [len(t["prompt_ts"]) for t in found["ours"]] == [2, 2]
