// Modes hint and overlap: which experts the page cache lets go, when, and of which pages.

#include "ggml-moe-pages.h"
#include "helpers.h"

#include <chrono>
#include <thread>

static const uintptr_t BASE     = 0x100000000;
static const size_t    MAP_SIZE = (size_t) 1 << 30;
static const size_t    PAGE     = 4096;
static const int64_t   N_EXPERT = 8;
static const size_t    SLICE    = 3*PAGE;

struct t_request {
    char      what; // w: willneed, d: drop
    uintptr_t addr;
    size_t    size;

    bool operator==(const t_request & other) const {
        return what == other.what && addr == other.addr && size == other.size;
    }
};

static std::vector<t_request> requests;
static int                    result_open;
static int                    result_drop;
static uint64_t               spare;
static uint64_t               n_spare_asked;

static std::vector<t_request> only(char what) {
    std::vector<t_request> found;
    for (const auto & r : requests) {
        if (r.what == what) {
            found.push_back(r);
        }
    }
    return found;
}

static int fake_drop(intptr_t file, uintptr_t addr, size_t size, uint64_t offset) {
    CHECK_EQ((uint64_t) file, 7u);
    CHECK_EQ(offset, addr - BASE); // the mapping starts with the file
    requests.push_back({ 'd', addr, size });
    return result_drop;
}

//
// the policy alone
//

static ggml_moe_ids selection(std::vector<int32_t> experts) {
    ggml_moe_ids ids;
    ids.n_expert = N_EXPERT;
    ids.distinct = experts; // ascending
    ids.rows     = { experts };
    return ids;
}

// experts dropped for a selection, by the slices of a layer whose parts start at 0x1000 and 0x9000
static std::vector<int32_t> dropped(ggml_moe_pages & pages, std::vector<int32_t> experts, uintptr_t base = 0) {
    std::vector<ggml_moe_range> slices;
    pages.select({{ base + 0x1000, 16 }, { base + 0x9000, 32 }}, N_EXPERT, selection(experts), false, slices);
    CHECK(slices.size() % 2 == 0);
    std::vector<int32_t> found;
    for (size_t i = 0; i < slices.size(); i += 2) {
        const uintptr_t id = (slices[i].begin - 0x1000) % 0x100000/16;
        const uintptr_t of = slices[i].begin - 0x1000 - id*16;
        CHECK_EQ(slices[i].size(), 16u);
        CHECK_EQ(slices[i + 1].begin, of + 0x9000 + id*32);
        CHECK_EQ(slices[i + 1].size(), 32u);
        found.push_back((int32_t) (id + (of == base ? 0 : 100)));
    }
    return found;
}

static void test_policy() {
    using experts = std::vector<int32_t>;
    const uint64_t expert = 16 + 32;

    // used once each: the one that was used longest ago
    ggml_moe_pages pages(24.0f);
    pages.budget = 2*expert;
    CHECK(dropped(pages, { 0 }).empty());
    CHECK(dropped(pages, { 1 }).empty());
    CHECK(dropped(pages, { 2 }) == experts({ 0 }));
    CHECK(dropped(pages, { 1 }).empty()); // still there
    CHECK(dropped(pages, { 0 }) == experts({ 2 }));

    // used eight times, then others once each: what was used often stays, though it was used longest ago
    ggml_moe_pages often(24.0f);
    often.budget = 3*expert;
    for (int i = 0; i < 8; i++) {
        CHECK(dropped(often, { 5 }).empty());
    }
    CHECK(dropped(often, { 1 }).empty());
    CHECK(dropped(often, { 2 }).empty());
    CHECK(dropped(often, { 3 }) == experts({ 1 }));
    CHECK(dropped(often, { 4 }) == experts({ 2 }));

    // nothing that has just been asked for, were the budget ever so small
    ggml_moe_pages small(24.0f);
    small.budget = expert;
    CHECK(dropped(small, { 0, 1, 2 }).empty());
    CHECK(dropped(small, { 1, 2 }) == experts({ 0 }));

    // of two layers in turn, used alike: the one that has just run is due later. Its 0 is as old as the other's
    ggml_moe_pages layers(24.0f);
    layers.budget = 4*expert;
    const uintptr_t other = 0x100000;
    CHECK(dropped(layers, { 0 }).empty());
    CHECK(dropped(layers, { 0 }, other).empty());
    CHECK(dropped(layers, { 1 }).empty());
    CHECK(dropped(layers, { 1 }, other).empty());
    CHECK(dropped(layers, { 2 }) == experts({ 0 }));
    CHECK(dropped(layers, { 2 }, other) == experts({ 0 }));

    // a model that goes leaves nothing behind: 1 and 2 of this layer are held, and there is room for 3 and 4
    layers.forget({ other, other + 0x100000 });
    CHECK(dropped(layers, { 3, 4 }).empty());
    CHECK(dropped(layers, { 5 }) == experts({ 1 }));
}

//
// through the hooks
//

// two matrices that are computed together; each slice starts in the middle of a page
struct t_model {
    t_graph         g;
    int32_t *       ids;
    const uintptr_t begin[2] = { BASE + PAGE/2, BASE + PAGE/2 + N_EXPERT*SLICE };

    t_model() {
        ggml_tensor * t = g.ids(1, N_EXPERT, {{ 0 }});
        t->op = GGML_OP_VIEW;
        ids   = (int32_t *) t->data;
        for (const uintptr_t addr : begin) {
            g.add(GGML_OP_MUL_MAT_ID, g.weights(addr, N_EXPERT, SLICE), t);
        }
    }

    void run(int32_t expert) {
        requests.clear();
        ids[0] = expert;
        g.run();
    }

    // of whole pages of the slices
    std::vector<t_request> drops(int32_t expert) const {
        std::vector<t_request> expected;
        for (const uintptr_t addr : begin) {
            expected.push_back({ 'd', addr + expert*SLICE + PAGE/2, SLICE - PAGE });
        }
        return expected;
    }
};

static void reset(enum ggml_moe_prefetch_mode mode, uint64_t cache_bytes) {
    ggml_moe_prefetch_map_remove((const void *) BASE, MAP_SIZE);
    CHECK(ggml_moe_prefetch_set_mode(GGML_MOE_PREFETCH_MODE_OFF));
    ggml_moe_prefetch_params params;
    ggml_moe_prefetch_default_params(&params, sizeof(params));
    params.mode        = mode;
    params.cache_bytes = cache_bytes;
    CHECK(ggml_moe_prefetch_set_params(&params));
    ggml_moe_prefetch_map_add((const void *) BASE, MAP_SIZE, 3);
    ggml_moe_prefetch_counter_reset();
    n_spare_asked = 0;
}

static void test_hooks() {
    t_model model;
    const uint64_t expert = 2*SLICE;

    for (const auto mode : { GGML_MOE_PREFETCH_MODE_HINT, GGML_MOE_PREFETCH_MODE_OVERLAP }) {
        reset(mode, 2*expert);
        model.run(0);
        model.run(1);
        CHECK(only('d').empty());
        CHECK_EQ(t_counter("cache_budget"), 2*expert);

        // after the reads have been asked for
        model.run(2);
        CHECK(only('d') == model.drops(0));
        CHECK_EQ(requests.size(), 4u);
        CHECK(requests[0].what == 'w' && requests[1].what == 'w');
        CHECK_EQ(t_counter("bytes_dropped"), 2*(SLICE - PAGE));

        // a model that is loaded again starts with nothing
        ggml_moe_prefetch_map_remove((const void *) BASE, MAP_SIZE);
        ggml_moe_prefetch_map_add((const void *) BASE, MAP_SIZE, 3);
        model.run(3);
        model.run(4);
        CHECK(only('d').empty());
        model.run(5);
        CHECK(only('d') == model.drops(3));
    }

    // as published, and off: the kernel's business
    for (const auto mode : { GGML_MOE_PREFETCH_MODE_OFF, GGML_MOE_PREFETCH_MODE_MADV }) {
        reset(mode, expert);
        for (int32_t id = 0; id < 4; id++) {
            model.run(id);
            CHECK(only('d').empty());
        }
    }
}

// what the system leaves, less always used weights and half of a margin of 64 MiB
static void test_budget() {
    t_model model;
    const uint64_t expert = 2*SLICE;
    const uint64_t margin = 32*1024*1024;

    spare = margin + 2*expert;
    reset(GGML_MOE_PREFETCH_MODE_HINT, 0);
    model.run(0);
    model.run(1);
    CHECK(only('d').empty());
    CHECK_EQ(t_counter("cache_budget"), 2*expert);
    CHECK_EQ(n_spare_asked, 1u); // not with every layer

    spare = margin + expert;
    std::this_thread::sleep_for(std::chrono::milliseconds(520));
    model.run(2);
    CHECK(only('d').size() == 4u); // 0 and 1

    // not known, or enough for the whole file: all may stay
    for (const uint64_t enough : { (uint64_t) 0, margin + MAP_SIZE }) {
        spare = enough;
        reset(GGML_MOE_PREFETCH_MODE_HINT, 0);
        for (int32_t id = 0; id < N_EXPERT; id++) {
            model.run(id);
            CHECK(only('d').empty());
        }
        CHECK_EQ(t_counter("cache_budget"), 0u);
    }

    // always used weights come off
    spare = margin + 10*expert;
    reset(GGML_MOE_PREFETCH_MODE_HINT, 0);
    t_graph g;
    ggml_tensor * ids = g.ids(1, N_EXPERT, {{ 0 }});
    ids->op = GGML_OP_VIEW;
    g.add(GGML_OP_MUL_MAT, g.weights(BASE + 100*PAGE, 1, 9*expert));
    g.add(GGML_OP_MUL_MAT_ID, g.weights(BASE, N_EXPERT, SLICE), ids);
    g.run();
    std::this_thread::sleep_for(std::chrono::milliseconds(520));
    g.run();
    CHECK_EQ(t_counter("cache_budget"), expert);
}

// a refusal is counted and the last request; a system without such a request makes no error of it, and a file that
// cannot be read directly is left alone
static void test_refusals() {
    t_model model;
    const uint64_t expert = 2*SLICE;

    reset(GGML_MOE_PREFETCH_MODE_HINT, expert);
    for (const int error : { EINVAL, ENOSYS }) {
        reset(GGML_MOE_PREFETCH_MODE_HINT, expert);
        result_drop = -error;
        model.run(0);
        model.run(1);
        CHECK_EQ(only('d').size(), 1u);
        std::this_thread::sleep_for(std::chrono::milliseconds(520));
        model.run(2);
        CHECK(only('d').empty());
        CHECK_EQ(t_counter("errors"), error == EINVAL);
        CHECK_EQ(t_counter("bytes_dropped"), 0u);
    }
    result_drop = 0;

    result_open = -EINVAL;
    reset(GGML_MOE_PREFETCH_MODE_HINT, expert);
    result_open = 0;
    model.run(0);
    model.run(1);
    CHECK(only('d').empty());
    CHECK_EQ(t_counter("errors"), 0u);
}

int main() {
    static ggml_moe_os os = t_os();
    os.advise_willneed = [](uintptr_t addr, size_t size) { requests.push_back({ 'w', addr, size }); return 0; };
    os.page_drop       = fake_drop;
    os.direct_open     = [](int, intptr_t * file) { *file = 7; return result_open; };
    os.memory_spare    = [] { n_spare_asked++; return spare; };
    ggml_moe_prefetch_set_os(&os);

    test_policy();
    test_hooks();
    test_budget();
    test_refusals();
    return 0;
}
