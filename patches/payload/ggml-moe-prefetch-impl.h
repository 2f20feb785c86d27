#pragma once

// Inner parts of ggml-moe-prefetch.cpp, visible to its unit tests.

#include "ggml-impl.h"
#include "ggml-moe-os.h"
#include "ggml-moe-prefetch.h"

#include <cstddef>
#include <cstdint>
#include <vector>

struct ggml_moe_range {
    uintptr_t begin;
    uintptr_t end; // exclusive

    size_t size() const { return end > begin ? end - begin : 0; }
};

// the pages that hold any byte of the range / the pages that hold no byte outside of it; page_size is a power of two
ggml_moe_range ggml_moe_range_outer(ggml_moe_range range, size_t page_size);
ggml_moe_range ggml_moe_range_inner(ggml_moe_range range, size_t page_size);

// distinct expert ids in ascending order; ids has shape [n_expert_used, n_tokens], type I32, any strides
// returns the number of ids outside [0, n_expert), which are left out
uint64_t ggml_moe_ids_distinct(const ggml_tensor * ids, int64_t n_expert, std::vector<int32_t> & experts);

// weights of all expert matmuls that share the ids of node i, when node i is the first of them; otherwise none
void ggml_moe_group_weights(const ggml_cgraph * cgraph, int i, std::vector<const ggml_tensor *> & weights);

// replaces the operating system; NULL restores the native one
void ggml_moe_prefetch_set_os(const ggml_moe_os * os);
