#pragma once

// A cache of experts in memory of its own, filled past the page cache.
//
// The unit is one expert of one layer: its slices of gate, up and down lie in one slot. The file mapping stays as
// it is, so whoever reads an expert by its mapped address gets the right bytes, in the cache or not; only the
// expert matmul is sent to the slot. Memory is reused, never zeroed again, and never given to a page fault.

#include "ggml-moe-graph.h"
#include "ggml-moe-os.h"
#include "ggml-moe-policy.h"
#include "ggml-moe-prefetch.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

struct ggml_moe_counters {
    std::atomic<uint64_t> values[GGML_MOE_PREFETCH_COUNTER_COUNT] = {};

    void add(enum ggml_moe_prefetch_counter counter, uint64_t n = 1) {
        values[counter].fetch_add(n, std::memory_order_relaxed);
    }
};

// ggml_moe_prefetch_layer as it is added up, by the announcing thread and by the readers
struct ggml_moe_layer_stats {
    char                  name[GGML_MAX_NAME] = {};
    std::atomic<uint64_t> n_selections{0};
    std::atomic<uint64_t> n_experts   {0};
    std::atomic<uint64_t> n_missed    {0};
    std::atomic<uint64_t> bytes       {0};
    std::atomic<uint64_t> n_late      {0};
    std::atomic<uint64_t> n_in_time   {0};
    std::atomic<uint64_t> hint_ns     {0};
    std::atomic<uint64_t> wait_ns     {0};
    std::atomic<uint64_t> read_ns     {0};
    std::atomic<uint64_t> total_ns    {0};
    std::atomic<uint64_t> last_read   {0}; // end of the latest read, on the clock of ggml_moe_now_ns
};

uint64_t ggml_moe_now_ns(void);

// failed reads in a row after which a layer is left to the mapping, but for a try in so many passes
static constexpr uint32_t GGML_MOE_CACHE_N_FAILED = 16;
static constexpr uint32_t GGML_MOE_CACHE_N_RETRY  = 256;

struct ggml_moe_cache_layer;
struct ggml_moe_cache_pool;

// where one matrix of a layer lies: n_expert slices, one after the other
struct ggml_moe_cache_part {
    uintptr_t begin;          // of the first expert in the mapping
    size_t    slice;          // bytes of one expert
    intptr_t  file;           // direct handle
    uint64_t  file_offset;    // of the first expert
    size_t    slot_offset;    // in a slot, a multiple of the page
    bool      resident_known; // whether the system tells what of the mapping is in memory
};

enum ggml_moe_cache_state : uint8_t {
    GGML_MOE_CACHE_ABSENT, // queued or being read
    GGML_MOE_CACHE_READY,  // read, not yet asked for
    GGML_MOE_CACHE_USED,
    GGML_MOE_CACHE_FAILED, // could not be read: the mapping serves it
};

struct ggml_moe_cache_slot {
    static constexpr size_t MAX_PARTS = 4;

    char *                 data   = nullptr;
    ggml_moe_cache_layer * layer  = nullptr; // NULL: free
    int32_t                expert = -1;
    int                    n_pins = 0;       // selections under way, reads queued and under way
    bool                   ahead  = false;   // read before its layer is due: kept until then
    bool                   filled = false;   // its memory has been touched
    std::atomic<uint8_t>   state[MAX_PARTS] = {};
};

struct ggml_moe_cache_layer {
    std::vector<ggml_moe_cache_part>   parts;
    std::vector<ggml_moe_cache_slot *> slots;     // [n_expert], NULL: not in the cache
    ggml_moe_uses                      uses;      // of all experts: the counts outlive the slot
    size_t                             index = 0; // position among all layers, in the order they run
    ggml_moe_cache_pool *              pool  = nullptr;
    ggml_moe_layer_stats *             stats = nullptr;
    uint32_t                           n_failed = 0; // latest reads, that did not succeed
    std::vector<int32_t>               foreseen;     // experts of its next selection, as far as one can tell

    bool overlaps(ggml_moe_range range) const;
    bool readable() const { return n_failed < GGML_MOE_CACHE_N_FAILED || uses.pass % GGML_MOE_CACHE_N_RETRY == 0; }
};

// slots of one size; layers whose experts have the same size share them
struct ggml_moe_cache_pool {
    size_t                             slot_size = 0;
    size_t                             n_experts = 0; // in all layers
    size_t                             n_max     = 0; // slots that may hold memory
    size_t                             n_held    = 0; // slots that do, or will once they are read
    size_t                             n_filled  = 0; // slots whose memory has been touched
    size_t                             n_ahead   = 0; // slots that were read ahead
    std::deque<ggml_moe_cache_slot>    slots;
    std::vector<ggml_moe_cache_slot *> free;          // hold memory
    std::vector<ggml_moe_cache_slot *> spare;         // hold none
    std::vector<std::pair<void *, size_t>> regions;
};

// one selection of experts under way: what each matmul of the group reads, and in which order
struct ggml_moe_cache_plan {
    ggml_moe_cache_layer *             layer = nullptr;
    std::thread::id                    owner;           // the thread that announced it
    std::vector<const ggml_tensor *>   nodes;           // one per part, NULL: not in this group
    std::vector<int32_t>               order;           // all experts, the selected ones first: those in memory, then in the order of reading
    std::vector<ggml_moe_cache_slot *> slots;           // [n_selected], NULL: read through the mapping
};

struct ggml_moe_cache {
    // `watch` is called often by one of the readers, about ten times a second when it has nothing to do; it must not throw
    ggml_moe_cache(const ggml_moe_os & os, ggml_moe_counters & counters, int n_readers, float half_life, std::function<void()> watch);
    ~ggml_moe_cache();

    size_t n_readers() const { return readers.size(); } // 0: no thread could be started, nothing can be read

    // the layer whose first matrix starts at `begin`, or NULL
    ggml_moe_cache_layer * find(uintptr_t begin);

    // 0 or -errno; nothing is kept of a layer that cannot be added
    int add(std::vector<ggml_moe_cache_part> parts, int64_t n_expert, size_t index, ggml_moe_layer_stats & stats);

    // forgets all layers with a part in the range and waits for their reads
    void remove(ggml_moe_range range);

    // bytes of slots, shared among the pools by the size of their layers; slots in use go when they are no longer
    void   set_budget(uint64_t bytes);
    size_t bytes_filled(); // of memory that has been touched
    size_t bytes_full();   // with every expert in memory

    // starts to read what is missing of the selection and keeps it in memory until `finish`
    // `overflow` gets the experts that no slot is left for; returns how many were missing
    size_t begin(ggml_moe_cache_plan & plan, const ggml_moe_ids & ids, std::vector<int32_t> & overflow);
    void finish(ggml_moe_cache_plan & plan);

    // reads experts of a layer that is not due yet, as far as slots can be had for them; returns how many are on their way
    size_t ahead(ggml_moe_cache_layer * layer, const std::vector<int32_t> & experts);

    // the same of experts that will be needed if `select`, the surest first, is right about the next selection of the
    // layer that starts at `begin`; it runs on a reader that has no demand, and is over when `settle` returns
    void foresee(uintptr_t begin, std::function<std::vector<int32_t>()> select);

    // no guess is under way and none will be made before the next `foresee`
    void settle();

    // a new graph: what was read ahead and never asked for may go
    void drop_ahead();

    // nothing more is read ahead, and what was begun is over when it returns
    void stop_ahead();

    // address of a slice, waiting for its read; NULL: the mapping serves it
    const char * wait(const ggml_moe_cache_plan & plan, size_t part, size_t i_selected);

private:
    struct job {
        ggml_moe_cache_slot * slot  = nullptr;
        uint32_t              part  = 0;
        bool                  guess = false; // may turn out not to be needed
        bool                  early = false; // taken before it was wanted
    };

    struct guess {
        uintptr_t                             begin; // of the layer
        uint64_t                              token; // of the layer: a guess about an earlier selection is void
        std::function<std::vector<int32_t>()> select;
    };

    const ggml_moe_os & os;
    ggml_moe_counters & counters;
    const ggml_moe_policy policy;
    const std::function<void()> watch;

    std::mutex              mutex; // all below, and the slots' fields but for the states
    std::condition_variable work;  // for readers
    std::condition_variable ready; // for who waits for a part
    bool                    stop = false;
    std::deque<job>         demand;
    std::deque<job>         early; // read only when there is no demand
    size_t                  n_guessed = 0; // guesses being read
    size_t                  n_early   = 0; // jobs being read that were not wanted yet when they were taken
    bool                    no_ahead  = false;
    float                   trust = 0.5f;  // share of the foreseen experts that were selected, the latest counting most
    std::deque<guess>       guesses;
    size_t                  n_guessing = 0; // under way
    std::unordered_map<uintptr_t, std::unique_ptr<ggml_moe_cache_layer>> layers;
    std::vector<std::unique_ptr<ggml_moe_cache_pool>> pools;
    uint64_t                budget = 0;
    size_t                  running = 0; // index of the layer
    std::vector<std::thread> readers;

    void read(bool watches);
    void follow(std::unique_lock<std::mutex> & lock);
    bool next_job(job & next);
    size_t bytes(size_t ggml_moe_cache_pool::* n_slots);
    size_t ahead(ggml_moe_cache_layer & layer, const std::vector<int32_t> & experts, bool guess);
    void cancel(ggml_moe_cache_layer & layer, const ggml_moe_ids & ids);
    bool unqueue(ggml_moe_cache_slot & slot);
    ggml_moe_cache_state read_part(const job & job);
    bool copy_part(const job & job);
    void share_budget();
    void trim(ggml_moe_cache_pool & pool);
    void evict(ggml_moe_cache_slot & slot);
    void set_ahead(ggml_moe_cache_slot & slot, bool ahead);
    size_t acquire(ggml_moe_cache_pool & pool, size_t n, std::vector<ggml_moe_cache_slot *> & found);
    void place(ggml_moe_cache_layer & layer, int32_t expert, ggml_moe_cache_slot & slot);
};
