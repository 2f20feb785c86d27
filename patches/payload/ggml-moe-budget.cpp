#include "ggml-moe-budget.h"

#include <algorithm>

void ggml_moe_always_learn(ggml_moe_prefetch_state & state, const ggml_cgraph * cgraph) {
    const auto ranges = ggml_moe_always_used(cgraph, 0, cgraph->n_nodes);
    std::unique_lock<std::shared_mutex> lock(state.mutex);
    for (const ggml_moe_range & range : ranges) {
        if (ggml_moe_find_mapping(state, range)) {
            state.always[range.begin] = range.size();
        }
    }
}

// with the state's mutex held: of always used weights, bytes that are not locked; what is locked is not free
static uint64_t ggml_moe_always_bytes(const ggml_moe_prefetch_state & state) {
    uint64_t n = 0;
    for (const auto & range : state.always) {
        n += range.second;
    }
    return n - std::min<uint64_t>(n, state.counters.values[GGML_MOE_PREFETCH_COUNTER_BYTES_LOCKED]);
}

// with the state's mutex held: bytes of all files
static uint64_t ggml_moe_mapped_bytes(const ggml_moe_prefetch_state & state) {
    uint64_t n = 0;
    for (const ggml_moe_mapping & mapping : state.mappings) {
        n += mapping.range.size();
    }
    return n;
}

// for what is to come: a library or a device's driver takes memory at its first use, faster than it is looked at here
static uint64_t ggml_moe_margin(uint64_t spare) {
    return std::max<uint64_t>(64*1024*1024, spare/32);
}

// How much the system keeps for itself is not known: too little was left when always used weights are read again and
// again. Once is somebody else's doing. True: the budget is to be smaller by one more step
static bool ggml_moe_cache_give_way(ggml_moe_prefetch_state & state, uint64_t now, uint64_t tolerated) {
    const uint64_t window     = 500*1000*1000; // nanoseconds
    const uint32_t n_patience = 600;           // windows until a step is taken back

    ggml_moe_pushed_out & pushed_out = state.pushed_out;
    if (!state.cache_needed || state.cache_filling) {
        pushed_out.absent = 0;
        pushed_out.begin  = now;
        return false;
    }
    if (now < pushed_out.begin + window) {
        return false;
    }
    const bool some = pushed_out.absent.exchange(0) > tolerated;
    pushed_out.begin  = now;
    pushed_out.n_lost = some ? pushed_out.n_lost + 1 : 0;
    pushed_out.n_kept = some ? 0 : pushed_out.n_kept + 1;
    if (pushed_out.n_lost == 2) {
        pushed_out.n_lost = 0;
        pushed_out.n_steps++;
        return true;
    }
    if (pushed_out.n_kept == n_patience) {
        pushed_out.n_kept   = 0;
        pushed_out.n_steps -= pushed_out.n_steps > 0;
    }
    return false;
}

// All memory that nobody else needs: not the process, not its always used weights, and a margin.
void ggml_moe_cache_follow(ggml_moe_prefetch_state & state, const ggml_moe_os & os) {
    // while it fills, others may be taking memory too
    const uint64_t now  = ggml_moe_now_ns();
    const uint64_t last = state.budget_ns;
    if (last != 0 && now - last < (state.cache_filling ? 10 : 100)*1000*1000) {
        return;
    }
    state.budget_ns = now;

    // it takes the kernel some time to tell, and graphs go on meanwhile
    const uint64_t free      = os.memory_spare();
    const uint64_t available = os.memory_available();

    std::unique_lock<std::shared_mutex> lock(state.mutex);
    if (!state.cache) {
        return;
    }
    uint64_t budget = state.params.cache_bytes;
    bool     lost   = false;
    if (budget == 0) {
        const uint64_t spare  = free + state.cache->bytes_filled();
        const uint64_t always = ggml_moe_always_bytes(state);
        // always used weights can give way for a moment, but with those on a device nothing can
        const uint64_t margin = ggml_moe_margin(spare);
        budget = spare - std::min(spare, always + (always < margin ? margin : margin/2));

        lost = ggml_moe_cache_give_way(state, now, margin/8);
        budget -= std::min(budget, std::min(state.pushed_out.n_steps*margin/2, spare/4));
    }
    budget -= std::min<uint64_t>(budget, state.copy_bytes); // which the page cache holds until it is copied

    // layers become known graph by graph when others run elsewhere: the files tell at once that not all can stay
    state.cache_needed = state.cache_needed || budget < state.cache->bytes_full() ||
        (state.params.cache_bytes == 0 && available != 0 && ggml_moe_mapped_bytes(state) > available);

    auto & counter = state.counters.values[GGML_MOE_PREFETCH_COUNTER_CACHE_BUDGET];
    const uint64_t before = counter;
    const uint64_t change = budget > before ? budget - before : before - budget;
    if (change > before/64 || lost) { // smaller changes are noise
        counter = budget;
        state.cache->set_budget(budget);
    }
    const uint64_t most = std::min<uint64_t>(counter, state.cache->bytes_full());
    state.cache_filling = state.cache_needed && state.params.cache_bytes == 0 && state.cache->bytes_filled() < most - most/32;
}

void ggml_moe_pages_follow(ggml_moe_prefetch_state & state, const ggml_moe_os & os, ggml_moe_pages & pages) {
    const uint64_t now  = ggml_moe_now_ns();
    const uint64_t last = pages.budget_ns;
    // by the thread that computes, so seldom: the page cache gives way by itself meanwhile
    if (last != 0 && now - last < 500*1000*1000) {
        return;
    }
    pages.budget_ns = now;

    const uint64_t spare = os.memory_spare();

    std::shared_lock<std::shared_mutex> lock(state.mutex);
    if (state.pages.get() != &pages) {
        return; // the mode was changed meanwhile
    }
    uint64_t budget = state.params.cache_bytes;
    if (budget == 0 && spare != 0) {
        const uint64_t held = ggml_moe_always_bytes(state) + ggml_moe_margin(spare)/2;
        budget = std::max<uint64_t>(1, spare - std::min(spare, held));
    }
    if (budget == 0 || budget >= ggml_moe_mapped_bytes(state)) {
        budget = UINT64_MAX;
    }
    const uint64_t before = pages.budget;
    const uint64_t change = budget > before ? budget - before : before - budget;
    if (change > before/64) { // smaller changes are noise
        pages.budget = budget;
        state.counters.values[GGML_MOE_PREFETCH_COUNTER_CACHE_BUDGET] = budget == UINT64_MAX ? 0 : budget;
    }
}
