"""Real releases: the series ports to each, and what is ported compiles, moves its counters and changes no output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.build.acceptance import accept
from toolkit.config import patches_dir
from toolkit.patch import patchfile
from toolkit.patch.anchors import load_anchors
from toolkit.patch.gitrepo import Git
from toolkit.patch.port import PORTED, Port, port
from toolkit.patch.series import load_series
from toolkit.patch.target import Target, resolve
from toolkit.patch.upstream import load_pin, pristine

pytestmark = pytest.mark.build

RELEASES = {
    "0.3.16": "4227c9be4268ac844921b90f31595f81236bd317",
    "0.3.22": "63d93d17336e41e4cc73a64451e5b1d2477abdb1",
    "0.3.26": "7c158fbb4aec1bdc9c81d6ca0e785139f4826fae",
    "0.3.30": "e3a74b299085cd00013804f7fca2e03441b2da20",
    "0.3.34": "e3546c7948e3af463d0b401e6421d5a4c2faf565",
    "0.3.35": "4df29be4f4c3673f428170fda944a5b19f743bb8",
    "0.3.36": "0c1e57098bba43ac29e6e3b677cdceebdd22334f",
}


def ported(version: str, home: Path) -> tuple[Target, Port]:
    series, pin = load_series(patches_dir()), load_pin()
    base = Git(root=pristine(pin, home).llama)
    target = resolve(version, None, home)
    anchors = load_anchors(patches_dir(), series)
    return target, port(series, anchors, base, pin.commit, target.repository, target.tree.commit, version)


@pytest.mark.parametrize("version", RELEASES)
def test_the_series_ports_to_fourteen_months_of_releases(version: str, real_home: Path) -> None:
    target, found = ported(version, real_home)
    assert target.tree.commit == RELEASES[version]
    assert {h.hook: h.status for h in found.hooks if h.status not in PORTED} == {}
    assert found.series is not None
    graph = next(h for h in found.hooks if h.hook == "graph")
    assert graph.functions == ("ggml_graph_compute_thread",)


@pytest.mark.parametrize("version", ["0.3.16", "0.3.36"])
def test_the_oldest_and_the_pinned_release_are_accepted(version: str, real_home: Path, tiny: Path) -> None:
    target, found = ported(version, real_home)
    assert found.series is not None
    result = accept(found.series, target.tree, tiny, real_home)
    assert result.problems == ()
    assert (result.compiled, result.counters_moved, result.outputs_equal) == (True, True, True)
    assert set(result.modes) > {"off", "hint"}


def test_a_port_that_does_not_compile_or_does_nothing_is_not_accepted(real_home: Path, tiny: Path) -> None:
    target, found = ported("0.3.36", real_home)
    assert found.series is not None
    graph = next(h for h in found.series.hooks if h.name == "graph")

    def with_call(call: bytes) -> bool:
        text = graph.patch.text.replace(b"ggml_moe_prefetch_node(cgraph, node_n);", call)
        assert text != graph.patch.text
        changed = replace(graph, patch=patchfile.parse(text, Path("graph.patch")))
        hooks = tuple(changed if h.name == "graph" else h for h in found.series.hooks)  # type: ignore[union-attr]
        result = accept(replace(found.series, hooks=hooks), target.tree, tiny, real_home)  # type: ignore[type-var]
        assert not result.ok
        assert result.problems
        return result.compiled

    assert not with_call(b"ggml_moe_prefetch_node(no_such_name, node_n);")
    assert with_call(b"(void) node_n;")
