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
    std::vector<int32_t> experts;

    // two tokens, top 3 of 8; repeats once; the other five columns of a row are not selected
    CHECK_EQ(ggml_moe_ids_distinct(g.ids(3, 8, {{ 5, 0, 2, 1, 1, 1, 1, 1 }, { 2, 7, 0, 3, 3, 3, 3, 3 }}), 8, experts), 0u);
    CHECK(experts == std::vector<int32_t>({ 0, 2, 5, 7 }));

    // outside of [0, n_expert): left out and counted
    CHECK_EQ(ggml_moe_ids_distinct(g.ids(4, 4, {{ -1, 4, 3, 1000000 }}), 4, experts), 3u);
    CHECK(experts == std::vector<int32_t>({ 3 }));

    // more than 255 and more than 512 experts
    CHECK_EQ(ggml_moe_ids_distinct(g.ids(4, 896, {{ 895, 256, 255, 0 }}), 896, experts), 0u);
    CHECK(experts == std::vector<int32_t>({ 0, 255, 256, 895 }));

    // no token
    CHECK_EQ(ggml_moe_ids_distinct(g.ids(2, 4, {}), 4, experts), 0u);
    CHECK(experts.empty());
}

static void test_groups() {
    t_graph g;
    std::vector<const ggml_tensor *> weights;

    ggml_tensor * ids0 = g.ids(2, 8, {{ 1, 2 }});
    ggml_tensor * ids1 = g.ids(2, 8, {{ 1, 2 }});
    ggml_tensor * ids2 = g.ids(1, 4, {{ 0 }});
    ggml_tensor * w[8];
    for (auto & t : w) {
        t = g.weights(0x1000, 8, 16);
    }

    // layer 0: gate, up, down with other nodes between; layer 1: merged gate_up and down, then grouped experts
    // with ids of their own
    const int gate    = g.add(GGML_OP_MUL_MAT_ID, w[0], ids0);
    const int up      = g.add(GGML_OP_MUL_MAT_ID, w[1], ids0);
    g.add(GGML_OP_GLU);
    const int down    = g.add(GGML_OP_MUL_MAT_ID, w[2], ids0);
    g.add(GGML_OP_MUL_MAT, w[7]);
    const int gate_up = g.add(GGML_OP_MUL_MAT_ID, w[3], ids1);
    g.add(GGML_OP_GLU);
    const int down1   = g.add(GGML_OP_MUL_MAT_ID, w[4], ids1);
    const int chunk   = g.add(GGML_OP_MUL_MAT_ID, w[5], ids2);
    const int chunk1  = g.add(GGML_OP_MUL_MAT_ID, w[6], ids2);

    using list = std::vector<const ggml_tensor *>;
    auto group = [&](int i) { ggml_moe_group_weights(&g.cgraph, i, weights); return weights; };

    CHECK(group(gate)    == list({ w[0], w[1], w[2] }));
    CHECK(group(up)      == list());
    CHECK(group(down)    == list());
    CHECK(group(gate_up) == list({ w[3], w[4] }));
    CHECK(group(down1)   == list());
    CHECK(group(chunk)   == list({ w[5], w[6] }));
    CHECK(group(chunk1)  == list());

    // a graph split that starts inside a group still hints what is left of it
    ggml_cgraph split = g.cgraph;
    split.nodes   += down;
    split.n_nodes -= down;
    ggml_moe_group_weights(&split, 0, weights);
    CHECK(weights == list({ w[2] }));
}

int main() {
    test_ranges();
    test_ids();
    test_groups();
    return 0;
}
