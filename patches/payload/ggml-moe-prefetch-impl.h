#pragma once

// Inner parts of ggml-moe-prefetch.cpp, visible to its unit tests.

#include "ggml-moe-os.h"

// replaces the operating system; NULL restores the native one; no model may be mapped and the mode must be off
void ggml_moe_prefetch_set_os(const ggml_moe_os * os);
