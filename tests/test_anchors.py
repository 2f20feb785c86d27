"""Anchors: what is refused when read, what an edit does, and that the shipped ones are those of the series."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fake_upstream import FakeUpstream
from port_upstream import ANCHORS, CPU, CPU_AFTER, CPU_FILE, MMAP, MMAP_AFTER, MMAP_FILE, create, write_patches

from toolkit.config import patches_dir
from toolkit.errors import PinError
from toolkit.patch.anchors import AnchorError, Anchors, Edit, Place, apply_edits, load_anchors, present
from toolkit.patch.gitrepo import Git
from toolkit.patch.ports import saved_ports, series_for
from toolkit.patch.replay import dry, replay
from toolkit.patch.series import load_series
from toolkit.patch.upstream import load_pin, pristine


@pytest.fixture
def upstream(tmp_path: Path) -> FakeUpstream:
    return create(tmp_path / "upstream")


@pytest.fixture
def patches(tmp_path: Path, upstream: FakeUpstream) -> Path:
    return write_patches(tmp_path / "patches", upstream)


def load(patches: Path, text: str = ANCHORS) -> Anchors:
    (patches / "anchors.toml").write_text(text, encoding="utf-8")
    return load_anchors(patches, load_series(patches))


def edit(scope: str, kind: str, anchor: str, text: str = "new", count: int = 1) -> tuple[Edit, ...]:
    lines = tuple(anchor.split("\n")) if anchor else ()
    place = Place(kind=kind, anchor=lines, text=tuple(text.split("\n")), count=count)  # type: ignore[arg-type]
    return (Edit(scopes=(scope,), places=(place,)),)


def test_edits_give_what_the_patches_give(patches: Path) -> None:
    edits = load(patches).edits
    assert apply_edits(CPU, CPU_FILE, edits["graph"]) == CPU_AFTER
    assert apply_edits(MMAP, MMAP_FILE, edits["mapping"]) == MMAP_AFTER
    assert present(CPU_AFTER, edits["graph"]) == 2
    assert present(CPU, edits["graph"]) == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[[hook.graph]]", "[[hook.grph]]", "no hook grph"),
        ('scope = "graph_compute_thread"', "scope = 3", "scope"),
        ('at = [{ before = "compute_forward(tp, node);" }]', "at = []", "at least one place"),
        ('{ before = "compute_forward(tp, node);" }', '{ befor = "x" }', "exactly one of"),
        ('{ before = "compute_forward(tp, node);" }', '{ before = "x", after = "y" }', "exactly one of"),
        ('{ before = "compute_forward(tp, node);" }', '{ before = "x", count = 0 }', "count"),
        ("{ enter = true }", "{ enter = false }", "enter"),
        ("text = '#include \"moe.h\"'", 'text = ""', "text"),
        ('text = "expert_stream"', 'text = "("', "regular expression"),
        ('files = ["include/llama.h"]', 'files = "include/llama.h"', "files"),
    ],
)
def test_unusable_anchors_are_refused_with_the_key(patches: Path, old: str, new: str, said: str) -> None:
    assert old in ANCHORS
    with pytest.raises(PinError) as e:
        load(patches, ANCHORS.replace(old, new))
    assert said in str(e.value)
    assert "anchors.toml" in str(e.value)


def test_an_edit_without_text_inserts_what_the_hunk_of_its_number_adds(patches: Path) -> None:
    graph = ANCHORS.index("[[hook.graph]]")
    text = ANCHORS[:graph] + re.sub(r"^text = (?:'#.*\n|\'{3}[^']*\'{3}\n)", "", ANCHORS[graph:], flags=re.MULTILINE)
    assert text.count("text = ") == ANCHORS.count("text = ") - 2
    assert load(patches, text).edits == load(patches).edits
    # The mapping's second hunk removes lines, so there is no text to take from it.
    with pytest.raises(PinError, match=r"hook\.mapping\[1\].*text"):
        load(patches, ANCHORS.replace('text = "    moe_add(addr(), size());"\n', ""))


TWO = "void f() {\n    a();\n    b();\n}\n\nvoid g() {\n        a();\n}\n"


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        (edit("f", "before", "a();"), "void f() {\n    new\n    a();\n    b();\n}\n\nvoid g() {\n        a();\n}\n"),
        (edit("g", "after", "a();"), "void f() {\n    a();\n    b();\n}\n\nvoid g() {\n        a();\n        new\n}\n"),
        (edit("f", "replace", "a();\nb();"), "void f() {\n    new\n}\n\nvoid g() {\n        a();\n}\n"),
        (
            edit("f", "enter", "", "    new"),
            "void f() {\n    new\n    a();\n    b();\n}\n\nvoid g() {\n        a();\n}\n",
        ),
    ],
)
def test_an_edit_takes_the_indentation_of_its_place(edits: tuple[Edit, ...], expected: str) -> None:
    assert apply_edits(TWO, "a.c", edits) == expected


def test_a_body_on_one_line_is_opened() -> None:
    text = "  void A::f(int a) { g(a); }\nvoid A::h() {}\n"
    opened = apply_edits(text, "a.cpp", edit("A::f", "enter", "", "    new"))
    assert opened == "  void A::f(int a) {\n      new\n      g(a);\n  }\nvoid A::h() {}\n"
    assert apply_edits(text, "a.cpp", edit("A::h", "enter", "", "    new")).endswith("void A::h() {\n    new\n}\n")


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        (edit("f", "before", "c();"), r"no line 'c\(\);' in f"),
        (edit("", "before", "a();"), "outside of functions"),
        (edit("h", "before", "a();"), "no h in the file"),
        (edit("f", "before", "a();", count=2), "is there 1 times, expected 2"),
    ],
)
def test_an_edit_without_its_place_says_what_it_sought(edits: tuple[Edit, ...], said: str) -> None:
    with pytest.raises(AnchorError, match=said):
        apply_edits(TWO, "a.c", edits)


def test_counted_anchor_is_edited_every_time_and_a_doubled_one_never() -> None:
    text = "void f() {\n    a();\n    a();\n}\n"
    assert apply_edits(text, "a.c", edit("f", "before", "a();", count=2)).count("    new\n    a();\n") == 2
    with pytest.raises(AnchorError, match="2 times, expected 1"):
        apply_edits(text, "a.c", edit("f", "before", "a();"))


def test_function_defined_twice_has_no_place() -> None:
    with pytest.raises(AnchorError, match="defined 2 times, at lines 1, 3"):
        apply_edits("void f() {\n}\nvoid f() {\n}\n", "a.c", edit("f", "enter", ""))


def test_the_shipped_anchors_give_the_shipped_patches(real_home: Path) -> None:
    """At the pin, for every hook: then they can be trusted elsewhere."""
    pin, series = load_pin(), load_series(patches_dir())
    edits = load_anchors(patches_dir(), series).edits
    with dry(Git(root=pristine(pin, real_home).llama)) as git:
        commits = replay(series, git, pin.commit, pin.commit).commits
        assert len(commits) == len(series.hooks) + 1
        for hook, *around in zip(series.hooks, commits, commits[1:], strict=False):
            old, new = (git.run("cat-file", "blob", f"{c}:{hook.file}").stdout.decode() for c in around)
            assert apply_edits(old, hook.file, edits[hook.name]) == new, hook.name


def test_the_shipped_ports_were_made_from_the_shipped_hooks() -> None:
    """Otherwise the error says which port to write anew."""
    commits = [commit for saved in saved_ports(patches_dir()) for commit in saved.commits]
    assert len(set(commits)) == len(commits) > 0
    for commit in commits:
        series = series_for(patches_dir(), commit)
        assert {h.name for h in series.hooks} == {h.name for h in load_series(patches_dir()).hooks}
        assert any(h.source.startswith("ports/") for h in series.hooks)
