#pragma once

// hint, overlap: the page cache, with the policy of the cache.
//
// Left alone the kernel drops expert pages in the order they were read, since it does not look at the use of what is
// advised random (vma_has_recency in include/linux/mm_inline.h), and it does so a few pages at a time in the thread that
// asks for the next. So experts that were asked for are counted as held, and beyond a budget those worth least are
// dropped whole, while the disk reads what was asked for. The kernel may have dropped some before: that costs nothing.

#include "ggml-moe-policy.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

struct ggml_moe_pages_part {
    uintptr_t begin; // of the first expert in the mapping
    size_t    slice; // bytes of one expert

    bool operator==(const ggml_moe_pages_part & other) const { return begin == other.begin && slice == other.slice; }
};

struct ggml_moe_pages_layer {
    std::vector<ggml_moe_pages_part> parts;
    std::vector<bool>                held;            // [n_expert]
    ggml_moe_uses                    uses;
    bool                             ahead   = false; // asked for before its selection: nothing of it goes until then
    bool                             learned = false;

    size_t expert_bytes() const;
};

struct ggml_moe_pages {
    std::atomic<uint64_t> budget{UINT64_MAX}; // bytes of experts; UINT64_MAX: all may stay, nothing is counted
    std::atomic<uint64_t> budget_ns{0};       // when it was looked at

    explicit ggml_moe_pages(float half_life) : policy(half_life) {}

    // experts of a layer have been asked for; adds the slices to drop for them
    void select(const std::vector<ggml_moe_pages_part> & parts, int64_t n_expert, const ggml_moe_ids & ids, bool prompt,
        std::vector<ggml_moe_range> & dropped);

    // the same before the layer's selection is known, or due
    void ahead(const std::vector<ggml_moe_pages_part> & parts, int64_t n_expert, const std::vector<int32_t> & experts);

    // true the first time: the graph that computes this layer tells which weights are always used
    bool learn(const std::vector<ggml_moe_pages_part> & parts, int64_t n_expert);

    void forget(ggml_moe_range range); // layers with a part in it

private:
    const ggml_moe_policy policy;

    std::mutex                        mutex;  // all below
    std::vector<ggml_moe_pages_layer> layers; // in the order they run
    uint64_t                          n_bytes = 0; // of experts held

    size_t find(const std::vector<ggml_moe_pages_part> & parts, int64_t n_expert);
    void hold(ggml_moe_pages_layer & layer, const std::vector<int32_t> & experts);
};
