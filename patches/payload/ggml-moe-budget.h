#pragma once

// How much memory experts may take, as it changes.

#include "ggml-moe-state.h"

// weights of a graph that every token reads, so that they are left out of what experts may take
void ggml_moe_always_learn(ggml_moe_prefetch_state & state, const ggml_cgraph * cgraph);

// cache: its budget, looked at ten times a second and more often while it fills
void ggml_moe_cache_follow(ggml_moe_prefetch_state & state, const ggml_moe_os & os);

// hint, overlap: that of the experts in the page cache, looked at twice a second
void ggml_moe_pages_follow(ggml_moe_prefetch_state & state, const ggml_moe_os & os, ggml_moe_pages & pages);
