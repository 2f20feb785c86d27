// What each mode asks of the kernel, seen by a stand-in that records the requests.

#include "helpers.h"

#include <cerrno>
#include <set>

static std::vector<t_request> requests; // w: willneed, r: random, n: normal
static std::set<uintptr_t>    resident_pages;
static int                    result_willneed;
static int                    result_resident;
static uint64_t               available;
static bool                   resident_known = true;

static int fake_willneed(uintptr_t addr, size_t size) { requests.push_back({ 'w', addr, size }); return result_willneed; }
static int fake_random  (uintptr_t addr, size_t size) { requests.push_back({ 'r', addr, size }); return 0; }
static int fake_normal  (uintptr_t addr, size_t size) { requests.push_back({ 'n', addr, size }); return 0; }

static int fake_resident(uintptr_t addr, size_t size, uint8_t * pages) {
    for (size_t i = 0; i < size/4096; i++) {
        // only bit 0 is defined, the others must be ignored
        pages[i] = resident_pages.count(addr + i*4096) ? 0xff : 0xfe;
    }
    return result_resident;
}

static ggml_moe_os fake_os() {
    ggml_moe_os os = t_os();
    os.advise_willneed  = fake_willneed;
    os.advise_random    = fake_random;
    os.advise_normal    = fake_normal;
    os.resident         = fake_resident;
    os.resident_known   = [](int) { return resident_known; };
    os.memory_available = [] { return available; };
    return os;
}

// one mapping at 1 MiB with gate, up and down of 4 experts, 20 pages + 64 bytes a slice; gate starts 64 bytes into a page
static const uintptr_t BASE  = 0x100000;
static const size_t    SLICE = 20*4096 + 64;

struct t_layer {
    t_graph       g;
    uintptr_t     addr[3];

    t_layer(std::vector<std::vector<int32_t>> rows) {
        ggml_tensor * ids = g.ids(2, 4, rows);
        for (int i = 0; i < 3; i++) {
            addr[i] = BASE + 64 + i*4*SLICE;
            g.add(GGML_OP_MUL_MAT_ID, g.weights(addr[i], 4, SLICE), ids);
            g.add(GGML_OP_GLU);
        }
    }
};

static void reset(enum ggml_moe_prefetch_mode mode) {
    CHECK(ggml_moe_prefetch_set_mode(GGML_MOE_PREFETCH_MODE_OFF));
    CHECK(ggml_moe_prefetch_set_mode(mode));
    ggml_moe_prefetch_map_remove((const void *) BASE, 0x200000);
    ggml_moe_prefetch_map_add((const void *) BASE, 0x200000, -1);
    ggml_moe_prefetch_counter_reset();
    requests.clear();
    resident_pages.clear();
    result_willneed = result_resident = 0;
}

static std::vector<t_request> only(char what) {
    return t_only(requests, what);
}

static void test_off() {
    reset(GGML_MOE_PREFETCH_MODE_OFF);
    t_layer layer({{ 1, 3 }});
    layer.g.run();
    CHECK(requests.empty());
    for (int i = 0; i < ggml_moe_prefetch_counter_count(); i++) {
        CHECK_EQ(ggml_moe_prefetch_counter_value(i), 0u);
    }
}

static void test_madv() {
    reset(GGML_MOE_PREFETCH_MODE_MADV);
    t_layer layer({{ 3, 1 }});
    layer.g.run();

    // one request per expert and matrix, ascending, out to whole pages: a slice starts 64 + id*64 bytes past a page
    // boundary and is 64 bytes longer than 20 pages, so it touches 21 pages
    CHECK_EQ(requests.size(), 6u);
    for (int m = 0; m < 3; m++) {
        for (int k = 0; k < 2; k++) {
            const uintptr_t begin = layer.addr[m] + (k == 0 ? 1 : 3)*SLICE;
            CHECK((requests[2*m + k] == t_request{ 'w', begin & ~(uintptr_t) 4095, 21*4096 }));
        }
    }
    CHECK_EQ(t_counter("groups"), 3u);
    CHECK_EQ(t_counter("slices"), 6u);
    CHECK_EQ(t_counter("calls"),  6u);
    CHECK_EQ(t_counter("bytes_hinted"), 6u*21*4096);
    CHECK_EQ(t_counter("bytes_resident"), 0u);
    CHECK_EQ(t_counter("errors"), 0u);
}

static void test_hint() {
    reset(GGML_MOE_PREFETCH_MODE_HINT);
    t_layer layer({{ 1, 1 }, { 1, 1 }});

    // expert 1 of gate: pages 0..20 from its first page; the middle of the first piece and all of the second are in memory
    const uintptr_t page0 = (layer.addr[0] + SLICE) & ~(uintptr_t) 4095;
    for (size_t p = 3; p < 8; p++) {
        resident_pages.insert(page0 + p*4096);
    }
    for (size_t p = 16; p < 21; p++) {
        resident_pages.insert(page0 + p*4096);
    }

    // everything is asked for at the first matmul; the second and third ask for nothing
    ggml_moe_prefetch_node(&layer.g.cgraph, 0);
    const size_t n_first = requests.size();
    layer.g.run(1);
    CHECK_EQ(requests.size(), n_first);

    // the three tensors are 4*SLICE = 80 pages + 256 bytes, the first starting 64 bytes into a page: whole pages inside
    // begin one page later, 79 pages for each
    const auto random = only('r');
    CHECK_EQ(random.size(), 3u);
    for (int m = 0; m < 3; m++) {
        CHECK_EQ(random[m].addr, (layer.addr[m] + 4095) & ~(uintptr_t) 4095);
        CHECK_EQ(random[m].size, 79u*4096);
    }

    // gate: pages 0..15 from first to last absent page = all 16; pages 16..20 need nothing
    // up and down: 16 pages and 5 pages
    const auto willneed = only('w');
    CHECK_EQ(willneed.size(), 5u);
    CHECK((willneed[0] == t_request{ 'w', page0, 16*4096 }));
    for (int m = 1; m < 3; m++) {
        const uintptr_t page = (layer.addr[m] + SLICE) & ~(uintptr_t) 4095;
        CHECK((willneed[2*m - 1] == t_request{ 'w', page,           16*4096 }));
        CHECK((willneed[2*m    ] == t_request{ 'w', page + 16*4096,  5*4096 }));
    }
    CHECK_EQ(t_counter("groups"), 1u);
    CHECK_EQ(t_counter("slices"), 3u);
    CHECK_EQ(t_counter("calls"),  5u);
    CHECK_EQ(t_counter("bytes_hinted"),   (16 + 2*21)*4096u);
    CHECK_EQ(t_counter("bytes_resident"), 10u*4096);

    // the advice for faults is given once, and taken back when the mode changes
    ggml_moe_prefetch_node(&layer.g.cgraph, 0);
    CHECK_EQ(only('r').size(), 3u);
    CHECK(ggml_moe_prefetch_set_mode(GGML_MOE_PREFETCH_MODE_OFF));
    const auto normal = only('n');
    CHECK_EQ(normal.size(), 3u);
    for (int m = 0; m < 3; m++) {
        CHECK_EQ(normal[m].addr, random[m].addr);
        CHECK_EQ(normal[m].size, random[m].size);
    }
}

static void test_errors() {
    // every refusal is counted with its reason, and residency that is not known means: ask for all of it
    reset(GGML_MOE_PREFETCH_MODE_HINT);
    result_willneed = -EINVAL;
    result_resident = -ENOSYS;
    t_layer layer({{ 0, 0 }});
    layer.g.run();
    CHECK_EQ(t_counter("calls"),  6u);
    CHECK_EQ(t_counter("errors"), 6u);
    CHECK_EQ(t_counter("last_errno"), (uint64_t) EINVAL);
    CHECK_EQ(t_counter("bytes_resident"), 0u);

    // the kernel calls everything resident to who neither owns nor may write the file: not believed
    resident_known = false;
    reset(GGML_MOE_PREFETCH_MODE_HINT);
    resident_known = true;
    for (uintptr_t addr = BASE; addr < BASE + 0x200000; addr += 4096) {
        resident_pages.insert(addr);
    }
    layer.g.run();
    CHECK_EQ(t_counter("calls"), 6u);
    CHECK_EQ(t_counter("bytes_resident"), 0u);

    // ids that name no expert never become an address
    reset(GGML_MOE_PREFETCH_MODE_HINT);
    t_layer wrong({{ -1, 4 }});
    wrong.g.run();
    CHECK(only('w').empty());
    CHECK_EQ(t_counter("ids_ignored"), 2u);
}

static void test_mappings() {
    // weights outside of every mapping (repacked, on a device, loaded without mmap) are left alone
    reset(GGML_MOE_PREFETCH_MODE_HINT);
    ggml_moe_prefetch_map_remove((const void *) BASE, 0x200000);
    t_layer layer({{ 0, 1 }});
    layer.g.run();
    CHECK(requests.empty());
    CHECK_EQ(t_counter("unmapped"), 3u);

    // when only the part that holds the last tensor is unmapped, the other two are still hinted
    reset(GGML_MOE_PREFETCH_MODE_HINT);
    ggml_moe_prefetch_map_remove((const void *) layer.addr[2], 0x200000 - (layer.addr[2] - BASE));
    layer.g.run();
    CHECK_EQ(t_counter("unmapped"), 1u);
    CHECK_EQ(t_counter("slices"), 4u);
    for (const auto & r : only('w')) {
        CHECK(r.addr < layer.addr[2]);
    }
}

static void test_load() {
    available = 1000;

    reset(GGML_MOE_PREFETCH_MODE_OFF);
    CHECK(ggml_moe_prefetch_load_allowed(1001));
    CHECK_EQ(t_counter("load_skipped"), 0u);

    reset(GGML_MOE_PREFETCH_MODE_HINT);
    CHECK( ggml_moe_prefetch_load_allowed(1000));
    CHECK(!ggml_moe_prefetch_load_allowed(1001));
    CHECK_EQ(t_counter("load_skipped"), 1u);

    ggml_moe_prefetch_params params;
    ggml_moe_prefetch_get_params(&params, sizeof(params));
    params.load = 1;
    CHECK(ggml_moe_prefetch_set_params(&params));
    CHECK( ggml_moe_prefetch_load_allowed(1001));
    params.load = 0;
    CHECK(ggml_moe_prefetch_set_params(&params));
    CHECK(!ggml_moe_prefetch_load_allowed(1));
    params.load = -1;
    CHECK(ggml_moe_prefetch_set_params(&params));

    available = 0; // not known
    CHECK(ggml_moe_prefetch_load_allowed(1001));
}

static void test_params() {
    ggml_moe_prefetch_params before;
    ggml_moe_prefetch_get_params(&before, sizeof(before));

    // a caller of another version, and values out of range, change nothing
    CHECK(!ggml_moe_prefetch_get_params(&before, sizeof(before) + 8));
    auto refused = [&](auto change) {
        ggml_moe_prefetch_params params = before;
        change(params);
        CHECK(!ggml_moe_prefetch_set_params(&params));
        ggml_moe_prefetch_params after;
        ggml_moe_prefetch_get_params(&after, sizeof(after));
        CHECK(memcmp(&after, &before, sizeof(after)) == 0);
    };
    refused([](ggml_moe_prefetch_params & p) { p.size--; });
    refused([](ggml_moe_prefetch_params & p) { p.mode = 99; });
    refused([](ggml_moe_prefetch_params & p) { p.load = 2; });
    refused([](ggml_moe_prefetch_params & p) { p.n_readers = -1; });
    refused([](ggml_moe_prefetch_params & p) { p.half_life = 0; });
    refused([](ggml_moe_prefetch_params & p) { p.wide = 0; });
}

static void test_names() {
    CHECK(!ggml_moe_prefetch_set_mode((enum ggml_moe_prefetch_mode) 99));
    CHECK(!ggml_moe_prefetch_set_mode((enum ggml_moe_prefetch_mode) -1));
    CHECK(ggml_moe_prefetch_mode_name((enum ggml_moe_prefetch_mode) 99) == nullptr);
    CHECK(strcmp(ggml_moe_prefetch_mode_name(GGML_MOE_PREFETCH_MODE_HINT), "hint") == 0);
    CHECK(ggml_moe_prefetch_counter_name(-1) == nullptr);
    CHECK(ggml_moe_prefetch_counter_name(ggml_moe_prefetch_counter_count()) == nullptr);
    CHECK_EQ(ggml_moe_prefetch_counter_value(-1), 0u);
}

int main() {
    static const ggml_moe_os os = fake_os();
    ggml_moe_prefetch_set_os(&os);
    test_off();
    test_madv();
    test_hint();
    test_errors();
    test_mappings();
    test_load();
    test_params();
    test_names();
    return 0;
}
