#pragma once

// How a layer selects its experts, read off the graph, so that the next layer's selection can be foreseen: its router
// applied to this layer's input. Published hit rates of that on real models are 80 to 90 % (results/prediction.md).

#include "ggml-moe-graph.h"

#include <memory>

struct ggml_moe_router {
    // a constant of the graph; what lies in a device's memory is copied once
    struct constant {
        const ggml_tensor * tensor = nullptr;
        std::vector<char>   copy;

        explicit constant(const ggml_tensor * tensor);
        const char * data() const { return copy.empty() ? (const char *) tensor->data : copy.data(); }
    };

    // what is done to the logits before the largest are taken
    enum step_kind { STEP_SOFT_MAX, STEP_SQRT, STEP_SIGMOID, STEP_SOFTPLUS, STEP_ADD };

    struct step {
        step_kind          kind;
        std::vector<float> bias; // [n_expert], of an addition
    };

    constant          weights; // [n_in, n_expert]
    int64_t           n_used;
    std::vector<step> steps;   // in the order of computing

    explicit ggml_moe_router(const ggml_tensor * weights) : weights(weights) {}

    int64_t n_in()     const { return weights.tensor->ne[0]; }
    int64_t n_expert() const { return weights.tensor->ne[1]; }

    // the router behind an ids tensor of shape [n_used, n_tokens], or NULL when it is of a kind that is not known
    static std::unique_ptr<ggml_moe_router> of(const ggml_tensor * ids);

    // experts selected for x, [n_tokens][n_in]: distinct, every token's first choice before any second
    std::vector<int32_t> select(const std::vector<float> & x) const;
};
