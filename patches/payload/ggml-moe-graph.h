#pragma once

// What a compute graph tells about Mixture-of-Experts weights: which matmuls belong together, which experts they
// read, and which other weights come next. Pure functions of the graph.

#include "ggml-impl.h"

#include <cstddef>
#include <cstdint>
#include <vector>

struct ggml_moe_range {
    uintptr_t begin;
    uintptr_t end; // exclusive

    size_t size() const { return end > begin ? end - begin : 0; }
    bool contains(const ggml_moe_range & other) const { return begin <= other.begin && other.end <= end; }
};

// the pages that hold any byte of the range / the pages that hold no byte outside of it; page_size is a power of two
ggml_moe_range ggml_moe_range_outer(ggml_moe_range range, size_t page_size);
ggml_moe_range ggml_moe_range_inner(ggml_moe_range range, size_t page_size);

ggml_moe_range ggml_moe_tensor_range(const ggml_tensor * tensor);

// expert ids of one selection: a row of n_used for each token; an id outside [0, n_expert) is not in `rows`
struct ggml_moe_ids {
    int64_t                           n_expert  = 0;
    uint64_t                          n_ignored = 0;
    std::vector<std::vector<int32_t>> rows;     // [n_tokens][<= n_used]
    std::vector<int32_t>              distinct; // ascending
};

// ids has shape [n_used, n_tokens], type I32, any strides
void ggml_moe_ids_read(const ggml_tensor * ids, int64_t n_expert, ggml_moe_ids & out);

// ids that are rows of a table looked up by token (hash-routed layers) are known before the graph runs;
// false when these are not, or when their inputs are not in this process's memory
bool ggml_moe_ids_read_early(const ggml_tensor * ids, int64_t n_expert, ggml_moe_ids & out);

// experts of some matrices: [n_in, n_out, n_expert] each
using ggml_moe_matrices = std::vector<const ggml_tensor *>;

// the matmuls that share one ids tensor (gate, up, down), in the order they run
struct ggml_moe_group {
    std::vector<const ggml_tensor *> nodes;

    const ggml_tensor * ids() const      { return nodes[0]->src[2]; }
    int64_t             n_expert() const { return nodes[0]->src[0]->ne[2]; }
    ggml_moe_matrices   weights() const;
};

bool ggml_moe_in_host_memory(const ggml_tensor * tensor);

// a matmul by selected experts whose weights are in host memory, so that this process computes it
bool ggml_moe_is_expert_matmul(const ggml_tensor * node);

// the group that node i is the first matmul of; no nodes when it is none
ggml_moe_group ggml_moe_group_at(const ggml_cgraph * cgraph, int i);

// the next node from i on that is the first matmul of a group; n_nodes when there is none
int ggml_moe_group_next(const ggml_cgraph * cgraph, int i);

// weights that nodes [i0, i1) read whole: neither experts nor rows of a table; in the order of use, each once
std::vector<ggml_moe_range> ggml_moe_always_used(const ggml_cgraph * cgraph, int i0, int i1);
