#include "ggml-moe-hint.h"

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

void ggml_moe_hint_rows(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_cgraph * cgraph, int i1) {
    for (int i = 0; i < i1; i++) {
        const ggml_tensor * table = cgraph->nodes[i]->src[0];
        const ggml_tensor * rows  = cgraph->nodes[i]->src[1];
        if (cgraph->nodes[i]->op != GGML_OP_GET_ROWS || strcmp(table->name, "token_embd.weight") != 0 ||
                rows->op != GGML_OP_NONE || rows->type != GGML_TYPE_I32 || !ggml_moe_in_host_memory(rows)) {
            continue;
        }
        const ggml_moe_range range = ggml_moe_tensor_range(table);
        size_t n_resident = 0;
        std::shared_lock<std::shared_mutex> lock(state.mutex);
        const ggml_moe_mapping * mapping = ggml_moe_find_mapping(state, range);
        for (int64_t k = 0; mapping != nullptr && k < rows->ne[0]; k++) {
            int32_t row;
            memcpy(&row, (const char *) rows->data + k*rows->nb[0], sizeof(row));
            if (row >= 0 && row < table->ne[1]) {
                const uintptr_t begin = range.begin + row*table->nb[1];
                ggml_moe_hint_range(state, os, { begin, begin + table->nb[1] }, *mapping, n_resident);
            }
        }
    }
}

// What is pushed out goes many pages at a time. One fault alone is a row of a table that is left alone.
bool ggml_moe_all_resident(ggml_moe_prefetch_state & state, const ggml_moe_os & os, uint64_t & n_faults) {
    const uint64_t n_before = n_faults;
    n_faults = os.major_faults();
    if (n_faults - n_before > 1) {
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

size_t ggml_moe_hint_always(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_cgraph * cgraph, int i0, int i1) {
    size_t n_hinted   = 0;
    size_t n_absent   = 0;
    size_t n_resident = 0;
    bool   lock_wanted;
    const auto ranges = ggml_moe_always_used(cgraph, i0, i1);
    {
        std::shared_lock<std::shared_mutex> lock(state.mutex);
        lock_wanted = state.params.lock_bytes > 0 && !state.lock_refused;
        for (const ggml_moe_range & range : ranges) {
            if (const ggml_moe_mapping * mapping = ggml_moe_find_mapping(state, range)) {
                const size_t n_before = n_resident;
                n_hinted += ggml_moe_hint_range(state, os, range, *mapping, n_resident);
                n_absent += mapping->resident_known ? ggml_moe_range_outer(range, os.page_size).size() - (n_resident - n_before) : 0;
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
    return n_absent;
}

static void ggml_moe_queue_run(ggml_moe_prefetch_state & state) {
    std::unique_lock<std::mutex> queue_lock(state.queue_mutex);
    for (;;) {
        state.queue_filled.wait(queue_lock, [&] { return !state.queue.empty(); });
        const ggml_moe_range range = state.queue.front();
        state.queue.pop_front();
        queue_lock.unlock();
        if (state.mode.load() >= GGML_MOE_PREFETCH_MODE_OVERLAP) { // else switched meanwhile
            std::shared_lock<std::shared_mutex> lock(state.mutex);
            size_t n_resident = 0;
            if (const ggml_moe_mapping * mapping = ggml_moe_find_mapping(state, range)) {
                ggml_moe_hint_range(state, *state.os.load(), range, *mapping, n_resident);
            }
            state.count(GGML_MOE_PREFETCH_COUNTER_BYTES_RESIDENT, n_resident);
        }
        queue_lock.lock();
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
    for (const ggml_moe_range & range : state.queue) {
        n_bytes += range.size();
    }
    if (available != 0 && n_bytes > available/4) {
        return false; // it would push out what is in use
    }
    if (!state.queue_running) { // one thread, started by the first range
        try {
            std::thread([&state] {
                try {
                    ggml_moe_queue_run(state);
                } catch (const std::exception &) { // short of memory: the next range starts another
                    std::lock_guard<std::mutex> lock(state.queue_mutex);
                    state.queue_running = false;
                }
            }).detach();
        } catch (const std::system_error &) {
            return false;
        }
        state.queue_running = true;
    }
    for (const ggml_tensor * weights : matrices) {
        for (const int32_t id : experts) {
            if (id < weights->ne[2]) {
                const uintptr_t begin = (uintptr_t) weights->data + id*weights->nb[2];
                state.queue.push_back({ begin, begin + weights->nb[2] });
            }
        }
    }
    state.queue_filled.notify_one();
    return true;
}

void ggml_moe_queue_drop(ggml_moe_prefetch_state & state) {
    std::lock_guard<std::mutex> lock(state.queue_mutex);
    state.queue.clear();
}

void ggml_moe_drop(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const std::vector<ggml_moe_range> & slices) {
    for (const ggml_moe_range & slice : slices) {
        const ggml_moe_range range = ggml_moe_range_inner(slice, os.page_size); // neighbours share the rest
        int result;
        {
            std::shared_lock<std::shared_mutex> lock(state.mutex);
            const ggml_moe_mapping * mapping = ggml_moe_find_mapping(state, range);
            if (mapping == nullptr || mapping->file->error != 0 || mapping->file->kept) {
                continue; // gone meanwhile, or not to be dropped
            }
            result = os.page_drop(mapping->file->handle, range.begin, range.size(), range.begin - mapping->whole.begin);
            if (result != 0) {
                mapping->file->kept = true;
            }
            if (result != 0 && state.pages) {
                state.pages->forget(mapping->range);
            }
        }
        // not on this system, or of a file that is locked in memory: no failure
        state.check(result == -ENOSYS || result == -EINVAL ? 0 : result, "posix_fadvise(POSIX_FADV_DONTNEED)");
        state.count(GGML_MOE_PREFETCH_COUNTER_BYTES_DROPPED, result == 0 ? range.size() : 0);
    }
}
