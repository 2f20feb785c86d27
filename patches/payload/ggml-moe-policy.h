#pragma once

// Which experts are worth their memory: those used often and lately, of layers that run soon. The weights and
// half-lives are from results/eviction.md.

#include "ggml-moe-graph.h"

#include <cstddef>
#include <cstdint>
#include <vector>

// tokens from which on a batch is taken for a piece of a prompt
static constexpr size_t GGML_MOE_N_PROMPT = 9;

// powers of 2^(-1/half), tabulated: hundreds of experts are looked at for one that goes
struct ggml_moe_decay {
    std::vector<float> powers;

    explicit ggml_moe_decay(float half);
    float operator()(uint64_t n) const { return n < powers.size() ? powers[n] : 0.0f; }
};

// how often an expert was selected, an older selection counting less. A pass is a selection by a few tokens; a prompt
// is none, however many batches it comes in, and makes its experts only as good as used once
struct ggml_moe_use {
    float    recent   = 0.0f; // half after one pass
    float    frequent = 0.0f; // half after half_life passes
    float    tail     = 0.0f; // half after 16 tokens, prompt or not: the order among those of a prompt
    uint32_t pass     = 0;    // of the layer, when the first two were last brought up to date
    uint64_t token    = 0;    // of the layer, the same of the third
};

// of one layer
struct ggml_moe_uses {
    std::vector<ggml_moe_use> experts;   // [n_expert]
    uint32_t                  pass  = 0;
    uint64_t                  token = 0; // tokens routed so far
};

struct ggml_moe_policy {
    const ggml_moe_decay recent  {1.0f};  // by passes
    const ggml_moe_decay frequent;
    const ggml_moe_decay tail    {16.0f}; // by tokens

    explicit ggml_moe_policy(float half_life) : frequent(half_life) {}

    void  touch (ggml_moe_uses & uses, const ggml_moe_ids & ids, bool prompt) const;
    float counts(const ggml_moe_uses & uses, int32_t expert) const; // what an expert is worth, times `due` of its layer
};

// Layers run in a cycle of n, so an expert of a layer that has just run is needed later than one of the next layer.
float ggml_moe_due(size_t layer, size_t running, size_t n);
