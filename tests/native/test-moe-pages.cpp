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

static std::vector<t_request> requests; // w: willneed, d: drop
static int                    result_open;
static int                    result_drop;
static uint64_t               spare;
static uint64_t               n_spare_asked;
static bool                   resident;
static uint64_t               n_looks;

static std::vector<t_request> only(char what) {
    return t_only(requests, what);
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

// a layer whose two parts lie at 0x1000 and 0x9000 after its base
static std::vector<ggml_moe_pages_part> parts_at(uintptr_t base) {
    return {{ base + 0x1000, 16 }, { base + 0x9000, 32 }};
}

static const uint64_t  EXPERT = 16 + 32; // bytes
static const uintptr_t OTHER  = 0x100000; // base of another layer

// the experts dropped for a selection, those of another layer than the selected one plus 100
static std::vector<int32_t> dropped(ggml_moe_pages & pages, std::vector<int32_t> experts, uintptr_t base = 0, bool prompt = false) {
    std::vector<ggml_moe_range> slices;
    pages.select(parts_at(base), N_EXPERT, selection(experts), prompt, slices);
    CHECK(slices.size() % 2 == 0);
    std::vector<int32_t> found;
    for (size_t i = 0; i < slices.size(); i += 2) {
        const uintptr_t of = slices[i].begin < OTHER ? 0 : OTHER;
        const uintptr_t id = (slices[i].begin - of - 0x1000)/16;
        CHECK_EQ(slices[i].begin,     of + 0x1000 + id*16);
        CHECK_EQ(slices[i].size(),    16u);
        CHECK_EQ(slices[i + 1].begin, of + 0x9000 + id*32);
        CHECK_EQ(slices[i + 1].size(), 32u);
        found.push_back((int32_t) (id + (of == base ? 0 : 100)));
    }
    return found;
}

static void test_policy() {
    using experts = std::vector<int32_t>;

    // used once each: the one that was used longest ago
    ggml_moe_pages pages(24.0f);
    pages.budget = 2*EXPERT;
    CHECK(dropped(pages, { 0 }).empty());
    CHECK(dropped(pages, { 1 }).empty());
    CHECK(dropped(pages, { 2 }) == experts({ 0 }));
    CHECK(dropped(pages, { 1 }).empty()); // still there
    CHECK(dropped(pages, { 0 }) == experts({ 2 }));

    // used eight times, then others once each: what was used often stays, though it was used longest ago
    ggml_moe_pages often(24.0f);
    often.budget = 3*EXPERT;
    for (int i = 0; i < 8; i++) {
        CHECK(dropped(often, { 5 }).empty());
    }
    CHECK(dropped(often, { 1 }).empty());
    CHECK(dropped(often, { 2 }).empty());
    CHECK(dropped(often, { 3 }) == experts({ 1 }));
    CHECK(dropped(often, { 4 }) == experts({ 2 }));

    // three batches of a prompt count as one use, so that 0 is the one that was used longest ago
    ggml_moe_pages prompts(24.0f);
    prompts.budget = 2*EXPERT;
    for (int i = 0; i < 3; i++) {
        CHECK(dropped(prompts, { 0 }, 0, true).empty());
    }
    CHECK(dropped(prompts, { 1 }).empty());
    CHECK(dropped(prompts, { 2 }) == experts({ 0 }));

    // nothing that has just been asked for, were the budget ever so small
    ggml_moe_pages small(24.0f);
    small.budget = EXPERT;
    CHECK(dropped(small, { 0, 1, 2 }).empty());
    CHECK(dropped(small, { 1, 2 }) == experts({ 0 }));

    // two layers in turn; at the end both have used their 0 two passes ago, and the one that runs is due later
    ggml_moe_pages layers(24.0f);
    layers.budget = 5*EXPERT;
    for (const int32_t id : { 0, 1 }) {
        CHECK(dropped(layers, { id }).empty());
        CHECK(dropped(layers, { id }, OTHER).empty());
    }
    CHECK(dropped(layers, { 2 }).empty());
    CHECK(dropped(layers, { 2 }, OTHER) == experts({ 0 }));

    // a model that goes leaves nothing behind: 0, 1 and 2 of this layer are held, and there is room for 3 and 4
    layers.forget({ OTHER, OTHER + 0x100000 });
    CHECK(dropped(layers, { 3, 4 }).empty());
    CHECK(dropped(layers, { 5 }) == experts({ 0 }));

    // what was asked for ahead is counted, and does not go before its layer runs; then it is what was never used
    ggml_moe_pages ahead(24.0f);
    ahead.budget = 2*EXPERT;
    CHECK(dropped(ahead, { 0 }).empty());
    ahead.ahead(parts_at(OTHER), N_EXPERT, { 1 });
    CHECK(dropped(ahead, { 2 }) == experts({ 0 }));
    CHECK(dropped(ahead, { 3 }, OTHER) == experts({ 1 }));

    // a budget that shrank is caught up with by twice what is selected
    ggml_moe_pages shrunk(24.0f);
    for (int32_t id = 0; id < 7; id++) {
        shrunk.budget = 7*EXPERT;
        CHECK(dropped(shrunk, { id }).empty());
    }
    shrunk.budget = EXPERT;
    CHECK(dropped(shrunk, { 7 }) == experts({ 0, 1 }));
    CHECK(dropped(shrunk, { 7 }) == experts({ 2, 3 }));

    // the graph of a layer is looked at once
    ggml_moe_pages learned(24.0f);
    learned.ahead(parts_at(0), N_EXPERT, { 1 });
    CHECK(learned.learn(parts_at(0), N_EXPERT));
    CHECK(!learned.learn(parts_at(0), N_EXPERT));
    CHECK(learned.learn(parts_at(OTHER), N_EXPERT));
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
    CHECK_EQ(only('d').size(), 4u); // 0 and 1

    // less than nothing is left: all but what has just been asked for goes
    spare = margin/2;
    std::this_thread::sleep_for(std::chrono::milliseconds(520));
    model.run(3);
    CHECK(only('d') == model.drops(2));

    // not known, or enough for the whole file: all may stay
    for (const uint64_t enough : { (uint64_t) 0, margin + MAP_SIZE }) {
        spare = enough;
        reset(GGML_MOE_PREFETCH_MODE_HINT, 0);
        model.run(0);
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

// What is refused once is not asked for again, until the file is mapped anew. It is no failure where the system cannot,
// or where the file is locked in memory. A file that cannot be read directly has no handle to drop by.
static void test_refusals() {
    t_model model;
    const uint64_t expert = 2*SLICE;

    for (const int error : { EIO, EINVAL, ENOSYS }) {
        reset(GGML_MOE_PREFETCH_MODE_HINT, expert);
        result_drop = -error;
        model.run(0);
        model.run(1);
        CHECK_EQ(only('d').size(), 1u);
        model.run(2);
        CHECK(only('d').empty());
        CHECK_EQ(t_counter("errors"), error == EIO);
        CHECK_EQ(t_counter("bytes_dropped"), 0u);

        result_drop = 0;
        ggml_moe_prefetch_map_remove((const void *) BASE, MAP_SIZE);
        ggml_moe_prefetch_map_add((const void *) BASE, MAP_SIZE, 3);
        model.run(0);
        model.run(1);
        CHECK(only('d') == model.drops(0));
    }

    result_open = -EINVAL;
    reset(GGML_MOE_PREFETCH_MODE_HINT, expert);
    result_open = 0;
    model.run(0);
    model.run(1);
    CHECK(only('d').empty());
    CHECK_EQ(t_counter("errors"), 0u);
}

// once everything is in memory pages are not looked at any more; after a drop they are
static void test_looks_again() {
    t_model model;
    const uint64_t expert = 2*SLICE;
    const uint64_t margin = 32*1024*1024;

    spare    = margin + MAP_SIZE;
    resident = true;
    reset(GGML_MOE_PREFETCH_MODE_HINT, 0);
    for (int i = 0; i < 10; i++) {
        model.run(1);
    }
    uint64_t n_before = n_looks;
    model.run(2);
    CHECK_EQ(n_looks, n_before);

    spare = margin + expert;
    std::this_thread::sleep_for(std::chrono::milliseconds(520));
    model.run(1);
    model.run(2);
    CHECK(only('d') == model.drops(1));
    n_before = n_looks;
    model.run(1);
    CHECK(n_looks > n_before);
    resident = false;
}

int main() {
    static ggml_moe_os os = t_os();
    os.advise_willneed = [](uintptr_t addr, size_t size) { requests.push_back({ 'w', addr, size }); return 0; };
    os.page_drop       = fake_drop;
    os.direct_open     = [](int, intptr_t * file) { *file = 7; return result_open; };
    os.memory_spare    = [] { n_spare_asked++; return spare; };
    os.resident        = [](uintptr_t, size_t size, uint8_t * pages) {
        n_looks++;
        memset(pages, resident, size/PAGE);
        return 0;
    };
    ggml_moe_prefetch_set_os(&os);

    test_policy();
    test_hooks();
    test_budget();
    test_refusals();
    test_looks_again();
    return 0;
}
