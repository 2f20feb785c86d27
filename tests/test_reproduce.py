"""Reproduced experiments: published figures add up, tokens wrap, ratios pair processes, differences are listed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from results_rows import GIB, header, sample, write
from test_synth import write_vocabulary

from toolkit import results
from toolkit.bench import limits, machine
from toolkit.bench.plan import Arm, Conditions, Tokens
from toolkit.cli.reproduce import reproduce
from toolkit.errors import BenchError, MachineError, ResultsError
from toolkit.evidence.results_page import results_page
from toolkit.evidence.setting import command
from toolkit.model.arch.deepseek4 import flash
from toolkit.model.layout import read_model
from toolkit.model.shape import routing
from toolkit.model.synth import Synth
from toolkit.reproduce import context, moe_madv, overlap, published, rows, setup
from toolkit.reproduce.balance import Balance, Tried, search
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


def test_a_session_is_timed_interval_by_interval() -> None:
    pool = Positions(
        tokens=tuple(range(100, 110)), source="a list", experts=np.arange(10, dtype=np.int32).reshape(10, 1, 1)
    )
    taken = context.growing(pool, [3, 7, 12], 2)
    # contexts of 3, 7 and 12 tokens, 2 decoded at each: prompts of 3, 7 - 3 - 2 and 12 - 7 - 2
    assert (taken.prompt, taken.gen) == ((100, 101, 102), (103, 104))
    assert taken.further == (((105, 106), (107, 108)), ((109, 100, 101), (102, 103)))
    assert taken.all == [*range(100, 110), 100, 101, 102, 103]
    assert taken.spans == {
        "pp3": (0, 3, 0),
        "tg2": (3, 5, 0),
        "pp2 @ d5": (5, 7, 5),
        "tg2 @ d5": (7, 9, 5),
        "pp3 @ d9": (9, 12, 9),
        "tg2 @ d9": (12, 14, 9),
    }
    assert taken.experts is not None and taken.experts.ravel().tolist() == [*range(10), 0, 1, 2, 3]


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
    head |= {"pin": "0c1e57098aabb", "series": "aabbccddeeff00"}
    head["model"] |= {"layers": 11, "experts": 256, "top_k": 6}
    head["machine"] |= {"cpu": "Xeon", "os": "Debian 12", "read_ahead_kb": 128}
    names = {arm[0]: arm for arm in arms}
    data: list[dict[str, Any]] = []
    for block, letters in enumerate(order):
        for letter in letters:
            position = len(data) // 2
            arm, ts = names[letter], speeds[names[letter]] * (1 + block / 100)
            common = {
                "load_s": 1.0,
                "n_depth": 0,
                "hints": None if arm == "stock" else {"wait_ns": 500_000_000, "hint_ns": 1},
                "token_counters": {"psi_io_ms": [500.0, 1000.0]},
                "observed": {
                    "available_bytes": {"min": (9 - block) * GIB, "mean": 9 * GIB, "max": 9 * GIB},
                    "swap_delta_bytes": position << 20,
                    "temperature_c": None if arm == "stock" else {"min": 40, "mean": 41, "max": 42.5 + block},
                },
            }
            prompt = {"avg_ns": 2e9, "n_prompt": 16, "n_gen": 0}
            data.append(sample(head, block, position, arm, 8.0, "pp16", **prompt, **common))
            data.append(
                sample(head, block, position, arm, ts, "tg24", avg_ns=24e9 / ts, n_prompt=0, n_gen=24, **common)
            )
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
    # 1.5 s of each test with a task that waited: 3 of 2 + 24 s, 3 of 2 + 12 s
    assert off.io_share == pytest.approx(3 / 26)
    assert madv.io_share == pytest.approx(3 / 14)


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
    assert rows.failures([failed]) == ["a.jsonl: madv, 1 run: killed by the budget"]


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
        ratios=moe_madv.ratios(theirs, {"decode": runs}, list(speeds)),
        profile=[moe_madv.Figure(what="GiB of all experts", published="110.9", ours="1.5")],
        conditions=rows.differing(theirs, rows.our_conditions(runs["json"])),
        failures=[],
        path=None,
    )
    text = moe_madv.as_text(report)
    # the published headline in its own words: 0.98 -> 1.23 tok/s, 115.5 -> 103.1 s, n = 6 each
    assert "| published | hint on | 0.983 → 1.23 | +25.4 % | 116 → 103 | -10.7 % | 6 |" in text
    assert "| ours | madv | 1.01 → 2.02 | +100.0 % |" in text
    # load and prompt take 3 s, 24 tokens at 1.00, 1.01 and 1.02 t/s the rest; stock has no published figure
    assert (
        "| json | off | 120, 112, 115 | 27, 26.8, 26.5 | 0.8, 0.8, 0.8 | 8, 8, 8 | 1.1, 1.1, 1 | 1, 1.01, 1.02 | 100 |"
        in text
    )
    assert "| plain | stock | - |" in text
    assert "| decode suite, decode t/s | madv over off | 1.25 | 2.00 [2.00, 2.00] | 6 | faster |" in text
    assert "| decode suite, decode t/s | hint over off | - | 3.00 [3.00, 3.00] | 6 | faster |" in text
    assert "| decode | prewarm, hint on | 16 | 0 | 111 | not run | 1.14 | not run | 1.41 | not run |" in text
    # 3 + 24 / 2.00, / 2.02 and / 2.04 s of both prompts
    assert "| decode | hint on | 16 | 6 | 102 | 14.9 | 1.12 | 8 | 1.42 | 2.02 |" in text
    assert "- [json.jsonl](json.jsonl), 2026-01-02, pin 0c1e57098, series aabbccddeeff" in text
    data = json.loads(json.dumps(moe_madv.as_json(report)))
    assert data["published"]["model"]["revision"] == "cd42deba41ac0536e68b125dfc367197b0ec3038"
    assert len(data["ours"]) == 2 * 4 and len(data["ours"][0]["processes"]) == 3


def test_conditions_of_moe_madv_say_what_each_arm_read_at_load(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a.jsonl", ["om"], {"off": 1.0, "madv": 2.0}, n_ctx=256)
    read = {"off": 2 * GIB, "madv": GIB // 4}
    loaded = replace(run, samples=tuple(r | {"load_read_bytes": read[r["arm"]]} for r in run.samples))
    found = moe_madv.conditions([loaded])
    assert found["load"] == "off read 2.00 GiB, madv read 0.25 GiB"
    assert (found["context"], found["decoded"]) == ("256", "24")
    assert found["hint off"] == published.load("moe-madv").conditions["hint off"]


def overlap_run(path: Path, **more: dict[str, Any]) -> RunData:
    """on, off, off, on; `more`: fields of the rows of one arm."""
    run = run_of(path, ["oh", "ho"], {"overlap": 2.0, "hint": 1.0})
    return replace(run, samples=tuple(r | more.get(r["arm"], {}) for r in run.samples))


def layer(n: int, **times: float) -> dict[str, Any]:
    return {"layer": n, "wait_ms": 0.0, "read_ms": 0.0, "compute_ms": 10.0, "bytes": 1 << 20} | times


def test_five_hours_are_shared_by_the_prompts_of_both_suites(
    model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but the measuring: which files, for how long, of how many tokens, with which arms."""
    layout = read_model(model_file)
    arms = tuple(
        Arm(name=name, python=Path("python"), label="", wheel_sha256=name * 2, payload="1", mode=name)
        for name in ("off", "madv", "hint")
    )
    ready = setup.Setup(
        layout=layout,
        arms=arms,
        conditions=conditions(1 << 30),
        facts=machine.facts(model_file),
        out=tmp_path,
        stem="reproduce-moe-madv-m",
        wants_report=True,
        origin=setup.Origin(),
    )
    asked = []

    def measure(made: setup.Setup, tokens: Tokens, part: str, **changes: Any) -> RunData:
        asked.append(
            (part, len(tokens.prompt), len(tokens.gen), changes["minutes"], changes["blocks"], changes["n_ctx"])
        )
        speeds = dict.fromkeys(made.arm_names, 1.0)
        assert list(speeds) == ["off", "madv", "hint", "prewarm-off", "prewarm-madv"]
        return run_of(tmp_path / f"{part}.jsonl", ["om"], speeds, name=part, n_ctx=1024)

    monkeypatch.setattr(moe_madv, "prepare", lambda *_: ready)
    monkeypatch.setattr(moe_madv, "measure", measure)
    options = setup.Options(
        model=model_file,
        scale=64,
        arms=None,
        blocks=3,
        threads=None,
        budget=None,
        oversubscribe=2.2,
        out=tmp_path,
        origin=setup.Origin(),
        dry_run=False,
    )
    report = moe_madv.reproduce(options, quick=False, matrix=False, hours=5)
    # 300 minutes in four parts
    assert asked == [
        ("longrun-decode-json", 16, 24, 75.0, None, 1024),
        ("longrun-decode-plain", 16, 24, 75.0, None, 1024),
        ("longrun-prefill-note", 88, 2, 75.0, None, 1024),
        ("longrun-prefill-code", 88, 2, 75.0, None, 1024),
    ]
    assert report is not None and report.path == tmp_path / "reproduce-moe-madv-m.md"
    covered = next(f for f in report.profile if "prewarmed" in f.what)
    assert covered.published == "17.7 %" and 6 < float(covered.ours.split()[0]) < 100  # 16 of 256 at random: 6.25 %
    with pytest.raises(BenchError, match="the arm off is missing"):
        moe_madv.reproduce(replace(options, arms=("stock", "hint")), quick=False, matrix=False, hours=None)


def test_overlap_report_says_ratio_waits_layers_and_equality(tmp_path: Path) -> None:
    run = overlap_run(
        tmp_path / "a.jsonl",
        overlap={"timeline": [layer(0, bytes=4 << 20), layer(1, compute_ms=30.0)]},
        hint={"timeline": [layer(0, wait_ms=50.0), layer(1, wait_ms=70.0)]},
    )
    assert overlap.order(run) == "on, off, off, on"
    theirs = published.load("overlap")
    report = overlap.Report(
        published=theirs,
        run=run,
        batch=16,
        balance=Balance(disk_mib_s=1000.0, tried=(Tried(batch=16, read_bytes=500 << 20, read_s=0.5, compute_s=0.45),)),
        times=[overlap.times(run, arm) for arm in ("overlap", "hint")],
        ratios=[rows.ratio([run], "overlap", "hint", "prompt t/s", "prompt_ts", published=1.92)],
        outputs_equal=rows.outputs_equal([run], "overlap", "hint"),
        text_equal=True,
        conditions=[],
        failures=[],
        path=None,
    )
    text = overlap.as_text(report)
    assert "| prompt t/s | overlap over hint | 1.92 | 1.00 [1.00, 1.00] | 2 | undecided |" in text
    # half a second of waiting in the prompt of every process
    assert "| overlap | 8, 8 | 23 | 0.5 | 0.5, 0.5 | 1e-09, 1e-09 |" in text
    assert "| hint | 8, 8 | 69 | 0.5 | 0.5, 0.5 |" in text
    assert "Waits are the payload's counter." in text
    assert "| logits | equal | equal |" in text and "| text | equal | equal |" in text
    assert "| 16 | 500 | 0.5 | 0.45 | 10 % |" in text  # 0.05 of 0.5
    assert "A batch of 16 tokens takes as long to read, at 1000 MiB/s, as to compute in memory, within 10 %." in text
    # MiB, waits and the rest of both arms, then their sums; nothing was counted as read
    assert "| layer | MiB, overlap | MiB, hint | wait ms, overlap | wait ms, hint | rest ms, overlap |" in text
    assert "| 0 | 4 | 1 | 0 | 50 | 10 | 10 |" in text
    assert "| all | 5 | 2 | 0 | 120 | 40 | 20 |" in text
    assert json.loads(json.dumps(overlap.as_json(report)))["balance"]["found"] is True


def test_waits_come_from_the_kernel_where_it_counts_them(tmp_path: Path) -> None:
    run = overlap_run(tmp_path / "a.jsonl", overlap={"io_wait_s": 1.25}, hint={"hints": None})
    on, off = overlap.times(run, "overlap"), overlap.times(run, "hint")
    assert (on.waits_s, on.waits_of) == ([1.25, 1.25], overlap.IO_WAIT)
    assert (off.waits_s, off.waits_of, off.hook_s, off.layers) == (None, None, None, [])


# --- the balanced batch ---------------------------------------------------------------------------------------


def batches(read_s: Any, compute_s: Any) -> Balance:
    tried = search(lambda n: Tried(batch=n, read_bytes=1, read_s=read_s(n), compute_s=compute_s(n)))
    return Balance(disk_mib_s=1.0, tried=tried)


def test_linear_compute_is_balanced_in_two_tries() -> None:
    # 4 ms a token against 1 s of reads: 250 tokens
    found = batches(lambda n: 1.0, lambda n: 0.004 * n)
    assert ([t.batch for t in found.tried], found.found) == ([64, 250], True)


def test_between_two_batches_the_ratio_is_a_power() -> None:
    # (n / 100)² s: 64 asks for 64 / 0.4096 = 156, which is too much; the power law through both gives 100
    found = batches(lambda n: 1.0, lambda n: (n / 100) ** 2)
    assert ([t.batch for t in found.tried], found.best.batch, found.best.apart) == ([64, 156, 100], 100, 0.0)


@pytest.mark.parametrize(
    ("read_s", "compute_s", "tried"),
    [(1e-3, 1.0, [64, 16, 4, 1]), (1e3, 1e-3, [64, 256, 1024, 4096])],
    ids=["always bound by computing", "always bound by reads"],
)
def test_no_balance_is_said_with_the_closest(read_s: float, compute_s: float, tried: list[int]) -> None:
    found = batches(lambda n: read_s, lambda n: compute_s * n)
    assert ([t.batch for t in found.tried], found.found) == (tried, False)
    assert found.best.batch == tried[-1]


def test_neighbouring_batches_end_the_search() -> None:
    # a jump between 70 and 71 tokens: no batch has both times alike
    found = batches(lambda n: 1.0, lambda n: 0.5 if n <= 70 else 2.0)
    assert not found.found
    assert len(found.tried) <= 8 and len({t.batch for t in found.tried}) == len(found.tried)


# --- lengths of the context -----------------------------------------------------------------------------------


def test_fresh_processes_keep_their_outlier_and_their_memory(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a.jsonl", ["h", "h", "h"], {"hint": 4.0})
    decoded = iter([7.91, 2.77, 7.91])
    changed = tuple(r | {"avg_ts": next(decoded)} if r["test"] == "tg24" else r for r in run.samples)
    (found,) = context.parts(replace(run, samples=changed), "hint")
    assert (found.length, found.added) == (16, 16)
    assert found.decode is not None and found.prefill is not None
    # by hand: mean 18.59 / 3, sample SD sqrt((2 * 1.71333² + 3.42667²) / 2)
    assert (round(found.decode["mean"], 2), round(found.decode["sd"], 2)) == (6.20, 2.97)
    assert (found.prefill["mean"], found.prefill["sd"]) == (8.0, 0.0)
    assert [x.memory.min_available_bytes for x in found.runs] == [9 * GIB, 8 * GIB, 7 * GIB]
    assert found.memory == rows.Memory(min_available_bytes=7 * GIB, swap_delta_bytes=2 << 20, max_temperature_c=44.5)


def test_session_reports_each_added_interval(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a.jsonl", ["h", "h"], {"hint": 4.0})
    later = [
        r | {"test": f"{r['test']} @ d40", "n_depth": 40, "avg_ts": r["avg_ts"] / 2, "n_prompt": r["n_prompt"] * 3}
        for r in run.samples
    ]
    found = context.parts(replace(run, samples=(*run.samples, *later)), "hint")
    # 16 tokens of prompt, 24 decoded, then 48 more of prompt
    assert [(x.length, x.added) for x in found] == [(16, 16), (88, 48)]
    assert [x.prefill["values"] for x in found if x.prefill] == [[8.0, 8.0], [4.0, 4.0]]
    assert [x.decode["values"] for x in found if x.decode] == [[4.0, 4.04], [2.0, 2.02]]
    theirs = published.load("context")
    report = context.Report(
        published=theirs,
        fresh=[],
        session=found,
        conditions=rows.differing(theirs, context.conditions([run], 24)),
        failures=[],
        runs=[run],
        path=None,
    )
    text = context.as_text(report)
    assert "| published | 131072 | - | 286.41 | 10.77 |  |  |" in text
    assert "| hint | 88 | 48 | 4 ± 0 | 2.01 ± 0.014 | 2, 2.02 |  |" in text
    assert "| session | hint | 16 | 2 | 8 | 4.04 | 8192 MiB | 1 MiB | 43.5 |" in text
    assert "| available memory | 24.9 GiB at least (EVO-X2) | 8192 MiB at least |" in text


def test_memory_that_nobody_watched_is_not_known(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a.jsonl", ["s"], {"stock": 4.0})
    assert rows.memory([]) == rows.Memory(min_available_bytes=None, swap_delta_bytes=None, max_temperature_c=None)
    assert rows.memory(run.samples).max_temperature_c is None
    assert rows.memory([r | {"observed": None} for r in run.samples]).min_available_bytes is None


def test_the_command_of_a_long_run_stays_as_it_was(tmp_path: Path) -> None:
    asked = "moe-madv reproduce moe-madv --hours 5"
    run = run_of(tmp_path / "a.jsonl", ["om"], {"off": 1.0, "madv": 2.0})
    plan = {key: value for key, value in run.header["plan"].items() if key != "blocks"}
    timed = replace(
        run,
        header=run.header | {"command": asked, "plan": plan},
        samples=tuple(row | {"minutes": 75.0} for row in run.samples),
    )
    assert command(timed) == asked


def test_a_file_of_one_arm_is_no_comparison_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    run_of(tmp_path / "m" / "one.jsonl", ["h"], {"hint": 4.0})
    run_of(tmp_path / "m" / "two.jsonl", ["om"], {"off": 1.0, "madv": 2.0}, name="r2")
    page = results_page(tmp_path)
    assert page.count("](m/two.jsonl) | demo.gguf |") == 2  # pp16 and tg24
    assert "](m/one.jsonl) | demo.gguf |" not in page


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
    with pytest.raises(MachineError, match=r"budget: 0\.00 GiB do not hold the always used weights"):
        setup.preflight(layout, conditions(1 << 20), facts)
    with pytest.raises(MachineError, match=r"memory: the budget is 1048576.00 GiB, .* are available"):
        setup.preflight(layout, conditions(1 << 50), facts)


def available(gib: int) -> limits.Available:
    return limits.Available(bytes=gib * GIB, source="a test")


def test_the_published_model_on_this_much_memory() -> None:
    """139.91 GiB over 2.2 are 63.59 GiB; 10 GiB always used need 15 with a context."""
    size, budget = 150_225_324_672, int(150_225_324_672 / 2.2)
    assert setup.lacking(size, 10 * GIB, budget, available(64)) == []
    text, hint = setup.lacking(size, 10 * GIB, budget, available(22))
    assert text == "- memory: the budget is 63.59 GiB, 22.00 GiB are available (a test): 41.59 GiB are missing"
    # nine tenths of 22 GiB, 20275 MiB; 143268 MiB over that
    assert hint == "--budget 20275MiB, where the model is 7.1 times as large; or more memory"
    text, hint = setup.lacking(size, 10 * GIB, budget, available(14))
    assert "49.59 GiB are missing" in text
    assert hint == "a machine with 15.0 GiB of memory or more, or --scale for a smaller model"
    # a budget that is too small for the weights, on a machine that has room
    text, hint = setup.lacking(size, 10 * GIB, 8 * GIB, available(64))
    assert text.endswith("10.00 GiB, and a process: 7.00 GiB are missing for these and a context")
    assert hint.startswith("--budget 15360MiB, where the model is 9.3 times as large")
    # a model that is hardly larger than the 256 MiB of a process: 40 MiB always used, 296 in all
    text, hint = setup.lacking(90 << 20, 40 << 20, 41 << 20, available(22))
    assert "0.04 GiB do not hold" in text and "0.25 GiB are missing" in text
    assert hint == "--budget 296MiB and a larger model: this one fits in there"
    both = setup.lacking(size, 10 * GIB, 8 * GIB, available(4))
    assert [line[:9] for line in both[:2]] == ["- memory:", "- budget:"]


def test_a_real_model_that_is_not_there_is_said_with_its_size(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "DeepSeek-V4-Flash-MXFP4_MOE.gguf"
    got = CliRunner().invoke(reproduce, ["moe-madv", "--model", str(path)])
    assert isinstance(got.exception, MachineError)
    assert "the published one has 139.91 GiB" in got.exception.what
    assert f"GiB are free in {tmp_path}" in got.exception.what
    assert got.exception.hint is not None and "cd42deba41ac0536e68b125dfc367197b0ec3038" in got.exception.hint
    # 1 GiB more than is free
    figures = {"size": shutil.disk_usage(tmp_path).free + GIB, "source": "x", "revision": "y"}
    with pytest.raises(MachineError, match=r"(0\.9|1\.0)\d GiB too few"):
        setup.require_file(path, figures)
    got = CliRunner().invoke(reproduce, ["context", "--model", str(path)])
    assert isinstance(got.exception, MachineError) and got.exception.where == str(path)
    assert not path.parent.exists()


def test_a_file_as_large_as_the_published_one_is_refused_for_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every header of the real size, the data a hole: nothing of it may be read before the refusal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(limits, "available_memory", lambda: available(22))
    path = hollow(tmp_path / "flash.gguf", write_vocabulary(tmp_path / "v.gguf"))
    size = path.stat().st_size
    assert 130 < size / GIB < 150
    got = CliRunner().invoke(reproduce, ["moe-madv", "--model", str(path)])
    assert isinstance(got.exception, MachineError)
    assert f"the budget is {size / 2.2 / GIB:.2f} GiB, 22.00 GiB are available" in got.exception.what
    assert f"{size / 2.2 / GIB - 22:.2f} GiB are missing" in got.exception.what
    assert got.exception.hint is not None and got.exception.hint.startswith("--budget 20275MiB")
    assert not (tmp_path / "results").exists()


def hollow(path: Path, vocab: Path) -> Path:
    """A model of the published shape with its header and no data."""

    class Stop(Exception):
        pass

    def stop(_: int) -> None:
        raise Stop

    synth = Synth(*routing(flash(1), None, 0), vocab=vocab, seed=0, preset="deepseek-v4-flash")
    with pytest.raises(Stop):
        synth._write(path, stop)
    with path.open("r+b") as f:
        f.truncate(path.stat().st_size + synth.nbytes)  # a hole: more than the header and every tensor
    return path


def test_a_mode_that_is_missing_is_said() -> None:
    setup.require_modes(["stock", "off", "hint"], ["off", "madv", "hint"], "the wheel moe1.cpu")
    with pytest.raises(BenchError, match=r"the wheel moe1\.cpu has no mode overlap; it has off, madv, hint") as e:
        setup.require_modes(["overlap", "hint"], ["off", "madv", "hint"], "the wheel moe1.cpu")
    assert e.value.hint is not None and "moe-madv build" in e.value.hint


# --- the command ----------------------------------------------------------------------------------------------


def test_dry_run_says_what_would_be_done(model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["moe-madv", "--quick", "--model", str(model_file), "--budget", "1GiB", "--dry-run"]
    got = CliRunner().invoke(reproduce, args)
    assert (got.exit_code, got.stdout) == (0, "")
    assert "moe-madv: off, madv, hint x 3 repeats on m.gguf" in got.stderr
    assert "budget 1.00 GiB (0.0x)" in got.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["context", "--lengths", "512,512"], "rising list of lengths"),
        (["context", "--lengths", "512,256"], "rising list of lengths"),
        (["context", "--lengths", "512,x"], "rising list of lengths"),
        (["context", "--lengths", "32K,32784"], "32768 and 32784 are not more than -n 16 apart"),
        (["context", "--lengths", "16"], "0 and 16 are not more than -n 16 apart"),
        (["overlap", "--batch", "some"], "'some' is neither a number of tokens nor auto"),
        (["moe-madv", "--hours", "0"], "0.0 is not in the range"),
        (["moe-madv", "--scale", "0.5"], "'0.5' is not 1/N"),
        (["overlap", "--off", "stock"], "'stock' is not one of"),
    ],
)
def test_bad_options_are_refused(args: list[str], message: str) -> None:
    got = CliRunner().invoke(reproduce, args)
    assert got.exit_code == 2
    assert message in got.stderr
