"""The whole chain on a model that fits a test: both arms, every mode, checks, rows, comparison."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from toolkit import results
from toolkit.bench import limits
from toolkit.bench.check import matches_prescription, trace_experts
from toolkit.bench.launch import job_of, launch
from toolkit.bench.plan import Arm, Conditions
from toolkit.bench.tokens import prescribed
from toolkit.cli import cli
from toolkit.model.layout import read_model
from toolkit.model.synth import prescription

pytestmark = pytest.mark.build

CONDITIONS = Conditions(blocks=1, n_batch=512, n_ubatch=512, cold=False, n_threads=2)


def _moe_madv(*args: str | Path) -> str:
    done = CliRunner().invoke(cli, [str(a) for a in args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def arms(both_wheels: Path) -> Sequence[Arm]:
    from toolkit.bench.select import arms_by_name
    from toolkit.config import patches_dir
    from toolkit.patch.series import load_series
    from toolkit.patch.upstream import load_pin

    return arms_by_name(["stock", "off", "madv", "hint"], load_pin(), load_series(patches_dir()), both_wheels)


def test_every_arm_gives_the_same_rows_of_a_complete_run(
    tiny: Path, both_wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_MADV_HOME", str(both_wheels))
    out = tmp_path / "dir with ünïcode" / "run.jsonl"
    args = ["bench", "run", tiny, "-p", "16", "-n", "8", "-t", "2", "--blocks", "2", "--out", out, "--json"]
    found = json.loads(_moe_madv(*args))
    assert {(c["test"], c["candidate"], c["outputs_equal"]) for c in found["comparisons"]} == {
        (test, arm, True) for test in ("pp16", "tg8") for arm in ("off", "madv", "hint")
    }

    (run,) = results.read([out])
    names = ["stock", "off", "madv", "hint"]
    assert [s["arm"] for s in run.samples if s["test"] == "tg8"] == [*names, *reversed(names)]
    assert {s["status"] for s in run.samples} == {"ok"}
    assert len({s["logits_sha256"] for s in run.samples if s["test"] == "tg8"}) == 1
    assert {c["arm"]: c["outputs_equal"] for c in run.checks} == dict.fromkeys(names, True)
    assert run.checks[0]["experts_match"] is True

    # every token takes top-k experts in each of gate, up and down of each layer
    layout = read_model(tiny)
    slices = 8 * sum(3 * layer.top_k for layer in layout.layers)
    groups = 8 * len(layout.layers)
    for sample in (s for s in run.samples if s["test"] == "tg8"):
        hints = sample["hints"]
        if sample["arm"] == "stock":
            assert hints is None
        elif sample["arm"] == "off":
            assert set(hints.values()) == {0}
        elif sample["arm"] == "madv":
            assert (hints["slices"], hints["calls"], hints["groups"]) == (slices, slices, 3 * groups)
            assert hints["errors"] == hints["unmapped"] == hints["ids_ignored"] == 0
        else:
            # each slice was asked for or found in memory, until all had been there for two rounds of the layers
            assert hints["groups"] == groups
            assert hints["slices"] % (slices // groups) == 0
            assert hints["slices"] <= slices
            assert hints["errors"] == hints["unmapped"] == hints["ids_ignored"] == 0
            share = hints["slices"] / slices
            assert hints["bytes_hinted"] + hints["bytes_resident"] >= share * 8 * (layout.routed_bytes_per_token or 0)


def test_a_finished_run_is_not_measured_again_and_a_cut_one_continues(
    tiny: Path, both_wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_MADV_HOME", str(both_wheels))
    out = tmp_path / "run.jsonl"
    args = [
        "bench",
        "run",
        tiny,
        "--arms",
        "stock,hint",
        "-p",
        "0",
        "-n",
        "4",
        "-t",
        "2",
        "--blocks",
        "2",
        "--out",
        out,
    ]
    _moe_madv(*args)
    whole = out.read_bytes()
    _moe_madv(*args)
    assert out.read_bytes() == whole

    # a kill in the middle of the third row
    lines = whole.splitlines(keepends=True)
    kept = b"".join(lines[:5])
    out.write_bytes(kept + lines[5][:40])
    _moe_madv(*args)
    again = out.read_bytes()
    assert again.startswith(kept)
    (run,) = results.read([out])
    assert sorted(s["position"] for s in run.samples) == [0, 1, 2, 3]

    # another plan does not mix into the file
    done = CliRunner().invoke(cli, [str(a) for a in [*args, "-n", "5"]])
    assert done.exit_code != 0
    assert "plan.n_gen" in str(done.exception)
    assert out.read_bytes() == again


def test_physical_batches_smaller_than_the_prompt_select_the_same_experts(tiny: Path, arms: Sequence[Arm]) -> None:
    layout = read_model(tiny)
    tokens = prescribed(prescription(tiny), 16, 4)
    assert tokens.experts is not None
    traces = []
    for n_ubatch in (512, 5):
        job = job_of(layout, CONDITIONS, 20) | {"n_prompt": 16, "n_ubatch": n_ubatch}
        with limits.memory_budget(None) as unlimited:
            blocks = [layer.block for layer in layout.layers]
            traces.append(trace_experts(arms[0], tokens, job, unlimited, blocks, layout.layers[0].top_k))
    for trace in traces:
        assert matches_prescription(trace, tokens.experts)
    # all but the prompt's rows of the last layer are computed
    computed = (traces[0] >= 0).all(axis=2)
    assert computed[:, :-1].all()
    assert np.flatnonzero(computed[:, -1]).tolist() == list(range(15, 20))


def test_a_shared_expert_is_not_hinted_and_changes_nothing(
    tiny_shared: Path, both_wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_MADV_HOME", str(both_wheels))
    out = tmp_path / "shared.jsonl"
    args = ["bench", "run", tiny_shared, "--arms", "stock,hint", "-p", "8", "-n", "4", "--blocks", "1", "--out", out]
    _moe_madv(*args)
    (run,) = results.read([out])
    assert run.checks[0]["experts_match"] is True
    assert run.checks[1]["outputs_equal"] is True
    (hint,) = (s for s in run.samples if (s["arm"], s["test"]) == ("hint", "tg4"))
    layout = read_model(tiny_shared)
    assert hint["hints"]["groups"] == 4 * len(layout.layers)
    assert hint["hints"]["slices"] <= 4 * sum(3 * layer.top_k for layer in layout.layers)
    assert layout.shared_expert_bytes


def test_a_prompt_longer_than_a_batch_gives_the_same_logits_at_its_end(tiny: Path, arms: Sequence[Arm]) -> None:
    tokens = prescribed(prescription(tiny), 16, 0)
    ends = []
    for n_batch in (16, 5):
        job = job_of(read_model(tiny), CONDITIONS, 16) | {"n_prompt": 16, "n_batch": n_batch, "n_ubatch": 5}
        with limits.memory_budget(None) as unlimited:
            outcome = launch(arms[0], {**job, "tokens": tokens.all}, unlimited)
        assert outcome.reason is None
        ends.append(outcome.tests[0]["greedy"][-1])
        assert outcome.tests[0]["n_tokens"] == ([16] if n_batch == 16 else [5, 5, 5, 1])
    assert ends[0] == ends[1]


def test_ordinary_text_runs_too(tiny: Path, arms: Sequence[Arm]) -> None:
    job = job_of(read_model(tiny), CONDITIONS, 64)
    with limits.memory_budget(None) as unlimited:
        outcome = launch(arms[0], {**job, "text": "The sea was calm."}, unlimited)
        assert outcome.reason is None
        assert len(outcome.tokens) >= 4
        outcome = launch(arms[3], {**job, "tokens": list(outcome.tokens), "n_prompt": 2}, unlimited)
    assert outcome.reason is None
    assert all(test["logits_finite"] for test in outcome.tests)


def test_a_model_that_vanishes_is_a_reason_not_a_crash(tiny: Path, arms: Sequence[Arm], tmp_path: Path) -> None:
    job = job_of(read_model(tiny), CONDITIONS, 8) | {"model": str(tmp_path / "gone.gguf")}
    with limits.memory_budget(None) as unlimited:
        outcome = launch(arms[3], {**job, "tokens": [1, 2], "n_prompt": 1}, unlimited)
    assert outcome.reason is not None
    assert "gone.gguf" in outcome.reason
    assert outcome.tests == ()


def test_the_mode_switches_inside_a_process(tiny: Path, arms: Sequence[Arm], tmp_path: Path) -> None:
    """The C setter, as a program would use it: counters move in hint, stand still in off."""
    script = tmp_path / "switch.py"
    api = Path(__file__).parents[2] / "toolkit/bench/llama_api.py"
    script.write_text(
        f"""
import importlib.util, json
spec = importlib.util.spec_from_file_location("api", {str(api)!r})
api = importlib.util.module_from_spec(spec)
spec.loader.exec_module(api)
payload = api.Payload()
keep = api.capture_log(lambda line: None)
session = api.Session({str(tiny)!r}, n_ctx=64, n_batch=64, n_ubatch=64, n_threads=2)
seen = [payload.modes(), payload.mode()]
for mode in ("hint", "off", "madv"):
    payload.set_mode(mode)
    payload.reset()
    session.decode([5, 6, 7], 3 * len(seen))
    seen.append([payload.mode(), payload.counters()["groups"]])
try:
    payload.set_mode("fast")
except api.LlamaError as e:
    seen.append(str(e))
print(json.dumps(seen))
""",
        encoding="utf-8",
    )
    from toolkit.process import run

    env = {k: "" for k in os.environ if k.startswith("MOE_MADV_")}
    seen = json.loads(run([arms[3].python, "-I", script], cwd=tmp_path, env=env).stdout)
    layers = len(read_model(tiny).layers)
    assert seen[0] == ["off", "madv", "hint", "overlap", "cache"]
    assert seen[1:5] == ["off", ["hint", layers], ["off", 0], ["madv", 3 * layers]]
    assert "no mode 'fast'" in seen[5]
