"""A throw-away llama.cpp whose files look like those the hooks touch, a series of two hooks for it, and its anchors."""

from __future__ import annotations

import re
from pathlib import Path

from fake_upstream import FakeUpstream, hook_patch, write

OTHER_FILE = "ggml/src/ggml-other/ggml-other.c"
CPU_FILE = "ggml/src/ggml-cpu/ggml-cpu.c"
MMAP_FILE = "src/llama-mmap.cpp"

LOOP = """\
    for (int node_n = 0; node_n < tp->n_nodes; node_n++) {
        struct node * node = tp->nodes[node_n];

        compute_forward(tp, node);

        if (node_n + 1 < tp->n_nodes) {
            barrier(tp);
        }
    }
"""
TARGET = f"""\
static int graph_compute_thread(void * data) {{
    struct pool * tp = data;

{LOOP}
    barrier(tp);

    return 0;
}}
"""
FILLER = "".join(f"static int filler_{i}(int x) {{\n    return x + {i};\n}}\n\n" for i in range(12))
CPU = f"""\
#include "ops.h"
#include "ggml.h"
#include "common.h"

#include <assert.h>

{FILLER}{TARGET}
int graph_compute(struct pool * tp) {{
    return graph_compute_thread(tp);
}}
"""
# Another backend with a function of the same name, which is none of ours.
NAMESAKE = f'#include "ggml.h"\n\n{TARGET}'
MMAP = """\
#include "llama-mmap.h"

#include "ggml.h"

#include <cstring>

struct llama_mmap::impl {
    impl(struct llama_file * file, size_t prefetch, bool numa) { map(file, prefetch, numa); }
    size_t size;
};

llama_mmap::llama_mmap(struct llama_file * file, size_t prefetch, bool numa) : pimpl(std::make_unique<impl>(file)) {}
llama_mmap::~llama_mmap() = default;

size_t llama_mmap::size() const { return pimpl->size; }
"""

CALL = "        if (tp->ith == 0) {\n            moe_node(tp, node_n);\n        }\n\n"
INCLUDE = '#include "moe.h"\n'
CPU_AFTER = CPU.replace('#include "ggml.h"\n', '#include "ggml.h"\n' + INCLUDE).replace(
    "        compute_forward(tp, node);\n", CALL + "        compute_forward(tp, node);\n"
)
CTOR = " : pimpl(std::make_unique<impl>(file)) {"
MMAP_AFTER = (
    MMAP.replace('#include "ggml.h"\n', '#include "ggml.h"\n' + INCLUDE)
    .replace(CTOR + "}\n", CTOR + "\n    moe_add(addr(), size());\n}\n")
    .replace("~llama_mmap() = default;\n", "~llama_mmap() {\n    moe_remove(addr(), size());\n}\n")
)

SERIES = f"""
label = "moe1"
author = "Demo <demo@localhost>"
date = 2026-01-02T03:04:05Z

# The payload.
[[payload]]
source = "payload/moe.h"
target = "ggml/include/moe.h"

# The hooks.
[[hook]]
name = "mapping"
patch = "hooks/mapping.patch"
file = "{MMAP_FILE}"
reason = "The mapping's owner knows its range."
status = "local"

[[hook]]
name = "graph"
patch = "hooks/graph.patch"
file = "{CPU_FILE}"
reason = "The graph knows the ids."
status = "local"
"""
ANCHORS = """
[[hook.mapping]]
scope = ""
at = [{ after = '#include "ggml.h"' }]
text = '#include "moe.h"'

[[hook.mapping]]
scope = "llama_mmap::llama_mmap"
at = [{ enter = true }]
text = "    moe_add(addr(), size());"

[[hook.mapping]]
scope = ""
at = [{ replace = "llama_mmap::~llama_mmap() = default;" }]
text = '''
llama_mmap::~llama_mmap() {
    moe_remove(addr(), size());
}
'''

[[hook.graph]]
scope = ""
at = [{ after = '#include "ggml.h"' }]
text = '#include "moe.h"'

[[hook.graph]]
scope = "graph_compute_thread"
at = [{ before = "compute_forward(tp, node);" }]
text = '''
if (tp->ith == 0) {
    moe_node(tp, node_n);
}

'''

[[overlap]]
name = "streamed experts"
files = ["include/llama.h"]
text = "expert_stream"
honest = "leave it off in both arms"
"""


def create(root: Path) -> FakeUpstream:
    """A repository whose HEAD is the pin."""
    upstream = FakeUpstream.create(root)
    upstream.commit({CPU_FILE: CPU, MMAP_FILE: MMAP, OTHER_FILE: NAMESAKE}, "the pin")
    return upstream


def write_patches(folder: Path, upstream: FakeUpstream) -> Path:
    graph = hook_patch(upstream, CPU_FILE, CPU, CPU_AFTER, "demo : the graph hook")
    mapping = hook_patch(upstream, MMAP_FILE, MMAP, MMAP_AFTER, "demo : the mapping hook")
    write(folder, {"series.toml": SERIES, "anchors.toml": ANCHORS, "payload/moe.h": "#pragma once\n"})
    write(folder, {"hooks/graph.patch": graph, "hooks/mapping.patch": mapping})
    return folder


def function_of(text: str, needle: str) -> str:
    """Name of the function around the only line with `needle`: the nearest head above it that starts a line."""
    lines = text.replace("\r\n", "\n").split("\n")
    (at,) = [i for i, line in enumerate(lines) if needle in line]
    head = next(line for line in reversed(lines[: at + 1]) if re.match(r"[a-z].*\)[^;]*\{?$", line))
    found = re.search(r"([\w:~]+)\(", head)
    assert found is not None
    return found[1]
