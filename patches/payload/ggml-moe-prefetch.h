#pragma once

// Early reads for Mixture-of-Experts weights that are mapped from a file larger than memory.
//
// The hooks tell this unit which files are mapped, which graph node comes next and which expert a matmul is about to
// read; it makes the bytes arrive early and in the right size. It never changes a value that is computed.
// Every function may be called from any thread. Nothing here throws or fails a computation:
// a request that the kernel refuses is counted, reported once, and the page fault does the work.

#include "ggml.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_cgraph;

enum ggml_moe_prefetch_mode {
    GGML_MOE_PREFETCH_MODE_OFF     = 0, // hooks return at once
    GGML_MOE_PREFETCH_MODE_MADV    = 1, // one WILLNEED per selected expert, at the matmul that reads it
    GGML_MOE_PREFETCH_MODE_HINT    = 2, // all selected experts of gate, up and down before the first of the three; others leave the page cache by use
    GGML_MOE_PREFETCH_MODE_OVERLAP = 3, // hint, and while a layer computes what the next one needs for certain
    GGML_MOE_PREFETCH_MODE_CACHE   = 4, // experts in memory of their own, read past the page cache, evicted by use
    GGML_MOE_PREFETCH_MODE_COUNT
};

enum ggml_moe_prefetch_counter {
    GGML_MOE_PREFETCH_COUNTER_MAPPINGS,         // mappings registered by the loader
    GGML_MOE_PREFETCH_COUNTER_LOAD_SKIPPED,     // loads that left out the read of the whole file
    GGML_MOE_PREFETCH_COUNTER_GROUPS,           // selections announced; madv: matmuls
    GGML_MOE_PREFETCH_COUNTER_GROUPS_EARLY,     // selections known and announced before their graph ran
    GGML_MOE_PREFETCH_COUNTER_COPIES,           // expert matrices that the scheduler copied to another device
    GGML_MOE_PREFETCH_COUNTER_SLICES,           // expert matrices considered for a hint
    GGML_MOE_PREFETCH_COUNTER_CALLS,            // requests given to the kernel
    GGML_MOE_PREFETCH_COUNTER_BYTES_HINTED,     // bytes in these requests
    GGML_MOE_PREFETCH_COUNTER_BYTES_RESIDENT,   // bytes of considered slices that were already in memory
    GGML_MOE_PREFETCH_COUNTER_BYTES_ALWAYS,     // bytes of always used weights among the hinted ones
    GGML_MOE_PREFETCH_COUNTER_BYTES_LOCKED,     // bytes of always used weights that are locked in memory
    GGML_MOE_PREFETCH_COUNTER_BYTES_DROPPED,    // hint, overlap: bytes of experts that the page cache was told to drop
    GGML_MOE_PREFETCH_COUNTER_CACHE_BUDGET,     // bytes of experts that the cache, or in hint and overlap the page cache, may hold; 0: all
    GGML_MOE_PREFETCH_COUNTER_EXPERTS_RESIDENT, // cache: selected experts that were in memory
    GGML_MOE_PREFETCH_COUNTER_EXPERTS_MISSED,   // cache: selected experts that were not
    GGML_MOE_PREFETCH_COUNTER_EXPERTS_AHEAD,    // cache: experts read before their selection was known
    GGML_MOE_PREFETCH_COUNTER_EXPERTS_AHEAD_UNUSED,   // cache: of these, not selected then
    GGML_MOE_PREFETCH_COUNTER_EXPERTS_FORESEEN,       // cache: experts that the next layer's router named early
    GGML_MOE_PREFETCH_COUNTER_EXPERTS_FORESEEN_RIGHT, // cache: of these, selected
    GGML_MOE_PREFETCH_COUNTER_EXPERTS_OVERFLOW, // cache: selected experts that no memory was left for
    GGML_MOE_PREFETCH_COUNTER_EVICTED,          // cache: experts that made room for others
    GGML_MOE_PREFETCH_COUNTER_READS,            // cache: expert matrices read from the disk
    GGML_MOE_PREFETCH_COUNTER_READS_IN_TIME,    // cache: matrices read or copied, there when they were asked for
    GGML_MOE_PREFETCH_COUNTER_READS_LATE,       // cache: the same, waited for
    GGML_MOE_PREFETCH_COUNTER_BYTES_READ,       // cache: bytes read from the disk
    GGML_MOE_PREFETCH_COUNTER_BYTES_COPIED,     // cache: bytes copied, since the page cache held them
    GGML_MOE_PREFETCH_COUNTER_READ_NS,          // cache: time of all reads, nanoseconds, summed over the readers
    GGML_MOE_PREFETCH_COUNTER_WAIT_NS,          // cache: time the announcing thread waited for reads, nanoseconds
    GGML_MOE_PREFETCH_COUNTER_ERRORS,           // requests that the kernel or the platform refused
    GGML_MOE_PREFETCH_COUNTER_LAST_ERRNO,       // why the latest of them was refused
    GGML_MOE_PREFETCH_COUNTER_IDS_IGNORED,      // expert ids outside [0, n_expert)
    GGML_MOE_PREFETCH_COUNTER_UNMAPPED,         // expert matmuls whose weights are in no registered mapping
    GGML_MOE_PREFETCH_COUNTER_HINT_NS,          // time spent in the node hook, nanoseconds
    GGML_MOE_PREFETCH_COUNTER_COUNT
};

// version of this payload, part of a wheel's manifest
GGML_API const char * ggml_moe_prefetch_version(void);

// every setting; the environment variable in brackets gives its value at the start of the process
struct ggml_moe_prefetch_params {
    size_t   size;        // of this struct
    int32_t  mode;        // enum ggml_moe_prefetch_mode [MOE_MADV_MODE, by name]
    int32_t  load;        // read of the whole file at load: 1 yes, 0 no, -1 if it fits in memory [MOE_MADV_LOAD, on/off/auto]
    uint64_t cache_bytes; // hint and up: memory for experts; 0: all that is free, followed as it changes [MOE_MADV_CACHE_MIB]
    uint64_t lock_bytes;  // overlap, cache: always used weights to lock in memory at most [MOE_MADV_LOCK_MIB]
    int32_t  n_readers;   // cache: threads that read; 0: 2 to 4, by the cores [MOE_MADV_READERS]
    int32_t  half_life;   // hint and up: passes after which a selection counts half [MOE_MADV_HALF_LIFE]
    int32_t  foresee;     // cache: experts of the next layer by its router's early word: 1 yes, 0 no [MOE_MADV_FORESEE, on/off]
    int32_t  wide;        // overlap, cache: a batch that selects this share of the experts reads the next layer whole, percent [MOE_MADV_WIDE]
};

// size is sizeof(struct ggml_moe_prefetch_params), the caller's version of it
// settings hold from the next graph on; those of the cache from the next time it is set up, after a change of the mode
// what the load has read ahead, and the read-ahead of the open file, stay as the mode at load time decided
// false: a size or value that is not known; nothing is changed then
GGML_API bool ggml_moe_prefetch_default_params(struct ggml_moe_prefetch_params * params, size_t size);
GGML_API bool ggml_moe_prefetch_get_params    (struct ggml_moe_prefetch_params * params, size_t size);
GGML_API bool ggml_moe_prefetch_set_params    (const struct ggml_moe_prefetch_params * params);

GGML_API bool                        ggml_moe_prefetch_set_mode(enum ggml_moe_prefetch_mode mode);
GGML_API enum ggml_moe_prefetch_mode ggml_moe_prefetch_get_mode(void);
GGML_API const char *                ggml_moe_prefetch_mode_name(enum ggml_moe_prefetch_mode mode); // NULL: no such mode

// counters since the start of the process or the last reset; locked bytes and the budget are states and stay
GGML_API int          ggml_moe_prefetch_counter_count(void);
GGML_API const char * ggml_moe_prefetch_counter_name (int counter); // NULL: no such counter
GGML_API uint64_t     ggml_moe_prefetch_counter_value(int counter);
GGML_API void         ggml_moe_prefetch_counter_reset(void);

// where the time of each layer went, in the order the layers run; times in nanoseconds, sums since the last reset
struct ggml_moe_prefetch_layer {
    char     name[GGML_MAX_NAME]; // of its first expert matrix
    uint64_t n_selections;
    uint64_t n_experts;           // distinct experts selected, summed over selections
    uint64_t n_missed;            // of these, not in memory
    uint64_t bytes;               // read or asked for
    uint64_t n_late;              // matrices waited for
    uint64_t n_in_time;           // matrices read and there when asked for
    uint64_t hint_ns;             // in the node hook
    uint64_t wait_ns;             // announcing thread waiting for reads
    uint64_t read_ns;             // from the announcement to the end of the last read, waited for or not
    uint64_t total_ns;            // from the announcement to that of the next layer
};

GGML_API int  ggml_moe_prefetch_layer_count(void);
GGML_API bool ggml_moe_prefetch_layer_get(int i, struct ggml_moe_prefetch_layer * layer); // false: no such layer

//
// hooks
//

// loader, before a model of n_bytes in all its files is mapped: may the load read the whole of it ahead?
GGML_API bool ggml_moe_prefetch_load_allowed(uint64_t n_bytes);

// loader, after mapping a file and before unmapping all or part of it
GGML_API void ggml_moe_prefetch_map_add   (const void * addr, size_t size, int fd);
GGML_API void ggml_moe_prefetch_map_remove(const void * addr, size_t size);

// scheduler, one thread: before it computes a graph, for each of its splits in their order, and after it; so that what
// comes next is known when layers alternate between devices. inputs are the tensors that the scheduler will copy
GGML_API void ggml_moe_prefetch_graph_begin(void);
GGML_API void ggml_moe_prefetch_graph_split(const struct ggml_cgraph * split, struct ggml_tensor ** inputs, int n_inputs);
GGML_API void ggml_moe_prefetch_graph_end  (void);

// scheduler, same thread: before it copies experts to another device; ids has shape [n_used, n_tokens], its values in
// data; NULL when all experts are copied
GGML_API void ggml_moe_prefetch_copy(const struct ggml_tensor * weights, const struct ggml_tensor * ids, const int32_t * data);

// CPU backend, one thread, right before node i of the graph is computed and after all nodes before it
GGML_API void ggml_moe_prefetch_node(const struct ggml_cgraph * cgraph, int i);

// CPU backend, all threads, in the loop of an expert matmul: the id of the i-th expert to compute, i ascending from 0
// waits until its weights are there; dst is then a copy in `view`, whose src[0] has them at data + id*nb[2]
struct ggml_moe_prefetch_view {
    struct ggml_tensor         dst;
    struct ggml_tensor         weights;
    const struct ggml_tensor * node;
    const void *               plan;
};

GGML_API int ggml_moe_prefetch_expert(struct ggml_tensor ** dst, int i, struct ggml_moe_prefetch_view * view);

#ifdef __cplusplus
}
#endif
