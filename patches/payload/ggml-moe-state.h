#pragma once

// What the hooks share: settings, counters, mappings, layers. One object for the process.

#include "ggml-moe-cache.h"
#include "ggml-moe-graph.h"
#include "ggml-moe-os.h"
#include "ggml-moe-pages.h"
#include "ggml-moe-prefetch.h"
#include "ggml-moe-router.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

// a direct handle that closes with the last mapping that uses it
struct ggml_moe_file {
    const ggml_moe_os & os;
    intptr_t            handle = -1;
    int                 error  = 0;

    mutable std::atomic<bool> kept{false}; // its pages cannot be dropped

    ggml_moe_file(const ggml_moe_os & os, int fd) : os(os) { error = os.direct_open(fd, &handle); }
    ~ggml_moe_file() {
        if (error == 0) {
            os.direct_close(handle);
        }
    }
};

struct ggml_moe_mapping {
    ggml_moe_range                       range;  // what is left of it
    ggml_moe_range                       whole;  // as it was mapped, from the file's first byte
    size_t                               window; // bytes of one willneed request
    bool                                 resident_known;
    std::shared_ptr<const ggml_moe_file> file;
};

// a selection in the cache, as the threads of its matmuls see it
struct ggml_moe_prefetch_state;

struct ggml_moe_plan : ggml_moe_cache_plan {
    std::shared_ptr<ggml_moe_cache> cache;
    ggml_moe_prefetch_state *       state = nullptr; // in whose list it is
};

// cache: always used weights that decode finds gone, looked at in windows of half a second
struct ggml_moe_pushed_out {
    std::atomic<uint64_t> absent{0};   // bytes in this window
    uint64_t              begin   = 0; // of the window
    uint32_t              n_lost  = 0; // windows in a row with some
    uint32_t              n_kept  = 0; // windows in a row without
    uint32_t              n_steps = 0; // by which the budget has given way

    void reset() {
        absent = begin = n_lost = n_kept = n_steps = 0;
    }
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
    std::unordered_map<uintptr_t, size_t>     always; // always used weights seen so far: begin, bytes
    std::unordered_map<uintptr_t, size_t>     layer_index; // by the begin of the first matrix
    std::deque<ggml_moe_layer_stats>          layers;
    std::vector<size_t>                       layers_unused; // of models that have gone
    std::atomic<size_t>                       n_layers{0};
    bool                                      lock_refused = false;
    std::shared_ptr<ggml_moe_cache>           cache;
    std::unordered_set<uintptr_t>             uncached;    // layers that the cache cannot serve, by the begin of the first matrix
    std::unordered_map<uintptr_t, std::shared_ptr<const ggml_moe_router>> routers; // by the begin of the first matrix; NULL: of no known kind
    std::shared_ptr<ggml_moe_pages>           pages;       // hint, overlap
    std::atomic<uint64_t>                     copy_bytes{0};        // experts that a graph under way copies to a device, of two layers
    bool                                      cache_needed = false; // whether there is less memory than experts
    std::atomic<uint64_t>                     budget_ns{0};         // when the budget was looked at
    ggml_moe_pushed_out                       pushed_out;
    std::atomic<bool>                         cache_filling{true};  // it holds less than it may

    // after some tokens in which every page was there, a major fault is awaited before pages are looked at again
    std::atomic<uint64_t> n_clean{0};

    // before all other mutexes: while a cache that was switched off is still reading ahead, no model goes away
    std::mutex                   retiring_mutex;

    std::shared_mutex            plans_mutex;
    std::vector<ggml_moe_plan *> plans;
    std::atomic<size_t>          n_plans{0};

    // overlap: ranges for which to start reads without holding up a compute thread
    std::mutex                 queue_mutex;
    std::condition_variable    queue_filled;
    std::deque<ggml_moe_range> queue;
    bool                       queue_running = false;

    ggml_moe_prefetch_state(); // settings from the environment

    void count(enum ggml_moe_prefetch_counter counter, uint64_t n = 1) {
        counters.add(counter, n);
    }

    // counts a request that failed and reports the first of them
    void check(int result, const char * what);
};

ggml_moe_prefetch_state & ggml_moe_prefetch_get_state();

// with the state's mutex held: the mapping that holds the range, or NULL
const ggml_moe_mapping * ggml_moe_find_mapping(const ggml_moe_prefetch_state & state, ggml_moe_range range);

// the times of a layer, by its first expert matrix; made when it is seen first
ggml_moe_layer_stats & ggml_moe_layer_of(ggml_moe_prefetch_state & state, const ggml_tensor * first);
