"""Reproduced experiments: published figures add up, tokens wrap, ratios pair processes, differences are listed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from results_rows import GIB, header, sample, write
from test_synth import write_vocabulary

from toolkit import results
from toolkit.bench import machine
from toolkit.bench.plan import Conditions
from toolkit.cli.reproduce import reproduce
from toolkit.errors import BenchError, MachineError, ResultsError
from toolkit.model.arch.deepseek4 import flash
from toolkit.model.layout import read_model
from toolkit.model.shape import routing
from toolkit.model.synth import Synth
from toolkit.reproduce import context, moe_madv, overlap, published, rows, setup
from toolkit.reproduce.positions import Positions
from toolkit.results import RunData

# --- published figures ----------------------------------------------------------------------------------------


def test_every_file_names_its_sources_and_conditions() -> None:
    names = sorted(path.stem for path in published.folder().glob("*.toml"))
    assert names == ["context", "moe-madv", "overlap"]
    for name in names:
        found = published.load(name)
        assert found.title and found.source and found.conditions["model"] and found.conditions["machine"]


def test_the_runs_of_moe_madv_give_its_headline() -> None:
    """Published: 0.98 -> 1.23 tok/s (+25.4 %), 115.5 -> 103.1 s (-10.7 %)."""
    found = published.load("moe-madv")
    # (1.4 + 1.4 + 1.3 + 1.1 * 3) / (1.1 + 1.1 + 1.0 + 0.9 * 3) = 7.4 / 5.9
    assert moe_madv.published_ratio(found, "gen_ts") == pytest.approx(7.4 / 5.9)
    assert round(100 * moe_madv.published_ratio(found, "gen_ts") - 100, 1) == 25.4
    off = (120.34 + 111.72 + 114.94 + 113.87 + 116.89 + 115.53) / 6
    on = (100.26 + 101.73 + 101.75 + 104.25 + 106.79 + 104.01) / 6
    assert (round(off, 1), round(on, 1), round(100 * (1 - on / off), 1)) == (115.5, 103.1, 10.7)
    assert moe_madv.published_ratio(found, "wall_s") == pytest.approx(off / on)
    assert round(found.figures["model"]["size"] / GIB, 2) == 139.91
    assert sum(case["n"] for case in found.figures["longrun"]) == 99


def test_the_outlier_of_the_context_series_is_in_its_mean() -> None:
    (longest,) = (r for r in published.load("context").figures["fresh"] if r["length"] == 131072)
    found = rows.spread(longest["decode_runs"])
    assert found is not None
    assert (round(found["mean"], 2), round(found["sd"], 2)) == (longest["decode_ts"], longest["decode_sd"])
    assert found["values"] == [7.91, 2.77, 7.91]


def test_a_file_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "folder", lambda: tmp_path)
    (tmp_path / "x.toml").write_text('title = "x"\n[sources]\n[conditions]\n', encoding="utf-8")
    with pytest.raises(ResultsError, match="figures without a source"):
        published.load("x")
    (tmp_path / "y.toml").write_text('title = "y"\n', encoding="utf-8")
    with pytest.raises(ResultsError, match=r"not the figures of an experiment.*sources"):
        published.load("y")


# --- tokens ---------------------------------------------------------------------------------------------------


def test_positions_start_over_and_take_their_experts_along() -> None:
    experts = np.arange(5, dtype=np.int32).reshape(5, 1, 1)
    pool = Positions(tokens=(50, 51, 52, 53, 54), source="a list", experts=experts)
    taken = pool.take(3, 4, 2)
    assert (taken.prompt, taken.gen) == ((53, 54, 50, 51), (52, 53))
    assert taken.experts is not None and taken.experts.ravel().tolist() == [3, 4, 0, 1, 2, 3]
    assert taken.source == "a list, from position 3"
    assert Positions(tokens=(1, 2), source="text").take(0, 1, 1).experts is None


# --- rows -----------------------------------------------------------------------------------------------------


def run_of(
    path: Path, order: list[str], speeds: dict[str, float], *, name: str = "r1", **header_changes: Any
) -> RunData:
    """A finished run: arms by initial, `speeds` in decoded t/s; a prompt of 16 takes 2 s, the load 1 s."""
    arms = list(speeds)
    head = header([arms] * len(order), tests=("pp16", "tg24"), run_id=name, n_prompt=16, n_gen=24, **header_changes)
    head["plan"]["tokens_source"] = "prescribed by the model"
    head["model"] |= {"layers": 11, "experts": 256, "top_k": 6}
    head["machine"] |= {"cpu": "Xeon", "os": "Debian 12", "read_ahead_kb": 128}
    names = {arm[0]: arm for arm in arms}
    data: list[dict[str, Any]] = []
    for block, letters in enumerate(order):
        for letter in letters:
            position = len(data) // 2
            arm, ts = names[letter], speeds[names[letter]] * (1 + block / 100)
            common = {"load_s": 1.0, "hints": None if arm == "stock" else {"wait_ns": 500_000_000, "hint_ns": 1}}
            data.append(sample(head, block, position, arm, 8.0, "pp16", avg_ns=2e9, token_ms=[2000.0], **common))
            data.append(sample(head, block, position, arm, ts, "tg24", avg_ns=24e9 / ts, **common))
    checks = [
        {"kind": "check", "run_id": name, "arm": arm, "outputs_equal": True, "greedy": [1, 2, 3], "text": "equal"}
        for arm in arms
    ]
    write(path, head, *checks, *data)
    return results.read([path])[0]


def test_a_process_is_its_load_and_both_tests(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a.jsonl", ["om"], {"off": 1.0, "madv": 2.0})
    (off,), (madv,) = rows.processes(run, "off"), rows.processes(run, "madv")
    assert (off.wall_s, madv.wall_s) == (1 + 2 + 24, 1 + 2 + 12)
    assert (off.prompt_ts, off.gen_ts, madv.gen_ts) == (8.0, 1.0, 2.0)
    assert madv.hints == {"wait_ns": 10**9, "hint_ns": 2}


def test_ratios_pair_processes_over_files(tmp_path: Path) -> None:
    runs = [
        run_of(tmp_path / f"{i}.jsonl", ["om", "mo", "om"], {"off": 1.0 + i, "madv": 2.0 + 2 * i}, name=f"r{i}")
        for i in range(2)
    ]
    decode = rows.ratio(runs, "madv", "off", "decode", "gen_ts", published=1.25)
    assert decode.ratio == pytest.approx(2.0)
    assert (decode.n_pairs, decode.verdict, decode.published) == (6, "faster", 1.25)
    assert decode.ci95 is not None and 1.99 < decode.ci95[0] <= decode.ci95[1] < 2.01
    # less time is faster: (3 + 24 / 1) / (3 + 24 / 2) for the first block of the first file
    wall = rows.ratio(runs[:1], "madv", "off", "run time", "wall_s")
    off = [3 + 24 / (1 + b / 100) for b in range(3)]
    madv = [3 + 24 / (2 * (1 + b / 100)) for b in range(3)]
    assert wall.ratio == pytest.approx(sum(off) / sum(madv))
    assert wall.verdict == "faster"


def test_no_ratio_when_outputs_differ(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    run_of(path, ["om", "mo", "om"], {"off": 1.0, "madv": 2.0})
    text = path.read_text(encoding="utf-8").splitlines()
    changed = [line.replace('"ff"', '"00"') if '"arm": "madv"' in line else line for line in text]
    path.write_text("\n".join(changed) + "\n", encoding="utf-8")
    found = rows.ratio(results.read([path]), "madv", "off", "decode", "gen_ts")
    assert (found.ratio, found.ci95, found.verdict) == (None, None, "outputs differ")


def test_a_failed_process_is_named_and_left_out(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a.jsonl", ["om"], {"off": 1.0, "madv": 2.0})
    bad = [
        r | {"status": "failed", "reason": "killed by the budget\nlog"} if r["arm"] == "madv" else r
        for r in run.samples
    ]
    failed = replace(run, samples=tuple(bad))
    assert rows.processes(failed, "madv") == []
    assert rows.failures([failed]) == [f"a.jsonl: madv {t} failed: killed by the budget" for t in ("pp16", "tg24")]


def test_conditions_that_are_the_same_are_not_listed(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a.jsonl", ["om", "mo", "om"], {"off": 1.0, "madv": 2.0})
    theirs = published.load("moe-madv")
    found = {c.what: (c.published, c.ours) for c in rows.differing(theirs, rows.our_conditions(run))}
    assert "repeats" not in found  # three in both
    assert found["memory"][1] == "2.00 GiB by cgroup-v1; the model is 1.5 times as large"
    assert found["machine"] == ("Apple M1 Max", "Xeon, 2 threads")
    assert found["read-ahead"] == ("not stated", "128 KiB")
    assert found["context"] == ("1024", "not recorded")


# --- reports --------------------------------------------------------------------------------------------------


def test_moe_madv_report_puts_figures_side_by_side(tmp_path: Path) -> None:
    speeds = {"stock": 0.8, "off": 1.0, "madv": 2.0, "hint": 3.0}
    runs = {
        name: run_of(tmp_path / f"{name}.jsonl", ["somh", "hmos", "somh"], speeds, name=name)
        for name in ("json", "plain")
    }
    theirs = published.load("moe-madv")
    report = moe_madv.Report(
        published=theirs,
        runs={"decode": runs},
        arms=list(speeds),
        ratios=moe_madv._ratios(theirs, {"decode": runs}, list(speeds)),
        conditions=rows.differing(theirs, rows.our_conditions(runs["json"])),
        failures=[],
    )
    text = moe_madv.as_text(report)
    # 1.1, 1.1, 1.0 against 1.00, 1.01, 1.02; the stock arm has no published figure
    assert "| json | off | 116 | 26.8 | 0.8 | 8 | 1.07 | 1.01 | 100 |  |" in text
    assert "| plain | stock | - |" in text
    assert "| decode suite, decode t/s | madv over off | 1.25 | 2.00 [2.00, 2.00] | 6 | faster |" in text
    assert "| decode suite, decode t/s | hint over off | - | 3.00 [3.00, 3.00] | 6 | faster |" in text
    assert "| decode | prewarm, hint on | 16 | 111 | not run | 1.14 | not run | 1.41 | not run |" in text
    data = json.loads(json.dumps(moe_madv.as_json(report)))
    assert data["published"]["model"]["revision"] == "cd42deba41ac0536e68b125dfc367197b0ec3038"
    assert len(data["ours"]) == 2 * 4 and len(data["ours"][0]["processes"]) == 3


def test_conditions_of_moe_madv_say_what_each_arm_read_at_load(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a.jsonl", ["om"], {"off": 1.0, "madv": 2.0}, n_ctx=256)
    read = {"off": 2 * GIB, "madv": GIB // 4}
    loaded = replace(run, samples=tuple(r | {"load_read_bytes": read[r["arm"]]} for r in run.samples))
    found = moe_madv._conditions([loaded])
    assert found["load"] == "off read 2.00 GiB, madv read 0.25 GiB"
    assert (found["context"], found["decoded"]) == ("256", "24")
    assert found["hint off"] == published.load("moe-madv").conditions["hint off"]


def test_overlap_report_says_ratio_waits_and_equality(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a.jsonl", ["oh", "ho"], {"overlap": 2.0, "hint": 1.0})
    assert overlap._order(run) == "on, off, off, on"
    theirs = published.load("overlap")
    report = overlap.Report(
        published=theirs,
        run=run,
        times=[overlap._times(run, arm) for arm in ("overlap", "hint")],
        ratios=[rows.ratio([run], "overlap", "hint", "prompt t/s", "prompt_ts", published=1.92)],
        outputs_equal=rows.outputs_equal([run], "overlap", "hint"),
        text_equal=True,
        conditions=[],
        failures=[],
    )
    text = overlap.as_text(report)
    assert "| prompt t/s | overlap over hint | 1.92 | 1.00 [1.00, 1.00] | 2 | undecided |" in text
    # two tests of half a second each in every process
    assert "| overlap | 8, 8 | 23 | 1, 1 |" in text and "| hint | 8, 8 | 69 | 1, 1 |" in text
    assert "| logits | equal | equal |" in text and "| text | equal | equal |" in text


def test_session_reports_each_added_interval(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a.jsonl", ["h", "h", "h"], {"hint": 4.0})
    grown = [
        r | {"token_ms": [100.0, 200.0, 400.0 + 40 * r["block"]]} if r["test"] == "pp16" else r for r in run.samples
    ]
    found = context.intervals(replace(run, samples=tuple(grown)), "hint", 512)
    assert [x.length for x in found] == [512, 1024, 1536]
    assert found[0].prefill is not None and found[0].prefill["mean"] == pytest.approx(5120)
    assert found[1].prefill is not None and found[1].prefill["mean"] == pytest.approx(2560)
    assert found[2].prefill is not None
    assert found[2].prefill["values"] == pytest.approx([512 / 0.4, 512 / 0.44, 512 / 0.48])
    assert found[0].decode is None and found[2].decode is not None
    assert found[2].decode["values"] == pytest.approx([4.0, 4.04, 4.08])


def test_memory_is_watched_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    with context.MemoryWatch(path):
        pass
    first = context.MemoryWatch.read(path)
    lowest = first["min_available_bytes"]
    assert lowest is not None and 0 < lowest < 1 << 50
    path.write_text(json.dumps({"min_available_bytes": 5, "swap_delta_bytes": 1 << 40}), encoding="utf-8")
    with context.MemoryWatch(path):
        pass
    assert context.MemoryWatch.read(path) == {"min_available_bytes": 5, "swap_delta_bytes": 1 << 40}
    assert context.MemoryWatch.read(tmp_path / "none.json") == {}


# --- preflight ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    shape = replace(flash(1834), ff=32, shared_ff=32)
    synth = Synth(
        *routing(shape, None, 0), vocab=write_vocabulary(folder / "v.gguf"), seed=0, preset="deepseek-v4-flash"
    )
    synth.write(folder / "m.gguf", force=False, advance=lambda _: None)
    return folder / "m.gguf"


def conditions(budget: int) -> Conditions:
    return Conditions(blocks=1, n_batch=512, n_ubatch=512, cold=True, n_threads=1, budget_bytes=budget)


def test_budget_is_the_size_over_the_oversubscription(model_file: Path) -> None:
    layout = read_model(model_file)
    assert setup.budget_of(layout, None, 2.2) == int(model_file.stat().st_size / 2.2)
    assert setup.budget_of(layout, "48GiB", 2.2) == 48 << 30


def test_preflight_refuses_what_cannot_run(model_file: Path) -> None:
    layout, facts = read_model(model_file), machine.facts(model_file)
    with pytest.raises(BenchError, match="does not hold the always used weights"):
        setup.preflight(layout, conditions(1 << 20), facts)
    with pytest.raises(MachineError, match=r"the budget is 1048576.00 GiB, .* are available"):
        setup.preflight(layout, conditions(1 << 50), facts)


def test_a_mode_that_is_missing_is_said() -> None:
    setup.require_modes(["stock", "off", "hint"], ["off", "madv", "hint"], "the wheel moe1.cpu")
    with pytest.raises(BenchError, match=r"the wheel moe1\.cpu has no mode overlap; it has off, madv, hint") as e:
        setup.require_modes(["overlap", "hint"], ["off", "madv", "hint"], "the wheel moe1.cpu")
    assert e.value.hint is not None and "moe-madv build" in e.value.hint


# --- the command ----------------------------------------------------------------------------------------------


def test_dry_run_says_what_would_be_done(model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["moe-madv", "--quick", "--model", str(model_file), "--dry-run"]
    got = CliRunner().invoke(reproduce, args)
    assert (got.exit_code, got.stdout) == (0, "")
    assert "moe-madv: off, madv, hint x 3 repeats on m.gguf" in got.stderr
    assert "(2.2x)" in got.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["context", "--lengths", "512,700"], "rising list of multiples"),
        (["context", "--lengths", "512,256"], "rising list of multiples"),
        (["context", "--lengths", "512,x"], "rising list of multiples"),
        (["moe-madv", "--scale", "0.5"], "'0.5' is not 1/N"),
        (["overlap", "--off", "stock"], "'stock' is not one of"),
    ],
)
def test_bad_options_are_refused(args: list[str], message: str) -> None:
    got = CliRunner().invoke(reproduce, args)
    assert got.exit_code == 2
    assert message in got.stderr
