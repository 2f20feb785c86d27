// Pure parts: page ranges, expert ids, matmul groups.

#include "helpers.h"

static void test_ranges() {
    const size_t KiB = 1024;

    // an expert of 24576 bytes that starts 32 bytes into a page; bounds worked out by hand
    const ggml_moe_range expert = { 0x100000 + 32, 0x100000 + 32 + 24576 };

    ggml_moe_range r = ggml_moe_range_outer(expert, 4*KiB);
    CHECK_EQ(r.begin, 0x100000u);
    CHECK_EQ(r.end,   0x107000u); // 7 pages of 4 KiB

    r = ggml_moe_range_outer(expert, 16*KiB);
    CHECK_EQ(r.begin, 0x100000u);
    CHECK_EQ(r.end,   0x108000u); // 2 pages of 16 KiB

    r = ggml_moe_range_outer(expert, 64*KiB);
    CHECK_EQ(r.begin, 0x100000u);
    CHECK_EQ(r.end,   0x110000u); // 1 page of 64 KiB

    r = ggml_moe_range_inner(expert, 4*KiB);
    CHECK_EQ(r.begin, 0x101000u);
    CHECK_EQ(r.end,   0x106000u);

    r = ggml_moe_range_inner(expert, 16*KiB);
    CHECK_EQ(r.size(), 0u); // no whole page of 16 KiB: [0x104000, 0x104000)

    r = ggml_moe_range_inner(expert, 64*KiB);
    CHECK_EQ(r.size(), 0u);

    // already aligned ranges and empty ones do not grow
    for (const size_t page : { 4*KiB, 16*KiB, 64*KiB }) {
        r = ggml_moe_range_outer({ 0x200000, 0x220000 }, page);
        CHECK_EQ(r.begin, 0x200000u);
        CHECK_EQ(r.end,   0x220000u);
        r = ggml_moe_range_inner({ 0x200000, 0x220000 }, page);
        CHECK_EQ(r.size(), 0x20000u);
        CHECK_EQ(ggml_moe_range_outer({ 0x200000, 0x200000 }, page).size(), 0u);
    }

    // one byte needs one page
    r = ggml_moe_range_outer({ 0x200040, 0x200041 }, 4*KiB);
    CHECK_EQ(r.size(), 4*KiB);
}

static void test_ids() {
    t_graph g;
    ggml_moe_ids ids;
    using list = std::vector<int32_t>;

    // two tokens, top 3 of 8; repeats once; the other five columns of a row are not selected
    ggml_moe_ids_read(g.ids(3, 8, {{ 5, 0, 2, 1, 1, 1, 1, 1 }, { 2, 7, 0, 3, 3, 3, 3, 3 }}), 8, ids);
    CHECK_EQ(ids.n_ignored, 0u);
    CHECK(ids.distinct == list({ 0, 2, 5, 7 }));
    CHECK(ids.rows == std::vector<list>({{ 5, 0, 2 }, { 2, 7, 0 }}));

    // outside of [0, n_expert): left out and counted
    ggml_moe_ids_read(g.ids(4, 4, {{ -1, 4, 3, 1000000 }}), 4, ids);
    CHECK_EQ(ids.n_ignored, 3u);
    CHECK(ids.distinct == list({ 3 }));
    CHECK(ids.rows == std::vector<list>({{ 3 }}));

    // more than 255 and more than 512 experts
    ggml_moe_ids_read(g.ids(4, 896, {{ 895, 256, 255, 0 }}), 896, ids);
    CHECK(ids.distinct == list({ 0, 255, 256, 895 }));

    // no token
    ggml_moe_ids_read(g.ids(2, 4, {}), 4, ids);
    CHECK(ids.distinct.empty());
}

// a hash-routed layer: row t of a table [2, 3] names the experts of token t
static void test_ids_early() {
    t_graph g;
    ggml_moe_ids ids;
    using list = std::vector<int32_t>;

    ggml_tensor * table  = g.ids(2, 2, {{ 4, 1 }, { 7, 0 }, { 2, 9 }});
    ggml_tensor * tokens = g.ids(4, 4, {{ 2, 0, 0, 1 }});
    ggml_tensor * rows   = g.ids(2, 2, {});
    tokens->ne[1] = 1;
    rows->op     = GGML_OP_GET_ROWS;
    rows->src[0] = table;
    rows->src[1] = tokens;

    CHECK(ggml_moe_ids_read_early(rows, 8, ids)); // expert 9 of row 2 does not exist
    CHECK(ids.rows == std::vector<list>({{ 2 }, { 4, 1 }, { 4, 1 }, { 7, 0 }}));
    CHECK(ids.distinct == list({ 0, 1, 2, 4, 7 }));
    CHECK_EQ(ids.n_ignored, 1u);

    // computed ids, computed tokens, and a token outside of the table are not known early
    CHECK(!ggml_moe_ids_read_early(g.ids(2, 8, {{ 1, 2 }}), 8, ids));
    tokens->op = GGML_OP_ADD;
    CHECK(!ggml_moe_ids_read_early(rows, 8, ids));
    tokens->op = GGML_OP_NONE;
    ((int32_t *) tokens->data)[3] = 3;
    CHECK(!ggml_moe_ids_read_early(rows, 8, ids));
}

static void test_groups() {
    t_graph g;

    ggml_tensor * ids0 = g.ids(2, 8, {{ 1, 2 }});
    ggml_tensor * ids1 = g.ids(2, 8, {{ 1, 2 }});
    ggml_tensor * ids2 = g.ids(1, 4, {{ 0 }});
    ids0->op = ids1->op = ids2->op = GGML_OP_VIEW; // computed, as in a real graph
    ggml_tensor * w[8];
    for (int i = 0; i < 8; i++) {
        w[i] = g.weights(0x1000*(i + 1), 8, 16);
    }

    // layer 0: gate, up, down with other nodes between; layer 1: merged gate_up and down, then grouped experts
    // with ids of their own
    const int gate    = g.add(GGML_OP_MUL_MAT_ID, w[0], ids0);
    const int up      = g.add(GGML_OP_MUL_MAT_ID, w[1], ids0);
    g.add(GGML_OP_GLU);
    const int down    = g.add(GGML_OP_MUL_MAT_ID, w[2], ids0);
    const int dense   = g.add(GGML_OP_MUL_MAT, w[7]);
    const int gate_up = g.add(GGML_OP_MUL_MAT_ID, w[3], ids1);
    g.add(GGML_OP_GLU);
    const int down1   = g.add(GGML_OP_MUL_MAT_ID, w[4], ids1);
    const int chunk   = g.add(GGML_OP_MUL_MAT_ID, w[5], ids2);
    const int chunk1  = g.add(GGML_OP_MUL_MAT_ID, w[6], ids2);

    using list = std::vector<const ggml_tensor *>;
    auto group_of = [](const ggml_cgraph & cgraph, int i) {
        list weights;
        for (const ggml_tensor * node : ggml_moe_group_at(&cgraph, i).nodes) {
            weights.push_back(node->src[0]);
        }
        return weights;
    };
    auto group = [&](int i) { return group_of(g.cgraph, i); };

    CHECK(group(gate)    == list({ w[0], w[1], w[2] }));
    CHECK(group(up)      == list());
    CHECK(group(down)    == list());
    CHECK(group(dense)   == list());
    CHECK(group(gate_up) == list({ w[3], w[4] }));
    CHECK(group(down1)   == list());
    CHECK(group(chunk)   == list({ w[5], w[6] }));
    CHECK(group(chunk1)  == list());

    CHECK_EQ(ggml_moe_group_next(&g.cgraph, 0),           gate);
    CHECK_EQ(ggml_moe_group_next(&g.cgraph, gate + 1),    gate_up);
    CHECK_EQ(ggml_moe_group_next(&g.cgraph, gate_up + 1), chunk);
    CHECK_EQ(ggml_moe_group_next(&g.cgraph, chunk + 1),   g.cgraph.n_nodes);

    // a graph split that starts inside a group still hints what is left of it
    ggml_cgraph split = g.cgraph;
    split.nodes   += down;
    split.n_nodes -= down;
    CHECK(group_of(split, 0) == list({ w[2] }));

    // always used: the dense matrix only, once; not experts, not rows of a table, not what is computed
    ggml_tensor * table = g.weights(0x9000, 1, 64);
    const int rows = g.add(GGML_OP_GET_ROWS, table);
    g.add(GGML_OP_MUL_MAT, w[7]);
    g.add(GGML_OP_MUL_MAT, g.nodes[rows]);
    const auto always = ggml_moe_always_used(&g.cgraph, 0, g.cgraph.n_nodes);
    CHECK_EQ(always.size(), 1u);
    CHECK_EQ(always[0].begin, (uintptr_t) w[7]->data);
    CHECK_EQ(always[0].size(), 8u*16);
    CHECK(ggml_moe_always_used(&g.cgraph, 0, dense).empty());

    // one row of a table by a view: what is read of it, by who reads the view, and not the table
    ggml_tensor * row = g.weights((uintptr_t) table->data + 32, 1, 16);
    row->op       = GGML_OP_VIEW;
    row->view_src = table;
    g.add(GGML_OP_VIEW, table);
    const int cast = g.add(GGML_OP_CPY, row);
    const auto of_view = ggml_moe_always_used(&g.cgraph, cast - 1, g.cgraph.n_nodes);
    CHECK_EQ(of_view.size(), 1u);
    CHECK_EQ(of_view[0].begin, (uintptr_t) table->data + 32);
    CHECK_EQ(of_view[0].size(), 16u);
}

int main() {
    test_ranges();
    test_ids();
    test_ids_early();
    test_groups();
    return 0;
}
