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
from toolkit.evidence.compare import compare
from toolkit.evidence.setting import command
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


def _reproduce(home: Path, monkeypatch: pytest.MonkeyPatch, *args: object) -> Any:
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
    origin = ["--source", "a test", "--revision", "1"]
    args = [
        "moe-madv",
        "--model",
        flash_small,
        "--arms",
        "off,madv",
        "--repeats",
        "1",
        "--matrix",
        *origin,
        "--out",
        out,
    ]
    found = _reproduce(both_wheels, monkeypatch, *args)
    stem = "reproduce-moe-madv-small"
    names = ["decode-json", "decode-plain", "prefill-code", "prefill-note"]
    assert sorted(path.name for path in out.glob("*.jsonl")) == [f"{stem}-{name}.jsonl" for name in names]
    runs = results.read(sorted(out.glob("*.jsonl")))
    # two prompts of a suite are different tokens, and every one takes its prescribed experts
    assert len({run.header["plan"]["tokens_sha256"] for run in runs}) == 4
    assert [run.checks[0]["experts_match"] for run in runs] == [True] * 4
    assert {run.header["model"]["source"] for run in runs} == {"a test"}
    assert {run.header["plan"]["n_ctx"] for run in runs} == {1024}
    arms = ["off", "madv", "prewarm-off", "prewarm-madv"]
    assert {(len(x["processes"]), x["arm"]) for x in found["ours"]} == {(1, arm) for arm in arms}
    assert {r["n_pairs"] for r in found["ratios"]} == {2}
    assert all(r["ratio"] > 0 for r in found["ratios"])
    assert found["failures"] == []
    # the pages of results name the command that made a file
    asked = "moe-madv reproduce moe-madv --model small.gguf --arms off,madv --repeats 1 --matrix --source 'a test'"
    assert all(command(run).startswith(asked) for run in runs)
    # a context of 1024 tokens is not among what differs
    assert {c["what"] for c in found["conditions"]}.isdisjoint({"context", "decoded"})

    # 16 of 256 experts in each of the layers are read before the prewarmed runs
    layers = read_model(flash_small).layers
    warmed = {"prewarm_bytes": sum(16 * (layer.bytes_per_expert or 0) for layer in layers)}
    for run in runs:
        assert [run.header["arms"][arm].get("config") for arm in arms] == [None, None, warmed, warmed]
        assert {row["arm"] for row in run.samples if row.get("prewarm_s", 0) > 0} == set(arms[2:])
        # every file is one that the other commands read, with a limit for the prompt and for decode
        limits_of = {c.test: c.candidate_limit_fraction for c in compare([run]).comparisons}
        assert set(limits_of) == set(run.header["plan"]["tests"])
        assert all(fraction is not None and fraction > 0 for fraction in limits_of.values())
    report = (out / f"{stem}.md").read_text(encoding="utf-8")
    assert "| ours | prewarm-madv |" in report
    assert "not run" not in report

    before = {path: path.read_bytes() for path in out.iterdir()}
    again = _reproduce(both_wheels, monkeypatch, *args)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert again["ratios"] == found["ratios"]


def test_context_grows_in_fresh_processes_and_in_one_session(
    flash_small: Path, both_wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    args = ["context", "--model", flash_small, "--lengths", "64,128,256", "-n", "8", "--repeats", "2", "--out", out]
    found = _reproduce(both_wheels, monkeypatch, *args)
    assert [(x["length"], len(x["decode"]["values"])) for x in found["fresh"]] == [(64, 2), (128, 2), (256, 2)]
    # 8 tokens decoded at 64 and at 128 are part of what comes after
    assert [(x["length"], x["added"]) for x in found["session"]] == [(64, 64), (128, 56), (256, 120)]
    assert [len(x["decode"]["values"]) for x in found["session"]] == [2, 2, 2]
    watched = [once["memory"] for x in (*found["fresh"], *found["session"]) for once in x["runs"]]
    assert len(watched) == 12
    assert all(memory["min_available_bytes"] > 0 for memory in watched)
    assert (out / "reproduce-context-small.md").read_text(encoding="utf-8").count("| session | hint |") == 6

    runs = results.read(map(Path, found["files"]))
    # past the end of its list the model goes on from the beginning, with the experts that belong to each token
    assert [run.checks[0]["experts_match"] for run in runs] == [True] * 4
    session = runs[-1]
    tests = ["pp64", "tg8", "pp56 @ d72", "tg8 @ d72", "pp120 @ d136", "tg8 @ d136"]
    assert session.header["plan"]["tests"] == tests
    assert [row["test"] for row in session.samples] == tests * 2
    # the same tokens at the same places: the session's first interval is the fresh process
    logits = {(run.path.name, row["test"]): row["logits_sha256"] for run in (runs[0], session) for row in run.samples}
    fresh, grown = (path.name for path in (runs[0].path, session.path))
    assert logits[fresh, "tg8"] == logits[grown, "tg8"]


def test_overlap_runs_on_off_off_on_with_a_batch_it_finds(
    flash_small: Path, both_wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    args = ["overlap", "--model", flash_small, "--batch", "auto", "--out", out]
    found = _reproduce(both_wheels, monkeypatch, *args)
    assert found["order"] == "on, off, off, on"
    assert (found["outputs_equal"], found["text_equal"]) == (True, True)
    assert [len(t["prompt_ts"]) for t in found["ours"]] == [2, 2]
    layers = len(read_model(flash_small).layers)
    assert [len(t["layers"]) for t in found["ours"]] == [layers, layers]
    tried = found["balance"]["tried"]
    assert found["batch"] in [t["batch"] for t in tried]
    assert all(t["compute_s"] > 0 and t["read_bytes"] > 0 for t in tried)
    (run,) = results.read(map(Path, found["files"]))
    assert run.header["plan"]["n_ubatch"] == run.header["plan"]["n_prompt"] == found["batch"]

    # what was found is kept: another call neither searches nor measures
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert _reproduce(both_wheels, monkeypatch, *args)["balance"] == found["balance"]
    assert {path: path.read_bytes() for path in out.iterdir()} == before
