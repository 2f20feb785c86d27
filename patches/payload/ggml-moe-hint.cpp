#include "ggml-moe-hint.h"
#include "ggml-moe-prefetch-impl.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>

//
// hints
//

void ggml_moe_madv_slice(ggml_moe_prefetch_state & state, const ggml_moe_os & os, ggml_moe_range slice) {
    slice = ggml_moe_range_outer(slice, os.page_size);
    state.count(GGML_MOE_PREFETCH_COUNTER_SLICES);
    state.count(GGML_MOE_PREFETCH_COUNTER_CALLS);
    state.count(GGML_MOE_PREFETCH_COUNTER_BYTES_HINTED, slice.size());
    state.check(os.advise_willneed(slice.begin, slice.size()), "madvise(MADV_WILLNEED)");
}

// appends the pieces of the range that are to be asked for: such that the kernel honours whole, each from its first to
// its last absent page
static void ggml_moe_absent(const ggml_moe_os & os, ggml_moe_range range, const ggml_moe_mapping & mapping,
        size_t & n_resident, std::vector<ggml_moe_range> & pieces) {
    static thread_local std::vector<uint8_t> resident;

    range = ggml_moe_range_outer(range, os.page_size);

    const size_t n_pages = range.size()/os.page_size;
    resident.resize(n_pages);
    if (!mapping.resident_known || os.resident(range.begin, range.size(), resident.data()) != 0) {
        std::fill(resident.begin(), resident.end(), 0); // not known: ask for all of it
    }

    const size_t window_pages = std::max<size_t>(1, mapping.window/os.page_size);

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
        if (first != p1) {
            pieces.push_back({ range.begin + first*os.page_size, range.begin + last*os.page_size });
        }
    }
}

static size_t ggml_moe_willneed(ggml_moe_prefetch_state & state, const ggml_moe_os & os, ggml_moe_range piece) {
    state.count(GGML_MOE_PREFETCH_COUNTER_CALLS);
    state.count(GGML_MOE_PREFETCH_COUNTER_BYTES_HINTED, piece.size());
    state.check(os.advise_willneed(piece.begin, piece.size()), "madvise(MADV_WILLNEED)");
    return piece.size();
}

static size_t ggml_moe_hint_range(ggml_moe_prefetch_state & state, const ggml_moe_os & os, ggml_moe_range range,
        const ggml_moe_mapping & mapping, size_t & n_resident) {
    static thread_local std::vector<ggml_moe_range> pieces;

    pieces.clear();
    ggml_moe_absent(os, range, mapping, n_resident, pieces);
    size_t n_hinted = 0;
    for (const ggml_moe_range & piece : pieces) {
        n_hinted += ggml_moe_willneed(state, os, piece);
    }
    return n_hinted;
}

void ggml_moe_hint_random(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_moe_matrices & matrices) {
    for (const ggml_tensor * weights : matrices) {
        const ggml_moe_range range = ggml_moe_range_inner(ggml_moe_tensor_range(weights), os.page_size);
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
            const int result = os.advise_random(range.begin, range.size());
            lock.unlock(); // who receives the message may ask for the settings
            state.check(result, "madvise(MADV_RANDOM)");
        }
    }
}

size_t ggml_moe_hint_experts(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_moe_matrices & matrices,
        const std::vector<int32_t> & experts) {
    size_t n_hinted   = 0;
    size_t n_resident = 0;

    for (const ggml_tensor * weights : matrices) {
        const ggml_moe_range range = ggml_moe_tensor_range(weights);

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

// What is pushed out goes many pages at a time. One fault alone is a row of a table, which nobody can foresee.
bool ggml_moe_all_resident(ggml_moe_prefetch_state & state, const ggml_moe_os & os) {
    const uint64_t faults = os.major_faults();
    if (faults - state.faults.exchange(faults) > 1) {
        state.n_clean = 0;
    }
    return state.n_clean > 2*state.n_layers;
}

void ggml_moe_saw(ggml_moe_prefetch_state & state, size_t n_absent) {
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
    if (state.mode.load() < GGML_MOE_PREFETCH_MODE_OVERLAP || // switched since the node hook looked
        state.lock_refused || !ggml_moe_find_mapping(state, range) ||
        std::any_of(state.locked.begin(), state.locked.end(), same)) {
        return;
    }
    // more than half of the memory would leave too little for the experts
    const uint64_t available = os.memory_available();
    if (held + range.size() > std::min<uint64_t>(state.params.lock_bytes, available == 0 ? UINT64_MAX : available/2)) {
        state.lock_refused = true;
        return;
    }
    const int result = os.lock(range.begin, range.size());
    if (result != 0) {
        state.lock_refused = true;
        state.count(GGML_MOE_PREFETCH_COUNTER_ERRORS);
        state.counters.values[GGML_MOE_PREFETCH_COUNTER_LAST_ERRNO] = (uint64_t) -result;
        lock.unlock(); // who receives the message may ask for the settings
        GGML_LOG_WARN("%s: locked %.0f MiB of always used weights, then: %s; raise the limit with `ulimit -l unlimited` "
            "or set MOE_MADV_LOCK_MIB=%.0f\n", "ggml_moe_prefetch", held/1048576.0, strerror(-result), held/1048576.0);
        return;
    }
    state.locked.push_back(range);
    state.counters.values[GGML_MOE_PREFETCH_COUNTER_BYTES_LOCKED] += range.size();
}

void ggml_moe_hint_always(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_cgraph * cgraph, int i0, int i1) {
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

//
// requests made by a thread that computes nothing
//

// with the queue's mutex held
static void ggml_moe_asked_done(ggml_moe_prefetch_state & state, const ggml_moe_request & request) {
    if (request.asked && ++request.asked->n_done >= request.asked->n_wanted) {
        request.asked->n_wanted = SIZE_MAX;
        state.queue_done.notify_all();
    }
}

static void ggml_moe_queue_run(ggml_moe_prefetch_state & state) {
    std::unique_lock<std::mutex> queue_lock(state.queue_mutex);
    for (;;) {
        state.queue_filled.wait(queue_lock, [&] { return !state.demand.empty() || !state.early.empty(); });
        auto & queue = state.demand.empty() ? state.early : state.demand;
        const ggml_moe_request request = std::move(queue.front());
        queue.pop_front();
        queue_lock.unlock();
        if (state.mode.load() >= GGML_MOE_PREFETCH_MODE_HINT) { // else switched meanwhile
            const ggml_moe_os & os = *state.os.load();
            std::shared_lock<std::shared_mutex> lock(state.mutex);
            const ggml_moe_mapping * mapping = ggml_moe_find_mapping(state, request.range);
            if (mapping && request.asked) {
                ggml_moe_willneed(state, os, request.range);
            } else if (mapping) {
                size_t n_resident = 0;
                ggml_moe_hint_range(state, os, request.range, *mapping, n_resident);
                state.count(GGML_MOE_PREFETCH_COUNTER_BYTES_RESIDENT, n_resident);
            }
        }
        queue_lock.lock();
        ggml_moe_asked_done(state, request);
    }
}

// with the queue's mutex held: one thread, started by the first request; false: there is none to be had
static bool ggml_moe_queue_start(ggml_moe_prefetch_state & state) {
    if (state.queue_running) {
        return true;
    }
    try {
        std::thread([&state] {
            try {
                ggml_moe_queue_run(state);
            } catch (const std::exception &) { // short of memory looking ahead: the next request starts another
                std::lock_guard<std::mutex> lock(state.queue_mutex);
                state.queue_running = false;
            }
            ggml_moe_queue_drop(state);
        }).detach();
    } catch (const std::system_error &) {
        return false;
    }
    return state.queue_running = true;
}

size_t ggml_moe_ask(ggml_moe_prefetch_state & state, const ggml_moe_os & os, ggml_moe_plan & plan, const ggml_moe_group & group,
        const std::vector<int32_t> & experts) {
    struct absent {
        int32_t                                  expert;
        size_t                                   n_pieces = 0;
        std::vector<std::vector<ggml_moe_range>> pieces; // by node
    };
    const size_t n_nodes = group.nodes.size();
    std::vector<absent> selected;
    for (const int32_t id : experts) {
        selected.push_back({ id, 0, std::vector<std::vector<ggml_moe_range>>(n_nodes) });
    }
    size_t n_resident = 0;
    for (size_t k = 0; k < n_nodes; k++) {
        const ggml_tensor *  weights = group.nodes[k]->src[0];
        const ggml_moe_range range   = ggml_moe_tensor_range(weights);

        std::shared_lock<std::shared_mutex> lock(state.mutex);
        const ggml_moe_mapping * mapping = ggml_moe_find_mapping(state, range);
        if (mapping == nullptr) {
            state.count(GGML_MOE_PREFETCH_COUNTER_UNMAPPED);
            continue;
        }
        for (absent & a : selected) {
            if (a.expert < weights->ne[2]) {
                const uintptr_t begin = range.begin + a.expert*weights->nb[2];
                state.count(GGML_MOE_PREFETCH_COUNTER_SLICES);
                ggml_moe_absent(os, { begin, begin + weights->nb[2] }, *mapping, n_resident, a.pieces[k]);
                a.n_pieces += a.pieces[k].size();
            }
        }
    }
    state.count(GGML_MOE_PREFETCH_COUNTER_BYTES_RESIDENT, n_resident);

    std::stable_partition(selected.begin(), selected.end(), [](const absent & a) { return a.n_pieces == 0; });

    plan.nodes = group.nodes;
    plan.order.clear();
    plan.needs.clear();
    std::deque<ggml_moe_request> requests;
    size_t n_bytes = 0;
    auto asked = std::make_shared<ggml_moe_asked>();
    for (size_t k = 0; k < n_nodes; k++) { // matrix by matrix, as they are computed
        for (const absent & a : selected) {
            for (const ggml_moe_range & piece : a.pieces[k]) {
                requests.push_back({ piece, asked });
                n_bytes += piece.size();
            }
            plan.needs.push_back(a.pieces[k].empty() ? 0 : requests.size());
        }
    }
    if (requests.empty()) {
        return 0;
    }
    asked->n_all = requests.size();

    // the rest, which no row selects, so that `order` is a permutation
    std::vector<bool> in_order(group.n_expert());
    for (const absent & a : selected) {
        plan.order.push_back(a.expert);
        in_order[a.expert] = true;
    }
    for (size_t id = 0; id < in_order.size(); id++) {
        if (!in_order[id]) {
            plan.order.push_back((int32_t) id);
        }
    }

    for (const ggml_tensor * node : group.nodes) {
        ggml_moe_queue_cut(state, ggml_moe_tensor_range(node->src[0])); // what was queued early is due now
    }
    {
        std::lock_guard<std::mutex> lock(state.queue_mutex);
        if (ggml_moe_queue_start(state)) {
            state.demand.insert(state.demand.end(), requests.begin(), requests.end());
            plan.asked = std::move(asked);
        }
    }
    if (plan.asked) {
        state.queue_filled.notify_one();
        return n_bytes;
    }
    std::shared_lock<std::shared_mutex> lock(state.mutex);
    for (const ggml_moe_request & request : requests) {
        if (ggml_moe_find_mapping(state, request.range)) {
            ggml_moe_willneed(state, os, request.range);
        }
    }
    return n_bytes;
}

void ggml_moe_ask_wait(ggml_moe_prefetch_state & state, const ggml_moe_plan & plan, size_t n) {
    ggml_moe_asked & asked = *plan.asked;
    if (asked.n_done.load(std::memory_order_acquire) >= n) {
        return;
    }
    const uint64_t start = ggml_moe_now_ns();
    {
        std::unique_lock<std::mutex> lock(state.queue_mutex);
        while (asked.n_done.load(std::memory_order_acquire) < n) {
            asked.n_wanted = std::min(asked.n_wanted, n);
            state.queue_done.wait(lock);
        }
    }
    if (plan.owner == std::this_thread::get_id()) {
        const uint64_t ns = ggml_moe_now_ns() - start;
        state.count(GGML_MOE_PREFETCH_COUNTER_WAIT_NS, ns);
        plan.stats->wait_ns += ns;
    }
}

bool ggml_moe_queue_push(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_moe_matrices & matrices,
        const std::vector<int32_t> & experts) {
    uint64_t n_bytes = 0;
    for (const ggml_tensor * weights : matrices) {
        n_bytes += experts.size()*weights->nb[2];
    }
    const uint64_t available = os.memory_available();

    std::lock_guard<std::mutex> lock(state.queue_mutex);
    for (const ggml_moe_request & request : state.early) {
        n_bytes += request.range.size();
    }
    if (available != 0 && n_bytes > available/4) {
        return false; // it would push out what is in use
    }
    if (!ggml_moe_queue_start(state)) {
        return false;
    }
    for (const ggml_tensor * weights : matrices) {
        for (const int32_t id : experts) {
            if (id < weights->ne[2]) {
                const uintptr_t begin = (uintptr_t) weights->data + id*weights->nb[2];
                state.early.push_back({ { begin, begin + weights->nb[2] }, nullptr });
            }
        }
    }
    state.queue_filled.notify_one();
    return true;
}

void ggml_moe_queue_cut(ggml_moe_prefetch_state & state, ggml_moe_range cut) {
    std::lock_guard<std::mutex> lock(state.queue_mutex);
    for (auto * queue : { &state.demand, &state.early }) {
        const auto gone = std::stable_partition(queue->begin(), queue->end(), [&](const ggml_moe_request & request) {
            return request.range.end <= cut.begin || cut.end <= request.range.begin;
        });
        std::for_each(gone, queue->end(), [&](const ggml_moe_request & request) { ggml_moe_asked_done(state, request); });
        queue->erase(gone, queue->end());
    }
}

void ggml_moe_prefetch_settle(void) {
    ggml_moe_prefetch_state & state = ggml_moe_prefetch_get_state();
    const auto last = std::make_shared<ggml_moe_asked>();
    std::unique_lock<std::mutex> lock(state.queue_mutex);
    if (state.queue_running) {
        state.early.push_back({ { 0, 0 }, last }); // of no mapping
        state.queue_filled.notify_one();
        last->n_wanted = 1;
        state.queue_done.wait(lock, [&] { return last->n_done == 1; });
    }
}

void ggml_moe_queue_drop(ggml_moe_prefetch_state & state) {
    ggml_moe_queue_cut(state, { 0, UINTPTR_MAX });
}

void ggml_moe_release(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_moe_matrices & matrices) {
    std::shared_lock<std::shared_mutex> lock(state.mutex);
    for (const ggml_tensor * weights : matrices) {
        const ggml_moe_range range = ggml_moe_range_inner(ggml_moe_tensor_range(weights), os.page_size);
        const int result = ggml_moe_find_mapping(state, range) ? os.advise_cold(range.begin, range.size()) : 0;
        if (result != -ENOSYS) { // a kindness that not every system knows
            state.check(result, "madvise(MADV_COLD)");
        }
    }
}
