"""The series: what is refused when it is read, and what applying it does to a tree."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_upstream import GRAPH, LOADER, FakeUpstream, git, hook_patch, snapshot, write, write_series

from toolkit.cli.patch import patch as patch_command
from toolkit.errors import PatchError, PinError
from toolkit.patch import patchfile, patching
from toolkit.patch.patching import State
from toolkit.patch.replay import HookStatus
from toolkit.patch.series import Series, load_series


@pytest.fixture
def upstream(tmp_path: Path) -> FakeUpstream:
    return FakeUpstream.create(tmp_path / "upstream")


@pytest.fixture
def patches(tmp_path: Path, upstream: FakeUpstream) -> Path:
    return write_series(tmp_path / "patches", upstream)


@pytest.fixture
def series(patches: Path) -> Series:
    return load_series(patches)


@pytest.fixture
def llama(tmp_path: Path, upstream: FakeUpstream) -> Path:
    return upstream.clone(tmp_path / "llama")


def state(llama: Path) -> tuple[str, str, dict[str, bytes]]:
    """Everything a failed run must leave alone: HEAD, status and every file."""
    status = git(llama, "status", "--porcelain", "--ignored", "--untracked-files=all")
    return git(llama, "rev-parse", "HEAD"), status, snapshot(llama)


# Reading


def test_digest_is_sha256_over_length_prefixed_parts(series: Series, patches: Path) -> None:
    parts = [b"moe1"]
    parts += [b"payload", b"ggml/include/moe.h", (patches / "payload/moe.h").read_bytes()]
    parts += [b"payload", b"ggml/src/moe.cpp", (patches / "payload/moe.cpp").read_bytes()]
    parts += [b"hook", b"src/loader.cpp", (patches / "hooks/loader.patch").read_bytes()]
    parts += [b"hook", b"ggml/src/graph.c", (patches / "hooks/graph.patch").read_bytes()]
    joined = b"".join(len(p).to_bytes(8, "big") + p for p in parts)
    assert series.digest == hashlib.sha256(joined).hexdigest()


def test_digest_ignores_comments_and_line_ends_of_a_checkout(series: Series, patches: Path) -> None:
    toml = patches / "series.toml"
    toml.write_text("# a remark\n" + toml.read_text(encoding="utf-8"), encoding="utf-8")
    hook = patches / "hooks/loader.patch"
    hook.write_bytes(hook.read_bytes().replace(b"\n", b"\r\n"))
    assert load_series(patches).digest == series.digest


def test_digest_changes_with_one_byte_of_payload(series: Series, patches: Path) -> None:
    write(patches, {"payload/moe.cpp": "#include <moe.h>\n"})
    assert load_series(patches).digest != series.digest


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('label = "moe1"', 'label = "MoE-1"', "label"),
        ('author = "Demo <demo@localhost>"', 'author = "Demo"', "author"),
        ("date = 2026-01-02T03:04:05Z", "date = 2026-01-02T03:04:05", "offset"),
        ("payload/moe.cpp", "payload/none.cpp", "none.cpp"),
        ("hooks/graph.patch", "hooks/none.patch", "none.patch"),
        ('target = "ggml/src/moe.cpp"', 'target = "../moe.cpp"', "target"),
        ('target = "ggml/src/moe.cpp"', 'target = "ggml/include/moe.h"', "twice"),
        ('target = "ggml/src/moe.cpp"', 'target = ".git/config"', "target"),
        ('name = "graph"', 'name = "loader"', "twice"),
        ('reason = "The graph knows the ids."', 'reason = ""', "reason"),
        ('status = "to-upstream"', 'status = "maybe"', "status"),
        ('file = "ggml/src/graph.c"', 'file = "src/loader.cpp"', "ggml/src/graph.c"),
        ("[[payload]]", "[[payload", "TOML"),
    ],
)
def test_unusable_series_is_refused_with_the_file_and_key(patches: Path, old: str, new: str, said: str) -> None:
    toml = patches / "series.toml"
    text = toml.read_text(encoding="utf-8")
    assert old in text
    toml.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(PinError) as e:
        load_series(patches)
    assert said in str(e.value)
    assert "series.toml" in str(e.value)


def test_patch_of_two_files_is_refused(patches: Path) -> None:
    loader, graph = patches / "hooks/loader.patch", patches / "hooks/graph.patch"
    loader.write_bytes(loader.read_bytes() + graph.read_bytes())
    with pytest.raises(PinError, match=r"src/loader\.cpp, ggml/src/graph\.c"):
        load_series(patches)


@pytest.mark.parametrize(
    "section",
    [
        "diff --git a/logo.png b/logo.png\nBinary files a/logo.png and b/logo.png differ\n",
        "diff --git a/logo.png b/logo.png\nindex 1..2\nGIT binary patch\nliteral 0\n",
        "Binary files a/logo.png and b/logo.png differ\n",
    ],
)
def test_binary_section_is_named(patches: Path, section: str) -> None:
    hook = patches / "hooks/loader.patch"
    text = hook.read_bytes().decode()
    at = text.index("diff --git")
    hook.write_bytes((text[:at] + section + text[at:]).encode())
    with pytest.raises(PinError, match=r"binary section for logo\.png"):
        load_series(patches)


def test_plain_diff_and_new_file_are_refused(patches: Path) -> None:
    hook = patches / "hooks/loader.patch"
    text = hook.read_bytes()
    hook.write_bytes(text[text.index(b"--- a/") :])
    with pytest.raises(PinError, match="none in git's format"):
        load_series(patches)
    hook.write_bytes(text.replace(b"index ", b"new file mode 100644\nindex ", 1))
    with pytest.raises(PinError, match="new file mode"):
        load_series(patches)


def test_truncated_patch_is_refused(patches: Path) -> None:
    hook = patches / "hooks/loader.patch"
    text = hook.read_bytes()
    hook.write_bytes(text[: text.index(b"int hook_2")])
    with pytest.raises(PinError, match="corrupt"):
        load_series(patches)


def test_normalise_restores_blank_context_and_keeps_cr_of_hunk_lines() -> None:
    good = b"--- a/f\n+++ b/f\n@@ -1,3 +1,4 @@\n a\n \n+x\r\n b\n-- \n2.0\n"
    stripped = good.replace(b"\n \n", b"\n\n")
    assert patchfile.normalise(good) == good
    assert patchfile.normalise(stripped) == good
    assert patchfile.normalise(stripped.replace(b"\n", b"\r\n")) == good


def test_message_is_read_from_the_mailbox_header(series: Series) -> None:
    assert series.hooks[0].patch.subject == "demo : the loader hook"
    assert series.hooks[0].patch.body == "Why it is there."


# Applying


def test_result_is_what_git_am_makes(series: Series, llama: Path, upstream: FakeUpstream, patches: Path) -> None:
    other = upstream.clone(llama.parent / "by-am")
    write(other, {"ggml/include/moe.h": "#pragma once\n", "ggml/src/moe.cpp": '#include "moe.h"\n'})
    git(other, "add", "-A")
    git(other, "commit", "-q", "-m", "payload")
    git(other, "am", "-q", str(patches / "hooks/loader.patch"), str(patches / "hooks/graph.patch"))

    report = patching.apply(series, llama, upstream.head)

    assert (report.before, report.changed) == (State.PRISTINE, True)
    assert git(llama, "rev-parse", "HEAD^{tree}") == git(other, "rev-parse", "HEAD^{tree}")
    assert snapshot(llama) == snapshot(other)
    assert git(llama, "status", "--porcelain", "--ignored") == ""
    log = git(llama, "log", "--reverse", "--format=%s|%an|%ae|%at|%cn|%ce|%ct", f"{upstream.head}..HEAD").splitlines()
    who = "Demo|demo@localhost|1767323045"  # 2026-01-02T03:04:05Z
    subjects = ["moe-madv : add the moe1 payload", "demo : the loader hook", "demo : the graph hook"]
    assert log == [f"{s}|{who}|{who}" for s in subjects]
    trailers = git(llama, "log", "--format=%(trailers:key=MoE-MADV-Series,valueonly)", f"{upstream.head}..HEAD")
    assert trailers.split() == [series.digest] * 3


def test_commit_id_does_not_depend_on_the_user(
    series: Series, llama: Path, upstream: FakeUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = patching.apply(series, llama, upstream.head).commit
    hooks = tmp_path / "hooks"
    write(hooks, {"post-checkout": "#!/bin/sh\necho spoiled >> src/loader.cpp\n"})
    (hooks / "post-checkout").chmod(0o755)
    config = tmp_path / "gitconfig"
    config.write_text(
        "[user]\nname = Me\nemail = me@localhost\n[core]\nautocrlf = true\n"
        f"hooksPath = {hooks}\n[commit]\ngpgsign = true\n[apply]\nwhitespace = fix\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Me")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2001-01-01T00:00:00Z")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    deep = tmp_path / "a path: with" / "colon"
    shutil.copytree(upstream.root, deep)
    assert patching.apply(series, deep, git_head(deep)).commit == expected
    assert b"spoiled" not in (deep / "src/loader.cpp").read_bytes()


def git_head(root: Path) -> str:
    return (root / ".git/refs/heads/master").read_text(encoding="utf-8").strip()


def test_second_run_changes_nothing(series: Series, llama: Path, upstream: FakeUpstream) -> None:
    first = patching.apply(series, llama, upstream.head)
    before = state(llama)
    second = patching.apply(series, llama, upstream.head)
    assert (second.before, second.changed, second.commit) == (State.APPLIED, False, first.commit)
    assert state(llama) == before
    git(llama, "checkout", "--", ".")
    assert patching.inspect(series, llama, upstream.head).state is State.APPLIED


def test_tree_inside_another_repository(series: Series, upstream: FakeUpstream, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "-q")
    llama = upstream.clone(outer / "v" / "llama.cpp")
    patching.apply(series, llama, upstream.head)
    assert b"int hook_1;" in (llama / "src/loader.cpp").read_bytes()
    assert git(outer, "log", "--oneline", "--all", check=False) == ""


@pytest.mark.parametrize("nested", [False, True])
def test_tree_without_git_gets_it_from_the_fetched_tree(
    series: Series, upstream: FakeUpstream, tmp_path: Path, nested: bool
) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    if nested:
        git(outer, "init", "-q")
    llama = upstream.clone(outer / "llama.cpp")
    shutil.rmtree(llama / ".git")
    before = snapshot(outer)
    with pytest.raises(PatchError, match="no git repository of its own"):
        patching.apply(series, llama, upstream.head)
    report = patching.apply(series, llama, upstream.head, donor=upstream.root)
    assert snapshot(llama).keys() - {p.removeprefix("llama.cpp/") for p in before} == {
        "ggml/include/moe.h",
        "ggml/src/moe.cpp",
    }
    assert git(llama, "rev-parse", "HEAD") == report.commit


def test_changed_tree_without_git_is_left_without_git(series: Series, upstream: FakeUpstream, llama: Path) -> None:
    shutil.rmtree(llama / ".git")
    write(llama, {"include/llama.h": "#pragma twice\n"})
    before = snapshot(llama)
    with pytest.raises(PatchError, match=r"include/llama\.h was changed"):
        patching.apply(series, llama, upstream.head, donor=upstream.root)
    assert snapshot(llama) == before
    assert not (llama / ".git").exists()


def test_worktree(series: Series, llama: Path, upstream: FakeUpstream, tmp_path: Path) -> None:
    work = tmp_path / "work"
    git(llama, "worktree", "add", "-q", "--detach", str(work), upstream.head)
    commit = patching.apply(series, work, upstream.head).commit
    assert git(work, "rev-parse", "HEAD") == commit
    assert git(llama, "rev-parse", "HEAD") == upstream.head


def test_two_runs_at_once_end_applied(series: Series, llama: Path, upstream: FakeUpstream) -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(patching.apply, series, llama, upstream.head) for _ in range(2)]
        reports = [run.result() for run in runs]
    assert sorted(r.changed for r in reports) == [False, True]
    assert patching.inspect(series, llama, upstream.head).state is State.APPLIED


def test_the_users_branch_stays_where_it_is(series: Series, llama: Path, upstream: FakeUpstream) -> None:
    git(llama, "checkout", "-q", "master")
    patching.apply(series, llama, upstream.head)
    assert git(llama, "rev-parse", "master") == upstream.head


# Refusals leave the tree as it was


def conflicting(upstream: FakeUpstream) -> str:
    return upstream.commit({"ggml/src/graph.c": GRAPH.replace("void f_b()", "void f_b2()")})


def test_fuzz_is_refused_and_nothing_is_half_done(series: Series, upstream: FakeUpstream, tmp_path: Path) -> None:
    pin = conflicting(upstream)
    llama = upstream.clone(tmp_path / "llama")
    before = state(llama)
    with pytest.raises(PatchError) as e:
        patching.apply(series, llama, pin)
    assert "graph: conflict, ggml/src/graph.c:" in str(e.value)
    assert "loader" not in e.value.what
    assert state(llama) == before
    assert not (llama / ".git/rebase-apply").exists()


def test_change_that_is_upstream_is_named_and_not_reversed(
    series: Series, upstream: FakeUpstream, tmp_path: Path
) -> None:
    text = GRAPH[: GRAPH.rindex(" step();\n")] + " step();\n moe();\n unlock();\n}\n"
    pin = upstream.commit({"ggml/src/graph.c": text})
    llama = upstream.clone(tmp_path / "llama")
    with pytest.raises(PatchError, match="graph: already-present"):
        patching.apply(series, llama, pin)
    assert (llama / "ggml/src/graph.c").read_text(encoding="utf-8") == text


def test_one_of_two_hunks_upstream(series: Series, upstream: FakeUpstream, tmp_path: Path) -> None:
    edited = LOADER.replace("int loader_5 = 5;\n", "int loader_5 = 5;\nint hook_1;\n")
    upstream.commit({"src/loader.cpp": edited})
    results = {r.name: r for r in patching.check(series, upstream.clone(tmp_path / "llama"))}
    assert results["loader"].status is HookStatus.CONFLICT
    assert results["loader"].detail == "hunk 1 is already present, hunk 2 fits"


def test_moved_lines_apply_with_their_offset_reported(series: Series, upstream: FakeUpstream, tmp_path: Path) -> None:
    upstream.commit({"src/loader.cpp": "// one\n// two\n" + LOADER})
    results = {r.name: r for r in patching.check(series, upstream.clone(tmp_path / "llama"))}
    assert results["loader"].status is HookStatus.CLEAN
    assert results["loader"].detail.count("(offset 2 lines)") == 2


def test_missing_upstream_file_is_gone_and_the_rest_is_still_tried(
    series: Series, upstream: FakeUpstream, tmp_path: Path
) -> None:
    git(upstream.root, "mv", "src/loader.cpp", "src/loading.cpp")
    git(upstream.root, "commit", "-q", "-m", "move")
    results = patching.check(series, upstream.clone(tmp_path / "llama"))
    assert [(r.name, r.status.value) for r in results] == [
        ("payload", "clean"),
        ("payload", "clean"),
        ("loader", "gone"),
        ("graph", "clean"),
    ]


def test_upstream_file_in_the_place_of_a_payload(series: Series, upstream: FakeUpstream, tmp_path: Path) -> None:
    upstream.commit({"ggml/src/moe.cpp": "int theirs;\n"})
    results = patching.check(series, upstream.clone(tmp_path / "llama"))
    assert [r.status for r in results[:2]] == [HookStatus.CLEAN, HookStatus.CONFLICT]


def test_ignored_file_in_the_way_is_not_overwritten(series: Series, llama: Path, upstream: FakeUpstream) -> None:
    (llama / ".git/info/exclude").write_text("moe.cpp\n", encoding="utf-8")
    write(llama, {"ggml/src/moe.cpp": "mine\n"})
    before = state(llama)
    with pytest.raises(PatchError, match="in the way"):
        patching.apply(series, llama, upstream.head)
    assert state(llama) == before


def test_failed_checkout_goes_back(
    series: Series, llama: Path, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(llama, "checkout", "-q", "master")
    before = state(llama)
    run = patching.Git.run
    failing = ["checkout"]

    def full_disk(self: patching.Git, *args: str | Path, **options: object) -> object:
        done = run(self, *args, **options)  # type: ignore[arg-type]
        if args[0] in failing:
            failing.clear()
            raise OSError(28, "No space left on device")
        return done

    monkeypatch.setattr(patching.Git, "run", full_disk)
    # Stopped after the files were written, before anyone was told.
    with pytest.raises(OSError, match="No space"):
        patching.apply(series, llama, upstream.head)
    assert failing == []
    assert state(llama) == before
    assert git(llama, "symbolic-ref", "HEAD") == "refs/heads/master"


def test_crlf_upstream_file_is_patched_in_kind(series: Series, upstream: FakeUpstream, tmp_path: Path) -> None:
    pin = upstream.commit({"src/loader.cpp": LOADER.replace("\n", "\r\n")})
    llama = upstream.clone(tmp_path / "llama")
    patching.apply(series, llama, pin)
    data = (llama / "src/loader.cpp").read_bytes()
    assert data.count(b"\n") == data.count(b"\r\n") == 42
    assert b"int hook_1;\r\n" in data


def test_crlf_work_tree_is_refused_with_the_reason(series: Series, llama: Path, upstream: FakeUpstream) -> None:
    write(llama, {"src/loader.cpp": LOADER.replace("\n", "\r\n")})
    before = state(llama)
    with pytest.raises(PatchError, match=r"src/loader\.cpp has CR LF line ends"):
        patching.apply(series, llama, upstream.head)
    assert state(llama) == before


def test_crlf_patch_with_stripped_blank_lines_applies(upstream: FakeUpstream, patches: Path, llama: Path) -> None:
    blank = "}\n\nvoid f_b() {\n"
    data = hook_patch(upstream, "ggml/src/graph.c", blank, blank + " moe();\n", "demo : the graph hook")
    assert b"\n \n" in data
    (patches / "hooks/graph.patch").write_bytes(data.replace(b"\n \n", b"\n\n").replace(b"\n", b"\r\n"))
    patching.apply(load_series(patches), llama, upstream.head)
    assert blank + " moe();\n" in (llama / "ggml/src/graph.c").read_bytes().decode()


# States


def test_left_over_rebase_apply_is_half_applied_and_reset(
    series: Series, llama: Path, upstream: FakeUpstream, patches: Path, tmp_path: Path
) -> None:
    other = FakeUpstream.create(tmp_path / "other")
    other.commit({"src/loader.cpp": LOADER.replace("loader_5 ", "five ")})
    bad = hook_patch(other, "src/loader.cpp", "int five = 5;\n", "int five = 5;\nint x;\n")
    (tmp_path / "bad.patch").write_bytes(bad)
    git(llama, "am", "-3", str(tmp_path / "bad.patch"), check=False)
    assert (llama / ".git/rebase-apply").is_dir()
    with pytest.raises(PatchError, match="rebase-apply") as e:
        patching.apply(series, llama, upstream.head)
    assert e.value.hint == "moe-madv patch apply --reset"
    report = patching.apply(series, llama, upstream.head, reset=True)
    assert report.before is State.HALF_APPLIED
    assert not (llama / ".git/rebase-apply").exists()
    assert patching.inspect(series, llama, upstream.head).state is State.APPLIED


def test_reset_keeps_what_it_takes_out(series: Series, llama: Path, upstream: FakeUpstream, tmp_path: Path) -> None:
    write(llama, {"ggml/src/moe.cpp": "copied by hand\n", "src/loader.cpp": LOADER + "int mine;\n"})
    found = patching.inspect(series, llama, upstream.head)
    assert found.state is State.HALF_APPLIED
    assert found.changes == ("ggml/src/moe.cpp", "src/loader.cpp")
    before = state(llama)
    with pytest.raises(PatchError, match="half-applied"):
        patching.apply(series, llama, upstream.head)
    assert state(llama) == before
    report = patching.apply(series, llama, upstream.head, reset=True)
    assert report.kept is not None
    again = upstream.clone(tmp_path / "again")
    git(again, "apply", str(report.kept))
    assert snapshot(again) == before[2]


def test_hook_applied_by_hand_is_recognised(series: Series, llama: Path, upstream: FakeUpstream, patches: Path) -> None:
    git(llama, "apply", str(patches / "hooks/loader.patch"))
    with pytest.raises(PatchError, match=r"src/loader\.cpp already has hook loader"):
        patching.apply(series, llama, upstream.head)
    results = {r.name: r.status for r in patching.check(series, llama)}
    assert results["loader"] is HookStatus.ALREADY_PRESENT
    assert results["graph"] is HookStatus.CLEAN


def test_only_some_commits_are_half_applied(series: Series, llama: Path, upstream: FakeUpstream) -> None:
    whole = patching.apply(series, llama, upstream.head).commit
    git(llama, "reset", "-q", "--hard", "HEAD~1")
    found = patching.inspect(series, llama, upstream.head)
    assert found.state is State.HALF_APPLIED
    assert found.notes == ("only 2 of the 3 commits of the series are there",)
    assert patching.apply(series, llama, upstream.head, reset=True).commit == whole


def test_one_hook_reverted_in_the_work_tree_is_half_applied(
    series: Series, llama: Path, upstream: FakeUpstream, patches: Path
) -> None:
    patching.apply(series, llama, upstream.head)
    git(llama, "apply", "-R", str(patches / "hooks/graph.patch"))
    assert patching.inspect(series, llama, upstream.head).state is State.HALF_APPLIED


def test_older_series_is_stale_and_replaced(
    series: Series, llama: Path, upstream: FakeUpstream, patches: Path, tmp_path: Path
) -> None:
    patching.apply(series, llama, upstream.head)
    toml = patches / "series.toml"
    newer = toml.read_text(encoding="utf-8").replace("ggml/src/moe.cpp", "ggml/src/moe2.cpp")
    toml.write_text(newer, encoding="utf-8")
    new = load_series(patches)
    found = patching.inspect(new, llama, upstream.head)
    assert (found.state, found.digest) == (State.STALE, series.digest)
    report = patching.apply(new, llama, upstream.head)
    assert report.commit == patching.apply(new, upstream.clone(tmp_path / "fresh"), upstream.head).commit
    assert not (llama / "ggml/src/moe.cpp").exists()
    assert (llama / "ggml/src/moe2.cpp").is_file()


def test_amended_commit_is_the_users_and_stays(series: Series, llama: Path, upstream: FakeUpstream) -> None:
    patching.apply(series, llama, upstream.head)
    write(llama, {"ggml/src/graph.c": GRAPH + "int mine;\n"})
    git(llama, "commit", "-q", "-a", "--amend", "--no-edit")
    before = state(llama)
    for reset in (False, True):
        with pytest.raises(PatchError, match="foreign"):
            patching.apply(series, llama, upstream.head, reset=reset)
    assert state(llama) == before


@pytest.mark.parametrize("files", [{"notes.txt": "mine\n"}, {"include/llama.h": "mine\n"}])
def test_user_changes_are_foreign_even_with_reset(
    series: Series, llama: Path, upstream: FakeUpstream, files: dict[str, str | bytes]
) -> None:
    write(llama, files)
    before = state(llama)
    with pytest.raises(PatchError, match="foreign"):
        patching.apply(series, llama, upstream.head, reset=True)
    assert state(llama) == before


def test_another_commit_is_foreign_and_names_both(series: Series, llama: Path, upstream: FakeUpstream) -> None:
    old = upstream.head
    new = upstream.commit({"include/llama.h": "// new\n"})
    found = patching.inspect(series, llama, new)
    assert found.state is State.FOREIGN
    assert old in found.notes[0] and new in found.notes[0]
    assert found.hint == f"moe-madv patch check --tree {llama}"


def test_the_lock_of_a_killed_git_is_removed_and_that_of_a_living_one_is_not(
    series: Series, llama: Path, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = llama / ".git" / "index.lock"
    lock.write_bytes(b"")
    monkeypatch.setattr(patching, "_LOCK_PAUSE", 0.0)
    monkeypatch.setattr(patching, "_running", lambda: ["sh", "git"])
    with pytest.raises(PatchError, match="holds a lock") as e:
        patching.apply(series, llama, upstream.head)
    assert e.value.hint is not None and e.value.hint.endswith(f"rm {lock}")
    assert lock.exists()
    monkeypatch.setattr(patching, "_running", lambda: [])
    with pytest.raises(PatchError, match="holds a lock"):
        patching.apply(series, llama, upstream.head)
    monkeypatch.setattr(patching, "_running", lambda: ["sh", "gitk-like"])
    assert patching.apply(series, llama, upstream.head).changed
    assert not lock.exists()


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="no /proc")
def test_running_programs_are_listed_by_name() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"started\n")  # the kernel sets the name in the middle of exec: wait for an answer
        process.stdin.flush()
        assert process.stdout.readline() == b"started\n"
        assert "cat" in patching._running()
        process.stdin.close()


def test_ignored_build_output_does_not_matter(series: Series, llama: Path, upstream: FakeUpstream) -> None:
    write(llama, {"build/x.o": b"\x00", "src/loader.o": b"\x00"})
    assert patching.inspect(series, llama, upstream.head).state is State.PRISTINE


def test_empty_submodule_is_missing(series: Series, tmp_path: Path) -> None:
    (tmp_path / "s/vendor/llama.cpp").mkdir(parents=True)
    found = patching.inspect(series, tmp_path / "s/vendor/llama.cpp", "0" * 40)
    assert found.state is State.MISSING
    assert found.hint == "moe-madv fetch"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="changing owners needs root")
def test_tree_of_another_user_names_the_remedy(series: Series, llama: Path, upstream: FakeUpstream) -> None:
    for path in [llama, *llama.rglob("*")]:
        os.chown(path, 65534, 65534)
    with pytest.raises(Exception, match="belongs to another user") as e:
        patching.apply(series, llama, upstream.head)
    assert f"git config --global --add safe.directory {llama}" in str(e.value)


# Command line


@pytest.fixture
def cli(patches: Path, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    write(
        patches,
        {
            "upstream.toml": f'binding = "1.2.3"\n[pin."1.2.3"]\nsdist_sha256 = "{"a" * 64}"\n'
            f'commit = "{upstream.head}"\n'
        },
    )
    monkeypatch.setattr("toolkit.cli.patch.patches_dir", lambda: patches)
    monkeypatch.setattr("toolkit.patch.upstream.patches_dir", lambda: patches)
    return CliRunner()


def test_apply_check_and_status_on_a_binding_tree(
    cli: CliRunner, upstream: FakeUpstream, tmp_path: Path, series: Series
) -> None:
    tree = str(upstream.binding(tmp_path / "binding"))
    assert json.loads(cli.invoke(patch_command, ["status", "--tree", tree, "--json"]).stdout)["state"] == "pristine"
    applied = cli.invoke(patch_command, ["apply", "--tree", tree])
    assert applied.exit_code == 0
    commit = git(tmp_path / "binding/vendor/llama.cpp", "rev-parse", "HEAD")
    assert applied.stdout.split()[0] == commit
    status = json.loads(cli.invoke(patch_command, ["status", "--tree", tree, "--json"]).stdout)
    assert (status["state"], status["head"], status["base"]) == ("applied", commit, upstream.head)
    assert status["series"] == status["digest"] == series.digest
    checked = cli.invoke(patch_command, ["check", "--tree", tree, "--json"])
    assert checked.exit_code == 0
    assert {h["status"] for h in json.loads(checked.stdout)["hooks"]} == {"clean"}


def test_check_fails_when_not_all_are_clean(cli: CliRunner, upstream: FakeUpstream, tmp_path: Path) -> None:
    conflicting(upstream)
    tree = upstream.clone(tmp_path / "llama")
    result = cli.invoke(patch_command, ["check", "--tree", str(tree)])
    assert isinstance(result.exception, PatchError)
    assert re.search(r"^graph: conflict, ggml/src/graph\.c:\d+", result.stdout, flags=re.MULTILINE)


def test_list_gives_reasons_and_digest(cli: CliRunner, series: Series) -> None:
    listed = json.loads(cli.invoke(patch_command, ["list", "--json"]).stdout)
    assert (listed["label"], listed["series"]) == ("moe1", series.digest)
    assert [h["reason"] for h in listed["hooks"]] == ["The loader knows the mappings.", "The graph knows the ids."]
    assert listed["payload"][0]["sha256"] == hashlib.sha256(b"#pragma once\n").hexdigest()


def test_status_before_any_fetch(cli: CliRunner) -> None:
    status = json.loads(cli.invoke(patch_command, ["status", "--json"]).stdout)
    assert (status["state"], status["hint"]) == ("unfetched", "moe-madv fetch")
