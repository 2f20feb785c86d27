#pragma once

// How a layer selects its experts, read off the graph, so that the next layer's selection can be foreseen: its router
// applied to this layer's input. Published hit rates of that on real models are 80 to 90 % (results/prediction.md).

#include "ggml-moe-graph.h"

#include <memory>

struct ggml_moe_router {
    // what is done to the logits before the largest are taken
    enum step_kind { STEP_SOFT_MAX, STEP_SQRT, STEP_SIGMOID, STEP_SOFTPLUS, STEP_ADD };

    struct step {
        step_kind          kind;
        std::vector<float> bias; // [n_expert], of an addition
    };

    // the weights, [n_in, n_expert]; what lies in a device's memory is copied. No pointer to a tensor stays: a model's
    // tensors go before its mappings do
    enum ggml_type    type;
    int64_t           n_in;
    int64_t           n_expert;
    size_t            stride; // of a row, bytes
    const char *      data;
    std::vector<char> copy;

    int64_t           n_used;
    std::vector<step> steps; // in the order of computing

    // the router behind an ids tensor of shape [n_used, n_tokens], or NULL when it is of a kind that is not known
    static std::unique_ptr<ggml_moe_router> of(const ggml_tensor * ids);

    // experts selected for x, [n_tokens][n_in]: distinct, every token's first choice before any second
    std::vector<int32_t> select(const std::vector<float> & x) const;
};
