#include "ggml-moe-prefetch.h"
#include "ggml-moe-prefetch-impl.h"

#include "ggml-moe-cache.h"
#include "ggml-moe-graph.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <shared_mutex>
#include <string>
#include <unordered_set>

#if !defined(_WIN32)
#    include <pthread.h>
#endif

#define GGML_MOE_PREFETCH_VERSION "2"

//
// names
//

static const char * const GGML_MOE_PREFETCH_MODE_NAME[] = {
    "off",
    "madv",
    "hint",
    "overlap",
    "cache",
};

static_assert(sizeof(GGML_MOE_PREFETCH_MODE_NAME)/sizeof(char *) == GGML_MOE_PREFETCH_MODE_COUNT, "a mode has no name");

static const char * const GGML_MOE_PREFETCH_COUNTER_NAME[] = {
    "mappings",
    "load_skipped",
    "groups",
    "groups_early",
    "slices",
    "calls",
    "bytes_hinted",
    "bytes_resident",
    "bytes_always",
    "bytes_locked",
    "cache_budget",
    "experts_resident",
    "experts_missed",
    "experts_ahead",
    "experts_overflow",
    "evicted",
    "reads",
    "reads_in_time",
    "reads_late",
    "bytes_read",
    "read_ns",
    "wait_ns",
    "errors",
    "last_errno",
    "ids_ignored",
    "unmapped",
    "hint_ns",
};

static_assert(sizeof(GGML_MOE_PREFETCH_COUNTER_NAME)/sizeof(char *) == GGML_MOE_PREFETCH_COUNTER_COUNT, "a counter has no name");

//
// settings
//

static bool ggml_moe_mode_by_name(const char * name, int32_t & mode) {
    for (int i = 0; i < GGML_MOE_PREFETCH_MODE_COUNT; i++) {
        if (strcmp(name, GGML_MOE_PREFETCH_MODE_NAME[i]) == 0) {
            mode = i;
            return true;
        }
    }
    return false;
}

static bool ggml_moe_params_valid(const ggml_moe_prefetch_params & params) {
    return params.size == sizeof(params) &&
        params.mode      >=  0 && params.mode      <  GGML_MOE_PREFETCH_MODE_COUNT &&
        params.load      >= -1 && params.load      <= 1 &&
        params.n_readers >=  0 && params.n_readers <= 64 &&
        params.half_life >=  1 && params.half_life <= 1000000 &&
        params.wide      >=  1 && params.wide      <= 101;
}

void ggml_moe_prefetch_default_params(struct ggml_moe_prefetch_params * params) {
    *params = {
        /*.size        =*/ sizeof(*params),
        /*.mode        =*/ GGML_MOE_PREFETCH_MODE_OFF,
        /*.load        =*/ -1,
        /*.cache_bytes =*/ 0,
        /*.lock_bytes  =*/ 0,
        /*.n_readers   =*/ 0,
        /*.half_life   =*/ 24,
        /*.wide        =*/ 60,
    };
}

// a value that is not understood leaves the default, with a warning
static void ggml_moe_params_from_env(ggml_moe_prefetch_params & params) {
    auto set = [&](const char * name, const std::function<bool(const char *, ggml_moe_prefetch_params &)> & parse) {
        const char * text = getenv(name);
        if (text == nullptr || text[0] == '\0') {
            return;
        }
        ggml_moe_prefetch_params changed = params;
        if (parse(text, changed) && ggml_moe_params_valid(changed)) {
            params = changed;
        } else {
            GGML_LOG_WARN("%s: %s=%s is not understood and left out\n", "ggml_moe_prefetch", name, text);
        }
    };
    auto number = [](const char * text, auto & value, uint64_t unit) {
        char * end = nullptr;
        errno = 0;
        const unsigned long long n = strtoull(text, &end, 10);
        if (end == text || *end != '\0' || text[0] == '-' || errno != 0 || n > INT_MAX) {
            return false;
        }
        value = (std::remove_reference_t<decltype(value)>) (n*unit);
        return true;
    };
    const uint64_t mib = 1024*1024;

    set("MOE_MADV_MODE", [](const char * text, ggml_moe_prefetch_params & p) { return ggml_moe_mode_by_name(text, p.mode); });
    set("MOE_MADV_LOAD", [](const char * text, ggml_moe_prefetch_params & p) {
        p.load = strcmp(text, "on") == 0 ? 1 : strcmp(text, "off") == 0 ? 0 : strcmp(text, "auto") == 0 ? -1 : 2;
        return true;
    });
    set("MOE_MADV_CACHE_MIB", [&](const char * text, ggml_moe_prefetch_params & p) { return number(text, p.cache_bytes, mib); });
    set("MOE_MADV_LOCK_MIB",  [&](const char * text, ggml_moe_prefetch_params & p) { return number(text, p.lock_bytes,  mib); });
    set("MOE_MADV_READERS",   [&](const char * text, ggml_moe_prefetch_params & p) { return number(text, p.n_readers,     1); });
    set("MOE_MADV_HALF_LIFE", [&](const char * text, ggml_moe_prefetch_params & p) { return number(text, p.half_life,     1); });
    set("MOE_MADV_WIDE",      [&](const char * text, ggml_moe_prefetch_params & p) { return number(text, p.wide,          1); });
}

//
// state
//

// a direct handle that closes with the last mapping that uses it
struct ggml_moe_file {
    const ggml_moe_os & os;
    intptr_t            handle = -1;
    int                 error  = 0;

    ggml_moe_file(const ggml_moe_os & os, int fd) : os(os) { error = os.direct_open(fd, &handle); }
    ~ggml_moe_file() {
        if (error == 0) {
            os.direct_close(handle);
        }
    }
};

struct ggml_moe_mapping {
    ggml_moe_range                       range;
    uintptr_t                            base;   // address of the file's first byte
    size_t                               window; // bytes of one willneed request
    bool                                 resident_known;
    std::shared_ptr<const ggml_moe_file> file;
};

// a selection in the cache, as the threads of its matmuls see it
struct ggml_moe_plan : ggml_moe_cache_plan {
    std::shared_ptr<ggml_moe_cache> cache;
};

struct ggml_moe_prefetch_state {
    std::atomic<int>   mode{GGML_MOE_PREFETCH_MODE_OFF};
    ggml_moe_counters  counters;
    std::atomic<int>   wide{100}; // as in the settings, for those who hold no lock
    std::atomic<bool>  error_reported{false};

    std::atomic<const ggml_moe_os *> os{ggml_moe_os_native()};

    // held shared while requests are made, so that no mapping goes away under them
    std::shared_mutex                         mutex;
    ggml_moe_prefetch_params                  params;
    std::vector<ggml_moe_mapping>             mappings;
    std::vector<ggml_moe_range>               random; // what has been advised random, to be undone when the mode changes
    std::vector<ggml_moe_range>               locked;
    std::unordered_set<uintptr_t>             always; // begin of always used weights seen so far
    uint64_t                                  bytes_always = 0;
    std::unordered_map<uintptr_t, size_t>     layer_index; // by the begin of the first matrix
    std::deque<ggml_moe_layer_stats>          layers;
    std::atomic<size_t>                       n_layers{0};
    bool                                      lock_refused = false;
    std::shared_ptr<ggml_moe_cache>           cache;
    std::unordered_set<uintptr_t>             uncached;    // layers that the cache cannot serve, by the begin of the first matrix
    bool                                      cache_needed = false; // whether there is less memory than experts
    uint64_t                                  budget_ns    = 0;     // when the budget was looked at

    // after some tokens in which every page was there, a major fault is awaited before pages are looked at again
    std::atomic<uint64_t> faults{0};
    std::atomic<uint64_t> n_clean{0};

    std::shared_mutex            plans_mutex;
    std::vector<ggml_moe_plan *> plans;

    // overlap: ranges for which to start reads without holding up a compute thread
    std::mutex                 queue_mutex;
    std::condition_variable    queue_filled;
    std::deque<ggml_moe_range> queue;
    bool                       queue_running = false;

    ggml_moe_prefetch_state() {
        ggml_moe_prefetch_default_params(&params);
        ggml_moe_params_from_env(params);
        mode = params.mode;
        wide = params.wide;
    }

    void count(enum ggml_moe_prefetch_counter counter, uint64_t n = 1) {
        counters.add(counter, n);
    }

    void check(int result, const char * what) {
        if (result == 0) {
            return;
        }
        count(GGML_MOE_PREFETCH_COUNTER_ERRORS);
        counters.values[GGML_MOE_PREFETCH_COUNTER_LAST_ERRNO].store((uint64_t) -result, std::memory_order_relaxed);
        if (!error_reported.exchange(true)) {
            GGML_LOG_WARN("%s: %s failed: %s (further failures are only counted)\n", "ggml_moe_prefetch", what, strerror(-result));
        }
    }
};

// never destroyed: a model that outlives static destruction still unregisters its mappings
static ggml_moe_prefetch_state & ggml_moe_prefetch_get_state() {
    static ggml_moe_prefetch_state * state = [] {
        auto * s = new ggml_moe_prefetch_state;
#if !defined(_WIN32)
        // the threads that read do not follow into a child: it goes on with page faults
        pthread_atfork(nullptr, nullptr, [] { ggml_moe_prefetch_get_state().mode = GGML_MOE_PREFETCH_MODE_OFF; });
#endif
        return s;
    }();
    return *state;
}

// what the announcing thread of a graph remembers from node to node
struct ggml_moe_thread {
    const ggml_cgraph *    cgraph      = nullptr;
    int                    i           = -1;
    ggml_moe_layer_stats * layer       = nullptr; // announced last
    uint64_t               announced   = 0;
    ggml_moe_group         group;                 // announced last
    bool                   wide        = false;
    ggml_moe_plan          plan;

    ~ggml_moe_thread();
};

static void ggml_moe_plan_end(ggml_moe_prefetch_state & state, ggml_moe_plan & plan) {
    std::unique_lock<std::shared_mutex> lock(state.plans_mutex);
    if (plan.cache) {
        plan.cache->finish(plan);
        state.plans.erase(std::remove(state.plans.begin(), state.plans.end(), &plan), state.plans.end());
        const auto cache = std::move(plan.cache);
        lock.unlock(); // its end, if this was the last to use it, joins threads
    }
}

ggml_moe_thread::~ggml_moe_thread() {
    ggml_moe_plan_end(ggml_moe_prefetch_get_state(), plan);
}

static const ggml_moe_mapping * ggml_moe_find_mapping(const ggml_moe_prefetch_state & state, ggml_moe_range range) {
    for (const auto & mapping : state.mappings) {
        if (mapping.range.contains(range)) {
            return &mapping;
        }
    }
    return nullptr;
}

//
// hints
//

// the behaviour published as MoE-MADV: the whole slice in one request, whatever of it is in memory
static void ggml_moe_madv_slice(ggml_moe_prefetch_state & state, const ggml_moe_os & os, ggml_moe_range slice) {
    slice = ggml_moe_range_outer(slice, os.page_size);
    state.count(GGML_MOE_PREFETCH_COUNTER_SLICES);
    state.count(GGML_MOE_PREFETCH_COUNTER_CALLS);
    state.count(GGML_MOE_PREFETCH_COUNTER_BYTES_HINTED, slice.size());
    state.check(os.advise_willneed(slice.begin, slice.size()), "madvise(MADV_WILLNEED)");
}

// pieces that the kernel honours whole, each from its first to its last absent page; returns the bytes asked for
static size_t ggml_moe_hint_range(ggml_moe_prefetch_state & state, const ggml_moe_os & os, ggml_moe_range range,
        const ggml_moe_mapping & mapping, size_t & n_resident) {
    static thread_local std::vector<uint8_t> resident;

    range = ggml_moe_range_outer(range, os.page_size);

    const size_t n_pages = range.size()/os.page_size;
    resident.resize(n_pages);
    if (!mapping.resident_known || os.resident(range.begin, range.size(), resident.data()) != 0) {
        std::fill(resident.begin(), resident.end(), 0); // not known: ask for all of it
    }

    const size_t window_pages = std::max<size_t>(1, mapping.window/os.page_size);
    size_t n_hinted = 0;

    for (size_t p0 = 0; p0 < n_pages; p0 += window_pages) {
        const size_t p1 = std::min(n_pages, p0 + window_pages);

        size_t first = p1;
        size_t last  = p0;
        for (size_t p = p0; p < p1; p++) {
            if (resident[p] & 1) {
                n_resident += os.page_size;
            } else {
                first = std::min(first, p);
                last  = p + 1;
            }
        }
        if (first == p1) {
            continue;
        }

        const size_t size = (last - first)*os.page_size;
        n_hinted += size;
        state.count(GGML_MOE_PREFETCH_COUNTER_CALLS);
        state.check(os.advise_willneed(range.begin + first*os.page_size, size), "madvise(MADV_WILLNEED)");
    }

    state.count(GGML_MOE_PREFETCH_COUNTER_BYTES_HINTED, n_hinted);
    return n_hinted;
}

// A fault on an expert page must not drag in its neighbours, which belong to experts that nobody asked for.
static void ggml_moe_hint_random(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_moe_group & group) {
    for (const ggml_tensor * node : group.nodes) {
        const ggml_moe_range range = ggml_moe_range_inner(ggml_moe_tensor_range(node->src[0]), os.page_size);
        auto same = [&](const ggml_moe_range & r) { return r.begin == range.begin && r.end == range.end; };
        {
            std::shared_lock<std::shared_mutex> lock(state.mutex);
            if (range.size() == 0 || std::any_of(state.random.begin(), state.random.end(), same)) {
                continue;
            }
        }
        std::unique_lock<std::shared_mutex> lock(state.mutex);
        if (state.mode.load() < GGML_MOE_PREFETCH_MODE_HINT) {
            return; // switched since the node hook looked: what is advised now would never be undone
        }
        if (ggml_moe_find_mapping(state, range) && std::none_of(state.random.begin(), state.random.end(), same)) {
            state.random.push_back(range);
            state.check(os.advise_random(range.begin, range.size()), "madvise(MADV_RANDOM)");
        }
    }
}

// the slices of some experts in every matrix of a group; returns the bytes asked for
static size_t ggml_moe_hint_experts(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_moe_group & group,
        const std::vector<int32_t> & experts) {
    size_t n_hinted   = 0;
    size_t n_resident = 0;

    for (const ggml_tensor * node : group.nodes) {
        const ggml_tensor *  weights = node->src[0];
        const ggml_moe_range range   = ggml_moe_tensor_range(weights);

        std::shared_lock<std::shared_mutex> lock(state.mutex);

        const ggml_moe_mapping * mapping = ggml_moe_find_mapping(state, range);
        if (mapping == nullptr) {
            state.count(GGML_MOE_PREFETCH_COUNTER_UNMAPPED);
            continue;
        }
        for (const int32_t id : experts) {
            if (id >= weights->ne[2]) {
                continue;
            }
            const uintptr_t begin = range.begin + id*weights->nb[2];
            state.count(GGML_MOE_PREFETCH_COUNTER_SLICES);
            n_hinted += ggml_moe_hint_range(state, os, { begin, begin + weights->nb[2] }, *mapping, n_resident);
        }
    }
    state.count(GGML_MOE_PREFETCH_COUNTER_BYTES_RESIDENT, n_resident);
    return n_hinted;
}

// Looking at pages costs as much as 1 % of a token when all are there. A page that has gone shows as a major fault of
// this process, so once nothing was missing for two rounds of all layers, faults are counted instead of pages.
static bool ggml_moe_all_resident(ggml_moe_prefetch_state & state, const ggml_moe_os & os) {
    const uint64_t faults = os.major_faults();
    if (state.faults.exchange(faults) != faults) {
        state.n_clean = 0;
    }
    return state.n_clean > 2*state.n_layers;
}

static void ggml_moe_saw(ggml_moe_prefetch_state & state, size_t n_absent) {
    if (n_absent == 0) {
        state.n_clean++;
    } else {
        state.n_clean = 0;
    }
}

//
// ahead of the next layer
//

static void ggml_moe_lock(ggml_moe_prefetch_state & state, const ggml_moe_os & os, ggml_moe_range range) {
    range = ggml_moe_range_outer(range, os.page_size);
    std::unique_lock<std::shared_mutex> lock(state.mutex);

    auto same = [&](const ggml_moe_range & r) { return r.begin == range.begin; };
    const uint64_t held = state.counters.values[GGML_MOE_PREFETCH_COUNTER_BYTES_LOCKED];
    // more than half of the memory would leave too little for the experts
    const uint64_t most = std::min(state.params.lock_bytes, os.memory_available()/2);
    if (state.lock_refused || held + range.size() > most || !ggml_moe_find_mapping(state, range) ||
        std::any_of(state.locked.begin(), state.locked.end(), same)) {
        return;
    }
    const int result = os.lock(range.begin, range.size());
    if (result != 0) {
        state.lock_refused = true;
        state.count(GGML_MOE_PREFETCH_COUNTER_ERRORS);
        state.counters.values[GGML_MOE_PREFETCH_COUNTER_LAST_ERRNO] = (uint64_t) -result;
        GGML_LOG_WARN("%s: locked %.0f MiB of always used weights, then: %s; raise the limit with `ulimit -l unlimited` "
            "or set MOE_MADV_LOCK_MIB=%.0f\n", "ggml_moe_prefetch", held/1048576.0, strerror(-result), held/1048576.0);
        return;
    }
    state.locked.push_back(range);
    state.counters.values[GGML_MOE_PREFETCH_COUNTER_BYTES_LOCKED] += range.size();
}

// weights that nodes [i0, i1) are sure to read
static void ggml_moe_hint_always(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_cgraph * cgraph, int i0, int i1) {
    size_t n_hinted   = 0;
    size_t n_resident = 0;
    bool   lock_wanted;
    const auto ranges = ggml_moe_always_used(cgraph, i0, i1);
    {
        std::shared_lock<std::shared_mutex> lock(state.mutex);
        lock_wanted = state.params.lock_bytes > 0 && !state.lock_refused;
        for (const ggml_moe_range & range : ranges) {
            if (const ggml_moe_mapping * mapping = ggml_moe_find_mapping(state, range)) {
                n_hinted += ggml_moe_hint_range(state, os, range, *mapping, n_resident);
            }
        }
    }
    state.count(GGML_MOE_PREFETCH_COUNTER_BYTES_ALWAYS, n_hinted);
    ggml_moe_saw(state, n_hinted);
    if (lock_wanted) {
        for (const ggml_moe_range & range : ranges) {
            ggml_moe_lock(state, os, range);
        }
    }
}

// one thread, started by the first range: a request for a whole layer blocks its caller until the disk has taken it
static void ggml_moe_queue_push(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_moe_group & group) {
    uint64_t n_bytes = 0;
    for (const ggml_tensor * node : group.nodes) {
        n_bytes += ggml_nbytes(node->src[0]);
    }
    const uint64_t available = os.memory_available();
    if (available != 0 && n_bytes > available/4) {
        return; // it would push out what is in use
    }

    std::lock_guard<std::mutex> lock(state.queue_mutex);
    for (const ggml_tensor * node : group.nodes) {
        const ggml_moe_range range = ggml_moe_tensor_range(node->src[0]);
        for (uintptr_t begin = range.begin; begin < range.end; begin += node->src[0]->nb[2]) {
            state.queue.push_back({ begin, begin + node->src[0]->nb[2] });
        }
    }
    if (!state.queue_running) {
        state.queue_running = true;
        std::thread([&state] {
            std::unique_lock<std::mutex> queue_lock(state.queue_mutex);
            for (;;) {
                state.queue_filled.wait(queue_lock, [&] { return !state.queue.empty(); });
                const ggml_moe_range range = state.queue.front();
                state.queue.pop_front();
                queue_lock.unlock();
                {
                    std::shared_lock<std::shared_mutex> lock(state.mutex);
                    size_t n_resident = 0;
                    if (const ggml_moe_mapping * mapping = ggml_moe_find_mapping(state, range)) {
                        ggml_moe_hint_range(state, *state.os.load(), range, *mapping, n_resident);
                    }
                    state.count(GGML_MOE_PREFETCH_COUNTER_BYTES_RESIDENT, n_resident);
                }
                queue_lock.lock();
            }
        }).detach();
    }
    state.queue_filled.notify_one();
}

static void ggml_moe_queue_drop(ggml_moe_prefetch_state & state) {
    std::lock_guard<std::mutex> lock(state.queue_mutex);
    state.queue.clear();
}

//
// cache
//

static ggml_moe_layer_stats & ggml_moe_layer_of(ggml_moe_prefetch_state & state, const ggml_moe_group & group) {
    const uintptr_t begin = (uintptr_t) group.weights(0)->data;
    {
        std::shared_lock<std::shared_mutex> lock(state.mutex);
        const auto it = state.layer_index.find(begin);
        if (it != state.layer_index.end()) {
            return state.layers[it->second];
        }
    }
    std::unique_lock<std::shared_mutex> lock(state.mutex);
    const auto it = state.layer_index.find(begin);
    if (it != state.layer_index.end()) {
        return state.layers[it->second];
    }
    state.layer_index[begin] = state.layers.size();
    state.layers.emplace_back();
    state.n_layers = state.layers.size();
    memcpy(state.layers.back().name, group.weights(0)->name, sizeof(state.layers.back().name));
    return state.layers.back();
}

// All memory that nobody else needs: not the process, not its always used weights, and a margin for what is to come.
static void ggml_moe_cache_follow(ggml_moe_prefetch_state & state, const ggml_moe_os & os) {
    std::unique_lock<std::shared_mutex> lock(state.mutex);
    const uint64_t now = ggml_moe_now_ns();
    if (!state.cache || (state.budget_ns != 0 && now - state.budget_ns < 250*1000*1000)) {
        return;
    }
    state.budget_ns = now;

    uint64_t budget = state.params.cache_bytes;
    if (budget == 0) {
        const uint64_t held   = state.cache->bytes_held();
        const uint64_t spare  = os.memory_spare() + held;
        const uint64_t margin = std::max<uint64_t>(64*1024*1024, spare/32);
        budget = spare - std::min(spare, state.bytes_always + margin);
    }
    state.cache_needed = state.cache_needed || budget < state.cache->bytes_full();

    auto & counter = state.counters.values[GGML_MOE_PREFETCH_COUNTER_CACHE_BUDGET];
    const uint64_t before = counter;
    const uint64_t change = budget > before ? budget - before : before - budget;
    if (change > before/64) { // smaller changes are noise
        counter = budget;
        state.cache->set_budget(budget);
    }
}

static int ggml_moe_cache_parts(const ggml_moe_prefetch_state & state, const ggml_moe_group & group, std::vector<ggml_moe_cache_part> & parts) {
    for (const ggml_tensor * node : group.nodes) {
        const ggml_tensor *  weights = node->src[0];
        const ggml_moe_range range   = ggml_moe_tensor_range(weights);
        const ggml_moe_mapping * mapping = ggml_moe_find_mapping(state, range);
        if (mapping == nullptr) {
            return -ENXIO;
        }
        if (mapping->file->error != 0) {
            return mapping->file->error;
        }
        if (weights->ne[2] != group.n_expert() || weights->ne[3] != 1) {
            return -EINVAL;
        }
        parts.push_back({ range.begin, weights->nb[2], mapping->file->handle, range.begin - mapping->base, 0 });
    }
    return 0;
}

// layers and weights of a graph that are not known yet
static void ggml_moe_cache_learn(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_cgraph * cgraph) {
    bool all_known = true;
    for (int i = ggml_moe_group_next(cgraph, 0); all_known && i < cgraph->n_nodes; i = ggml_moe_group_next(cgraph, i + 1)) {
        const uintptr_t begin = (uintptr_t) cgraph->nodes[i]->src[0]->data;
        std::shared_lock<std::shared_mutex> lock(state.mutex);
        all_known = state.uncached.count(begin) || (state.cache && state.cache->find(begin));
    }
    if (all_known) {
        return;
    }

    for (int i = ggml_moe_group_next(cgraph, 0); i < cgraph->n_nodes; i = ggml_moe_group_next(cgraph, i + 1)) {
        const ggml_moe_group group = ggml_moe_group_at(cgraph, i);
        if (group.nodes.empty()) {
            continue;
        }
        const uintptr_t        begin = (uintptr_t) group.weights(0)->data;
        ggml_moe_layer_stats & stats = ggml_moe_layer_of(state, group);

        std::unique_lock<std::shared_mutex> lock(state.mutex);
        if (state.mode.load() != GGML_MOE_PREFETCH_MODE_CACHE || state.uncached.count(begin)) {
            continue;
        }
        if (!state.cache) {
            // one reader keeps most disks busy while it is not waiting for a core
            const int n_cores   = (int) std::thread::hardware_concurrency();
            const int n_readers = state.params.n_readers > 0 ? state.params.n_readers : std::max(2, std::min(4, n_cores/2));
            state.cache = std::make_shared<ggml_moe_cache>(os, state.counters, n_readers, (float) state.params.half_life);
            state.counters.values[GGML_MOE_PREFETCH_COUNTER_CACHE_BUDGET] = 0;
        }
        if (state.cache->find(begin)) {
            continue;
        }
        std::vector<ggml_moe_cache_part> parts;
        int result = ggml_moe_cache_parts(state, group, parts);
        if (result == 0) {
            result = state.cache->add(parts, group.n_expert(), state.layer_index[begin], stats);
        }
        if (result == 0) {
            state.budget_ns = 0;
        } else {
            if (state.uncached.empty()) {
                GGML_LOG_WARN("%s: %s cannot be cached: %s; such layers run as in mode overlap\n", "ggml_moe_prefetch",
                    group.weights(0)->name, result == -ENXIO ? "it is not mapped from a file" : strerror(-result));
            }
            state.uncached.insert(begin);
        }
    }

    const auto ranges = ggml_moe_always_used(cgraph, 0, cgraph->n_nodes);
    std::unique_lock<std::shared_mutex> lock(state.mutex);
    for (const ggml_moe_range & range : ranges) {
        if (ggml_moe_find_mapping(state, range) && state.always.insert(range.begin).second) {
            state.bytes_always += range.size();
        }
    }
}

static std::shared_ptr<ggml_moe_cache> ggml_moe_cache_of(ggml_moe_prefetch_state & state) {
    std::shared_lock<std::shared_mutex> lock(state.mutex);
    return state.cache_needed ? state.cache : nullptr;
}

//
// graph
//

static void ggml_moe_layer_end(ggml_moe_thread & thread) {
    if (ggml_moe_layer_stats * layer = thread.layer) {
        const uint64_t last_read = layer->last_read;
        layer->total_ns += ggml_moe_now_ns() - thread.announced;
        layer->read_ns  += last_read > thread.announced ? last_read - thread.announced : 0;
        thread.layer = nullptr;
    }
}

static void ggml_moe_graph_begin(ggml_moe_prefetch_state & state, const ggml_moe_os & os, ggml_moe_thread & thread,
        const ggml_cgraph * cgraph, int mode) {
    ggml_moe_layer_end(thread);
    ggml_moe_plan_end(state, thread.plan);
    thread.wide = false;

    const int first = ggml_moe_group_next(cgraph, 0);
    if (mode < GGML_MOE_PREFETCH_MODE_OVERLAP || first == cgraph->n_nodes) {
        return;
    }
    if (!ggml_moe_all_resident(state, os)) {
        ggml_moe_hint_always(state, os, cgraph, 0, first);
    }
    std::shared_ptr<ggml_moe_cache> cache;
    if (mode == GGML_MOE_PREFETCH_MODE_CACHE) {
        ggml_moe_cache_learn(state, os, cgraph);
        ggml_moe_cache_follow(state, os);
        cache = ggml_moe_cache_of(state);
        if (cache) {
            cache->drop_ahead();
        }
    }

    static thread_local ggml_moe_ids ids;
    for (int i = first; i < cgraph->n_nodes; i = ggml_moe_group_next(cgraph, i + 1)) {
        const ggml_moe_group group = ggml_moe_group_at(cgraph, i);
        if (group.nodes.empty() || !ggml_moe_ids_read_early(group.ids(), group.n_expert(), ids)) {
            continue;
        }
        state.count(GGML_MOE_PREFETCH_COUNTER_GROUPS_EARLY);
        ggml_moe_cache_layer * layer = cache ? cache->find((uintptr_t) group.weights(0)->data) : nullptr;
        if (layer != nullptr) {
            cache->ahead(layer, ids.distinct);
        } else {
            ggml_moe_hint_random(state, os, group);
            ggml_moe_hint_experts(state, os, group, ids.distinct);
        }
    }
}

static void ggml_moe_announce(ggml_moe_prefetch_state & state, const ggml_moe_os & os, ggml_moe_thread & thread,
        const ggml_cgraph * cgraph, int i, int mode) {
    ggml_moe_group group = ggml_moe_group_at(cgraph, i);
    if (group.nodes.empty()) {
        return;
    }
    ggml_moe_layer_end(thread);
    ggml_moe_plan_end(state, thread.plan);

    static thread_local ggml_moe_ids         ids;
    static thread_local std::vector<int32_t> rest;

    ggml_moe_ids_read(group.ids(), group.n_expert(), ids);
    state.count(GGML_MOE_PREFETCH_COUNTER_GROUPS);
    state.count(GGML_MOE_PREFETCH_COUNTER_IDS_IGNORED, ids.n_ignored);

    ggml_moe_layer_stats & stats = ggml_moe_layer_of(state, group);
    thread.layer     = &stats;
    thread.announced = ggml_moe_now_ns();
    stats.n_selections++;
    stats.n_experts += ids.distinct.size();

    const auto cache = mode == GGML_MOE_PREFETCH_MODE_CACHE ? ggml_moe_cache_of(state) : nullptr;
    ggml_moe_cache_layer * layer = cache ? cache->find((uintptr_t) group.weights(0)->data) : nullptr;

    if (layer != nullptr) {
        ggml_moe_plan & plan = thread.plan;
        std::unique_lock<std::shared_mutex> lock(state.plans_mutex);
        plan.cache = cache;
        plan.layer = layer;
        plan.owner = std::this_thread::get_id();
        plan.nodes = group.nodes;
        stats.n_missed += cache->begin(plan, ids, rest);
        state.count(GGML_MOE_PREFETCH_COUNTER_EXPERTS_OVERFLOW, rest.size());
        state.plans.push_back(&plan);
    } else {
        rest = ids.distinct;
    }

    const bool all_resident = ggml_moe_all_resident(state, os);
    if (!rest.empty()) {
        ggml_moe_hint_random(state, os, group);
        if (!all_resident) {
            const size_t n_hinted = ggml_moe_hint_experts(state, os, group, rest);
            stats.bytes += n_hinted;
            ggml_moe_saw(state, n_hinted);
        }
    }

    if (mode >= GGML_MOE_PREFETCH_MODE_OVERLAP) {
        const int next = ggml_moe_group_next(cgraph, i + 1);
        if (!all_resident) {
            ggml_moe_hint_always(state, os, cgraph, i, next);
        }

        const bool wide = (int64_t) ids.distinct.size()*100 >= group.n_expert()*state.wide;
        if (wide && next < cgraph->n_nodes) {
            const ggml_moe_group after = ggml_moe_group_at(cgraph, next);
            ggml_moe_cache_layer * layer_after = cache ? cache->find((uintptr_t) after.weights(0)->data) : nullptr;
            if (layer_after != nullptr) {
                rest.resize(after.n_expert());
                for (size_t id = 0; id < rest.size(); id++) {
                    rest[id] = (int32_t) id;
                }
                cache->ahead(layer_after, rest);
            } else if (!all_resident) {
                ggml_moe_hint_random(state, os, after);
                ggml_moe_queue_push(state, os, after);
            }
        }
        // experts of a wide batch are read once for many tokens: what decode uses should outlive them
        if (wide && thread.wide && layer == nullptr && !all_resident) {
            std::shared_lock<std::shared_mutex> lock(state.mutex);
            for (const ggml_tensor * node : thread.group.nodes) {
                const ggml_moe_range range = ggml_moe_range_inner(ggml_moe_tensor_range(node->src[0]), os.page_size);
                if (ggml_moe_find_mapping(state, range)) {
                    state.check(os.advise_cold(range.begin, range.size()), "madvise(MADV_COLD)");
                }
            }
        }
        thread.wide = wide;
    }
    thread.group = std::move(group);
    stats.hint_ns += ggml_moe_now_ns() - thread.announced;
}

void ggml_moe_prefetch_node(const struct ggml_cgraph * cgraph, int i) {
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();

    const int mode = state.mode.load(std::memory_order_relaxed);
    if (mode == GGML_MOE_PREFETCH_MODE_OFF) {
        return;
    }

    static thread_local ggml_moe_thread thread;

    const ggml_moe_os & os    = *state.os.load();
    const bool          begin = thread.cgraph != cgraph || i <= thread.i;
    thread.cgraph = cgraph;
    thread.i      = i;

    const bool expert_matmul = cgraph->nodes[i]->op == GGML_OP_MUL_MAT_ID;
    if (!begin && !expert_matmul) {
        return;
    }
    const uint64_t start = ggml_moe_now_ns();

    if (begin) {
        ggml_moe_graph_begin(state, os, thread, cgraph, mode);
    }
    if (expert_matmul && mode == GGML_MOE_PREFETCH_MODE_MADV) {
        static thread_local ggml_moe_ids ids;
        const ggml_tensor *  weights = cgraph->nodes[i]->src[0];
        const ggml_moe_range range   = ggml_moe_tensor_range(weights);
        ggml_moe_ids_read(cgraph->nodes[i]->src[2], weights->ne[2], ids);
        state.count(GGML_MOE_PREFETCH_COUNTER_GROUPS);
        state.count(GGML_MOE_PREFETCH_COUNTER_IDS_IGNORED, ids.n_ignored);

        std::shared_lock<std::shared_mutex> lock(state.mutex);
        if (ggml_moe_find_mapping(state, range) == nullptr) {
            state.count(GGML_MOE_PREFETCH_COUNTER_UNMAPPED);
        } else {
            for (const int32_t id : ids.distinct) {
                const uintptr_t slice = range.begin + id*weights->nb[2];
                ggml_moe_madv_slice(state, os, { slice, slice + weights->nb[2] });
            }
        }
    } else if (expert_matmul) {
        ggml_moe_announce(state, os, thread, cgraph, i, mode);
    }

    state.count(GGML_MOE_PREFETCH_COUNTER_HINT_NS, ggml_moe_now_ns() - start);
}

int ggml_moe_prefetch_expert(struct ggml_tensor ** dst, int i, struct ggml_moe_prefetch_view * view) {
    if (i == 0) {
        ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();
        view->plan = nullptr;
        view->node = *dst;
        if (state.mode.load(std::memory_order_relaxed) != GGML_MOE_PREFETCH_MODE_CACHE) {
            return i;
        }
        std::shared_lock<std::shared_mutex> lock(state.plans_mutex);
        for (const ggml_moe_plan * plan : state.plans) {
            if (std::find(plan->nodes.begin(), plan->nodes.end(), view->node) != plan->nodes.end()) {
                view->plan    = plan;
                view->dst     = *view->node;
                view->weights = *view->node->src[0];
                view->dst.src[0] = &view->weights;
                *dst = &view->dst;
                break;
            }
        }
    }
    if (view->plan == nullptr) {
        return i;
    }

    // the announcing thread keeps the plan until all threads have left the group
    const ggml_moe_plan & plan = *(const ggml_moe_plan *) view->plan;
    const int id = plan.order[i];
    view->weights.data = view->node->src[0]->data;
    if (i < (int) plan.slots.size()) {
        const size_t part = std::find(plan.nodes.begin(), plan.nodes.end(), view->node) - plan.nodes.begin();
        if (const char * data = plan.cache->wait(plan, part, i)) {
            view->weights.data = (void *) ((uintptr_t) data - id*view->weights.nb[2]);
        }
    }
    return id;
}

//
// loader
//

bool ggml_moe_prefetch_load_allowed(uint64_t n_bytes) {
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();

    if (state.mode.load() == GGML_MOE_PREFETCH_MODE_OFF) {
        return true;
    }

    std::shared_lock<std::shared_mutex> lock(state.mutex);
    bool allowed = state.params.load == 1;
    if (state.params.load == -1) {
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
        /*.base           =*/ (uintptr_t) addr,
        /*.window         =*/ os.read_window(fd),
        /*.resident_known =*/ os.resident_known(fd),
        /*.file           =*/ std::make_shared<ggml_moe_file>(os, fd),
    };

    // the loader's sequential advice doubles the read-ahead of every fault on this file
    if (state.mode.load() >= GGML_MOE_PREFETCH_MODE_HINT) {
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

    // a thread keeps its last selection until its next one: nothing runs any more, or unmapping would be wrong
    {
        std::unique_lock<std::shared_mutex> lock(state.plans_mutex);
        for (auto it = state.plans.begin(); it != state.plans.end();) {
            ggml_moe_plan & plan = **it;
            const uintptr_t begin = plan.layer->parts[0].begin;
            if (cut.begin <= begin && begin < cut.end) {
                plan.cache->finish(plan);
                plan.cache.reset();
                it = state.plans.erase(it);
            } else {
                ++it;
            }
        }
    }

    std::unique_lock<std::shared_mutex> lock(state.mutex);
    if (state.cache) {
        state.cache->remove(cut);
    }
    ggml_moe_cut(state.mappings, cut, [](ggml_moe_mapping & m) -> ggml_moe_range & { return m.range; });
    ggml_moe_cut(state.random,   cut, [](ggml_moe_range   & r) -> ggml_moe_range & { return r; });
    ggml_moe_cut(state.locked,   cut, [](ggml_moe_range   & r) -> ggml_moe_range & { return r; });
    uint64_t n_locked = 0;
    for (const ggml_moe_range & range : state.locked) {
        n_locked += range.size();
    }
    state.counters.values[GGML_MOE_PREFETCH_COUNTER_BYTES_LOCKED] = n_locked;

    auto inside = [&](uintptr_t begin) { return cut.begin <= begin && begin < cut.end; };
    for (auto it = state.layer_index.begin(); it != state.layer_index.end();) {
        it = inside(it->first) ? state.layer_index.erase(it) : std::next(it);
    }
    for (auto * set : { &state.always, &state.uncached }) {
        for (auto it = set->begin(); it != set->end();) {
            it = inside(*it) ? set->erase(it) : std::next(it);
        }
    }
    if (state.mappings.empty()) { // the last model has gone
        state.cache.reset();
        state.cache_needed = false;
        state.bytes_always = 0;
    }
}

//
// control
//

const char * ggml_moe_prefetch_version(void) {
    return GGML_MOE_PREFETCH_VERSION;
}

void ggml_moe_prefetch_get_params(struct ggml_moe_prefetch_params * params) {
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();
    std::shared_lock<std::shared_mutex> lock(state.mutex);
    *params = state.params;
}

bool ggml_moe_prefetch_set_params(const struct ggml_moe_prefetch_params * params) {
    if (!ggml_moe_params_valid(*params)) {
        return false;
    }
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();

    ggml_moe_queue_drop(state);
    std::shared_ptr<ggml_moe_cache> cache;
    {
        std::unique_lock<std::shared_mutex> lock(state.mutex);
        const ggml_moe_os & os = *state.os.load();
        if (params->mode < GGML_MOE_PREFETCH_MODE_HINT) {
            for (const ggml_moe_range & range : state.random) {
                state.check(os.advise_normal(range.begin, range.size()), "madvise(MADV_NORMAL)");
            }
            state.random.clear();
        }
        if (params->mode < GGML_MOE_PREFETCH_MODE_OVERLAP || params->lock_bytes == 0) {
            for (const ggml_moe_range & range : state.locked) {
                state.check(os.unlock(range.begin, range.size()), "munlock");
            }
            state.locked.clear();
            state.counters.values[GGML_MOE_PREFETCH_COUNTER_BYTES_LOCKED] = 0;
        }
        if (params->mode != GGML_MOE_PREFETCH_MODE_CACHE) {
            cache = std::move(state.cache); // selections under way keep it until they end
            state.cache.reset();
            state.cache_needed = false;
            state.uncached.clear();
            state.counters.values[GGML_MOE_PREFETCH_COUNTER_CACHE_BUDGET] = 0;
        }
        state.budget_ns = 0;
        state.n_clean   = 0;
        state.params    = *params;
        state.wide      = params->wide;
        state.mode      = params->mode;
    }
    return true;
}

bool ggml_moe_prefetch_set_mode(enum ggml_moe_prefetch_mode mode) {
    ggml_moe_prefetch_params params;
    ggml_moe_prefetch_get_params(&params);
    params.mode = mode;
    return ggml_moe_prefetch_set_params(&params);
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
    return counter < 0 || counter >= GGML_MOE_PREFETCH_COUNTER_COUNT ? 0 : ggml_moe_prefetch_get_state().counters.values[counter].load();
}

void ggml_moe_prefetch_counter_reset(void) {
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();
    for (int i = 0; i < GGML_MOE_PREFETCH_COUNTER_COUNT; i++) {
        if (i != GGML_MOE_PREFETCH_COUNTER_BYTES_LOCKED && i != GGML_MOE_PREFETCH_COUNTER_CACHE_BUDGET) {
            state.counters.values[i].store(0);
        }
    }
    std::unique_lock<std::shared_mutex> lock(state.mutex);
    for (ggml_moe_layer_stats & layer : state.layers) {
        for (auto * value : { &layer.n_selections, &layer.n_experts, &layer.n_missed, &layer.bytes, &layer.n_late,
                &layer.n_in_time, &layer.hint_ns, &layer.wait_ns, &layer.read_ns, &layer.total_ns }) {
            value->store(0);
        }
    }
}

int ggml_moe_prefetch_layer_count(void) {
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();
    std::shared_lock<std::shared_mutex> lock(state.mutex);
    return (int) state.layers.size();
}

bool ggml_moe_prefetch_layer_get(int i, struct ggml_moe_prefetch_layer * layer) {
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();
    std::shared_lock<std::shared_mutex> lock(state.mutex);
    if (i < 0 || (size_t) i >= state.layers.size()) {
        return false;
    }
    const ggml_moe_layer_stats & stats = state.layers[i];
    *layer = {};
    memcpy(layer->name, stats.name, sizeof(layer->name));
    layer->n_selections = stats.n_selections;
    layer->n_experts    = stats.n_experts;
    layer->n_missed     = stats.n_missed;
    layer->bytes        = stats.bytes;
    layer->n_late       = stats.n_late;
    layer->n_in_time    = stats.n_in_time;
    layer->hint_ns      = stats.hint_ns;
    layer->wait_ns      = stats.wait_ns;
    layer->read_ns      = stats.read_ns;
    layer->total_ns     = stats.total_ns;
    return true;
}

void ggml_moe_prefetch_set_os(const ggml_moe_os * os) {
    ggml_moe_prefetch_get_state().os.store(os ? os : ggml_moe_os_native());
}
