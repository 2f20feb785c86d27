#pragma once

// Early reads for Mixture-of-Experts weights that are mapped from a file larger than memory.
//
// The hooks tell this unit which files are mapped and which graph node comes next; it tells the kernel
// which expert slices that node is about to touch. It never changes a value that is computed.
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
    GGML_MOE_PREFETCH_MODE_OFF  = 0, // hooks return at once
    GGML_MOE_PREFETCH_MODE_MADV = 1, // one WILLNEED per selected expert, at the matmul that reads it
    GGML_MOE_PREFETCH_MODE_HINT = 2, // all selected experts of gate, up and down before the first of the three
    GGML_MOE_PREFETCH_MODE_COUNT
};

enum ggml_moe_prefetch_counter {
    GGML_MOE_PREFETCH_COUNTER_MAPPINGS,       // mappings registered by the loader
    GGML_MOE_PREFETCH_COUNTER_LOAD_SKIPPED,   // loads that left out the read of the whole file
    GGML_MOE_PREFETCH_COUNTER_GROUPS,         // hint: first matmuls of a group; madv: matmuls
    GGML_MOE_PREFETCH_COUNTER_SLICES,         // expert matrices considered
    GGML_MOE_PREFETCH_COUNTER_CALLS,          // requests given to the kernel
    GGML_MOE_PREFETCH_COUNTER_BYTES_HINTED,   // bytes in these requests
    GGML_MOE_PREFETCH_COUNTER_BYTES_RESIDENT, // hint: bytes of considered slices that were already in memory
    GGML_MOE_PREFETCH_COUNTER_ERRORS,         // requests that the kernel or the platform refused
    GGML_MOE_PREFETCH_COUNTER_LAST_ERRNO,     // why the latest of them was refused
    GGML_MOE_PREFETCH_COUNTER_IDS_IGNORED,    // expert ids outside [0, n_expert)
    GGML_MOE_PREFETCH_COUNTER_UNMAPPED,       // expert matmuls whose weights are in no registered mapping
    GGML_MOE_PREFETCH_COUNTER_HINT_NS,        // time spent in the node hook, nanoseconds
    GGML_MOE_PREFETCH_COUNTER_COUNT
};

// version of this payload, part of a wheel's manifest
GGML_API const char * ggml_moe_prefetch_version(void);

// the initial mode comes from the environment variable MOE_MADV_MODE (off, madv, hint); default off
// a later change holds for hints and for faults on experts; what the load has read ahead, and the read-ahead
// of the open file, stay as the mode at load time decided
GGML_API bool                        ggml_moe_prefetch_set_mode(enum ggml_moe_prefetch_mode mode);
GGML_API enum ggml_moe_prefetch_mode ggml_moe_prefetch_get_mode(void);
GGML_API const char *                ggml_moe_prefetch_mode_name(enum ggml_moe_prefetch_mode mode); // NULL: no such mode

// counters since the start of the process or the last reset
GGML_API int          ggml_moe_prefetch_counter_count(void);
GGML_API const char * ggml_moe_prefetch_counter_name (int counter); // NULL: no such counter
GGML_API uint64_t     ggml_moe_prefetch_counter_value(int counter);
GGML_API void         ggml_moe_prefetch_counter_reset(void);

//
// hooks
//

// loader, before a model of n_bytes in all its files is mapped: may the load read the whole of it ahead?
// no, when a mode is on and n_bytes exceeds the memory available; MOE_MADV_LOAD=on or off decides otherwise
GGML_API bool ggml_moe_prefetch_load_allowed(uint64_t n_bytes);

// loader, after mapping a file and before unmapping all or part of it
GGML_API void ggml_moe_prefetch_map_add   (const void * addr, size_t size, int fd);
GGML_API void ggml_moe_prefetch_map_remove(const void * addr, size_t size);

// CPU backend, one thread, right before node i of the graph is computed and after all nodes before it
GGML_API void ggml_moe_prefetch_node(const struct ggml_cgraph * cgraph, int i);

#ifdef __cplusplus
}
#endif
