// The functions of ggml that the payload links against, so that its tests need no ggml build.

#include "ggml-backend.h"
#include "ggml-impl.h"

#include <cstdarg>
#include <cstdio>

size_t ggml_nbytes(const struct ggml_tensor * tensor) {
    return tensor->ne[2]*tensor->nb[2]; // expert matrices are contiguous, one after the other
}

void ggml_log_internal(enum ggml_log_level, const char * format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
}

bool ggml_backend_buffer_is_host(ggml_backend_buffer_t) {
    return true;
}
