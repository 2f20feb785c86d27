#include "ggml-moe-budget.h"
#include "ggml-moe-hint.h"
#include "ggml-moe-state.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <functional>
#include <numeric>
#include <thread>

//
// threads
//

// experts that the scheduler copies to another device, which selects and computes there
struct ggml_moe_copied {
    const ggml_tensor * weights; // the original
    const ggml_tensor * ids;
};

// what the announcing thread of a graph remembers from node to node
struct ggml_moe_thread {
    const ggml_cgraph *    cgraph      = nullptr;
    int                    i           = -1;
    ggml_moe_layer_stats * layer       = nullptr; // announced last
    uint64_t               announced   = 0;
    uint64_t               n_faults    = 0;       // of this thread, when it was last asked
    ggml_moe_plan          plan;

    // of a scheduler that is computing: the nodes of all its splits, what it copies, and the originals of copied ids
    ggml_cgraph                                                  whole = {};
    std::vector<ggml_moe_copied>                                 copies;
    size_t                                                       n_queued = 0; // of the copies, from the first one
    std::unordered_map<const ggml_tensor *, const ggml_tensor *> originals;

    ~ggml_moe_thread();

    // the whole graph that a split is part of, or the graph itself; i becomes the index there
    const ggml_cgraph * around(const ggml_cgraph * graph, int & i) {
        const ggml_moe_range all  = { (uintptr_t) whole.nodes, (uintptr_t) (whole.nodes + whole.n_nodes) };
        const ggml_moe_range some = { (uintptr_t) graph->nodes, (uintptr_t) (graph->nodes + graph->n_nodes) };
        if (whole.n_nodes == 0 || !all.contains(some)) {
            return graph;
        }
        i += (int) ((some.begin - all.begin)/sizeof(ggml_tensor *));
        return &whole;
    }

    void forget_schedule() {
        cgraph        = nullptr;
        whole.n_nodes = 0;
        n_queued      = 0;
        copies.clear();
        originals.clear();
    }
};

static thread_local ggml_moe_thread ggml_moe_this_thread;

static bool ggml_moe_plan_has(const ggml_moe_plan & plan, const ggml_tensor * node) {
    return std::find(plan.nodes.begin(), plan.nodes.end(), node) != plan.nodes.end();
}

// with the list's mutex held; the cache comes back so that it can end without it
static std::shared_ptr<ggml_moe_cache> ggml_moe_plan_unlist(ggml_moe_prefetch_state & state, ggml_moe_plan & plan) {
    plan.cache->finish(plan);
    state.plans.erase(std::remove(state.plans.begin(), state.plans.end(), &plan), state.plans.end());
    state.n_plans = state.plans.size();
    return std::move(plan.cache);
}

static void ggml_moe_plan_end(ggml_moe_plan & plan) {
    if (plan.state == nullptr) {
        return;
    }
    if (plan.state != &ggml_moe_prefetch_get_state()) { // in a child: its threads and locks are the parent's
        new std::shared_ptr<ggml_moe_cache>(std::move(plan.cache));
        plan.state = nullptr;
        return;
    }
    std::shared_ptr<ggml_moe_cache> cache; // its end, if this was the last to use it, joins threads
    std::unique_lock<std::shared_mutex> lock(plan.state->plans_mutex);
    if (plan.cache) { // else another thread ended it
        cache = ggml_moe_plan_unlist(*plan.state, plan);
    }
}

ggml_moe_thread::~ggml_moe_thread() {
    ggml_moe_plan_end(plan);
}

// The matmuls of a group that the cache knows by their weights are sent to it; returns the others, which read the
// mapping: adapters of a LoRA share the ids, and a graph that is run in pieces shows parts of a group.
static ggml_moe_group ggml_moe_plan_begin(ggml_moe_prefetch_state & state, ggml_moe_plan & plan,
        const std::shared_ptr<ggml_moe_cache> & cache, ggml_moe_cache_layer & layer, const ggml_moe_group & group) {
    ggml_moe_group others;

    plan.nodes.assign(layer.parts.size(), nullptr);
    for (const ggml_tensor * node : group.nodes) {
        const ggml_tensor * weights = node->src[0];
        size_t part = 0;
        while (part < layer.parts.size() && (plan.nodes[part] != nullptr || layer.parts[part].begin != (uintptr_t) weights->data ||
                layer.parts[part].slice != weights->nb[2] || (int64_t) layer.slots.size() != weights->ne[2])) {
            part++;
        }
        if (part < layer.parts.size()) {
            plan.nodes[part] = node;
        } else {
            others.nodes.push_back(node);
        }
    }
    plan.cache = cache;
    plan.layer = &layer;
    plan.owner = std::this_thread::get_id();
    plan.state = &state;
    return others;
}

//
// cache
//

static int ggml_moe_cache_parts(const ggml_moe_prefetch_state & state, const ggml_moe_group & group, std::vector<ggml_moe_cache_part> & parts) {
    for (const ggml_tensor * node : group.nodes) {
        const ggml_tensor *  weights = node->src[0];
        const ggml_moe_range range   = ggml_moe_tensor_range(weights);
        const ggml_moe_mapping * mapping = ggml_moe_find_mapping(state, range);
        if (mapping == nullptr && parts.empty()) {
            return -ENXIO;
        }
        if (mapping == nullptr || weights->ne[2] != group.n_expert() || weights->ne[3] != 1 ||
            std::any_of(parts.begin(), parts.end(), [&](const auto & part) { return part.begin == range.begin; })) {
            continue; // its matmul reads where it always did
        }
        if (mapping->file->error != 0) {
            return mapping->file->error;
        }
        parts.push_back({ range.begin, weights->nb[2], mapping->file->handle, range.begin - mapping->whole.begin, 0, mapping->resident_known });
    }
    return 0;
}

// layers and weights of a graph that are not known yet
static void ggml_moe_cache_learn(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_moe_thread & thread,
        const ggml_cgraph * cgraph) {
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
        const ggml_tensor *    first = group.nodes[0]->src[0];
        const uintptr_t        begin = (uintptr_t) first->data;
        ggml_moe_layer_stats & stats = ggml_moe_layer_of(state, first);
        const auto original = thread.originals.find(group.ids());
        std::shared_ptr<const ggml_moe_router> router =
            ggml_moe_router::of(original != thread.originals.end() ? original->second : group.ids());

        std::unique_lock<std::shared_mutex> lock(state.mutex);
        if (state.mode.load() != GGML_MOE_PREFETCH_MODE_CACHE || state.uncached.count(begin)) {
            continue;
        }
        if (!state.cache) {
            // one reader keeps most disks busy while it is not waiting for a core
            const int n_cores   = (int) std::thread::hardware_concurrency();
            const int n_readers = state.params.n_readers > 0 ? state.params.n_readers : std::max(2, std::min(4, n_cores/2));
            // memory can run short while no graph runs, as when another context is made
            state.cache = std::make_shared<ggml_moe_cache>(os, state.counters, n_readers, (float) state.params.half_life,
                [&state, &os] {
                    try {
                        ggml_moe_cache_follow(state, os);
                    } catch (const std::exception &) { // short of memory: the budget stays
                        state.count(GGML_MOE_PREFETCH_COUNTER_ERRORS);
                    }
                });
            state.counters.values[GGML_MOE_PREFETCH_COUNTER_CACHE_BUDGET] = 0;
        }
        if (state.cache->find(begin)) {
            continue;
        }
        std::vector<ggml_moe_cache_part> parts;
        int result = ggml_moe_cache_parts(state, group, parts);
        if (result == 0 && state.cache->n_readers() == 0) {
            result = -EAGAIN;
        }
        if (result == 0) {
            result = state.cache->add(parts, group.n_expert(), state.layer_index[begin], stats);
        }
        if (result == 0) {
            state.budget_ns      = 0;
            state.routers[begin] = router && router->n_expert == group.n_expert() ? std::move(router) : nullptr;
            continue;
        }
        const bool is_first = state.uncached.empty();
        state.uncached.insert(begin);
        lock.unlock(); // who receives the message may ask for the settings
        if (is_first) {
            GGML_LOG_WARN("%s: %s cannot be cached: %s; such layers run as in mode overlap\n", "ggml_moe_prefetch",
                first->name, result == -ENXIO ? "it is not mapped from a file" : strerror(-result));
        }
    }

    ggml_moe_always_learn(state, cgraph);
}

static std::shared_ptr<ggml_moe_cache> ggml_moe_cache_of(ggml_moe_prefetch_state & state) {
    std::shared_lock<std::shared_mutex> lock(state.mutex);
    return state.cache_needed ? state.cache : nullptr;
}

//
// page cache
//

// NULL when there is nothing to drop: not in these modes, or everything fits
static std::shared_ptr<ggml_moe_pages> ggml_moe_pages_of(ggml_moe_prefetch_state & state, const ggml_moe_os & os) {
    std::shared_ptr<ggml_moe_pages> pages;
    {
        std::shared_lock<std::shared_mutex> lock(state.mutex);
        pages = state.pages;
    }
    if (!pages) {
        std::unique_lock<std::shared_mutex> lock(state.mutex);
        const int mode = state.mode.load(); // it may have been switched since the node hook looked
        if (mode != GGML_MOE_PREFETCH_MODE_HINT && mode != GGML_MOE_PREFETCH_MODE_OVERLAP) {
            return nullptr;
        }
        if (!state.pages) {
            state.pages = std::make_shared<ggml_moe_pages>((float) state.params.half_life);
        }
        pages = state.pages;
    }
    ggml_moe_pages_follow(state, os, *pages);
    return pages->budget == UINT64_MAX ? nullptr : pages;
}

// what of the matrices can be dropped: adapters are not mapped, and some files are kept in memory
static std::vector<ggml_moe_pages_part> ggml_moe_pages_parts(ggml_moe_prefetch_state & state, const ggml_moe_matrices & matrices) {
    std::vector<ggml_moe_pages_part> parts;
    std::shared_lock<std::shared_mutex> lock(state.mutex);
    for (const ggml_tensor * weights : matrices) {
        const ggml_moe_mapping * mapping = ggml_moe_find_mapping(state, ggml_moe_tensor_range(weights));
        if (weights->ne[2] == matrices[0]->ne[2] && mapping != nullptr && mapping->file->error == 0 && !mapping->file->kept) {
            parts.push_back({ (uintptr_t) weights->data, weights->nb[2] });
        }
    }
    return parts;
}

// experts have been asked for; while the disk reads, others go that are worth less. cgraph: that
// computes them here, or NULL
static void ggml_moe_pages_select(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_cgraph * cgraph,
        const ggml_moe_matrices & matrices, const ggml_moe_ids & ids, bool prompt) {
    const auto pages = ggml_moe_pages_of(state, os);
    const auto parts = pages ? ggml_moe_pages_parts(state, matrices) : std::vector<ggml_moe_pages_part>();
    if (parts.empty()) {
        return;
    }
    if (cgraph != nullptr && pages->learn(parts, matrices[0]->ne[2])) {
        ggml_moe_always_learn(state, cgraph);
    }
    std::vector<ggml_moe_range> dropped;
    pages->select(parts, matrices[0]->ne[2], ids, prompt, dropped);
    if (!dropped.empty()) {
        state.n_clean = 0; // no fault tells of them
        ggml_moe_drop(state, os, dropped);
    }
}

static void ggml_moe_pages_ahead(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_moe_matrices & matrices,
        const std::vector<int32_t> & experts) {
    const auto pages = ggml_moe_pages_of(state, os);
    const auto parts = pages ? ggml_moe_pages_parts(state, matrices) : std::vector<ggml_moe_pages_part>();
    if (!parts.empty()) {
        pages->ahead(parts, matrices[0]->ne[2], experts);
    }
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

static std::vector<int32_t> ggml_moe_all_experts(int64_t n_expert) {
    std::vector<int32_t> ids(n_expert);
    std::iota(ids.begin(), ids.end(), 0);
    return ids;
}

// of two layers: the one that is copied and the one that is read meanwhile
static uint64_t ggml_moe_copy_bytes(const std::vector<ggml_moe_copied> & copies) {
    uint64_t most  = 0;
    uint64_t layer = 0;
    for (size_t k = 0; k < copies.size(); k++) {
        layer = (k > 0 && copies[k - 1].ids == copies[k].ids ? layer : 0) + ggml_nbytes(copies[k].weights);
        most  = std::max(most, layer);
    }
    return 2*most;
}

static void ggml_moe_graph_begin(ggml_moe_prefetch_state & state, const ggml_moe_os & os, ggml_moe_thread & thread,
        const ggml_cgraph * cgraph, int mode) {
    ggml_moe_layer_end(thread);
    ggml_moe_plan_end(thread.plan);

    if (mode < GGML_MOE_PREFETCH_MODE_HINT) {
        return;
    }
    const int first = ggml_moe_group_next(cgraph, 0);
    ggml_moe_hint_rows(state, os, cgraph, first);
    if (mode < GGML_MOE_PREFETCH_MODE_OVERLAP) {
        return;
    }
    if (!ggml_moe_all_resident(state, os, thread.n_faults) && first < cgraph->n_nodes) {
        ggml_moe_hint_always(state, os, cgraph, 0, first);
    }
    std::shared_ptr<ggml_moe_cache> cache;
    if (mode == GGML_MOE_PREFETCH_MODE_CACHE) {
        const uint64_t copy_bytes = ggml_moe_copy_bytes(thread.copies);
        if (state.copy_bytes.exchange(copy_bytes) != copy_bytes) {
            state.budget_ns = 0;
        }
        ggml_moe_cache_learn(state, os, thread, cgraph);
        if (state.budget_ns == 0 || state.cache_filling) { // else a reader does
            ggml_moe_cache_follow(state, os);
        }
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
        ggml_moe_cache_layer * layer = cache ? cache->find((uintptr_t) group.nodes[0]->src[0]->data) : nullptr;
        if (layer != nullptr) {
            cache->ahead(layer, ids.distinct);
        } else {
            ggml_moe_hint_random(state, os, group.weights());
            ggml_moe_hint_experts(state, os, group.weights(), ids.distinct);
            ggml_moe_pages_ahead(state, os, group.weights(), ids.distinct);
        }
    }
}

// has the next layer's selection foreseen from this one's input
static void ggml_moe_foresee(ggml_moe_prefetch_state & state, ggml_moe_cache & cache, const ggml_moe_group & group, const ggml_moe_group & after) {
    const uintptr_t     begin = (uintptr_t) after.nodes[0]->src[0]->data;
    const ggml_tensor * input = group.nodes[0]->src[1]; // [n_in, 1, n_tokens]

    std::shared_ptr<const ggml_moe_router> router;
    {
        std::shared_lock<std::shared_mutex> lock(state.mutex);
        const auto it = state.routers.find(begin);
        if (state.params.foresee == 0 || it == state.routers.end() || it->second == nullptr) {
            return;
        }
        router = it->second;
    }
    if (input == nullptr || input->type != GGML_TYPE_F32 || input->ne[0] != router->n_in || input->ne[1] != 1 ||
            !ggml_moe_in_host_memory(input)) {
        return;
    }
    std::vector<float> x(router->n_in*input->ne[2]);
    for (int64_t t = 0; t < input->ne[2]; t++) {
        memcpy(x.data() + t*router->n_in, (const char *) input->data + t*input->nb[2], router->n_in*sizeof(float));
    }
    cache.foresee(begin, [router, x = std::move(x)] { return router->select(x); });
}

static void ggml_moe_announce(ggml_moe_prefetch_state & state, const ggml_moe_os & os, ggml_moe_thread & thread,
        const ggml_cgraph * cgraph, int i, int mode) {
    ggml_moe_group group = ggml_moe_group_at(cgraph, i);
    if (group.nodes.empty()) {
        return;
    }
    ggml_moe_layer_end(thread);
    ggml_moe_plan_end(thread.plan);

    static thread_local ggml_moe_ids         ids;
    static thread_local std::vector<int32_t> rest;

    ggml_moe_ids_read(group.ids(), group.n_expert(), ids);
    state.count(GGML_MOE_PREFETCH_COUNTER_GROUPS);
    state.count(GGML_MOE_PREFETCH_COUNTER_IDS_IGNORED, ids.n_ignored);

    ggml_moe_layer_stats & stats = ggml_moe_layer_of(state, group.nodes[0]->src[0]);
    thread.layer     = &stats;
    thread.announced = ggml_moe_now_ns();
    stats.n_selections++;
    stats.n_experts += ids.distinct.size();

    if (mode == GGML_MOE_PREFETCH_MODE_CACHE && state.cache_filling) {
        ggml_moe_cache_follow(state, os);
    }
    const auto cache = mode == GGML_MOE_PREFETCH_MODE_CACHE ? ggml_moe_cache_of(state) : nullptr;
    ggml_moe_cache_layer * layer = cache ? cache->find((uintptr_t) group.nodes[0]->src[0]->data) : nullptr;

    std::vector<std::shared_ptr<ggml_moe_cache>> over;
    if (state.n_plans > 0) {
        // a node is in one running graph: another thread's plan for it is over, its graph's memory used again
        std::unique_lock<std::shared_mutex> lock(state.plans_mutex);
        for (size_t k = state.plans.size(); k-- > 0;) {
            ggml_moe_plan & old = *state.plans[k];
            if (std::any_of(group.nodes.begin(), group.nodes.end(), [&](const auto * n) { return ggml_moe_plan_has(old, n); })) {
                over.push_back(ggml_moe_plan_unlist(state, old));
            }
        }
    }

    ggml_moe_group others;
    if (layer != nullptr) {
        std::unique_lock<std::shared_mutex> lock(state.plans_mutex);
        others = ggml_moe_plan_begin(state, thread.plan, cache, *layer, group);
        stats.n_missed += cache->begin(thread.plan, ids, rest);
        state.count(GGML_MOE_PREFETCH_COUNTER_EXPERTS_OVERFLOW, rest.size());
        state.plans.push_back(&thread.plan);
        state.n_plans = state.plans.size();
        lock.unlock();
    } else {
        rest = ids.distinct;
    }

    const bool all_resident = ggml_moe_all_resident(state, os, thread.n_faults);
    // what the cache has no memory for has never been looked at
    if (!rest.empty() && (!all_resident || layer != nullptr)) {
        ggml_moe_hint_random(state, os, group.weights());
        const size_t n_hinted = ggml_moe_hint_experts(state, os, group.weights(), rest);
        stats.bytes += n_hinted;
        ggml_moe_saw(state, n_hinted);
    }
    if (!others.nodes.empty()) {
        stats.bytes += ggml_moe_hint_experts(state, os, others.weights(), ids.distinct);
    }

    if (mode >= GGML_MOE_PREFETCH_MODE_OVERLAP) {
        const int next = ggml_moe_group_next(cgraph, i + 1);
        const size_t n_absent = all_resident ? 0 : ggml_moe_hint_always(state, os, cgraph, i, next);
        if (layer != nullptr && rest.empty() && ids.rows.size() < GGML_MOE_N_PROMPT) {
            state.pushed_out.absent += n_absent; // by decode; a prompt is read through the page cache where it needs more
        }

        const bool wide = (int64_t) ids.distinct.size()*100 >= group.n_expert()*state.wide;
        if (next < cgraph->n_nodes) {
            const ggml_moe_group after = ggml_moe_group_at(cgraph, next);
            ggml_moe_cache_layer * layer_after = cache ? cache->find((uintptr_t) after.nodes[0]->src[0]->data) : nullptr;
            if (wide && layer_after != nullptr) {
                cache->ahead(layer_after, ggml_moe_all_experts(after.n_expert()));
            } else if (wide && !all_resident) {
                const auto all = ggml_moe_all_experts(after.n_expert());
                ggml_moe_hint_random(state, os, after.weights());
                if (ggml_moe_queue_push(state, os, after.weights(), all)) {
                    ggml_moe_pages_ahead(state, os, after.weights(), all);
                }
            } else if (layer_after != nullptr && ids.rows.size() < GGML_MOE_N_PROMPT && cgraph == &thread.whole) {
                // within a schedule only, whose end waits for guesses: they read weights of the model
                ggml_moe_foresee(state, *cache, group, after);
            }
        }
    }
    if (mode != GGML_MOE_PREFETCH_MODE_CACHE) {
        ggml_moe_pages_select(state, os, cgraph, group.weights(), ids, ids.rows.size() >= GGML_MOE_N_PROMPT);
    }
    stats.hint_ns += ggml_moe_now_ns() - thread.announced;
}

// No exception crosses a hook: short of memory or threads, the payload is off and page faults do the work.
template <typename F>
static void ggml_moe_guard(F && f) noexcept {
    try {
        f();
    } catch (const std::exception & e) {
        ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();
        state.mode = GGML_MOE_PREFETCH_MODE_OFF;
        try {
            ggml_moe_prefetch_set_mode(GGML_MOE_PREFETCH_MODE_OFF); // advice and memory given back too
        } catch (const std::exception &) {
            // not that either, then
        }
        state.count(GGML_MOE_PREFETCH_COUNTER_ERRORS);
        state.counters.values[GGML_MOE_PREFETCH_COUNTER_LAST_ERRNO] = ENOMEM;
        GGML_LOG_WARN("%s: %s; off from here on\n", "ggml_moe_prefetch", e.what());
    }
}

// true: this is the first that is seen of the graph
static bool ggml_moe_arrive(ggml_moe_thread & thread, const ggml_cgraph * cgraph, int i) {
    const bool begin = thread.cgraph != cgraph || i <= thread.i;
    thread.cgraph = cgraph;
    thread.i      = i;
    return begin;
}

static void ggml_moe_node(const ggml_cgraph * cgraph, int i) {
    ggml_moe_thread         & thread = ggml_moe_this_thread;
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();

    const int mode = state.mode.load(std::memory_order_relaxed);
    if (mode == GGML_MOE_PREFETCH_MODE_OFF) {
        if (state.n_plans.load(std::memory_order_relaxed) > 0) {
            ggml_moe_plan_end(thread.plan); // the last to hold the memory of a cache that was switched off
        }
        return;
    }

    const ggml_moe_os & os    = *state.os.load();
    cgraph = thread.around(cgraph, i);
    const bool          begin = ggml_moe_arrive(thread, cgraph, i);

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

static void ggml_moe_graph_split(const ggml_cgraph * split, ggml_tensor ** inputs, int n_inputs) {
    ggml_moe_thread & thread = ggml_moe_this_thread;
    if (ggml_moe_prefetch_get_state().mode.load(std::memory_order_relaxed) == GGML_MOE_PREFETCH_MODE_OFF || split->n_nodes == 0) {
        return;
    }

    // splits are consecutive views of one graph; were they not, each would be looked at by itself
    if (thread.whole.n_nodes == 0) {
        thread.whole.nodes = split->nodes;
    }
    if (split->nodes == thread.whole.nodes + thread.whole.n_nodes) {
        thread.whole.n_nodes += split->n_nodes;
    }

    const ggml_tensor * node = split->nodes[0];
    for (int k = 0; k < n_inputs; k++) {
        const ggml_tensor * input = inputs[k];
        if (node->op == GGML_OP_MUL_MAT_ID && input->op == GGML_OP_NONE && input->ne[2] > 1 && input != node->src[0] &&
                input->ne[2] == node->src[0]->ne[2] && ggml_moe_in_host_memory(input)) {
            thread.copies.push_back({ input, node->src[2] });
        }
        for (int i = 0; i < split->n_nodes && input->type == GGML_TYPE_I32; i++) {
            const ggml_tensor * ids = ggml_moe_is_expert_matmul(split->nodes[i]) ? split->nodes[i]->src[2] : nullptr;
            if (ids != nullptr && ids != input && ids->op == GGML_OP_NONE && ids->ne[0] == input->ne[0] && ids->ne[1] == input->ne[1]) {
                thread.originals[ids] = input;
            }
        }
    }
}

// the matrices of the layer that starts at copy k
static ggml_moe_matrices ggml_moe_copied_group(const std::vector<ggml_moe_copied> & copies, size_t k) {
    ggml_moe_matrices group;
    for (size_t j = k; j < copies.size() && copies[j].ids == copies[k].ids; j++) {
        group.push_back(copies[j].weights);
    }
    return group;
}

static void ggml_moe_copy(const ggml_tensor * weights, const ggml_tensor * ids_tensor, const int32_t * data) {
    ggml_moe_thread         & thread = ggml_moe_this_thread;
    ggml_moe_prefetch_state & state  = ggml_moe_prefetch_get_state();

    const int mode = state.mode.load(std::memory_order_relaxed);
    if (mode < GGML_MOE_PREFETCH_MODE_HINT) {
        return;
    }
    if (data == nullptr) { // it may be any tensor that goes to the device
        std::shared_lock<std::shared_mutex> lock(state.mutex);
        if (weights->op != GGML_OP_NONE || weights->ne[2] < 2 || !ggml_moe_in_host_memory(weights) ||
                !ggml_moe_find_mapping(state, ggml_moe_tensor_range(weights))) {
            return;
        }
    }
    const ggml_moe_os & os    = *state.os.load();
    const uint64_t      start = ggml_moe_now_ns();

    if (thread.whole.n_nodes > 0 && thread.cgraph == nullptr && ggml_moe_arrive(thread, &thread.whole, -1)) {
        ggml_moe_graph_begin(state, os, thread, &thread.whole, mode);
    }
    static thread_local ggml_moe_ids ids;
    if (data != nullptr) {
        ggml_tensor host = *ids_tensor;
        host.data = (void *) data;
        ggml_moe_ids_read(&host, weights->ne[2], ids);
    } else {
        ids = {};
        ids.distinct = ggml_moe_all_experts(weights->ne[2]);
    }

    ggml_moe_layer_stats & stats = ggml_moe_layer_of(state, weights);
    stats.n_selections++;
    stats.n_experts += ids.distinct.size();
    state.count(GGML_MOE_PREFETCH_COUNTER_COPIES);

    ggml_moe_hint_random(state, os, { weights });
    stats.bytes += ggml_moe_hint_experts(state, os, { weights }, ids.distinct);

    // what is copied after this one, a layer ahead at most
    auto & copies = thread.copies;
    const size_t k = std::find_if(copies.begin(), copies.end(), [&](const auto & c) { return c.weights == weights; }) - copies.begin();
    if (mode >= GGML_MOE_PREFETCH_MODE_OVERLAP && k < copies.size()) {
        const bool wide = (int64_t) ids.distinct.size()*100 >= weights->ne[2]*state.wide;
        for (size_t j = std::max(k + 1, thread.n_queued); j < copies.size() && j <= k + 3; j++) {
            const bool known = copies[j].ids == copies[k].ids;
            if (!known && !wide) {
                break;
            }
            const auto all = ggml_moe_all_experts(copies[j].weights->ne[2]);
            ggml_moe_hint_random(state, os, { copies[j].weights });
            if (!ggml_moe_queue_push(state, os, { copies[j].weights }, known ? ids.distinct : all)) {
                break;
            }
            if (!known && (j == 0 || copies[j - 1].ids != copies[j].ids)) { // the first of the next layer
                ggml_moe_pages_ahead(state, os, ggml_moe_copied_group(copies, j), all);
            }
            thread.n_queued = j + 1;
        }
    }
    if (mode != GGML_MOE_PREFETCH_MODE_CACHE && k < copies.size() && (k == 0 || copies[k - 1].ids != copies[k].ids)) {
        ggml_moe_pages_select(state, os, nullptr, ggml_moe_copied_group(copies, k), ids, true); // the scheduler copies for a prompt
    }
    const uint64_t ns = ggml_moe_now_ns() - start;
    stats.hint_ns += ns;
    state.count(GGML_MOE_PREFETCH_COUNTER_HINT_NS, ns);
}

void ggml_moe_prefetch_graph_begin(void) {
    ggml_moe_guard([] { ggml_moe_this_thread.forget_schedule(); });
}

void ggml_moe_prefetch_graph_split(const struct ggml_cgraph * split, struct ggml_tensor ** inputs, int n_inputs) {
    ggml_moe_guard([&] { ggml_moe_graph_split(split, inputs, n_inputs); });
}

void ggml_moe_prefetch_graph_end(void) {
    ggml_moe_guard([] {
        ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();
        if (const auto cache = state.mode.load() == GGML_MOE_PREFETCH_MODE_CACHE ? ggml_moe_cache_of(state) : nullptr) {
            cache->settle();
        }
        ggml_moe_layer_end(ggml_moe_this_thread);
        ggml_moe_plan_end(ggml_moe_this_thread.plan);
        ggml_moe_this_thread.forget_schedule();
    });
}

void ggml_moe_prefetch_copy(const struct ggml_tensor * weights, const struct ggml_tensor * ids, const int32_t * data) {
    ggml_moe_guard([&] { ggml_moe_copy(weights, ids, data); });
}

void ggml_moe_prefetch_node(const struct ggml_cgraph * cgraph, int i) {
    ggml_moe_guard([&] { ggml_moe_node(cgraph, i); });
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
            if (ggml_moe_plan_has(*plan, view->node)) {
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

    bool allowed = true;
    ggml_moe_guard([&] {
        std::shared_lock<std::shared_mutex> lock(state.mutex);
        const uint64_t available = state.params.load == -1 ? state.os.load()->memory_available() : 0;
        allowed = state.params.load == -1 ? available == 0 || n_bytes <= available : state.params.load == 1;
    });
    if (!allowed) {
        state.count(GGML_MOE_PREFETCH_COUNTER_LOAD_SKIPPED);
    }
    return allowed;
}

// entries of a set or map whose address lies in the range
template <typename T, typename F>
static void ggml_moe_forget(T & items, ggml_moe_range cut, F begin_of) {
    for (auto it = items.begin(); it != items.end();) {
        const uintptr_t begin = begin_of(*it);
        it = cut.begin <= begin && begin < cut.end ? items.erase(it) : std::next(it);
    }
}

// with the state's mutex held: what is known of weights in the range
static void ggml_moe_forget_layers(ggml_moe_prefetch_state & state, ggml_moe_range cut) {
    for (const auto & entry : state.layer_index) {
        if (cut.begin <= entry.first && entry.first < cut.end) {
            state.layers_unused.push_back(entry.second);
        }
    }
    ggml_moe_forget(state.layer_index, cut, [](const auto & entry) { return entry.first; });
    ggml_moe_forget(state.routers,     cut, [](const auto & entry) { return entry.first; });
    ggml_moe_forget(state.always,      cut, [](const auto & entry) { return entry.first; });
    ggml_moe_forget(state.uncached,    cut, [](uintptr_t begin)    { return begin; });
    if (state.pages) {
        state.pages->forget(cut);
    }
    state.n_layers = state.layer_index.size();
}

static void ggml_moe_map_add(const void * addr, size_t size, int fd) {
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();

    const ggml_moe_os & os = *state.os.load();
    const ggml_moe_mapping mapping = {
        /*.range          =*/ { (uintptr_t) addr, (uintptr_t) addr + size },
        /*.whole          =*/ { (uintptr_t) addr, (uintptr_t) addr + size },
        /*.window         =*/ os.read_window(fd),
        /*.resident_known =*/ os.resident_known(fd),
        /*.file           =*/ std::make_shared<ggml_moe_file>(os, fd),
    };

    // the loader's sequential advice doubles the read-ahead of every fault on this file
    if (state.mode.load() >= GGML_MOE_PREFETCH_MODE_HINT) {
        state.check(os.file_normal(fd), "posix_fadvise(POSIX_FADV_NORMAL)");
    }

    std::unique_lock<std::shared_mutex> lock(state.mutex);
    ggml_moe_forget_layers(state, mapping.range); // weights in memory of their own, which has been given back
    state.mappings.push_back(mapping);
    state.n_clean = 0; // nothing of it has been looked at
    if (state.pages) {
        state.pages->budget_ns = 0;
    }
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

static void ggml_moe_cut_queue(std::deque<ggml_moe_range> & queue, ggml_moe_range cut) {
    queue.erase(std::remove_if(queue.begin(), queue.end(), [&](const ggml_moe_range & range) {
        return range.begin < cut.end && cut.begin < range.end;
    }), queue.end());
}

static void ggml_moe_map_remove(const void * addr, size_t size) {
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();
    std::lock_guard<std::mutex> retiring(state.retiring_mutex);

    // Of this mapping only: another can lie in a hole that an earlier removal left in it.
    const ggml_moe_range removed = { (uintptr_t) addr, (uintptr_t) addr + size };
    std::vector<ggml_moe_range> cuts;
    {
        std::shared_lock<std::shared_mutex> lock(state.mutex);
        for (const ggml_moe_mapping & mapping : state.mappings) {
            const ggml_moe_range cut = { std::max(mapping.range.begin, removed.begin), std::min(mapping.range.end, removed.end) };
            if (mapping.whole.contains(removed) && cut.size() > 0) {
                cuts.push_back(cut);
            }
        }
    }

    for (const ggml_moe_range cut : cuts) {
        std::vector<std::shared_ptr<ggml_moe_cache>> over; // end without the locks, which a reader may wait for
        std::shared_ptr<ggml_moe_cache> last;

        // a thread keeps its last selection until its next one: nothing runs any more, or unmapping would be wrong
        {
            std::unique_lock<std::shared_mutex> lock(state.plans_mutex);
            for (size_t k = state.plans.size(); k-- > 0;) {
                over.push_back(state.plans[k]->cache); // one that was switched off may still read for it
                if (state.plans[k]->layer->overlaps(cut)) {
                    (void) ggml_moe_plan_unlist(state, *state.plans[k]);
                }
            }
        }

        std::unique_lock<std::shared_mutex> lock(state.mutex);
        over.push_back(state.cache);
        for (const auto & cache : over) {
            if (cache) {
                cache->remove(cut);
            }
        }
        ggml_moe_cut(state.mappings, cut, [](ggml_moe_mapping & m) -> ggml_moe_range & { return m.range; });
        ggml_moe_cut(state.random,   cut, [](ggml_moe_range   & r) -> ggml_moe_range & { return r; });
        ggml_moe_cut(state.locked,   cut, [](ggml_moe_range   & r) -> ggml_moe_range & { return r; });
        uint64_t n_locked = 0;
        for (const ggml_moe_range & range : state.locked) {
            n_locked += range.size();
        }
        state.counters.values[GGML_MOE_PREFETCH_COUNTER_BYTES_LOCKED] = n_locked;

        ggml_moe_forget_layers(state, cut);
        state.lock_refused = false;
        {
            std::lock_guard<std::mutex> queue_lock(state.queue_mutex);
            ggml_moe_cut_queue(state.queue, cut);
        }

        if (state.mappings.empty()) { // the last model has gone
            last = std::move(state.cache);
            state.cache_needed = false;
            state.pushed_out.reset();
        }
    }
}

void ggml_moe_prefetch_map_add(const void * addr, size_t size, int fd) {
    ggml_moe_guard([&] { ggml_moe_map_add(addr, size, fd); });
}

void ggml_moe_prefetch_map_remove(const void * addr, size_t size) {
    ggml_moe_guard([&] { ggml_moe_map_remove(addr, size); });
}
