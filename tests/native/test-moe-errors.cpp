// A kernel that refuses: EINVAL, ENOMEM, EAGAIN from every call in turn. Each refusal is counted, none is repeated
// without end, and what a matmul reads is right whatever was refused. And a mapping that goes while hints are queued.

#include "helpers.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

static const size_t    PAGE     = 4096;
static const uintptr_t MAP      = 0x100000000;
static const size_t    MAP_SIZE = 1000*PAGE;
static const int64_t   N_EXPERT = 8;
static const size_t    SLICE    = 2*PAGE + 64; // anywhere in a page
static const size_t    DENSE    = 3*PAGE;
static const int       N_LAYERS = 2;

enum t_call { WILLNEED, RANDOM, NORMAL, DROP, LOCK, UNLOCK, RESIDENT, FILE_NORMAL, OPEN, READ, RESERVE, DISCARD, N_CALLS };

static std::atomic<int>      refused{-1}; // a t_call
static std::atomic<int>      why{0};
static std::atomic<uint64_t> n_calls[N_CALLS];
static std::atomic<uint64_t> n_faults{0};
static std::atomic<bool>     mapped{false};
static std::atomic<bool>     touched_unmapped{false};
static std::atomic<int>      willneed_us{0};

static int result_of(t_call call) {
    n_calls[call]++;
    return refused == call ? -why : 0;
}

static int fake_willneed(uintptr_t addr, size_t) {
    if (willneed_us > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(willneed_us));
    }
    if (addr >= MAP && addr < MAP + MAP_SIZE && !mapped) {
        touched_unmapped = true;
    }
    return result_of(WILLNEED);
}

static uint8_t file_byte(uint64_t offset) {
    return (uint8_t) (offset*2654435761u >> 13);
}

static int64_t fake_read(intptr_t, void * data, size_t size, uint64_t offset) {
    const int result = result_of(READ);
    if (result != 0) {
        return result;
    }
    for (size_t i = 0; i < size; i++) {
        ((uint8_t *) data)[i] = file_byte(offset + i);
    }
    return (int64_t) size;
}

static void * fake_reserve(size_t size) {
    return result_of(RESERVE) == 0 ? calloc(size/PAGE + 1, PAGE) : nullptr;
}

static int fake_discard(void * data, size_t size) {
    const int result = result_of(DISCARD);
    if (result == 0) {
        memset(data, 0xee, size);
    }
    return result;
}

// dense weights and the three matrices of a layer, twice
struct t_model {
    t_graph                g;
    std::vector<int32_t *> ids;

    explicit t_model(int64_t n_used) {
        uintptr_t addr = MAP + 96;
        for (int l = 0; l < N_LAYERS; l++) {
            std::vector<int32_t> row(N_EXPERT);
            for (int64_t i = 0; i < N_EXPERT; i++) {
                row[i] = (int32_t) i;
            }
            ggml_tensor * t = g.ids(n_used, N_EXPERT, { row });
            t->op = GGML_OP_VIEW;
            ids.push_back((int32_t *) t->data);
            g.add(GGML_OP_MUL_MAT, g.weights(addr, 1, DENSE));
            addr += DENSE;
            for (int m = 0; m < 3; m++) {
                g.add(GGML_OP_MUL_MAT_ID, g.weights(addr, N_EXPERT, SLICE), t);
                addr += N_EXPERT*SLICE;
            }
        }
    }

    // how often the mapping served; every other slice holds the bytes of the file
    uint64_t run() {
        uint64_t n_mapped = 0;
        for (int i = 0; i < g.cgraph.n_nodes; i++) {
            ggml_moe_prefetch_node(&g.cgraph, i);
            if (g.nodes[i]->op != GGML_OP_MUL_MAT_ID) {
                continue;
            }
            ggml_tensor * dst = g.nodes[i];
            ggml_moe_prefetch_view view;
            std::vector<int> seen(N_EXPERT);
            for (int k = 0; k < N_EXPERT; k++) {
                const int id = ggml_moe_prefetch_expert(&dst, k, &view);
                CHECK(id >= 0 && id < N_EXPERT);
                seen[id]++;
                const int32_t * selected = (const int32_t *) g.nodes[i]->src[2]->data;
                if (std::find(selected, selected + g.nodes[i]->src[2]->ne[0], id) == selected + g.nodes[i]->src[2]->ne[0]) {
                    continue;
                }
                const uintptr_t in_file = (uintptr_t) g.nodes[i]->src[0]->data + id*SLICE;
                const uintptr_t data    = (uintptr_t) dst->src[0]->data + id*SLICE;
                if (data == in_file) {
                    n_mapped++;
                    continue;
                }
                for (size_t b = 0; b < SLICE; b++) {
                    CHECK_EQ(((const uint8_t *) data)[b], file_byte(in_file - MAP + b));
                }
            }
            CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
        }
        return n_mapped;
    }
};

static void unmap() {
    ggml_moe_prefetch_map_remove((const void *) MAP, MAP_SIZE);
    mapped = false;
}

// a slot has three parts; each of 2 pages and 64 bytes may start anywhere in a page, so 4 pages
static const size_t SLOT = 3*4*PAGE;

static void reset(enum ggml_moe_prefetch_mode mode, t_call call, int error, uint64_t n_slots = 4) {
    refused = -1;
    unmap();
    CHECK(ggml_moe_prefetch_set_mode(GGML_MOE_PREFETCH_MODE_OFF));
    ggml_moe_prefetch_params params;
    ggml_moe_prefetch_default_params(&params, sizeof(params));
    params.mode        = mode;
    params.cache_bytes = n_slots*SLOT;
    params.lock_bytes  = call == LOCK || call == UNLOCK ? (uint64_t) 1 << 30 : 0;
    params.n_readers   = 2;
    CHECK(ggml_moe_prefetch_set_params(&params));
    ggml_moe_prefetch_counter_reset();
    for (auto & n : n_calls) {
        n = 0;
    }
    refused = call;
    why     = error;
    mapped  = true;
    ggml_moe_prefetch_map_add((const void *) MAP, MAP_SIZE, 0);
}

// n refusals counted, the last one with its reason
static void check_errors(uint64_t n) {
    CHECK_EQ(t_counter("errors"), n);
    CHECK_EQ(t_counter("last_errno"), n > 0 ? (uint64_t) why : 0u);
}

static void test_advice(int error) {
    // hints: as many requests as without refusals, each counted
    t_model narrow(2);
    for (const auto mode : { GGML_MOE_PREFETCH_MODE_MADV, GGML_MOE_PREFETCH_MODE_HINT, GGML_MOE_PREFETCH_MODE_OVERLAP }) {
        uint64_t n_asked[2];
        for (const bool refuses : { false, true }) {
            reset(mode, refuses ? WILLNEED : N_CALLS, error);
            narrow.run();
            narrow.run();
            n_asked[refuses] = t_counter("calls");
            check_errors(refuses ? n_asked[1] : 0);
        }
        CHECK(n_asked[0] > 0);
        CHECK_EQ(n_asked[0], n_asked[1]);
    }

    // random: once for each matrix, not again with every token
    reset(GGML_MOE_PREFETCH_MODE_HINT, RANDOM, error);
    narrow.run();
    narrow.run();
    CHECK_EQ(n_calls[RANDOM], 3u*N_LAYERS);
    check_errors(3*N_LAYERS);

    // normal: the mode changes all the same, and what was refused is not tried at the next change
    reset(GGML_MOE_PREFETCH_MODE_HINT, NORMAL, error);
    narrow.run();
    CHECK(ggml_moe_prefetch_set_mode(GGML_MOE_PREFETCH_MODE_OFF));
    CHECK(ggml_moe_prefetch_get_mode() == GGML_MOE_PREFETCH_MODE_OFF);
    check_errors(3*N_LAYERS);
    CHECK(ggml_moe_prefetch_set_mode(GGML_MOE_PREFETCH_MODE_OFF));
    check_errors(3*N_LAYERS);

    // residency that is not told is no error: all is asked for
    uint64_t n_bytes[2];
    for (const bool refuses : { false, true }) {
        reset(GGML_MOE_PREFETCH_MODE_HINT, refuses ? RESIDENT : N_CALLS, error);
        narrow.run();
        n_bytes[refuses] = t_counter("bytes_hinted");
        check_errors(0);
        CHECK_EQ(t_counter("bytes_resident"), 0u);
    }
    CHECK(n_bytes[0] > 0);
    CHECK_EQ(n_bytes[0], n_bytes[1]);

    // drop: 16 experts of 3*(2*4096 + 64) bytes against 8*3*4*4096 of memory are 15.87 that fit; what is refused once
    // is not asked for again
    reset(GGML_MOE_PREFETCH_MODE_OVERLAP, DROP, error, N_EXPERT);
    t_model wide(N_EXPERT);
    wide.run();
    wide.run();
    CHECK_EQ(n_calls[DROP], 1u);
    check_errors(error == EINVAL ? 0 : 1); // EINVAL: of a file that is locked in memory

    // the advice of the open file: the mapping is known all the same
    reset(GGML_MOE_PREFETCH_MODE_HINT, FILE_NORMAL, error);
    check_errors(1);
    CHECK_EQ(t_counter("mappings"), 1u);
    narrow.run();
    CHECK_EQ(t_counter("unmapped"), 0u);
    check_errors(1);
}

static void test_locks(int error) {
    t_model model(2);
    for (const auto mode : { GGML_MOE_PREFETCH_MODE_OVERLAP, GGML_MOE_PREFETCH_MODE_CACHE }) {
        reset(mode, LOCK, error);
        model.run();
        model.run();
        CHECK_EQ(n_calls[LOCK], 1u);
        check_errors(1);
        CHECK_EQ(t_counter("bytes_locked"), 0u);

        reset(mode, UNLOCK, error);
        model.run();
        CHECK(t_counter("bytes_locked") > 0);
        CHECK(ggml_moe_prefetch_set_mode(GGML_MOE_PREFETCH_MODE_HINT));
        CHECK_EQ(n_calls[UNLOCK], (uint64_t) N_LAYERS);
        check_errors(N_LAYERS);
        CHECK_EQ(t_counter("bytes_locked"), 0u);
    }
}

static void test_cache(int error) {
    t_model model(2);
    const uint64_t n_all = 2u*3*N_LAYERS; // experts, matrices, layers

    // no direct reads, or no memory: as in mode overlap
    for (const t_call call : { OPEN, RESERVE }) {
        reset(GGML_MOE_PREFETCH_MODE_CACHE, call, error);
        for (int pass = 0; pass < 3; pass++) {
            CHECK_EQ(model.run(), n_all);
        }
        CHECK_EQ(t_counter("reads"), 0u);
        CHECK_EQ(t_counter("slices"), 3*n_all);
        CHECK(n_calls[RESERVE] <= (uint64_t) N_LAYERS); // not tried with every graph
    }

    // reads: each selection is tried again, until the layer is left to the mapping
    reset(GGML_MOE_PREFETCH_MODE_CACHE, READ, error);
    for (int pass = 0; pass < 20; pass++) {
        CHECK_EQ(model.run(), n_all);
    }
    CHECK(t_counter("errors") >= 16u*N_LAYERS);
    CHECK(t_counter("errors") <= (16u + 6)*N_LAYERS);
    check_errors(t_counter("reads"));
    CHECK_EQ(t_counter("bytes_read"), 0u);

    // some time the disk answers again
    reset(GGML_MOE_PREFETCH_MODE_CACHE, READ, error);
    CHECK_EQ(model.run(), n_all);
    refused = -1;
    CHECK_EQ(model.run(), 0u);

    // memory that cannot be given back: experts are evicted and read all the same
    reset(GGML_MOE_PREFETCH_MODE_CACHE, DISCARD, error, 8);
    for (int pass = 0; pass < 12; pass++) {
        for (int32_t * ids : model.ids) {
            ids[0] = pass % N_EXPERT;
            ids[1] = (pass + 3) % N_EXPERT;
        }
        CHECK_EQ(model.run(), 0u);
        if (pass == 6) {
            ggml_moe_prefetch_params params;
            ggml_moe_prefetch_get_params(&params, sizeof(params));
            params.cache_bytes = 4*SLOT;
            CHECK(ggml_moe_prefetch_set_params(&params));
        }
    }
    CHECK(n_calls[DISCARD] > 0);
    CHECK(t_counter("evicted") > 0);
    for (int32_t * ids : model.ids) {
        ids[0] = 0;
        ids[1] = 1;
    }
}

// a mapping goes while a layer of it is queued and a request is under way: none comes after
static void test_unmap_while_queued() {
    t_model wide(N_EXPERT);
    for (int round = 0; round < 50; round++) {
        reset(GGML_MOE_PREFETCH_MODE_OVERLAP, N_CALLS, 0);
        const uint64_t n_before = n_calls[WILLNEED];
        for (int i = 0; i < 2; i++) { // the dense weights, and the first selection
            ggml_moe_prefetch_node(&wide.g.cgraph, i);
        }
        willneed_us = 200;
        while (n_calls[WILLNEED] < n_before + 1 + round % 7) {
            std::this_thread::yield();
        }
        unmap();
        CHECK(!touched_unmapped);
        willneed_us = 0;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(!touched_unmapped);
    check_errors(0);
}

int main() {
    static ggml_moe_os os = t_os();
    os.advise_willneed  = fake_willneed;
    os.advise_random    = [](uintptr_t, size_t) { return result_of(RANDOM); };
    os.advise_normal    = [](uintptr_t, size_t) { return result_of(NORMAL); };
    os.page_drop        = [](intptr_t, uintptr_t, size_t, uint64_t) { return result_of(DROP); };
    os.lock             = [](uintptr_t, size_t) { return result_of(LOCK); };
    os.unlock           = [](uintptr_t, size_t) { return result_of(UNLOCK); };
    os.file_normal      = [](int) { return result_of(FILE_NORMAL); };
    os.direct_open      = [](int, intptr_t * file) { *file = 7; return result_of(OPEN); };
    os.direct_read      = fake_read;
    os.memory_reserve   = fake_reserve;
    os.memory_discard   = fake_discard;
    os.memory_free      = [](void * data, size_t) { free(data); };
    os.memory_available = [] { return (uint64_t) 1 << 40; };
    os.major_faults     = [] { return (uint64_t) ++n_faults; };
    os.resident         = [](uintptr_t, size_t size, uint8_t * pages) {
        memset(pages, refused == RESIDENT, size/PAGE); // not to be looked at then
        return result_of(RESIDENT);
    };
    ggml_moe_prefetch_set_os(&os);

    for (const int error : { EINVAL, ENOMEM, EAGAIN }) {
        test_advice(error);
        test_locks(error);
        test_cache(error);
    }
    test_unmap_while_queued();

    refused = -1;
    unmap();
    return 0;
}
