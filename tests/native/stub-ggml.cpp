// The functions of ggml that the payload links against, so that its tests need no ggml build.

#include "ggml-backend.h"
#include "ggml-impl.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

size_t ggml_nbytes(const struct ggml_tensor * tensor) {
    return tensor->ne[2]*tensor->nb[2]; // expert matrices are contiguous, one after the other
}

void ggml_log_internal(enum ggml_log_level, const char * format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
}

// a device's buffer is the one at address 1
bool ggml_backend_buffer_is_host(ggml_backend_buffer_t buffer) {
    return buffer != (ggml_backend_buffer_t) 1;
}

// no tensor of these tests is in a device's memory
void ggml_backend_tensor_get(const struct ggml_tensor *, void *, size_t, size_t) {
    abort();
}

const struct ggml_type_traits * ggml_get_type_traits(enum ggml_type) {
    static const ggml_type_traits f32 = {};
    return &f32;
}

enum ggml_unary_op ggml_get_unary_op(const struct ggml_tensor * tensor) {
    return (enum ggml_unary_op) tensor->op_params[0];
}

const char * ggml_unary_op_name(enum ggml_unary_op op) {
    return op == GGML_UNARY_OP_SIGMOID ? "SIGMOID" : op == GGML_UNARY_OP_RELU ? "RELU" : "SOFTPLUS";
}
