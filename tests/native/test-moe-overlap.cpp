// Mode overlap: what is asked for while a layer computes, what is locked, and when pages are no longer looked at.

#include "helpers.h"

#include <chrono>
#include <mutex>
#include <thread>

#if !defined(_WIN32)
#    include <sys/wait.h>
#    include <unistd.h>
#endif

static const uintptr_t BASE     = 0x100000000;
static const size_t    PAGE     = 4096;
static const int64_t   N_EXPERT = 8;
static const size_t    SLICE    = 2*PAGE;
static const size_t    DENSE    = 5*PAGE;

static std::mutex             mutex;
static std::vector<t_request> requests; // w: willneed, l: lock, u: unlock
static bool                   all_resident;
static uint64_t               n_faults;
static uint64_t               n_looks;
static int                    result_lock;
static uint64_t               available = (uint64_t) 1 << 40;

static int record(char what, uintptr_t addr, size_t size, int result = 0) {
    std::lock_guard<std::mutex> lock(mutex);
    requests.push_back({ what, addr, size });
    return result;
}

static std::vector<t_request> only(char what, uintptr_t begin = 0, uintptr_t end = UINTPTR_MAX) {
    std::lock_guard<std::mutex> lock(mutex);
    return t_only(requests, what, begin, end);
}

// dense weights, one expert matrix; three times; the file holds them in that order
struct t_model {
    t_graph       g;
    int32_t *     ids[3];
    ggml_tensor * experts[3];
    uintptr_t     dense[3];

    explicit t_model(int64_t n_used = 2) {
        uintptr_t addr = BASE;
        for (int l = 0; l < 3; l++) {
            std::vector<int32_t> row(N_EXPERT);
            for (int64_t i = 0; i < N_EXPERT; i++) {
                row[i] = (int32_t) i;
            }
            ggml_tensor * t = g.ids(n_used, N_EXPERT, { row });
            t->op  = GGML_OP_VIEW;
            ids[l] = (int32_t *) t->data;
            dense[l] = addr;
            g.add(GGML_OP_MUL_MAT, g.weights(addr, 1, DENSE));
            addr += DENSE;
            experts[l] = g.weights(addr, N_EXPERT, SLICE);
            g.add(GGML_OP_MUL_MAT_ID, experts[l], t);
            addr += N_EXPERT*SLICE;
        }
    }

    uintptr_t begin(int l) const { return (uintptr_t) experts[l]->data; }
};

static void reset(uint64_t lock_bytes = 0) {
    ggml_moe_prefetch_map_remove((const void *) BASE, (size_t) 1 << 30);
    CHECK(ggml_moe_prefetch_set_mode(GGML_MOE_PREFETCH_MODE_OFF));
    ggml_moe_prefetch_params params;
    ggml_moe_prefetch_default_params(&params, sizeof(params));
    params.mode       = GGML_MOE_PREFETCH_MODE_OVERLAP;
    params.lock_bytes = lock_bytes;
    CHECK(ggml_moe_prefetch_set_params(&params));
    ggml_moe_prefetch_map_add((const void *) BASE, (size_t) 1 << 30, -1);
    ggml_moe_prefetch_counter_reset();
    requests.clear();
    all_resident = false;
    result_lock  = 0;
}

static void test_decode() {
    reset();
    t_model model;

    // before anything: the weights up to the first selection
    ggml_moe_prefetch_node(&model.g.cgraph, 0);
    CHECK(only('w') == std::vector<t_request>({{ 'w', model.dense[0], DENSE }}));

    // at the first selection: its experts 0 and 1, then the dense weights of the next layer, and no other expert
    requests.clear();
    ggml_moe_prefetch_node(&model.g.cgraph, 1);
    CHECK(only('w') == std::vector<t_request>({
        { 'w', model.begin(0),         SLICE }, { 'w', model.begin(0) + SLICE, SLICE }, { 'w', model.dense[1], DENSE },
    }));
    CHECK_EQ(t_counter("bytes_always"), 2*DENSE);

    // the last layer has nothing after it
    requests.clear();
    model.g.run(4);
    CHECK_EQ(only('w', model.begin(2)).size(), 2u);
}

// a wide batch: the next layer whole, without holding up the caller
static void test_wide() {
    reset();
    t_model model(5); // 5 of 8 experts, more than 60 %
    for (int i = 0; i < 2; i++) {
        ggml_moe_prefetch_node(&model.g.cgraph, i);
    }
    for (int i = 0; i < 1000 && only('w', model.begin(1), model.begin(1) + N_EXPERT*SLICE).size() < N_EXPERT; i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    CHECK_EQ(only('w', model.begin(1), model.begin(1) + N_EXPERT*SLICE).size(), (size_t) N_EXPERT);

    // not when the layer would push out what is in use
    reset();
    available = 4*N_EXPERT*SLICE - 1;
    for (int i = 0; i < 2; i++) {
        ggml_moe_prefetch_node(&model.g.cgraph, i);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(only('w', model.begin(1), model.begin(1) + N_EXPERT*SLICE).empty());
    available = (uint64_t) 1 << 40;
}

// of the token embedding the pages of the rows that are taken, in every mode that hints; of no other table
static void test_rows() {
    for (const auto mode : { GGML_MOE_PREFETCH_MODE_HINT, GGML_MOE_PREFETCH_MODE_OVERLAP }) {
        for (const char * name : { "token_embd.weight", "per_layer_token_embd.weight" }) {
            reset();
            CHECK(ggml_moe_prefetch_set_mode(mode));
            t_graph g;
            const uintptr_t table_begin = BASE + 0x1000000;
            ggml_tensor * table = g.weights(table_begin, 1, 64*3*PAGE/2);
            table->ne[1] = 64;
            table->nb[1] = 3*PAGE/2; // a row and a half of pages
            snprintf(table->name, sizeof(table->name), "%s", name);
            ggml_tensor * tokens = g.ids(4, 4, {{ 2, 9, -1, 64 }}); // two of them are no rows
            tokens->ne[0] = 4;
            tokens->ne[1] = 1;
            g.nodes[g.add(GGML_OP_GET_ROWS, table)]->src[1] = tokens;
            ggml_tensor * selected = g.ids(2, N_EXPERT, {{ 0, 1 }});
            selected->op = GGML_OP_VIEW;
            g.add(GGML_OP_MUL_MAT_ID, g.weights(BASE, N_EXPERT, SLICE), selected);
            ggml_moe_prefetch_node(&g.cgraph, 0);
            if (strcmp(name, "token_embd.weight") == 0) {
                // row 2: pages 3 and 4; row 9: from 13.5 to 15
                CHECK(only('w', table_begin) == std::vector<t_request>({
                    { 'w', table_begin + 3*PAGE, 2*PAGE }, { 'w', table_begin + 13*PAGE, 2*PAGE },
                }));
            } else {
                CHECK(only('w', table_begin).empty());
            }
        }
    }
}

static void test_lock() {
    // two of the three fit in what may be locked; they stay locked until the mode changes
    t_model model;
    reset(2*DENSE + PAGE);
    for (int pass = 0; pass < 2; pass++) {
        model.g.run();
    }
    CHECK(only('l') == std::vector<t_request>({{ 'l', model.dense[0], DENSE }, { 'l', model.dense[1], DENSE }}));
    CHECK_EQ(t_counter("bytes_locked"), 2*DENSE);
    CHECK(ggml_moe_prefetch_set_mode(GGML_MOE_PREFETCH_MODE_HINT));
    CHECK_EQ(only('u').size(), 2u);
    CHECK_EQ(t_counter("bytes_locked"), 0u);

    // never more than half of the memory
    reset((uint64_t) 1 << 40);
    available = 2*DENSE;
    model.g.run();
    CHECK_EQ(only('l').size(), 1u);
    available = (uint64_t) 1 << 40;

    // refused once: not tried again
    reset((uint64_t) 1 << 40);
    result_lock = -ENOMEM;
    model.g.run();
    model.g.run();
    CHECK_EQ(only('l').size(), 1u);
    CHECK_EQ(t_counter("errors"), 1u);
    CHECK_EQ(t_counter("last_errno"), (uint64_t) ENOMEM);
    CHECK_EQ(t_counter("bytes_locked"), 0u);
}

// a model in memory: pages are looked at for some passes, then a fault is awaited, and then they are looked at again
static void test_all_resident() {
    reset();
    all_resident = true;
    t_model model;
    for (int pass = 0; pass < 20; pass++) {
        model.g.run();
    }
    const uint64_t n_before = n_looks;
    for (int pass = 0; pass < 5; pass++) {
        model.g.run();
    }
    CHECK_EQ(n_looks, n_before);
    CHECK(only('w').empty());

    n_faults++; // one is a row of a table
    model.g.run();
    CHECK_EQ(n_looks, n_before);

    n_faults += 2;
    all_resident = false;
    model.g.run();
    CHECK(n_looks > n_before);
    CHECK(only('w').size() >= 6u);
}

// a child has none of the threads: it goes on with page faults
static void test_fork() {
#if !defined(_WIN32)
    reset();
    t_model model;
    model.g.run();
    fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
        model.g.run();
        ggml_moe_prefetch_map_remove((const void *) BASE, (size_t) 1 << 30);
        _exit(ggml_moe_prefetch_get_mode() == GGML_MOE_PREFETCH_MODE_OFF && t_counter("mappings") == 0 ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_EQ(status, 0);
    CHECK(ggml_moe_prefetch_get_mode() == GGML_MOE_PREFETCH_MODE_OVERLAP);
#endif
}

int main() {
    static ggml_moe_os os = t_os();
    os.advise_willneed  = [](uintptr_t addr, size_t size) { return record('w', addr, size); };
    os.lock             = [](uintptr_t addr, size_t size) { return record('l', addr, size, result_lock); };
    os.unlock           = [](uintptr_t addr, size_t size) { return record('u', addr, size); };
    os.resident         = [](uintptr_t, size_t size, uint8_t * pages) {
        std::lock_guard<std::mutex> lock(mutex);
        n_looks++;
        memset(pages, all_resident, size/PAGE);
        return 0;
    };
    os.memory_available = [] { return available; };
    os.major_faults     = [] { return n_faults; };
    ggml_moe_prefetch_set_os(&os);

    test_decode();
    test_wide();
    test_rows();
    test_lock();
    test_all_resident();
    test_fork();
    return 0;
}
