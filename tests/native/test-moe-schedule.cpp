// Graphs that a scheduler runs in splits: what comes next is known across them, and experts are asked for before they
// are copied to a device.

#include "helpers.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

static const uintptr_t BASE     = 0x100000000;
static const size_t    PAGE     = 4096;
static const int64_t   N_EXPERT = 8;
static const size_t    SLICE    = 2*PAGE;
static const size_t    DENSE    = 3*PAGE;

static ggml_backend_buffer * DEVICE = (ggml_backend_buffer *) 1; // the stand-in ggml takes it for a device's

static std::mutex                                 mutex;
static std::vector<std::pair<uintptr_t, size_t>>  asked;
static std::vector<std::pair<uintptr_t, size_t>>  dropped;

using ranges = std::vector<std::pair<uintptr_t, size_t>>;

static ranges asked_of(uintptr_t begin, size_t size) {
    std::lock_guard<std::mutex> lock(mutex);
    ranges found;
    for (const auto & r : asked) {
        if (begin <= r.first && r.first < begin + size) {
            found.push_back(r);
        }
    }
    return found;
}

static void reset(enum ggml_moe_prefetch_mode mode) {
    ggml_moe_prefetch_map_remove((const void *) BASE, (size_t) 1 << 30);
    CHECK(ggml_moe_prefetch_set_mode(GGML_MOE_PREFETCH_MODE_OFF));
    CHECK(ggml_moe_prefetch_set_mode(mode));
    ggml_moe_prefetch_map_add((const void *) BASE, (size_t) 1 << 30, -1);
    ggml_moe_prefetch_counter_reset();
    asked.clear();
    dropped.clear();
}

static ggml_cgraph view(const t_graph & g, int i0, int i1) {
    ggml_cgraph split = g.cgraph;
    split.nodes   = g.cgraph.nodes + i0;
    split.n_nodes = i1 - i0;
    return split;
}

// per layer one dense matmul, in a split of its own, and one by experts
static void test_splits() {
    reset(GGML_MOE_PREFETCH_MODE_OVERLAP);
    t_graph   g;
    uintptr_t dense[3];
    uintptr_t experts[3];
    uintptr_t addr = BASE;
    for (int l = 0; l < 3; l++) {
        ggml_tensor * ids = g.ids(2, N_EXPERT, {{ 3, 5 }});
        ids->op    = GGML_OP_VIEW;
        dense[l]   = addr;
        experts[l] = addr + DENSE;
        g.add(GGML_OP_MUL_MAT, g.weights(dense[l], 1, DENSE));
        g.add(GGML_OP_MUL_MAT_ID, g.weights(experts[l], N_EXPERT, SLICE), ids);
        addr += DENSE + N_EXPERT*SLICE;
    }

    // without the scheduler's word a split ends at its own last node
    ggml_cgraph alone = view(g, 1, 2);
    ggml_moe_prefetch_node(&alone, 0);
    CHECK((asked_of(experts[0], N_EXPERT*SLICE) == ranges{{ experts[0] + 3*SLICE, SLICE }, { experts[0] + 5*SLICE, SLICE }}));
    CHECK(asked_of(dense[1], DENSE).empty());

    for (int pass = 0; pass < 2; pass++) { // the same graph again: its first node is a new beginning
        asked.clear();
        ggml_moe_prefetch_graph_begin();
        for (int i = 0; i < 6; i++) {
            const ggml_cgraph split = view(g, i, i + 1);
            ggml_moe_prefetch_graph_split(&split, nullptr, 0);
        }
        for (int i = 1; i < 6; i += 2) { // the dense ones run elsewhere
            const ggml_cgraph split = view(g, i, i + 1);
            ggml_moe_prefetch_node(&split, 0);
            const int l = i/2;
            CHECK_EQ(asked_of(dense[l], DENSE).size(), 1u);
            CHECK_EQ(asked_of(experts[l], N_EXPERT*SLICE).size(), 2u);
            if (l < 2) {
                CHECK((asked_of(dense[l + 1], DENSE) == ranges{{ dense[l + 1], DENSE }}));
                CHECK(asked_of(experts[l + 1], N_EXPERT*SLICE).empty());
            }
        }
        ggml_moe_prefetch_graph_end();
    }
    ggml_moe_prefetch_layer layer;
    CHECK(ggml_moe_prefetch_layer_get(ggml_moe_prefetch_layer_count() - 1, &layer));
    CHECK_EQ(layer.n_selections, 2u);
    CHECK(layer.total_ns > 0); // the last layer ends with the graph, not with the next one

    // a graph of another address is one by itself, whatever the scheduler showed before
    asked.clear();
    ggml_moe_prefetch_node(&alone, 0);
    CHECK(asked_of(dense[1], DENSE).empty());
}

// two layers of two matrices; the device computes them from copies
struct t_copies {
    t_graph                          g;
    std::vector<const ggml_tensor *> originals;
    std::vector<ggml_tensor *>       ids;

    t_copies() {
        for (int l = 0; l < 2; l++) {
            ggml_tensor * t = g.ids(4, N_EXPERT, {{ 0, 2, 3, 6 }});
            t->buffer = DEVICE;
            ids.push_back(t);
            for (int m = 0; m < 2; m++) {
                ggml_tensor * original = g.weights(BASE + (2*l + m)*N_EXPERT*SLICE, N_EXPERT, SLICE);
                ggml_tensor * copy     = g.weights(0x10, N_EXPERT, SLICE);
                copy->buffer = DEVICE;
                originals.push_back(original);
                g.add(GGML_OP_MUL_MAT_ID, copy, t);
            }
        }
    }

    void begin() {
        ggml_moe_prefetch_graph_begin();
        for (int i = 0; i < 4; i++) {
            const ggml_cgraph split = view(g, i, i + 1);
            ggml_tensor * input = (ggml_tensor *) originals[i];
            ggml_moe_prefetch_graph_split(&split, &input, 1);
        }
    }

    void copy(int i) {
        // as the scheduler has them: values in a buffer of its own
        std::vector<int32_t> data((const int32_t *) ids[i/2]->data, (const int32_t *) ids[i/2]->data + N_EXPERT);
        ggml_moe_prefetch_copy(originals[i], ids[i/2], data.data());
    }

    ranges of(int i) const { return asked_of((uintptr_t) originals[i]->data, N_EXPERT*SLICE); }

    size_t wait_for(int i, size_t n) const {
        for (int k = 0; k < 1000 && of(i).size() < n; k++) {
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
        return of(i).size();
    }
};

static ranges slices(uintptr_t begin, std::vector<int32_t> experts) {
    ranges expected;
    for (const int32_t id : experts) {
        expected.push_back({ begin + id*SLICE, SLICE });
    }
    return expected;
}

static void test_copies() {
    t_copies m;

    // hint: the used experts of the matrix that is copied
    reset(GGML_MOE_PREFETCH_MODE_HINT);
    m.begin();
    m.copy(0);
    CHECK(m.of(0) == slices(BASE, { 0, 2, 3, 6 }));
    CHECK(m.of(1).empty());
    ggml_moe_prefetch_graph_end();
    CHECK_EQ(t_counter("copies"), 1u);
    CHECK_EQ(t_counter("unmapped"), 0u);

    // overlap: meanwhile the other matrix of the layer, of which the experts are known; half of all are not enough
    // to read the next layer
    reset(GGML_MOE_PREFETCH_MODE_OVERLAP);
    m.begin();
    m.copy(0);
    CHECK_EQ(m.wait_for(1, 4), 4u);
    CHECK(m.of(1) == slices(BASE + N_EXPERT*SLICE, { 0, 2, 3, 6 }));
    CHECK(m.of(2).empty());
    m.copy(1);
    ggml_moe_prefetch_graph_end();

    // with the threshold at half of them: the next layer whole
    ggml_moe_prefetch_params params;
    CHECK(ggml_moe_prefetch_get_params(&params, sizeof(params)));
    params.wide = 50;
    reset(GGML_MOE_PREFETCH_MODE_OVERLAP);
    CHECK(ggml_moe_prefetch_set_params(&params));
    m.begin();
    m.copy(0);
    CHECK_EQ(m.wait_for(2, N_EXPERT), (size_t) N_EXPERT);
    CHECK_EQ(m.wait_for(3, N_EXPERT), (size_t) N_EXPERT);
    ggml_moe_prefetch_graph_end();

    // with memory for the experts of one layer: those of the layer before go, of both matrices
    ggml_moe_prefetch_default_params(&params, sizeof(params));
    params.mode        = GGML_MOE_PREFETCH_MODE_HINT;
    params.cache_bytes = 4*2*SLICE;
    reset(GGML_MOE_PREFETCH_MODE_HINT);
    CHECK(ggml_moe_prefetch_set_params(&params));
    m.begin();
    m.copy(0);
    m.copy(1);
    CHECK(dropped.empty());
    m.copy(2);
    ranges both = slices(BASE, { 0, 2, 3, 6 });
    const ranges second = slices(BASE + N_EXPERT*SLICE, { 0, 2, 3, 6 });
    both.insert(both.end(), second.begin(), second.end());
    std::sort(dropped.begin(), dropped.end());
    CHECK(dropped == both);
    ggml_moe_prefetch_graph_end();
    params.cache_bytes = 0;
    CHECK(ggml_moe_prefetch_set_params(&params));

    // whole matrices, as old versions copy them
    reset(GGML_MOE_PREFETCH_MODE_HINT);
    ggml_moe_prefetch_copy(m.originals[0], nullptr, nullptr);
    CHECK_EQ(m.of(0).size(), (size_t) N_EXPERT);

    // not below hint
    for (const auto mode : { GGML_MOE_PREFETCH_MODE_OFF, GGML_MOE_PREFETCH_MODE_MADV }) {
        reset(mode);
        m.begin();
        m.copy(0);
        ggml_moe_prefetch_graph_end();
        CHECK(asked.empty());
        CHECK_EQ(t_counter("copies"), 0u);
    }
    params.wide = 60;
    params.mode = GGML_MOE_PREFETCH_MODE_OFF;
    CHECK(ggml_moe_prefetch_set_params(&params));
}

int main() {
    ggml_moe_os os = t_os();
    os.advise_willneed = [](uintptr_t addr, size_t size) {
        std::lock_guard<std::mutex> lock(mutex);
        asked.push_back({ addr, size });
        return 0;
    };
    os.direct_open = [](int, intptr_t * file) { *file = 7; return 0; };
    os.page_drop   = [](intptr_t, uintptr_t addr, size_t size, uint64_t) {
        dropped.push_back({ addr, size });
        return 0;
    };
    ggml_moe_prefetch_set_os(&os);
    test_splits();
    test_copies();
    ggml_moe_prefetch_map_remove((const void *) BASE, (size_t) 1 << 30);
    return 0;
}
