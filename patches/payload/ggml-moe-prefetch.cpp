#include "ggml-moe-prefetch.h"
#include "ggml-moe-prefetch-impl.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <shared_mutex>

#define GGML_MOE_PREFETCH_VERSION "1"

//
// names
//

static const char * const GGML_MOE_PREFETCH_MODE_NAME[] = {
    "off",
    "madv",
    "hint",
};

static_assert(sizeof(GGML_MOE_PREFETCH_MODE_NAME)/sizeof(char *) == GGML_MOE_PREFETCH_MODE_COUNT, "a mode has no name");

static const char * const GGML_MOE_PREFETCH_COUNTER_NAME[] = {
    "mappings",
    "load_skipped",
    "groups",
    "slices",
    "calls",
    "bytes_hinted",
    "bytes_resident",
    "errors",
    "last_errno",
    "ids_ignored",
    "unmapped",
    "hint_ns",
};

static_assert(sizeof(GGML_MOE_PREFETCH_COUNTER_NAME)/sizeof(char *) == GGML_MOE_PREFETCH_COUNTER_COUNT, "a counter has no name");

//
// state
//

struct ggml_moe_mapping {
    ggml_moe_range range;
    size_t         window; // bytes of one willneed request
    bool           resident_known;
};

struct ggml_moe_prefetch_state {
    std::atomic<int>      mode{GGML_MOE_PREFETCH_MODE_OFF};
    std::atomic<uint64_t> counters[GGML_MOE_PREFETCH_COUNTER_COUNT] = {};
    std::atomic<bool>     error_reported{false};

    std::atomic<const ggml_moe_os *> os{ggml_moe_os_native()};

    // held shared while requests are made, so that no mapping goes away under them
    std::shared_mutex             mutex;
    std::vector<ggml_moe_mapping> mappings;
    std::vector<ggml_moe_range>   random; // what has been advised random, to be undone when the mode changes

    ggml_moe_prefetch_state() {
        const char * name = getenv("MOE_MADV_MODE");
        if (name == nullptr || name[0] == '\0') {
            return;
        }
        for (int i = 0; i < GGML_MOE_PREFETCH_MODE_COUNT; i++) {
            if (strcmp(name, GGML_MOE_PREFETCH_MODE_NAME[i]) == 0) {
                mode = i;
                return;
            }
        }
        GGML_LOG_WARN("%s: MOE_MADV_MODE=%s is none of off, madv, hint: stays off\n", __func__, name);
    }

    void count(enum ggml_moe_prefetch_counter counter, uint64_t n = 1) {
        counters[counter].fetch_add(n, std::memory_order_relaxed);
    }

    void check(int result, const char * what) {
        if (result == 0) {
            return;
        }
        count(GGML_MOE_PREFETCH_COUNTER_ERRORS);
        counters[GGML_MOE_PREFETCH_COUNTER_LAST_ERRNO].store((uint64_t) -result, std::memory_order_relaxed);
        if (!error_reported.exchange(true)) {
            GGML_LOG_WARN("%s: %s failed: %s (further failures are only counted)\n", __func__, what, strerror(-result));
        }
    }
};

// never destroyed: a model that outlives static destruction still unregisters its mappings
static ggml_moe_prefetch_state & ggml_moe_prefetch_get_state() {
    static ggml_moe_prefetch_state * state = new ggml_moe_prefetch_state;
    return *state;
}

//
// ranges
//

ggml_moe_range ggml_moe_range_outer(ggml_moe_range range, size_t page_size) {
    const uintptr_t mask = page_size - 1;
    return { range.begin & ~mask, (range.end + mask) & ~mask };
}

ggml_moe_range ggml_moe_range_inner(ggml_moe_range range, size_t page_size) {
    const uintptr_t mask = page_size - 1;
    range.begin = (range.begin + mask) & ~mask;
    range.end   = std::max(range.begin, range.end & ~mask);
    return range;
}

//
// experts
//

uint64_t ggml_moe_ids_distinct(const ggml_tensor * ids, int64_t n_expert, std::vector<int32_t> & experts) {
    static thread_local std::vector<uint8_t> selected;
    selected.assign(n_expert, 0);

    uint64_t n_ignored = 0;
    for (int64_t i1 = 0; i1 < ids->ne[1]; i1++) {
        for (int64_t i0 = 0; i0 < ids->ne[0]; i0++) {
            int32_t id;
            memcpy(&id, (const char *) ids->data + i1*ids->nb[1] + i0*ids->nb[0], sizeof(id));
            if (id < 0 || id >= n_expert) {
                n_ignored++;
                continue;
            }
            selected[id] = 1;
        }
    }

    experts.clear();
    for (int64_t id = 0; id < n_expert; id++) {
        if (selected[id]) {
            experts.push_back((int32_t) id);
        }
    }
    return n_ignored;
}

// Matmuls of one group share the ids tensor and follow each other, with other nodes between them. Comparing
// neighbours needs no plan of the graph, so it holds for reused graphs, graph splits and several contexts.
void ggml_moe_group_weights(const ggml_cgraph * cgraph, int i, std::vector<const ggml_tensor *> & weights) {
    weights.clear();

    const ggml_tensor * ids = cgraph->nodes[i]->src[2];

    for (int j = i - 1; j >= 0; j--) {
        if (cgraph->nodes[j]->op == GGML_OP_MUL_MAT_ID) {
            if (cgraph->nodes[j]->src[2] == ids) {
                return;
            }
            break;
        }
    }

    for (int j = i; j < cgraph->n_nodes; j++) {
        const ggml_tensor * node = cgraph->nodes[j];
        if (node->op == GGML_OP_MUL_MAT_ID) {
            if (node->src[2] != ids) {
                break;
            }
            weights.push_back(node->src[0]);
        }
    }
}

static ggml_moe_range ggml_moe_tensor_range(const ggml_tensor * tensor) {
    const uintptr_t begin = (uintptr_t) tensor->data;
    return { begin, begin + ggml_nbytes(tensor) };
}

static const ggml_moe_mapping * ggml_moe_find_mapping(const ggml_moe_prefetch_state & state, ggml_moe_range range) {
    for (const auto & mapping : state.mappings) {
        if (mapping.range.begin <= range.begin && range.end <= mapping.range.end) {
            return &mapping;
        }
    }
    return nullptr;
}

//
// modes
//

// the behaviour published as MoE-MADV: the whole slice in one request, whatever of it is in memory
static void ggml_moe_madv_slice(ggml_moe_prefetch_state & state, const ggml_moe_os & os, ggml_moe_range slice) {
    slice = ggml_moe_range_outer(slice, os.page_size);
    state.count(GGML_MOE_PREFETCH_COUNTER_SLICES);
    state.count(GGML_MOE_PREFETCH_COUNTER_CALLS);
    state.count(GGML_MOE_PREFETCH_COUNTER_BYTES_HINTED, slice.size());
    state.check(os.advise_willneed(slice.begin, slice.size()), "madvise(MADV_WILLNEED)");
}

// pieces that the kernel honours whole, each from its first to its last absent page
static void ggml_moe_hint_slice(ggml_moe_prefetch_state & state, const ggml_moe_os & os, ggml_moe_range slice,
        const ggml_moe_mapping & mapping) {
    static thread_local std::vector<uint8_t> resident;

    slice = ggml_moe_range_outer(slice, os.page_size);
    state.count(GGML_MOE_PREFETCH_COUNTER_SLICES);

    const size_t n_pages = slice.size() / os.page_size;
    resident.resize(n_pages);
    if (!mapping.resident_known || os.resident(slice.begin, slice.size(), resident.data()) != 0) {
        std::fill(resident.begin(), resident.end(), 0); // not known: ask for all of it
    }

    const size_t window_pages = std::max<size_t>(1, mapping.window / os.page_size);
    size_t n_resident = 0;

    for (size_t p0 = 0; p0 < n_pages; p0 += window_pages) {
        const size_t p1 = std::min(n_pages, p0 + window_pages);

        size_t first = p1;
        size_t last  = p0;
        for (size_t p = p0; p < p1; p++) {
            if (resident[p] & 1) {
                n_resident++;
            } else {
                first = std::min(first, p);
                last  = p + 1;
            }
        }
        if (first == p1) {
            continue;
        }

        const size_t size = (last - first) * os.page_size;
        state.count(GGML_MOE_PREFETCH_COUNTER_CALLS);
        state.count(GGML_MOE_PREFETCH_COUNTER_BYTES_HINTED, size);
        state.check(os.advise_willneed(slice.begin + first*os.page_size, size), "madvise(MADV_WILLNEED)");
    }

    state.count(GGML_MOE_PREFETCH_COUNTER_BYTES_RESIDENT, n_resident * os.page_size);
}

// A fault on an expert page must not drag in its neighbours, which belong to experts that nobody asked for.
static void ggml_moe_hint_random(ggml_moe_prefetch_state & state, const ggml_moe_os & os,
        const std::vector<const ggml_tensor *> & weights) {
    for (const ggml_tensor * tensor : weights) {
        const ggml_moe_range range = ggml_moe_range_inner(ggml_moe_tensor_range(tensor), os.page_size);
        auto same = [&](const ggml_moe_range & r) { return r.begin == range.begin && r.end == range.end; };
        {
            std::shared_lock<std::shared_mutex> lock(state.mutex);
            if (range.size() == 0 || std::any_of(state.random.begin(), state.random.end(), same)) {
                continue;
            }
        }
        std::unique_lock<std::shared_mutex> lock(state.mutex);
        if (state.mode.load() != GGML_MOE_PREFETCH_MODE_HINT) {
            return; // switched since the node hook looked: what is advised now would never be undone
        }
        if (ggml_moe_find_mapping(state, range) && std::none_of(state.random.begin(), state.random.end(), same)) {
            state.random.push_back(range);
            state.check(os.advise_random(range.begin, range.size()), "madvise(MADV_RANDOM)");
        }
    }
}

void ggml_moe_prefetch_node(const struct ggml_cgraph * cgraph, int i) {
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();

    const int mode = state.mode.load(std::memory_order_relaxed);
    if (mode == GGML_MOE_PREFETCH_MODE_OFF) {
        return;
    }

    const ggml_tensor * node = cgraph->nodes[i];
    if (node->op != GGML_OP_MUL_MAT_ID) {
        return;
    }

    const auto          t_start = std::chrono::steady_clock::now();
    const ggml_moe_os & os      = *state.os.load();

    static thread_local std::vector<const ggml_tensor *> weights;
    static thread_local std::vector<int32_t>             experts;

    if (mode == GGML_MOE_PREFETCH_MODE_MADV) {
        weights.assign(1, node->src[0]);
    } else {
        ggml_moe_group_weights(cgraph, i, weights);
        ggml_moe_hint_random(state, os, weights);
    }

    if (!weights.empty()) {
        state.count(GGML_MOE_PREFETCH_COUNTER_GROUPS);
        state.count(GGML_MOE_PREFETCH_COUNTER_IDS_IGNORED, ggml_moe_ids_distinct(node->src[2], weights[0]->ne[2], experts));
    }

    for (const ggml_tensor * tensor : weights) {
        const ggml_moe_range range = ggml_moe_tensor_range(tensor);

        std::shared_lock<std::shared_mutex> lock(state.mutex);

        const ggml_moe_mapping * mapping = ggml_moe_find_mapping(state, range);
        if (mapping == nullptr) {
            state.count(GGML_MOE_PREFETCH_COUNTER_UNMAPPED);
            continue;
        }

        for (const int32_t id : experts) {
            if (id >= tensor->ne[2]) {
                continue;
            }
            const uintptr_t begin = range.begin + id*tensor->nb[2];
            const ggml_moe_range slice = { begin, begin + tensor->nb[2] };
            if (mode == GGML_MOE_PREFETCH_MODE_MADV) {
                ggml_moe_madv_slice(state, os, slice);
            } else {
                ggml_moe_hint_slice(state, os, slice, *mapping);
            }
        }
    }

    const auto elapsed = std::chrono::steady_clock::now() - t_start;
    state.count(GGML_MOE_PREFETCH_COUNTER_HINT_NS, std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count());
}

//
// loader
//

bool ggml_moe_prefetch_load_allowed(uint64_t n_bytes) {
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();

    if (state.mode.load() == GGML_MOE_PREFETCH_MODE_OFF) {
        return true;
    }

    const char * load = getenv("MOE_MADV_LOAD");
    bool allowed;
    if (load != nullptr && strcmp(load, "on") == 0) {
        allowed = true;
    } else if (load != nullptr && strcmp(load, "off") == 0) {
        allowed = false;
    } else {
        const uint64_t available = state.os.load()->memory_available();
        allowed = available == 0 || n_bytes <= available;
    }

    if (!allowed) {
        state.count(GGML_MOE_PREFETCH_COUNTER_LOAD_SKIPPED);
    }
    return allowed;
}

void ggml_moe_prefetch_map_add(const void * addr, size_t size, int fd) {
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();

    const ggml_moe_os & os = *state.os.load();
    const ggml_moe_mapping mapping = {
        /*.range          =*/ { (uintptr_t) addr, (uintptr_t) addr + size },
        /*.window         =*/ os.read_window(fd),
        /*.resident_known =*/ os.resident_known(fd),
    };

    // the loader's sequential advice doubles the read-ahead of every fault on this file
    if (state.mode.load() == GGML_MOE_PREFETCH_MODE_HINT) {
        state.check(os.file_normal(fd), "posix_fadvise(POSIX_FADV_NORMAL)");
    }

    std::unique_lock<std::shared_mutex> lock(state.mutex);
    state.mappings.push_back(mapping);
    state.count(GGML_MOE_PREFETCH_COUNTER_MAPPINGS);
}

// what is left of each range when [cut.begin, cut.end) is taken out
template <typename T, typename F>
static void ggml_moe_cut(std::vector<T> & items, ggml_moe_range cut, F range_of) {
    std::vector<T> left;
    for (const T & item : items) {
        T before = item;
        T after  = item;
        range_of(before).end   = std::min(range_of(before).end,   cut.begin);
        range_of(after ).begin = std::max(range_of(after ).begin, cut.end);
        for (T & part : { std::ref(before), std::ref(after) }) {
            if (range_of(part).size() > 0) {
                left.push_back(part);
            }
        }
    }
    items = std::move(left);
}

void ggml_moe_prefetch_map_remove(const void * addr, size_t size) {
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();

    const ggml_moe_range cut = { (uintptr_t) addr, (uintptr_t) addr + size };

    std::unique_lock<std::shared_mutex> lock(state.mutex);
    ggml_moe_cut(state.mappings, cut, [](ggml_moe_mapping & m) -> ggml_moe_range & { return m.range; });
    ggml_moe_cut(state.random,   cut, [](ggml_moe_range   & r) -> ggml_moe_range & { return r; });
}

//
// control
//

const char * ggml_moe_prefetch_version(void) {
    return GGML_MOE_PREFETCH_VERSION;
}

bool ggml_moe_prefetch_set_mode(enum ggml_moe_prefetch_mode mode) {
    if ((int) mode < 0 || mode >= GGML_MOE_PREFETCH_MODE_COUNT) {
        return false;
    }
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();

    std::unique_lock<std::shared_mutex> lock(state.mutex);
    if (mode != GGML_MOE_PREFETCH_MODE_HINT) {
        for (const ggml_moe_range & range : state.random) {
            state.check(state.os.load()->advise_normal(range.begin, range.size()), "madvise(MADV_NORMAL)");
        }
        state.random.clear();
    }
    state.mode.store(mode);
    return true;
}

enum ggml_moe_prefetch_mode ggml_moe_prefetch_get_mode(void) {
    return (enum ggml_moe_prefetch_mode) ggml_moe_prefetch_get_state().mode.load();
}

const char * ggml_moe_prefetch_mode_name(enum ggml_moe_prefetch_mode mode) {
    return (int) mode < 0 || mode >= GGML_MOE_PREFETCH_MODE_COUNT ? nullptr : GGML_MOE_PREFETCH_MODE_NAME[mode];
}

int ggml_moe_prefetch_counter_count(void) {
    return GGML_MOE_PREFETCH_COUNTER_COUNT;
}

const char * ggml_moe_prefetch_counter_name(int counter) {
    return counter < 0 || counter >= GGML_MOE_PREFETCH_COUNTER_COUNT ? nullptr : GGML_MOE_PREFETCH_COUNTER_NAME[counter];
}

uint64_t ggml_moe_prefetch_counter_value(int counter) {
    return counter < 0 || counter >= GGML_MOE_PREFETCH_COUNTER_COUNT ? 0 : ggml_moe_prefetch_get_state().counters[counter].load();
}

void ggml_moe_prefetch_counter_reset(void) {
    for (auto & counter : ggml_moe_prefetch_get_state().counters) {
        counter.store(0);
    }
}

void ggml_moe_prefetch_set_os(const ggml_moe_os * os) {
    ggml_moe_prefetch_get_state().os.store(os ? os : ggml_moe_os_native());
}
