#pragma once

// Requests to the kernel for ranges of a mapping: to read, to keep, to let go.

#include "ggml-moe-state.h"

// the behaviour published as MoE-MADV: a whole slice in one request, whatever of it is in memory
void ggml_moe_madv_slice(ggml_moe_prefetch_state & state, const ggml_moe_os & os, ggml_moe_range slice);

// a fault on an expert page must not drag in its neighbours, which belong to experts that nobody asked for
void ggml_moe_hint_random(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_moe_matrices & matrices);

// the slices of some experts in every matrix; returns the bytes asked for
size_t ggml_moe_hint_experts(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_moe_matrices & matrices,
    const std::vector<int32_t> & experts);

// weights that nodes [i0, i1) are sure to read; locked too, within what the settings allow; returns the bytes of them that
// are known not to be in memory
size_t ggml_moe_hint_always(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_cgraph * cgraph, int i0, int i1);

// rows of the token embedding that nodes [0, i1) take: a fault would read around them as much as the read-ahead; other
// tables are llama.cpp's to read by the row
void ggml_moe_hint_rows(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_cgraph * cgraph, int i1);

// Looking at pages costs as much as 1 % of a token when all are there. Pages that have gone show as major faults of
// the threads of a matmul, so once nothing was missing for two rounds of all layers, the announcing thread's faults are
// counted instead of pages; `n_faults` is that thread's count so far.
bool ggml_moe_all_resident(ggml_moe_prefetch_state & state, const ggml_moe_os & os, uint64_t & n_faults);
void ggml_moe_saw(ggml_moe_prefetch_state & state, size_t n_absent);

// some experts of some matrices, without holding up the caller: a request for a whole layer blocks until the disk has
// taken it; false: it would push out what is in use
bool ggml_moe_queue_push(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const ggml_moe_matrices & matrices,
    const std::vector<int32_t> & experts);
void ggml_moe_queue_drop(ggml_moe_prefetch_state & state);

// slices that the page cache need not hold; a file of which it keeps them is not asked for again
void ggml_moe_drop(ggml_moe_prefetch_state & state, const ggml_moe_os & os, const std::vector<ggml_moe_range> & slices);
