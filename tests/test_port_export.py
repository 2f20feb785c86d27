"""Export: commits made by hand in a patched tree become files of patches/, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_upstream import FakeUpstream, git, snapshot, write
from port_upstream import CPU_FILE, MMAP_FILE, create, write_patches

from toolkit.cli.patch import patch as patch_command
from toolkit.errors import PatchError
from toolkit.patch import patching
from toolkit.patch.export import export
from toolkit.patch.series import load_series


@pytest.fixture
def upstream(tmp_path: Path) -> FakeUpstream:
    return create(tmp_path / "upstream")


@pytest.fixture
def patches(tmp_path: Path, upstream: FakeUpstream) -> Path:
    folder = write_patches(tmp_path / "patches", upstream)
    pin = f'binding = "1.2.3"\n\n[pin."1.2.3"]\nsdist_sha256 = "{"0" * 64}"\ncommit = "{upstream.head}"\n'
    (folder / "upstream.toml").write_text(pin, encoding="utf-8")
    return folder


@pytest.fixture
def llama(tmp_path: Path, upstream: FakeUpstream, patches: Path) -> Path:
    """A tree with the series on it."""
    tree = upstream.clone(tmp_path / "llama")
    patching.apply(load_series(patches), tree, upstream.head)
    return tree


def edit(llama: Path, file: str, old: str, new: str, *commit: str) -> None:
    path = llama / file
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")
    git(llama, "commit", "-q", "-a", *commit)


def exported(patches: Path, llama: Path, upstream: FakeUpstream) -> dict[str, bytes]:
    """What export changes; it is written, and then the series must say what the tree has."""
    found = export(load_series(patches), patches, llama, upstream.head)
    found.write()
    series = load_series(patches)
    check = upstream.clone(llama.parent / "check")
    patching.apply(series, check, upstream.head)
    assert snapshot(check) == snapshot(llama)
    assert export(load_series(patches), patches, check, upstream.head).files == {}
    return found.files


def test_nothing_changes_right_after_apply(patches: Path, llama: Path, upstream: FakeUpstream) -> None:
    before = snapshot(patches)
    export(load_series(patches), patches, llama, upstream.head).write()
    assert snapshot(patches) == before


def test_same_commits_with_other_dates_change_nothing(patches: Path, llama: Path, upstream: FakeUpstream) -> None:
    """A rebase by hand gives other commit ids and dates; what they say is the same."""
    git(llama, "rebase", "-q", "--force-rebase", upstream.head)
    git(llama, "commit", "-q", "--amend", "--no-edit", "--reset-author")
    before = snapshot(patches)
    found = export(load_series(patches), patches, llama, upstream.head)
    # The patches were written with three lines of context; export writes two, once.
    assert set(found.files) <= {"hooks/graph.patch", "hooks/mapping.patch"}
    found.write()
    again = export(load_series(patches), patches, llama, upstream.head)
    assert again.files == {}
    assert {n for n in before if before[n] != snapshot(patches)[n]} == set(found.files)


def test_payload_is_taken_as_it_is_at_head(patches: Path, llama: Path, upstream: FakeUpstream) -> None:
    edit(llama, "ggml/include/moe.h", "#pragma once\n", "#pragma once\nint moe;\n", "-m", "anything")
    files = exported(patches, llama, upstream)
    assert files["payload/moe.h"] == b"#pragma once\nint moe;\n"
    assert "series.toml" not in files


def test_fixup_of_a_hook_changes_its_patch_alone(patches: Path, llama: Path, upstream: FakeUpstream) -> None:
    edit(llama, CPU_FILE, "moe_node(tp, node_n);", "moe_node(tp, node_n, 1);", "--fixup", "HEAD")
    edit(llama, MMAP_FILE, "moe_add(addr(), size());", "moe_add(addr(), 1);", "--fixup", "HEAD~2")
    files = exported(patches, llama, upstream)
    assert b"+            moe_node(tp, node_n, 1);\n" in files["hooks/graph.patch"]
    assert b"+    moe_add(addr(), 1);\n" in files["hooks/mapping.patch"]
    assert b"Subject: demo : the graph hook\n\nWhy it is there.\n\ndiff --git" in files["hooks/graph.patch"]
    assert set(files) == {"hooks/graph.patch", "hooks/mapping.patch"}


def test_message_of_a_hook_is_part_of_it(patches: Path, llama: Path, upstream: FakeUpstream) -> None:
    git(llama, "commit", "-q", "--amend", "-m", "demo : the graph hook\n\nAnother reason.")
    assert b"\n\nAnother reason.\n\ndiff" in exported(patches, llama, upstream)["hooks/graph.patch"]


def test_new_payload_file_and_new_hook_get_entries(patches: Path, llama: Path, upstream: FakeUpstream) -> None:
    write(llama, {"ggml/src/moe-os.cpp": "int os;\n"})
    git(llama, "add", "-A")
    git(llama, "commit", "-q", "-m", "os")
    message = "demo : build it\n\nHook: build\nReason: It has to be compiled."
    edit(llama, "ggml/src/CMakeLists.txt", "  ggml.c\n", "  ggml.c\n  moe-os.cpp\n", "-m", message)
    files = exported(patches, llama, upstream)
    assert set(files) >= {"payload/moe-os.cpp", "hooks/build.patch", "series.toml"}
    series = load_series(patches)
    assert [p.target for p in series.payload] == ["ggml/include/moe.h", "ggml/src/moe-os.cpp"]
    assert [(h.name, h.reason) for h in series.hooks][2:] == [("build", "It has to be compiled.")]
    toml = (patches / "series.toml").read_text(encoding="utf-8")
    assert toml.index("# The payload.") < toml.index("moe-os.cpp") < toml.index("# The hooks.") < toml.index('"build"')


def test_two_hooks_of_one_file_are_told_apart_by_their_commits(
    patches: Path, llama: Path, upstream: FakeUpstream
) -> None:
    message = "demo : another\n\nHook: second\nReason: The end matters too."
    edit(
        llama,
        CPU_FILE,
        "    return graph_compute_thread(tp);\n",
        "    moe_end(tp);\n    return graph_compute_thread(tp);\n",
        "-m",
        message,
    )
    files = exported(patches, llama, upstream)
    assert b"moe_end" in files["hooks/second.patch"]
    assert b"moe_end" not in files.get("hooks/graph.patch", b"")
    edit(llama, CPU_FILE, "moe_end(tp);", "moe_end(tp, 1);", "--fixup", "HEAD")
    with pytest.raises(PatchError, match="is no hook's") as e:
        export(load_series(patches), patches, llama, upstream.head)
    assert "rebase --interactive --autosquash" in str(e.value.hint)


def test_crlf_in_a_hook_survives(patches: Path, upstream: FakeUpstream, tmp_path: Path) -> None:
    """A hook of a file stored with CR LF keeps its CRs from tree to patch to tree."""
    text = (upstream.root / MMAP_FILE).read_bytes().replace(b"\n", b"\r\n")
    upstream.commit({MMAP_FILE: text}, "CR LF")
    tree = upstream.clone(tmp_path / "llama")
    patching.apply(load_series(patches), tree, upstream.head)
    edit_bytes = (tree / MMAP_FILE).read_bytes().replace(b"moe_add(addr(), size());\r\n", b"moe_add(addr(), 2);\r\n")
    (tree / MMAP_FILE).write_bytes(edit_bytes)
    git(tree, "commit", "-q", "-a", "--fixup", "HEAD~1")
    files = exported(patches, tree, upstream)
    assert b"+    moe_add(addr(), 2);\r\n" in files["hooks/mapping.patch"]


@pytest.mark.parametrize("reset", ["pin", "without mapping"])
def test_a_tree_that_lost_a_hook_is_refused(patches: Path, llama: Path, upstream: FakeUpstream, reset: str) -> None:
    if reset == "pin":
        git(llama, "checkout", "-q", upstream.head)
    else:
        git(llama, "rebase", "-q", "--onto", "HEAD~2", "HEAD~1")
    before = snapshot(patches)
    with pytest.raises(PatchError, match="no commits on top" if reset == "pin" else "subject of hook mapping"):
        export(load_series(patches), patches, llama, upstream.head)
    assert snapshot(patches) == before


def test_work_that_is_not_committed_is_refused(patches: Path, llama: Path, upstream: FakeUpstream) -> None:
    (llama / CPU_FILE).write_text("int x;\n", encoding="utf-8")
    with pytest.raises(PatchError, match="without a commit") as e:
        export(load_series(patches), patches, llama, upstream.head)
    assert "--fixup" in str(e.value.hint)


def test_a_commit_of_two_upstream_files_is_refused(patches: Path, llama: Path, upstream: FakeUpstream) -> None:
    write(llama, {"README": "x\n", "CMakeLists.txt": "x\n", "include/llama.h": "x\n"})
    git(llama, "add", "-A")
    git(llama, "commit", "-q", "-m", "two")
    with pytest.raises(PatchError, match="changes 2 upstream files"):
        export(load_series(patches), patches, llama, upstream.head)


def test_command_with_dry_run_writes_nothing_and_fails(
    patches: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("toolkit.cli.patch", "toolkit.patch.upstream"):
        monkeypatch.setattr(f"{module}.patches_dir", lambda: patches)
    assert CliRunner().invoke(patch_command, ["export", "--tree", str(llama), "--dry-run"]).exit_code == 0
    edit(llama, "ggml/include/moe.h", "#pragma once\n", "#pragma once\nint moe;\n", "-m", "anything")
    before = snapshot(patches)
    result = CliRunner().invoke(patch_command, ["export", "--tree", str(llama), "--dry-run"])
    assert isinstance(result.exception, PatchError)
    assert str(patches / "payload" / "moe.h") in result.stdout
    assert snapshot(patches) == before
    assert CliRunner().invoke(patch_command, ["export", "--tree", str(llama)]).exit_code == 0
    assert snapshot(patches)["payload/moe.h"] == b"#pragma once\nint moe;\n"
