#include "ggml-moe-state.h"
#include "ggml-moe-hint.h"
#include "ggml-moe-prefetch-impl.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#if !defined(_WIN32)
#    include <pthread.h>
#endif

#define GGML_MOE_PREFETCH_VERSION "4"

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
    "copies",
    "slices",
    "calls",
    "bytes_hinted",
    "bytes_resident",
    "bytes_always",
    "bytes_locked",
    "bytes_dropped",
    "cache_budget",
    "experts_resident",
    "experts_missed",
    "experts_ahead",
    "experts_ahead_unused",
    "experts_foreseen",
    "experts_foreseen_right",
    "experts_overflow",
    "evicted",
    "reads",
    "reads_in_time",
    "reads_late",
    "bytes_read",
    "bytes_copied",
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
        params.half_life >=  1 && params.half_life <= 10000 &&
        params.foresee   >=  0 && params.foresee   <= 1 &&
        params.wide      >=  1 && params.wide      <= 101;
}

static void ggml_moe_params_default(ggml_moe_prefetch_params & params) {
    params = {
        /*.size        =*/ sizeof(params),
        /*.mode        =*/ GGML_MOE_PREFETCH_MODE_OFF,
        /*.load        =*/ -1,
        /*.cache_bytes =*/ 0,
        /*.lock_bytes  =*/ 0,
        /*.n_readers   =*/ 0,
        /*.half_life   =*/ 24,
        /*.foresee     =*/ 1,
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
    auto choice = [](const char * text, int32_t & value) {
        value = strcmp(text, "on") == 0 ? 1 : strcmp(text, "off") == 0 ? 0 : strcmp(text, "auto") == 0 ? -1 : 2;
        return value < 2;
    };
    set("MOE_MADV_LOAD", [&](const char * text, ggml_moe_prefetch_params & p) { return choice(text, p.load); });
    set("MOE_MADV_CACHE_MIB", [&](const char * text, ggml_moe_prefetch_params & p) { return number(text, p.cache_bytes, mib); });
    set("MOE_MADV_LOCK_MIB",  [&](const char * text, ggml_moe_prefetch_params & p) { return number(text, p.lock_bytes,  mib); });
    set("MOE_MADV_READERS",   [&](const char * text, ggml_moe_prefetch_params & p) { return number(text, p.n_readers,     1); });
    set("MOE_MADV_HALF_LIFE", [&](const char * text, ggml_moe_prefetch_params & p) { return number(text, p.half_life,     1); });
    set("MOE_MADV_FORESEE",   [&](const char * text, ggml_moe_prefetch_params & p) { return choice(text, p.foresee); });
    set("MOE_MADV_WIDE",      [&](const char * text, ggml_moe_prefetch_params & p) { return number(text, p.wide,          1); });
}

//
// state
//

ggml_moe_prefetch_state::ggml_moe_prefetch_state() {
    ggml_moe_params_default(params);
    ggml_moe_params_from_env(params);
    mode = params.mode;
    wide = params.wide;
}

void ggml_moe_prefetch_state::check(int result, const char * what) {
    if (result == 0) {
        return;
    }
    count(GGML_MOE_PREFETCH_COUNTER_ERRORS);
    counters.values[GGML_MOE_PREFETCH_COUNTER_LAST_ERRNO].store((uint64_t) -result, std::memory_order_relaxed);
    if (!error_reported.exchange(true)) {
        GGML_LOG_WARN("%s: %s failed: %s (further failures are only counted)\n", "ggml_moe_prefetch", what, strerror(-result));
    }
}

// never destroyed: a model that outlives static destruction still unregisters its mappings
static std::atomic<ggml_moe_prefetch_state *> & ggml_moe_prefetch_state_ptr() {
    static std::atomic<ggml_moe_prefetch_state *> ptr = [] {
#if !defined(_WIN32)
        // Threads and the locks they hold do not follow into a child: it gets a state of its own that knows nothing,
        // and goes on with page faults.
        pthread_atfork(nullptr, nullptr, [] {
            auto * fresh = new ggml_moe_prefetch_state;
            fresh->params.mode = GGML_MOE_PREFETCH_MODE_OFF;
            fresh->mode        = GGML_MOE_PREFETCH_MODE_OFF;
            ggml_moe_prefetch_state_ptr() = fresh;
        });
#endif
        return new ggml_moe_prefetch_state;
    }();
    return ptr;
}

ggml_moe_prefetch_state & ggml_moe_prefetch_get_state() {
    return *ggml_moe_prefetch_state_ptr().load(std::memory_order_acquire);
}

const ggml_moe_mapping * ggml_moe_find_mapping(const ggml_moe_prefetch_state & state, ggml_moe_range range) {
    for (const auto & mapping : state.mappings) {
        if (mapping.range.contains(range)) {
            return &mapping;
        }
    }
    return nullptr;
}

static void ggml_moe_layer_reset(ggml_moe_layer_stats & layer) {
    for (auto * value : { &layer.n_selections, &layer.n_experts, &layer.n_missed, &layer.bytes, &layer.n_late,
            &layer.n_in_time, &layer.hint_ns, &layer.wait_ns, &layer.read_ns, &layer.total_ns }) {
        value->store(0);
    }
}

ggml_moe_layer_stats & ggml_moe_layer_of(ggml_moe_prefetch_state & state, const ggml_tensor * first) {
    const uintptr_t begin = (uintptr_t) first->data;
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
    size_t index = state.layers.size();
    if (state.layers_unused.empty()) {
        state.layers.emplace_back();
    } else {
        // the lowest, so that a model that is loaded again has its layers in their order
        const auto lowest = std::min_element(state.layers_unused.begin(), state.layers_unused.end());
        index = *lowest;
        state.layers_unused.erase(lowest);
        ggml_moe_layer_reset(state.layers[index]);
    }
    state.layer_index[begin] = index;
    state.n_layers = state.layer_index.size();
    memcpy(state.layers[index].name, first->name, sizeof(state.layers[index].name));
    return state.layers[index];
}

//
// control
//

const char * ggml_moe_prefetch_version(void) {
    return GGML_MOE_PREFETCH_VERSION;
}

bool ggml_moe_prefetch_default_params(struct ggml_moe_prefetch_params * params, size_t size) {
    if (size != sizeof(*params)) {
        return false;
    }
    ggml_moe_params_default(*params);
    return true;
}

bool ggml_moe_prefetch_get_params(struct ggml_moe_prefetch_params * params, size_t size) {
    if (size != sizeof(*params)) {
        return false;
    }
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();
    std::shared_lock<std::shared_mutex> lock(state.mutex);
    *params = state.params;
    return true;
}

static bool ggml_moe_params_change(const std::function<void(ggml_moe_prefetch_params &)> & change) {
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();

    std::vector<std::pair<int, const char *>> results;
    {
        std::lock_guard<std::mutex> retiring(state.retiring_mutex);
        std::shared_ptr<ggml_moe_cache> cache;
        {
            std::unique_lock<std::shared_mutex> lock(state.mutex);
            ggml_moe_prefetch_params params = state.params;
            change(params);
            if (!ggml_moe_params_valid(params)) {
                return false;
            }
            ggml_moe_queue_drop(state);
            const ggml_moe_os & os = *state.os.load();
            if (params.mode < GGML_MOE_PREFETCH_MODE_HINT) {
                for (const ggml_moe_range & range : state.random) {
                    results.push_back({ os.advise_normal(range.begin, range.size()), "madvise(MADV_NORMAL)" });
                }
                state.random.clear();
            }
            if (params.mode < GGML_MOE_PREFETCH_MODE_OVERLAP || params.lock_bytes == 0) {
                for (const ggml_moe_range & range : state.locked) {
                    results.push_back({ os.unlock(range.begin, range.size()), "munlock" });
                }
                state.locked.clear();
                state.counters.values[GGML_MOE_PREFETCH_COUNTER_BYTES_LOCKED] = 0;
            }
            if (params.mode != GGML_MOE_PREFETCH_MODE_CACHE) {
                cache = std::move(state.cache);
                state.cache_needed = false;
                state.uncached.clear();
                state.pushed_out.reset();
                state.counters.values[GGML_MOE_PREFETCH_COUNTER_CACHE_BUDGET] = 0;
            }
            state.pages.reset();
            state.budget_ns    = 0;
            state.n_clean      = 0;
            state.lock_refused = false;
            state.params    = params;
            state.wide      = params.wide;
            state.mode      = params.mode;
        }
        if (cache) { // selections under way keep it until they end, its readers must not keep a model that has none
            cache->stop_ahead();
        }
    }
    for (const auto & result : results) { // without the lock: who receives the message may ask for the settings
        state.check(result.first, result.second);
    }
    return true;
}

bool ggml_moe_prefetch_set_params(const struct ggml_moe_prefetch_params * params) {
    return params->size == sizeof(*params) && ggml_moe_params_change([&](ggml_moe_prefetch_params & current) { current = *params; });
}

bool ggml_moe_prefetch_set_mode(enum ggml_moe_prefetch_mode mode) {
    return ggml_moe_params_change([value = (int32_t) mode](ggml_moe_prefetch_params & current) { current.mode = value; });
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
        ggml_moe_layer_reset(layer);
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
