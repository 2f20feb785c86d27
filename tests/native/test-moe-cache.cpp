// Mode cache against files made up in memory: every slice a matmul is sent to holds the file's bytes, whatever is
// evicted, refused, resized or unloaded meanwhile.

#include "helpers.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <random>
#include <thread>

static const size_t PAGE = 4096;

//
// two files, their mappings, and memory that is poisoned when it is not in use
//

static uint8_t file_byte(int fd, uint64_t offset) {
    return (uint8_t) ((offset*2654435761u >> 13) + 37*fd);
}

static const uint64_t FILE_SIZE[2] = { 3000*PAGE + 100, 1500*PAGE };

static std::atomic<int>      n_open{0};
static std::atomic<int>      open_result{0};
static std::atomic<int>      fail_every{0};  // every n-th read fails
static std::atomic<int>      read_us{0};     // how long a read takes
static std::atomic<uint64_t> spare{0};
static std::atomic<uint64_t> available{(uint64_t) 1 << 40};
static std::atomic<int>      n_reads{0};
static std::atomic<bool>     known{true};    // whether the system tells what is in memory
static std::atomic<int64_t>  n_reserved{0};
static std::atomic<uintptr_t> resident_end{0}; // what is mapped below is in memory
static std::atomic<int64_t>  n_dropped{0};
static std::mutex            pins_mutex;
static std::vector<int>      pins;           // CPUs that readers were given

static int fake_open(int fd, intptr_t * file) {
    if (open_result != 0) {
        return open_result;
    }
    n_open++;
    *file = 100 + fd;
    return 0;
}

static int64_t fake_read(intptr_t file, void * data, size_t size, uint64_t offset) {
    CHECK_EQ((uintptr_t) data % PAGE, 0u);
    CHECK_EQ(size   % PAGE, 0u);
    CHECK_EQ(offset % PAGE, 0u);
    if (read_us > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(read_us));
    }
    const int n = ++n_reads;
    if (fail_every > 0 && n % fail_every == 0) {
        return n % (2*fail_every) == 0 ? -EIO : 17; // an error, or less than asked for
    }
    const int fd = (int) file - 100;
    int64_t done = 0;
    for (; done < (int64_t) size && offset + done < FILE_SIZE[fd]; done++) {
        ((uint8_t *) data)[done] = file_byte(fd, offset + done);
    }
    return done;
}

static void * fake_reserve(size_t size) {
    void * data = aligned_alloc(PAGE, size);
    memset(data, 0xee, size);
    n_reserved += (int64_t) size;
    return data;
}

static int fake_discard(void * data, size_t size) {
    memset(data, 0xee, size);
    return 0;
}

static void fake_free(void * data, size_t size) {
    n_reserved -= (int64_t) size;
    free(data);
}

// the mappings hold what the files do: the page cache may be read in place of the file
static uintptr_t map_memory(int fd) {
    static uint8_t * memory = nullptr;
    if (memory == nullptr) {
        memory = (uint8_t *) aligned_alloc(PAGE, (3001 + 16 + 1500)*PAGE);
        for (int f = 0; f < 2; f++) {
            for (uint64_t i = 0; i < FILE_SIZE[f]; i++) {
                memory[f*(3001 + 16)*PAGE + i] = file_byte(f, i);
            }
        }
    }
    return (uintptr_t) memory + fd*(3001 + 16)*PAGE;
}

static const uintptr_t MAP[2] = { map_memory(0), map_memory(1) };

static void map_files() {
    for (int fd = 0; fd < 2; fd++) {
        ggml_moe_prefetch_map_add((const void *) MAP[fd], FILE_SIZE[fd], fd);
    }
}

static void unmap_files() {
    for (int fd = 0; fd < 2; fd++) {
        ggml_moe_prefetch_map_remove((const void *) MAP[fd], FILE_SIZE[fd]);
    }
}

//
// a model of n_layers with gate and up in the first file and down in the second; slices start anywhere in a page
//

static const int64_t N_EXPERT = 16;
static const size_t  SLICE    = 3*PAGE + 96;

struct t_model {
    t_graph               g;
    std::vector<int32_t *> ids; // [n_layers], the first two columns are selected
    int                   n_layers;

    explicit t_model(int n_layers) : n_layers(n_layers) {
        uint64_t offset[2] = { 160, 32 };
        for (int l = 0; l < n_layers; l++) {
            ggml_tensor * t = g.ids(2, N_EXPERT, {{ 0, 1 }});
            t->op = GGML_OP_VIEW;
            ids.push_back((int32_t *) t->data);
            for (int m = 0; m < 3; m++) {
                const int fd = m == 2;
                g.add(GGML_OP_MUL_MAT_ID, g.weights(MAP[fd] + offset[fd], N_EXPERT, SLICE), t);
                g.add(GGML_OP_GLU);
                offset[fd] += N_EXPERT*SLICE;
                CHECK(offset[fd] <= FILE_SIZE[fd]);
            }
        }
    }

    // as ggml-cpu does it: one thread announces, all threads walk the experts; returns how often the mapping served
    uint64_t run(int n_threads = 2) {
        std::atomic<uint64_t> n_mapped{0};
        for (int i = 0; i < g.cgraph.n_nodes; i++) {
            ggml_moe_prefetch_node(&g.cgraph, i);
            if (g.nodes[i]->op != GGML_OP_MUL_MAT_ID) {
                continue;
            }
            std::vector<std::thread> others;
            for (int t = 1; t < n_threads; t++) {
                others.emplace_back([&, i] { n_mapped += matmul(g.nodes[i]); });
            }
            n_mapped += matmul(g.nodes[i]);
            for (auto & other : others) {
                other.join();
            }
        }
        return n_mapped;
    }

    static uint64_t matmul(ggml_tensor * node) {
        ggml_tensor * dst = node;
        ggml_moe_prefetch_view view;
        uint64_t n_mapped = 0;
        std::vector<int> seen(N_EXPERT);
        for (int i = 0; i < N_EXPERT; i++) {
            const int id = ggml_moe_prefetch_expert(&dst, i, &view);
            CHECK(id >= 0 && id < N_EXPERT);
            seen[id]++;
            const int32_t * selected = (const int32_t *) node->src[2]->data;
            if (std::find(selected, selected + node->src[2]->ne[0], id) == selected + node->src[2]->ne[0]) {
                continue;
            }
            const uintptr_t mapped = (uintptr_t) node->src[0]->data + id*SLICE;
            const uintptr_t data   = (uintptr_t) dst->src[0]->data + id*SLICE;
            if (data == mapped) {
                n_mapped++;
                continue;
            }
            CHECK_EQ(data % PAGE, mapped % PAGE); // the alignment that kernels rely on
            const int      fd     = mapped >= MAP[1];
            const uint64_t offset = mapped - MAP[fd];
            for (size_t b = 0; b < SLICE; b++) {
                CHECK_EQ(((const uint8_t *) data)[b], file_byte(fd, offset + b));
            }
        }
        CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; })); // a permutation
        return n_mapped;
    }
};

// pages of a slot: each of three slices of 3 pages and 96 bytes may start anywhere in a page, so 5 pages
static const size_t SLOT = 3*5*PAGE;

static ggml_moe_prefetch_params cache_params(uint64_t n_slots) {
    ggml_moe_prefetch_params params;
    ggml_moe_prefetch_default_params(&params, sizeof(params));
    params.mode        = GGML_MOE_PREFETCH_MODE_CACHE;
    params.cache_bytes = n_slots*SLOT;
    params.n_readers   = 2;
    return params;
}

static void reset(const ggml_moe_prefetch_params & params) {
    unmap_files();
    CHECK(ggml_moe_prefetch_set_mode(GGML_MOE_PREFETCH_MODE_OFF));
    CHECK_EQ(n_reserved, 0u); // nothing outlives the last model
    CHECK_EQ(n_open, 0u);
    open_result = 0;
    fail_every  = 0;
    read_us     = 0;
    spare       = 0;
    resident_end = 0;
    CHECK(ggml_moe_prefetch_set_params(&params));
    map_files();
    ggml_moe_prefetch_counter_reset();
}

static void test_hits_and_evictions() {
    reset(cache_params(4));
    t_model model(1);

    // two experts, twice: read once, three matrices each
    CHECK_EQ(model.run(), 0u);
    CHECK_EQ(model.run(), 0u);
    CHECK_EQ(t_counter("groups"), 2u);
    CHECK_EQ(t_counter("experts_missed"),   2u);
    CHECK_EQ(t_counter("experts_resident"), 2u);
    CHECK_EQ(t_counter("reads"),            6u);
    CHECK_EQ(t_counter("reads_in_time") + t_counter("reads_late"), 6u);
    CHECK_EQ(t_counter("evicted"),          0u);

    // whole pages from a slice's first to its last: 96 bytes past three pages, 160 + id*SLICE into the file
    CHECK(t_counter("bytes_read") >= 6*4*PAGE && t_counter("bytes_read") <= 6*5*PAGE);

    // 0 and 1 were used twice, 2 and 3 will be once: 4 and 5 take the place of these
    model.ids[0][0] = 2;
    model.ids[0][1] = 3;
    CHECK_EQ(model.run(), 0u);
    CHECK_EQ(t_counter("evicted"), 0u);
    model.ids[0][0] = 0;
    model.ids[0][1] = 1;
    CHECK_EQ(model.run(), 0u);
    model.ids[0][0] = 4;
    model.ids[0][1] = 5;
    CHECK_EQ(model.run(), 0u);
    CHECK_EQ(t_counter("evicted"), 2u);
    ggml_moe_prefetch_counter_reset();
    model.ids[0][0] = 0;
    model.ids[0][1] = 1;
    CHECK_EQ(model.run(), 0u);
    CHECK_EQ(t_counter("experts_missed"), 0u);

    // where the time went
    ggml_moe_prefetch_layer layer;
    CHECK(!ggml_moe_prefetch_layer_get(ggml_moe_prefetch_layer_count(), &layer));
    CHECK(ggml_moe_prefetch_layer_get(ggml_moe_prefetch_layer_count() - 1, &layer));
    CHECK_EQ(layer.n_selections, 1u);
    CHECK_EQ(layer.n_experts,    2u);
    CHECK_EQ(layer.n_missed,     0u);
}

// what the page cache holds whole is copied and not read; its own copy is the first to go
static void test_copy() {
    reset(cache_params(4));
    t_model model(1);

    // gate of experts 0 and 1 and all but the last page of expert 2's; up and down lie behind
    resident_end = MAP[0] + (160 + 3*SLICE)/PAGE*PAGE;
    n_dropped = 0;
    CHECK_EQ(model.run(), 0u);
    CHECK_EQ(t_counter("bytes_copied"), 2*SLICE);
    CHECK_EQ(t_counter("reads"), 4u);
    CHECK_EQ(t_counter("reads_in_time") + t_counter("reads_late"), 6u);
    CHECK_EQ(n_dropped, 2*2*PAGE); // whole pages of the slice, which starts 160 and 256 bytes into one
    model.ids[0][0] = 2;
    CHECK_EQ(model.run(), 0u);
    CHECK_EQ(t_counter("bytes_copied"), 2*SLICE);
    CHECK_EQ(t_counter("reads"), 7u);

    // not where the system calls everything resident
    reset(cache_params(4));
    unmap_files();
    known = false;
    map_files();
    resident_end = UINTPTR_MAX;
    CHECK_EQ(model.run(), 0u);
    CHECK_EQ(t_counter("bytes_copied"), 0u);
    CHECK_EQ(t_counter("reads"), 6u);
    known = true;
}

// readers that share all CPUs with the matmuls stay on one each; where there are more CPUs the system places them
static void test_readers_spread() {
    const int n_cores = (int) std::thread::hardware_concurrency();
    for (const int n_readers : { n_cores, n_cores + 1, n_cores - 1 }) {
        if (n_readers < 1 || n_readers > 64) {
            continue; // a default, or more than the settings take
        }
        ggml_moe_prefetch_params params = cache_params(4);
        params.n_readers = n_readers;
        reset(params);
        {
            std::lock_guard<std::mutex> lock(pins_mutex);
            pins.clear();
        }
        t_model model(1);
        CHECK_EQ(model.run(), 0u);
        unmap_files(); // ends the readers
        std::vector<int> expected;
        for (int i = 0; i < n_readers && n_readers >= n_cores; i++) {
            expected.push_back(i % n_cores);
        }
        std::sort(expected.begin(), expected.end());
        std::sort(pins.begin(), pins.end());
        CHECK(pins == expected);
    }
}

static void test_random_traffic() {
    std::mt19937 rng(1);
    for (const int n_slots : { 2, 3, 7, 20, 40 }) {
        for (const int fail : { 0, 5 }) {
            reset(cache_params(n_slots));
            fail_every = fail;
            t_model model(4);
            uint64_t n_mapped = 0;
            for (int pass = 0; pass < 60; pass++) {
                for (int32_t * ids : model.ids) {
                    ids[0] = (int32_t) (rng() % N_EXPERT);
                    ids[1] = (int32_t) (rng() % N_EXPERT);
                }
                n_mapped += model.run(2);
                if (pass == 30 && n_slots > 7) { // less memory: what is given back is poisoned
                    ggml_moe_prefetch_params params = cache_params(5);
                    CHECK(ggml_moe_prefetch_set_params(&params));
                }
            }
            // a slice that could not be read is computed from the mapping, and only that
            CHECK_EQ(n_mapped > 0, fail > 0);
            CHECK_EQ(t_counter("errors") > 0, fail > 0);
            CHECK(t_counter("evicted") > 0);
            CHECK_EQ(t_counter("experts_overflow"), 0u); // no layer is given up for a read that fails now and then
            CHECK(t_counter("cache_budget") <= 40*SLOT);
        }
    }
}

// a batch that selects more experts than there is memory for: the rest goes through the mapping, hinted
static void test_overflow() {
    reset(cache_params(6));
    t_model model(2);
    t_graph wide;
    std::vector<int32_t> row(N_EXPERT);
    for (int32_t id = 0; id < N_EXPERT; id++) {
        row[id] = id;
    }
    ggml_tensor * ids = wide.ids(N_EXPERT, N_EXPERT, { row });
    for (int m = 0; m < 3; m++) {
        wide.add(GGML_OP_MUL_MAT_ID, model.g.nodes[2*m]->src[0], ids);
    }
    // the second layer is known too, so its share of the memory is not the first one's
    CHECK_EQ(model.run(), 0u);
    ggml_moe_prefetch_counter_reset();
    ggml_moe_prefetch_node(&wide.cgraph, 0);
    CHECK_EQ(t_counter("experts_overflow"), N_EXPERT - 6u);
    CHECK_EQ(t_counter("slices"), 3*(N_EXPERT - 6u));
    uint64_t n_mapped = 0;
    for (int m = 0; m < 3; m++) {
        n_mapped += t_model::matmul(wide.nodes[m]);
    }
    CHECK_EQ(n_mapped, 3*(N_EXPERT - 6u));
}

// a model can be unloaded right after the mode was switched, while a thread still keeps its last selection
static void test_switch_ends_reads_ahead() {
    reset(cache_params(40));
    t_model model(3);
    CHECK_EQ(model.run(), 0u);

    t_graph wide;
    std::vector<int32_t> row(N_EXPERT);
    for (int32_t id = 0; id < N_EXPERT; id++) {
        row[id] = id;
    }
    for (int l = 0; l < 2; l++) {
        ggml_tensor * ids = wide.ids(N_EXPERT, N_EXPERT, { row });
        for (int m = 0; m < 3; m++) {
            wide.add(GGML_OP_MUL_MAT_ID, model.g.nodes[6*l + 2*m]->src[0], ids);
        }
    }
    ggml_moe_prefetch_counter_reset();
    read_us = 2000;
    ggml_moe_prefetch_node(&wide.cgraph, 0);
    for (int m = 0; m < 3; m++) {
        CHECK_EQ(t_model::matmul(wide.nodes[m]), 0u);
    }
    CHECK_EQ(t_counter("experts_ahead"), N_EXPERT - 2u); // of the second layer, the first of them being read
    CHECK(ggml_moe_prefetch_set_mode(GGML_MOE_PREFETCH_MODE_OFF));
    const int n = n_reads;
    CHECK(t_counter("reads") < 2*3*(N_EXPERT - 2u));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK_EQ(n_reads, (uint64_t) n);
    ggml_moe_prefetch_node(&wide.cgraph, 1); // the thread lets go of its selection
}

static void wait_until(const char * counter, uint64_t value) {
    for (int i = 0; i < 2000 && t_counter(counter) != value; i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK_EQ(t_counter(counter), value);
}

// two layers; the second one's router: experts with the largest numbers for x > 0, with the smallest for x < 0
struct t_foreseen {
    t_model            model{2};
    t_graph            router;
    std::vector<float> rows = std::vector<float>(N_EXPERT);
    float              x = 1.0f;

    t_foreseen() {
        for (int64_t e = 0; e < N_EXPERT; e++) {
            rows[e] = (float) e;
        }
        ggml_tensor * w = router.weights((uintptr_t) rows.data(), 1, 0);
        w->ne[1] = N_EXPERT;
        w->nb[1] = sizeof(float);
        const int logits = router.add(GGML_OP_MUL_MAT, w);
        const int sorted = router.add(GGML_OP_ARGSORT, router.nodes[logits]);
        ggml_tensor * input = router.weights((uintptr_t) &x, 1, sizeof(float));
        for (int m = 0; m < 3; m++) {
            ((ggml_tensor *) model.g.nodes[6 + 2*m]->src[2])->src[0] = router.nodes[sorted];
            model.g.nodes[2*m]->src[1] = input;
        }
    }

    void select(int32_t first, int32_t second) {
        model.ids[1][0] = first;
        model.ids[1][1] = second;
    }

    void begin() {
        ggml_moe_prefetch_graph_begin();
        ggml_moe_prefetch_graph_split(&model.g.cgraph, nullptr, 0);
    }

    void layer(int l) {
        ggml_moe_prefetch_node(&model.g.cgraph, 6*l);
        for (int m = 0; m < 3; m++) {
            CHECK_EQ(t_model::matmul(model.g.nodes[6*l + 2*m]), 0u);
        }
    }
};

// other experts than any before: 7 and 8 are the largest
static void rows_reversed(t_foreseen & f) {
    for (int64_t e = 0; e < N_EXPERT; e++) {
        f.rows[e] = -std::abs((float) e - 7.5f);
    }
    f.x = 1.0f;
}

static void test_foresee() {
    for (const bool right : { true, false }) {
        reset(cache_params(20));
        t_foreseen f;
        f.select(right ? 15 : 1, right ? 14 : 0);

        // while the first layer has not been computed yet, the second one's experts are read
        f.begin();
        ggml_moe_prefetch_node(&f.model.g.cgraph, 0);
        wait_until("reads", 2*2*3);
        CHECK_EQ(t_counter("experts_ahead"), 2u);
        f.layer(1);
        ggml_moe_prefetch_graph_end();
        CHECK_EQ(t_counter("experts_foreseen"),       2u);
        CHECK_EQ(t_counter("experts_foreseen_right"), right ? 2u : 0u);
        CHECK_EQ(t_counter("experts_ahead_unused"),   right ? 0u : 2u);
        CHECK_EQ(t_counter("experts_missed"),         right ? 2u : 4u);
        CHECK_EQ(t_counter("reads"),                  right ? 12u : 18u);
    }

    // a guess that is wanted before it has been read does not count as one any more: later ones are read as before
    reset(cache_params(20));
    {
        t_foreseen f;
        f.begin();
        f.layer(0);
        wait_until("experts_ahead", 2);
        ggml_moe_prefetch_graph_end();
        for (int pass = 1; pass < 6; pass++) {
            read_us = 3000;
            f.x = pass % 2 ? -1.0f : 1.0f;
            f.select(pass % 2 ? 0 : 15, pass % 2 ? 1 : 14);
            const uint64_t n_ahead = t_counter("experts_ahead");
            f.begin();
            f.layer(0);
            if (pass == 1) {
                wait_until("experts_ahead", n_ahead + 2);
            }
            f.layer(1);
            ggml_moe_prefetch_graph_end();
        }
        read_us = 0;
        rows_reversed(f);
        const uint64_t n_reads = t_counter("reads");
        f.begin();
        ggml_moe_prefetch_node(&f.model.g.cgraph, 0);
        wait_until("reads", n_reads + 2*3);
        ggml_moe_prefetch_graph_end();
    }

    // without the scheduler's word that the graph has ended, a guess could outlive the model
    reset(cache_params(20));
    {
        t_foreseen f;
        f.layer(0);
        f.layer(1);
        CHECK_EQ(t_counter("experts_foreseen"), 0u);
    }

    // off on request
    ggml_moe_prefetch_params params = cache_params(20);
    params.foresee = 0;
    reset(params);
    t_foreseen f;
    f.begin();
    f.layer(0);
    f.layer(1);
    ggml_moe_prefetch_graph_end();
    CHECK_EQ(t_counter("experts_foreseen"), 0u);
}

// a layer that is read whole ahead of its selection: what has not begun when the selection is known is not read
static void test_cancel() {
    reset(cache_params(30)); // of 32 experts; half of them for what is read ahead
    read_us = 2000;
    t_model model(2);
    std::vector<int32_t> row(N_EXPERT);
    for (int32_t id = 0; id < N_EXPERT; id++) {
        row[id] = id;
    }
    t_graph wide;
    ggml_tensor * ids = wide.ids(10, N_EXPERT, { row }); // 10 of 16: more than 60 %
    ids->op = GGML_OP_VIEW;
    for (int i = 0; i < 6; i++) {
        wide.add(GGML_OP_MUL_MAT_ID, model.g.nodes[2*i]->src[0], i < 3 ? ids : model.g.nodes[2*i]->src[2]);
    }
    ggml_moe_prefetch_node(&wide.cgraph, 0);
    for (int m = 0; m < 3; m++) {
        CHECK_EQ(t_model::matmul(wide.nodes[m]), 0u);
    }
    CHECK_EQ(t_counter("experts_ahead"), 15u);
    for (int pass = 0; pass < 2; pass++) { // the second time with all that was cancelled
        model.ids[1][0] = 14;
        model.ids[1][1] = pass ? 3 : 13;
        ggml_moe_prefetch_node(&wide.cgraph, 3);
        for (int m = 3; m < 6; m++) {
            CHECK_EQ(t_model::matmul(wide.nodes[m]), 0u);
        }
        if (pass == 0) {
            CHECK(t_counter("reads") < 10*3 + 15*3u);
        }
    }
    CHECK(t_counter("experts_ahead_unused") < 13u);
    read_us = 0;
    for (int32_t id = 0; id < N_EXPERT; id += 2) { // none of them is left half read
        model.ids[1][0] = id;
        model.ids[1][1] = id + 1;
        CHECK_EQ(model.run(), 0u);
    }
}

// nothing is cached where it cannot be: no direct reads, no mapping, no memory asked for
static void test_fallback() {
    ggml_moe_prefetch_params params = cache_params(4);
    reset(params);
    unmap_files();
    open_result = -EINVAL;
    map_files();
    t_model model(2);
    CHECK_EQ(model.run(), 2u*2*3*2); // threads, experts, matrices, layers
    CHECK_EQ(t_counter("reads"), 0u);
    CHECK(t_counter("bytes_hinted") > 0);

    // all experts fit in what is spare: the page cache does as well
    reset(params);
    params.cache_bytes = 0;
    spare = (uint64_t) 1 << 34;
    CHECK(ggml_moe_prefetch_set_params(&params));
    CHECK_EQ(model.run(), 2u*2*3*2);
    CHECK_EQ(t_counter("reads"), 0u);

    // all that is spare, less a margin of 64 MiB
    reset(params);
    spare = 64*1024*1024 + 8*SLOT;
    CHECK_EQ(model.run(), 0u);
    CHECK_EQ(t_counter("cache_budget"), 8*SLOT);
    CHECK_EQ(t_counter("reads"), 2u*2*3);

    // less of it: noticed while no graph runs; the 4 slots that are held are no loss of what is spare
    spare = 64*1024*1024;
    for (int i = 0; i < 1000 && t_counter("cache_budget") != 4*SLOT; i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK_EQ(t_counter("cache_budget"), 4*SLOT);
}

// a model that goes while its reads are queued and under way, twice at the same addresses
static void test_unload() {
    reset(cache_params(8));
    for (int round = 0; round < 20; round++) {
        read_us = 300;
        t_model model(3);
        model.ids[0][0] = round % N_EXPERT;
        ggml_moe_prefetch_node(&model.g.cgraph, 0); // announced, never computed
        unmap_files();
        CHECK_EQ(n_reserved, 0u);
        CHECK_EQ(n_open, 0u);
        read_us = 0;
        map_files();
        CHECK_EQ(model.run(), 0u);
        unmap_files();
        map_files();
    }
}

static void test_mode_switch() {
    reset(cache_params(8));
    t_model model(3);
    CHECK_EQ(model.run(), 0u);
    for (const auto mode : { GGML_MOE_PREFETCH_MODE_HINT, GGML_MOE_PREFETCH_MODE_CACHE, GGML_MOE_PREFETCH_MODE_OFF,
            GGML_MOE_PREFETCH_MODE_CACHE, GGML_MOE_PREFETCH_MODE_OVERLAP }) {
        CHECK(ggml_moe_prefetch_set_mode(mode));
        const uint64_t n_mapped = model.run();
        CHECK_EQ(n_mapped, mode == GGML_MOE_PREFETCH_MODE_CACHE ? 0u : 2*2*3*3);
    }
}

// an adapter's matmuls share the ids of the group; they are in no file and read what they always did
static void test_adapter() {
    for (const bool known_before : { true, false }) {
        reset(cache_params(4));
        t_model model(1);
        if (known_before) {
            CHECK_EQ(model.run(), 0u);
        }
        t_graph lora;
        ggml_tensor * ids = model.g.nodes[0]->src[2];
        std::vector<int> adapters;
        for (int m = 0; m < 3; m++) {
            lora.add(GGML_OP_MUL_MAT_ID, model.g.nodes[2*m]->src[0], ids);
            adapters.push_back(lora.add(GGML_OP_MUL_MAT_ID, lora.weights(0x5000 + m, N_EXPERT, 64), ids));
        }
        for (int pass = 0; pass < 3; pass++) {
            ggml_moe_prefetch_node(&lora.cgraph, 0);
            for (int i = 0; i < lora.cgraph.n_nodes; i++) {
                ggml_tensor * dst = lora.nodes[i];
                ggml_moe_prefetch_view view;
                if (i % 2 == 0) {
                    CHECK_EQ(t_model::matmul(dst), 0u);
                } else {
                    CHECK_EQ(ggml_moe_prefetch_expert(&dst, 0, &view), 0u);
                    CHECK(dst == lora.nodes[i]);
                }
            }
        }
    }
}

// the thread that ran a graph last keeps its selection; another thread runs the same graph meanwhile
static void test_threads_swap() {
    reset(cache_params(12));
    t_model a(3);
    t_model b(3);
    std::mutex  m_a, m_b; // a graph is run by one thread at a time
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; t++) {
        threads.emplace_back([&, t] {
            std::mt19937 rng(t);
            for (int pass = 0; pass < 40; pass++) {
                t_model &    model = (pass + t) % 2 ? a : b;
                std::mutex & mutex = (pass + t) % 2 ? m_a : m_b;
                std::lock_guard<std::mutex> lock(mutex);
                for (int32_t * ids : model.ids) {
                    ids[0] = (int32_t) (rng() % N_EXPERT);
                    ids[1] = (int32_t) (rng() % N_EXPERT);
                }
                CHECK_EQ(model.run(2), 0u);
            }
        });
    }
    for (auto & thread : threads) {
        thread.join();
    }
}

// the last selection holds slots of a layer whose matrices lie in both files
static void test_unload_second_file_first() {
    reset(cache_params(8));
    t_model model(2);
    CHECK_EQ(model.run(), 0u);
    ggml_moe_prefetch_map_remove((const void *) MAP[1], FILE_SIZE[1]);
    ggml_moe_prefetch_map_remove((const void *) MAP[0], FILE_SIZE[0]);
    CHECK_EQ(n_reserved, 0u);
    map_files();
}

// another mapping can lie where a part of this one was given back
static void test_unload_with_hole() {
    reset(cache_params(2));
    const uintptr_t hole = MAP[0] + 2000*PAGE;
    ggml_moe_prefetch_map_remove((const void *) hole, 1000*PAGE);
    ggml_moe_prefetch_map_add   ((const void *) hole, 500*PAGE, 1);
    ggml_moe_prefetch_map_remove((const void *) MAP[0], FILE_SIZE[0]);
    t_graph g;
    g.add(GGML_OP_MUL_MAT_ID, g.weights(hole, N_EXPERT, SLICE), g.ids(2, N_EXPERT, {{ 0, 1 }}));
    g.run();
    CHECK_EQ(t_counter("experts_missed"), 2u);
    ggml_moe_prefetch_map_remove((const void *) hole, 500*PAGE);
    ggml_moe_prefetch_map_add   ((const void *) MAP[0], FILE_SIZE[0], 0);
}

static void test_off_gives_memory_back() {
    reset(cache_params(8));
    t_model model(2);
    CHECK_EQ(model.run(), 0u);
    CHECK(n_reserved > 0);
    CHECK(ggml_moe_prefetch_set_mode(GGML_MOE_PREFETCH_MODE_OFF));
    model.run();
    CHECK_EQ(n_reserved, 0u);
}

// a file that opens for direct reads and then refuses them is left to the mapping after some tries
static void test_reads_refused() {
    reset(cache_params(8));
    fail_every = 1;
    t_model model(1);
    for (int pass = 0; pass < 20; pass++) {
        model.ids[0][0] = pass % N_EXPERT;
        CHECK_EQ(model.run(1), pass % N_EXPERT == 1 ? 3u : 6u);
    }
    CHECK(t_counter("errors") >= 16 && t_counter("errors") < 16 + 6);
    CHECK_EQ(t_counter("reads"), t_counter("errors"));
    CHECK(t_counter("bytes_hinted") > 0);

    // and tried again after 256 passes, 20 of which are over
    fail_every = 0;
    ggml_moe_prefetch_counter_reset();
    model.ids[0][0] = 5;
    for (int pass = 20; pass < 255; pass++) {
        CHECK_EQ(model.run(1), 6u);
    }
    CHECK_EQ(t_counter("reads"), 0u);
    CHECK_EQ(model.run(1), 0u);
    CHECK_EQ(model.run(1), 0u);
    CHECK_EQ(t_counter("reads"), 6u);
}

// a model that is loaded again takes the place of the one that has gone, with times of its own
static void test_loaded_again() {
    reset(cache_params(8));
    const int n_before = ggml_moe_prefetch_layer_count();
    t_model model(4);
    for (int load = 0; load < 5; load++) {
        for (int pass = 0; pass <= load; pass++) {
            model.run();
        }
        ggml_moe_prefetch_layer layer;
        CHECK_EQ(ggml_moe_prefetch_layer_count(), std::max(n_before, 4));
        CHECK(ggml_moe_prefetch_layer_get(0, &layer));
        CHECK_EQ(layer.n_selections, (uint64_t) load + 1);
        unmap_files();
        map_files();
    }
}

// what is locked is not free, so it is taken off the budget once: by the kernel
static void test_budget() {
    const uint64_t mib = 1024*1024;
    ggml_moe_prefetch_params params = cache_params(0);
    reset(params);
    spare = 4096*mib;
    t_model model(1);
    model.run();
    CHECK_EQ(t_counter("cache_budget"), 4096*mib - 4096*mib/32); // a margin of 1/32

    reset(params);
    spare = 256*mib;
    model.run();
    CHECK_EQ(t_counter("cache_budget"), 256*mib - 64*mib); // and of 64 MiB at least

    // 8 MiB of always used weights: first they are yet to come, then they are locked and no longer spare
    model.g.add(GGML_OP_MUL_MAT, model.g.weights(MAP[0] + 512*PAGE, 1, 8*mib));
    reset(params);
    spare = 84*mib;
    model.run();
    CHECK_EQ(t_counter("cache_budget"), 12*mib);
    params.lock_bytes = 16*mib;
    reset(params);
    spare = 84*mib;
    model.run();
    wait_until("cache_budget", 20*mib);
    CHECK_EQ(t_counter("bytes_locked"), 8*mib);

    // always used weights of more than the margin serve as half of it
    params.lock_bytes = 0;
    reset(params);
    spare = 400*mib;
    for (int k = 0; k < 2; k++) {
        ggml_moe_prefetch_map_add((const void *) (MAP[0] + (k + 2)*0x10000000), 72*mib, 0);
        model.g.add(GGML_OP_MUL_MAT, model.g.weights(MAP[0] + (k + 2)*0x10000000, 1, 72*mib));
    }
    model.run();
    CHECK_EQ(t_counter("cache_budget"), (400 - 8 - 2*72 - 32)*mib);
    for (int k = 0; k < 2; k++) {
        ggml_moe_prefetch_map_remove((const void *) (MAP[0] + (k + 2)*0x10000000), 72*mib);
    }
}

// always used weights that decode finds gone again and again were pushed out: the cache gives way by half a margin, and
// stays there when they are no longer; what is lost once, or where the system does not tell, does not count
static void test_budget_gives_way() {
    const uint64_t  mib    = 1024*1024;
    const uintptr_t always = MAP[0] + 0x20000000;
    const auto start = [&] {
        reset(cache_params(0));
        ggml_moe_prefetch_map_add((const void *) always, 72*mib, 0);
        spare     = 400*mib;
        available = 1*mib; // less than the files: the cache is needed
        auto model = std::make_unique<t_model>(1);
        model->g.add(GGML_OP_MUL_MAT, model->g.weights(always, 1, 72*mib));
        for (int32_t id = 0; id < N_EXPERT; id += 2) { // all of it in the cache
            model->ids[0][0] = id;
            model->ids[0][1] = id + 1;
            model->run();
        }
        wait_until("cache_budget", (400 - 72 - 32)*mib);
        return model;
    };
    const auto decode = [](t_model & model, int n_windows) {
        for (int i = 0; i < 6*n_windows; i++) {
            model.run();
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
        }
    };

    {
        auto model = start();
        decode(*model, 3);
        const uint64_t after = t_counter("cache_budget");
        const uint64_t given = (400 - 72 - 32)*mib - after;
        CHECK(given > 30*mib && given <= 101*mib); // one step or more, by how slow the machine is, and a quarter at most
        resident_end = UINTPTR_MAX;
        decode(*model, 2); // what was lost before
        const uint64_t settled = t_counter("cache_budget");
        decode(*model, 3);
        CHECK_EQ(t_counter("cache_budget"), settled);

        // another start
        CHECK(ggml_moe_prefetch_set_mode(GGML_MOE_PREFETCH_MODE_OVERLAP));
        ggml_moe_prefetch_params params = cache_params(0);
        CHECK(ggml_moe_prefetch_set_params(&params));
        model->run();
        wait_until("cache_budget", (400 - 72 - 32)*mib);
    }
    ggml_moe_prefetch_map_remove((const void *) always, 72*mib);

    for (const bool is_known : { true, false }) {
        known = is_known;
        auto model = start();
        if (is_known) {
            model->run(); // one window only
            std::this_thread::sleep_for(std::chrono::milliseconds(700));
            resident_end = UINTPTR_MAX;
        }
        decode(*model, 3);
        CHECK_EQ(t_counter("cache_budget"), (400 - 72 - 32)*mib);
        CHECK(is_known || t_counter("bytes_always") >= 2*72*mib);
        ggml_moe_prefetch_map_remove((const void *) always, 72*mib);
    }
    known     = true;
    available = (uint64_t) 1 << 40;
}

// contexts of their own threads share the layers of one model
static void test_contexts() {
    reset(cache_params(10));
    std::vector<std::thread> contexts;
    for (int c = 0; c < 3; c++) {
        contexts.emplace_back([c] {
            std::mt19937 rng(c);
            t_model model(3);
            for (int pass = 0; pass < 40; pass++) {
                for (int32_t * ids : model.ids) {
                    ids[0] = (int32_t) (rng() % N_EXPERT);
                    ids[1] = (int32_t) (rng() % N_EXPERT);
                }
                model.run(2);
            }
        });
    }
    for (auto & context : contexts) {
        context.join();
    }
    CHECK_EQ(t_counter("groups"), 3u*40*3);
    CHECK_EQ(t_counter("errors"), 0u);
}

int main() {
    static ggml_moe_os os = t_os();
    os.direct_open      = fake_open;
    os.direct_read      = fake_read;
    os.direct_close     = [](intptr_t) { n_open--; };
    os.page_drop        = [](intptr_t, uintptr_t, size_t size, uint64_t) { n_dropped += (int64_t) size; return 0; };
    os.resident_known   = [](int) { return (bool) known; };
    os.resident         = [](uintptr_t addr, size_t size, uint8_t * pages) {
        for (size_t p = 0; p < size/PAGE; p++) {
            pages[p] = addr + (p + 1)*PAGE <= resident_end;
        }
        return 0;
    };
    os.memory_reserve   = fake_reserve;
    os.memory_discard   = fake_discard;
    os.memory_free      = fake_free;
    os.thread_pin       = [](int i) {
        std::lock_guard<std::mutex> lock(pins_mutex);
        pins.push_back(i);
        return 0;
    };
    os.memory_available = [] { return (uint64_t) available; };
    os.memory_spare     = [] { return (uint64_t) spare; };
    ggml_moe_prefetch_set_os(&os);

    test_hits_and_evictions();
    test_copy();
    test_readers_spread();
    test_random_traffic();
    test_overflow();
    test_switch_ends_reads_ahead();
    test_foresee();
    test_cancel();
    test_fallback();
    test_unload();
    test_mode_switch();
    test_contexts();
    test_adapter();
    test_threads_swap();
    test_unload_second_file_first();
    test_unload_with_hole();
    test_off_gives_memory_back();
    test_reads_refused();
    test_loaded_again();
    test_budget();
    test_budget_gives_way();

    unmap_files();
    CHECK_EQ(n_open, 0u);
    return 0;
}
