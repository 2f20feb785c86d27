"""Porting to upstreams that have moved: the status each move gets, and that a wrong place is never changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from fake_upstream import FakeUpstream, git
from port_upstream import (
    ANCHORS,
    CALL,
    CPU,
    CPU_FILE,
    INCLUDE,
    LOOP,
    MMAP,
    MMAP_FILE,
    TARGET,
    create,
    function_of,
    write_patches,
)

from toolkit.errors import PinError
from toolkit.patch import patching
from toolkit.patch.anchors import load_anchors
from toolkit.patch.gitrepo import Git
from toolkit.patch.port import Port, port
from toolkit.patch.replay import HookStatus
from toolkit.patch.series import load_series

CLEAN, THREE_WAY, ANCHORED = HookStatus.CLEAN, HookStatus.THREE_WAY, HookStatus.ANCHORED
CONFLICT, GONE, PRESENT = HookStatus.CONFLICT, HookStatus.GONE, HookStatus.ALREADY_PRESENT

TWIN = TARGET.replace("graph_compute_thread", "graph_compute_twin")
RENAMED = CPU.replace("graph_compute_thread", "graph_worker")
SHIFTED = "".join(f"int shift_{i};\n" for i in range(9))


@pytest.fixture
def upstream(tmp_path: Path) -> FakeUpstream:
    return create(tmp_path / "upstream")


@pytest.fixture
def patches(tmp_path: Path, upstream: FakeUpstream) -> Path:
    return write_patches(tmp_path / "patches", upstream)


Run = Callable[[Mapping[str, str | bytes]], Port]


@pytest.fixture
def run(tmp_path: Path, upstream: FakeUpstream, patches: Path) -> Run:
    """Commit files on top of the pin (None for one that goes away) and port to them."""
    pin = upstream.head

    def ported(files: Mapping[str, str | bytes | None]) -> Port:
        for name in [n for n, content in files.items() if content is None]:
            git(upstream.root, "rm", "-q", name)
        upstream.commit({n: c for n, c in files.items() if c is not None}, "upstream moves on")
        series = load_series(patches)
        before = git(upstream.root, "status", "--porcelain"), git(upstream.root, "count-objects")
        repository = Git(root=upstream.root)
        found = port(series, load_anchors(patches, series), repository, pin, repository, upstream.head, "next")
        assert before == (git(upstream.root, "status", "--porcelain"), git(upstream.root, "count-objects"))
        if found.series is not None:
            patching.apply(found.series, upstream.clone(tmp_path / "tree"), upstream.head)
        return found

    return ported


def status(found: Port, hook: str) -> HookStatus:
    return next(h.status for h in found.hooks if h.hook == hook)


def patched(tmp_path: Path, file: str) -> str:
    return (tmp_path / "tree" / file).read_bytes().decode()


# One upstream move per row: files, hook, the status it must get.
MOVES: dict[str, tuple[dict[str, str | None], str, HookStatus]] = {
    "nothing moved": ({"README.md": "x\n"}, "graph", CLEAN),
    "code further down": (
        {CPU_FILE: CPU.replace("#include <assert.h>\n", "#include <assert.h>\n" + SHIFTED)},
        "graph",
        CLEAN,
    ),
    "early return above": (
        {
            CPU_FILE: CPU.replace(
                "    struct pool * tp = data;\n", "    struct pool * tp = data;\n    if (!tp) { return 1; }\n"
            )
        },
        "graph",
        CLEAN,
    ),
    "context changed nearby": (
        {
            CPU_FILE: CPU.replace('#include "common.h"\n', '#include "common.h"\n#include "new.h"\n').replace(
                '#include "ops.h"', '#include "ops2.h"'
            )
        },
        "graph",
        THREE_WAY,
    ),
    "reindented": (
        {
            CPU_FILE: CPU.replace(
                LOOP,
                "    if (tp->ready) {\n"
                + "".join(f"    {x}\n" if x else "\n" for x in LOOP.split("\n")[:-1])
                + "    }\n",
            )
        },
        "graph",
        ANCHORED,
    ),
    "argument added": (
        {
            MMAP_FILE: MMAP.replace("bool numa)", "bool numa, bool lazy)").replace(
                "make_unique<impl>(file)", "make_unique<impl>(file, lazy)"
            )
        },
        "mapping",
        ANCHORED,
    ),
    # Another file has a function of the old name, as backends have.
    "function renamed": ({CPU_FILE: RENAMED}, "graph", CONFLICT),
    "twin before the target": ({CPU_FILE: CPU.replace(TARGET, TWIN + "\n" + TARGET)}, "graph", THREE_WAY),
    "twin before the renamed target": (
        {
            CPU_FILE: RENAMED.replace(
                TARGET.replace("graph_compute_thread", "graph_worker"),
                TWIN + "\n" + TARGET.replace("graph_compute_thread", "graph_worker"),
            )
        },
        "graph",
        CONFLICT,
    ),
    "defined twice": ({CPU_FILE: CPU.replace(TARGET, f"#ifdef A\n{TARGET}#else\n{TARGET}#endif\n")}, "graph", CONFLICT),
    "loop twice in the function": ({CPU_FILE: CPU.replace(LOOP, LOOP + "\n" + LOOP)}, "graph", CONFLICT),
    "file renamed": ({CPU_FILE: None, "ggml/src/cpu/graph.c": CPU}, "graph", THREE_WAY),
    "function moved to another file": (
        {CPU_FILE: CPU.replace(TARGET, ""), "ggml/src/ggml-cpu/threads.c": f'#include "ggml.h"\n\n{TARGET}'},
        "graph",
        ANCHORED,
    ),
    "file split": (
        {
            MMAP_FILE: MMAP.replace("llama_mmap::~llama_mmap() = default;\n", ""),
            "src/llama-unmap.cpp": '#include "ggml.h"\n\nllama_mmap::~llama_mmap() = default;\n',
        },
        "mapping",
        CONFLICT,
    ),
    "file and function gone": ({CPU_FILE: None}, "graph", GONE),
    "merged upstream": (
        {
            CPU_FILE: CPU.replace('#include "ggml.h"\n', '#include "ggml.h"\n' + INCLUDE).replace(
                "        compute_forward(tp, node);", CALL + "        compute_forward(tp, node);"
            )
        },
        "graph",
        PRESENT,
    ),
    "merged upstream at another place": (
        {
            CPU_FILE: CPU.replace('#include "common.h"\n', '#include "common.h"\n' + INCLUDE).replace(
                "        struct node * node = tp->nodes[node_n];\n\n",
                CALL + "        struct node * node = tp->nodes[node_n];\n\n",
            )
        },
        "graph",
        PRESENT,
    ),
    "half of it merged upstream": (
        {CPU_FILE: CPU.replace('#include "ggml.h"\n', '#include "ggml.h"\n' + INCLUDE)},
        "graph",
        CONFLICT,
    ),
    "CR LF": ({CPU_FILE: CPU.replace("\n", "\r\n")}, "graph", CLEAN),
    "CR LF and reindented": (
        {
            CPU_FILE: CPU.replace(
                LOOP,
                "    if (tp->ready) {\n"
                + "".join(f"    {x}\n" if x else "\n" for x in LOOP.split("\n")[:-1])
                + "    }\n",
            ).replace("\n", "\r\n")
        },
        "graph",
        ANCHORED,
    ),
}


@pytest.mark.parametrize("move", MOVES)
def test_each_move_gets_its_status_and_no_wrong_place_is_changed(move: str, run: Run, tmp_path: Path) -> None:
    files, hook, expected = MOVES[move]
    found = run(files)  # type: ignore[arg-type]
    result = next(h for h in found.hooks if h.hook == hook)
    assert result.status is expected, result.detail
    other = "mapping" if hook == "graph" else "graph"
    assert status(found, other) is CLEAN
    if expected in (CONFLICT, GONE):
        assert found.series is None
        assert result.hint is not None
        assert "port next" in result.hint
        return
    assert found.series is not None
    if expected is PRESENT:
        assert [h.name for h in found.series.hooks] == [other]
        assert result.hint is not None
        assert f"take hook {hook} out" in result.hint
        return
    text = patched(tmp_path, result.file)
    if hook == "graph":
        assert function_of(text, "moe_node") == "graph_compute_thread"
        assert text.count("moe.h") == 1
        lines = [line.strip() for line in text.split("\n")]
        assert lines[lines.index("moe_node(tp, node_n);") + 3] == "compute_forward(tp, node);"
    else:
        assert function_of(text, "moe_add") == "llama_mmap::llama_mmap"
        assert function_of(text, "moe_remove") == "llama_mmap::~llama_mmap"
    # Nothing of upstream's text is lost: taking our lines out gives it back.
    upstream_text = files.get(result.file)
    if upstream_text is not None and hook == "graph":
        assert text.replace("\r", "") != upstream_text
        kept = [x for x in text.split("\n") if "moe" not in x and "tp->ith == 0" not in x]
        assert len(kept) == upstream_text.count("\n") + 1 + CALL.count("\n") - 2


def test_reindented_hook_takes_the_new_indentation(run: Run, tmp_path: Path) -> None:
    run(MOVES["reindented"][0])  # type: ignore[arg-type]
    assert "            if (tp->ith == 0) {\n                moe_node(tp, node_n);\n" in patched(tmp_path, CPU_FILE)


def test_crlf_file_stays_crlf(run: Run, tmp_path: Path) -> None:
    run(MOVES["CR LF and reindented"][0])  # type: ignore[arg-type]
    data = (tmp_path / "tree" / CPU_FILE).read_bytes()
    assert data.count(b"\r\n") == data.count(b"\n") > 0


def test_changed_function_is_reported_although_the_hook_is_clean(run: Run) -> None:
    found = run(MOVES["early return above"][0])  # type: ignore[arg-type]
    graph = next(h for h in found.hooks if h.hook == "graph")
    assert graph.function_changes == ("graph_compute_thread +1 -0",)


def test_moved_file_is_named(run: Run) -> None:
    found = run(MOVES["file renamed"][0])  # type: ignore[arg-type]
    graph = next(h for h in found.hooks if h.hook == "graph")
    assert graph.file == "ggml/src/cpu/graph.c"
    assert f"moved from {CPU_FILE}" in graph.detail
    assert "-+++ b/ggml/src/ggml-cpu/ggml-cpu.c" in graph.diff


def test_conflict_names_the_commit_and_the_line(run: Run, upstream: FakeUpstream) -> None:
    gone = CPU.replace("        compute_forward(tp, node);", "        compute_all(tp);")
    found = run({CPU_FILE: gone})
    graph = next(h for h in found.hooks if h.hook == "graph")
    assert graph.status is CONFLICT
    assert graph.upstream[0].split(" ", 1)[0] == git(upstream.root, "rev-parse", "--short", "HEAD")
    assert graph.upstream[0].endswith("upstream moves on")
    head = next(i for i, line in enumerate(gone.split("\n"), 1) if line.startswith("static int graph_compute_thread"))
    assert graph.line == head
    assert "'compute_forward(tp, node);'" in graph.detail


def test_renamed_function_is_accepted_once_anchors_name_it(run: Run, patches: Path, tmp_path: Path) -> None:
    anchors = patches / "anchors.toml"
    named = ANCHORS.replace('scope = "graph_compute_thread"', 'scope = ["graph_worker", "graph_compute_thread"]')
    anchors.write_text(named, encoding="utf-8")
    found = run({CPU_FILE: RENAMED})
    assert status(found, "graph") is CLEAN
    assert function_of(patched(tmp_path, CPU_FILE), "moe_node") == "graph_worker"


def test_stale_anchors_are_not_used(run: Run, patches: Path) -> None:
    anchors = patches / "anchors.toml"
    anchors.write_text(ANCHORS.replace("moe_node(tp, node_n)", "moe_node(tp)"), encoding="utf-8")
    found = run(MOVES["reindented"][0])  # type: ignore[arg-type]
    graph = next(h for h in found.hooks if h.hook == "graph")
    assert graph.status is CONFLICT
    assert "out of date" in graph.detail


def test_hook_without_anchors_can_still_merge(run: Run, patches: Path) -> None:
    text = ANCHORS[: ANCHORS.index("[[hook.graph]]")]
    (patches / "anchors.toml").write_text(text, encoding="utf-8")
    assert status(run(MOVES["context changed nearby"][0]), "graph") is THREE_WAY  # type: ignore[arg-type]


def test_payload_file_in_the_way_stops_the_port(run: Run) -> None:
    found = run({"ggml/include/moe.h": "int upstreams_own;\n"})
    assert found.series is None
    assert [p.status for p in found.payload] == [CONFLICT]


def test_overlap_is_found_by_name(run: Run) -> None:
    assert [o.honest for o in run({"include/llama.h": "int expert_stream;\n"}).overlaps] == [
        "leave it off in both arms"
    ]


def test_port_to_an_older_commit(upstream: FakeUpstream, patches: Path) -> None:
    """From a newer pin back to an older tree, the way old releases are supported."""
    series = load_series(patches)
    pin = upstream.head
    older = git(upstream.root, "commit-tree", "HEAD^{tree}", "-m", "older")
    repository = Git(root=upstream.root)
    found = port(series, load_anchors(patches, series), repository, pin, repository, older, "old")
    assert [h.status for h in found.hooks] == [CLEAN, CLEAN]
    assert found.series is not None
    assert [h.patch.text.split(b"diff --git")[1] for h in found.series.hooks] == [
        patch.split(b"diff --git")[1]
        for patch in (_two_lines_of_context(upstream, pin, h.patch.text) for h in series.hooks)
    ]


def _two_lines_of_context(upstream: FakeUpstream, pin: str, patch: bytes) -> bytes:
    """The same change as `git diff -U2` writes it."""
    path = upstream.root.parent / "one.patch"
    path.write_bytes(patch)
    git(upstream.root, "apply", "--index", str(path))
    diff = git(upstream.root, "diff", "--cached", "-U2", "--full-index", pin)
    git(upstream.root, "reset", "-q", "--hard", pin)
    return (diff + "\n").encode()


def test_objects_of_the_pin_may_live_in_another_repository(
    upstream: FakeUpstream, patches: Path, tmp_path: Path
) -> None:
    """An sdist's llama.cpp is one commit alone: the merge base comes from the pin's own repository."""
    pin, base = upstream.head, upstream.clone(tmp_path / "base")
    upstream.commit({k: v for k, v in MOVES["context changed nearby"][0].items() if v is not None})
    lone = tmp_path / "lone"
    git(tmp_path, "clone", "-q", "--depth=1", upstream.root.as_uri(), str(lone))
    assert not Git(root=lone).ok("cat-file", "-e", pin)
    series = load_series(patches)
    anchors = load_anchors(patches, series)
    found = port(series, anchors, Git(root=base), pin, Git(root=lone), upstream.head, "next")
    assert status(found, "graph") is THREE_WAY


def test_series_that_does_not_fit_its_pin_is_an_error(upstream: FakeUpstream, patches: Path) -> None:
    series = load_series(patches)
    other = upstream.commit({CPU_FILE: RENAMED.replace("compute_forward", "other")})
    repository = Git(root=upstream.root)
    with pytest.raises(PinError, match="does not fit the pin"):
        port(series, load_anchors(patches, series), repository, other, repository, other, "x")
