"""The commands around a port: releases and revisions as targets, saved ports, export, and watching upstream."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_upstream import FakeUpstream, git, snapshot
from port_upstream import CPU, CPU_AFTER, CPU_FILE, create, function_of, write_patches
from results_rows import header, rows, write

from toolkit.cli.patch import patch as patch_command
from toolkit.cli.port import port as port_command
from toolkit.errors import FetchError, PatchError, PinError, ToolkitError
from toolkit.evidence.matrix import write_matrix
from toolkit.patch import sdist
from toolkit.patch.ports import saved_ports, series_for
from toolkit.patch.series import load_series
from toolkit.patch.upstream import fetch_sdist, load_pin, tree_dir

REINDENTED = CPU.replace("    for (int node_n", "  for (int node_n").replace(
    "        compute_forward", "      compute_forward"
)


@pytest.fixture
def upstream(tmp_path: Path) -> FakeUpstream:
    return create(tmp_path / "upstream")


@pytest.fixture
def patches(tmp_path: Path, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch) -> Path:
    """patches/ with the pin 1.2.3, its sdist and those of later releases in a find-links folder."""
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    folder = write_patches(tmp_path / "patches", upstream)
    offered = tmp_path / "offered"
    offered.mkdir()
    _, sha256 = upstream.sdist(offered, "1.2.3")
    pin = f'binding = "1.2.3" # in use\n\n[pin."1.2.3"]\nsdist_sha256 = "{sha256}"\ncommit = "{upstream.head}"\n'
    (folder / "upstream.toml").write_text(pin, encoding="utf-8")
    upstream.commit({CPU_FILE: REINDENTED}, "indentation")
    upstream.sdist(offered, "1.3.0")
    upstream.commit({"README.md": "more\n"}, "a readme")
    upstream.sdist(offered, "1.4.0")
    upstream.commit({CPU_FILE: REINDENTED.replace("graph_compute_thread", "graph_worker")}, "a name")
    upstream.sdist(offered, "1.5.0rc1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(offered))
    for module in ("toolkit.cli.port", "toolkit.cli.patch", "toolkit.patch.upstream"):
        monkeypatch.setattr(f"{module}.patches_dir", lambda: folder)
    return folder


def run(*args: str, fails: type[ToolkitError] | None = None, command: object = port_command) -> Result:
    result = CliRunner().invoke(command, list(args))  # type: ignore[arg-type]
    if fails is None:
        assert result.exit_code == 0, result.exception
    else:
        assert isinstance(result.exception, fails), result.exception
    return result


def targets(result: Result) -> dict[str, dict[str, object]]:
    return {t["target"]: t for t in json.loads(result.stdout)["targets"]}


def statuses(row: dict[str, object]) -> dict[str, str]:
    return {h["hook"]: h["status"] for h in row["hooks"]}  # type: ignore[index, attr-defined]


def test_releases_as_targets(patches: Path, upstream: FakeUpstream) -> None:
    before = snapshot(patches)
    rows = targets(run("1.2.3", "1.3.0", "1.4.0", "--no-build", "--json"))
    assert statuses(rows["1.2.3"]) == {"mapping": "clean", "graph": "clean"}
    assert statuses(rows["1.3.0"]) == {"mapping": "clean", "graph": "anchored"}
    assert rows["1.4.0"]["commit"] == git(upstream.root, "rev-parse", "HEAD~1")
    assert rows["1.4.0"]["date"] == git(upstream.root, "log", "-1", "--format=%cs", "HEAD~1")
    assert [rows["1.3.0"][key] for key in ("compiled", "outputs_equal", "counters_moved")] == [None] * 3
    assert snapshot(patches) == before


def test_one_bad_target_does_not_hide_the_others(patches: Path) -> None:
    result = run("1.5.0rc1", "9.9.9", "1.3.0", "--no-build", "--json", fails=PatchError)
    rows = targets(result)
    assert statuses(rows["1.5.0rc1"])["graph"] == "conflict"
    assert "no sdist" in str(rows["9.9.9"]["error"])
    assert statuses(rows["1.3.0"])["graph"] == "anchored"
    assert result.exception is not None
    assert "graph conflict" in str(result.exception)
    assert "moe-madv port 1.5.0rc1" in str(result.exception)


def test_report_for_people_names_what_changed(patches: Path) -> None:
    out = run("1.3.0", "--no-build").stdout
    assert f"graph    anchored   {CPU_FILE}:" in out
    assert "differs from the pin: graph_compute_thread +" in out
    assert "++      if (tp->ith == 0) {" in out  # the difference of the patches


@pytest.mark.parametrize("revision", ["master", "v2.0", "b12059", "id", "short id"])
def test_revisions_of_a_repository_as_targets(patches: Path, upstream: FakeUpstream, revision: str) -> None:
    commit = git(upstream.root, "rev-parse", "HEAD~1")
    git(upstream.root, "branch", "-f", "ok", commit)
    for tag in ("v2.0", "b12059"):
        git(upstream.root, "tag", tag, commit)
    name = {"id": commit, "short id": commit[:9], "master": "ok"}.get(revision, revision)
    row = targets(run("--git", str(upstream.root), name, "--no-build", "--json"))[name]
    assert row["commit"] == commit
    assert statuses(row) == {"mapping": "clean", "graph": "anchored"}


def test_history_of_a_local_repository_names_the_commit(patches: Path, upstream: FakeUpstream) -> None:
    result = run("--git", str(upstream.root), "master", "--no-build", "--json", fails=PatchError)
    graph = next(h for h in targets(result)["master"]["hooks"] if h["hook"] == "graph")  # type: ignore[attr-defined]
    assert {entry.split(" ", 2)[2] for entry in graph["upstream"]} == {"a name", "indentation"}


def test_a_word_that_is_no_version_asks_for_a_repository(patches: Path) -> None:
    assert "--git URL master" in str(run("master", "--no-build", fails=FetchError).exception)


def test_write_saves_pin_and_changed_hooks_once_for_a_range(patches: Path, upstream: FakeUpstream) -> None:
    main = snapshot(patches)
    run("1.3.0", "1.4.0", "--no-build", "--write")
    folder = patches / "ports" / "1.3.0"
    assert sorted(p.name for p in folder.iterdir()) == ["graph.patch", "port.toml"]
    assert not (patches / "ports" / "1.4.0").exists()
    (saved,) = saved_ports(patches)
    ids = [git(upstream.root, "rev-parse", f"HEAD~{n}") for n in (2, 1)]
    assert list(saved.commits) == ids
    assert list(saved.made_from) == ["graph"]
    now = snapshot(patches)
    assert {n: now[n] for n in main if n != "upstream.toml"} == {n: main[n] for n in main if n != "upstream.toml"}
    assert now["upstream.toml"].startswith(main["upstream.toml"])
    for version, commit in zip(("1.3.0", "1.4.0"), ids, strict=True):
        assert load_pin(patches / "upstream.toml", binding=version).commit == commit
    run("1.3.0", "1.4.0", "--no-build", "--write")
    assert snapshot(patches) == now


def test_a_saved_port_is_what_apply_and_status_use(patches: Path, home: Path) -> None:
    run("1.4.0", "--no-build", "--write")
    pin = load_pin(binding="1.4.0")
    fetch_sdist(pin, home)
    run("apply", "--sdist", "1.4.0", command=patch_command)
    llama = tree_dir(pin, "patched", home) / "vendor" / "llama.cpp"
    assert function_of((llama / CPU_FILE).read_text(encoding="utf-8"), "moe_node") == "graph_compute_thread"
    status = run("status", "--sdist", "1.4.0", "--json", command=patch_command)
    assert json.loads(status.stdout)["state"] == "applied"
    by_tree = run("status", "--tree", str(llama), "--json", command=patch_command)
    assert json.loads(by_tree.stdout)["state"] == "applied"
    assert series_for(patches, pin.commit).digest != load_series(patches).digest
    exported = run("export", "--sdist", "1.4.0", "--json", command=patch_command)
    assert json.loads(exported.stdout)["changed"] == []


def test_a_port_of_an_older_hook_is_refused_and_written_anew(patches: Path) -> None:
    run("1.3.0", "--no-build", "--write")
    commit = load_pin(patches / "upstream.toml", binding="1.3.0").commit
    for name in ("hooks/graph.patch", "anchors.toml"):
        path = patches / name
        text = path.read_text(encoding="utf-8")
        assert "moe_node(tp, node_n)" in text
        path.write_text(text.replace("moe_node(tp, node_n)", "moe_node(tp, node_n, 1)"), encoding="utf-8")
    with pytest.raises(PinError, match="graph of the series has changed") as e:
        series_for(patches, commit)
    assert e.value.hint == "moe-madv port 1.3.0 --write"
    run("1.3.0", "--no-build", "--write")
    assert b"moe_node(tp, node_n, 1)" in series_for(patches, commit).hooks[1].patch.text


def test_a_hook_that_upstream_merged_is_left_out_of_the_port(
    patches: Path, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream.commit({CPU_FILE: CPU_AFTER}, "the hook itself")
    upstream.sdist(patches.parent / "offered", "1.6.0")
    row = targets(run("1.6.0", "--no-build", "--write", "--json"))["1.6.0"]
    assert statuses(row) == {"mapping": "clean", "graph": "already-present"}
    (saved,) = saved_ports(patches)
    assert (saved.without, dict(saved.made_from)) == (("graph",), {})
    assert [h.name for h in series_for(patches, upstream.head).hooks] == ["mapping"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[commits]", "[comits]", "at least one commit"),
        ("[hooks]", 'without = "graph"\n[hooks]', "without"),
        ('graph = "', 'graph = 1 # "', "hooks"),
        ('"llama-cpp-python', '"x"\n"abc" = "llama-cpp-python', "40 hex digits"),
    ],
)
def test_unusable_port_is_refused_with_its_file(patches: Path, old: str, new: str, said: str) -> None:
    run("1.3.0", "--no-build", "--write")
    path = patches / "ports" / "1.3.0" / "port.toml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(PinError, match=said) as e:
        saved_ports(patches)
    assert e.value.where == str(path)


def test_matrix_has_a_row_per_target(patches: Path, tmp_path: Path) -> None:
    run("1.2.3", "9.9.9", "--no-build", "--save", str(tmp_path / "out" / "matrix"), fails=FetchError)
    stored = json.loads((tmp_path / "out" / "matrix.json").read_text(encoding="utf-8"))["targets"]
    assert [row["target"] for row in stored] == ["1.2.3", "9.9.9"]
    page = (tmp_path / "out" / "matrix.md").read_text(encoding="utf-8")
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    assert rows[0][:5] == ["version", "llama.cpp", "date", "mapping", "graph"]
    assert rows[2][3:] == ["clean", "clean", "not run", "not run", "not run", "-"]
    assert rows[3][0] == "9.9.9"


def test_matrix_takes_ratios_from_stored_results(tmp_path: Path) -> None:
    """Of the commit's own rows with the demo preset: 15 t/s over 10 t/s in every block."""
    order = [["stock", "hint"], ["hint", "stock"], ["stock", "hint"]]
    head = {**header(order), "pin": "a" * 40}
    data = rows(["sh", "hs", "sh"], [10.0, 15.0, 15.0, 10.0, 10.0, 15.0], head)
    (tmp_path / "machine").mkdir()
    write(tmp_path / "machine" / "2026-01-02-demo-stock-hint.jsonl", head, *data)
    row = {"target": "1", "commit": "a" * 40, "date": "2026-01-01", "hooks": [{"hook": "g", "status": "clean"}]}
    row |= {"compiled": True, "counters_moved": True, "outputs_equal": False}
    other = {**row, "target": "2", "commit": "b" * 40}
    _, page = write_matrix([row, other], tmp_path / "matrix")
    cells = [line.split("|") for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert [c.strip() for c in cells[2]][1:-2] == ["1", "aaaaaaaaa", "2026-01-01", "clean", "yes", "yes", "no"]
    assert cells[2][-2].strip().startswith("1.5")
    assert cells[2][-2].strip().endswith("] at 128 KiB")  # the header's read-ahead
    assert cells[3][-2].strip() == "-"


def test_newest_release_leaves_out_pre_releases(patches: Path) -> None:
    assert sdist.newest("llama-cpp-python") == "1.4.0"
    with pytest.raises(FetchError, match="no sdist of other"):
        sdist.newest("other")


def test_watch_upstream_says_what_a_bump_needs(patches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).parent.parent / "scripts" / "watch-upstream"
    code = compile(script.read_text(encoding="utf-8"), str(script), "exec")
    space: dict[str, object] = {"__name__": "watch", "__file__": str(script)}
    exec(code, space)
    result = CliRunner().invoke(space["main"], [])  # type: ignore[arg-type]
    assert result.exit_code == 20, result.output
    assert "llama-cpp-python 1.4.0 is out, the pin is 1.2.3" in result.stdout
    assert "graph    anchored" in result.stdout
    assert "moe-madv port 1.4.0 --write" in result.stdout
    text = (patches / "upstream.toml").read_text(encoding="utf-8").replace("1.2.3", "1.4.0")
    (patches / "upstream.toml").write_text(text, encoding="utf-8")
    result = CliRunner().invoke(space["main"], [])  # type: ignore[arg-type]
    assert (result.exit_code, "is the newest" in result.stdout) == (0, True)


def test_watch_upstream_runs_as_a_program() -> None:
    script = Path(__file__).parent.parent / "scripts" / "watch-upstream"
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, check=True)
    assert "scripts/watch-upstream --build" in done.stdout
