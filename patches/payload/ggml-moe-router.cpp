#include "ggml-moe-router.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

// its bytes, those of a device's memory copied
static const char * ggml_moe_bytes(const ggml_tensor * tensor, std::vector<char> & copy) {
    if (ggml_moe_in_host_memory(tensor)) {
        return (const char *) tensor->data;
    }
    copy.resize(ggml_nbytes(tensor));
    ggml_backend_tensor_get(tensor, copy.data(), 0, copy.size());
    return copy.data();
}

static bool ggml_moe_is_constant(const ggml_tensor * tensor) {
    return tensor != nullptr && tensor->op == GGML_OP_NONE && tensor->data != nullptr && tensor->view_src == nullptr;
}

// from the selection back to the logits; each operation has the scores as its first source
std::unique_ptr<ggml_moe_router> ggml_moe_router::of(const ggml_tensor * ids) {
    std::vector<step> steps;
    bool sorted = false;

    for (const ggml_tensor * t = ids; t != nullptr; t = t->src[0]) {
        switch (t->op) {
            case GGML_OP_VIEW:
            case GGML_OP_RESHAPE:
            case GGML_OP_CONT:
                break;
            case GGML_OP_ARGSORT:
                if (sorted) {
                    return nullptr; // experts in groups
                }
                sorted = true;
                break;
            case GGML_OP_SOFT_MAX:
                steps.push_back({ STEP_SOFT_MAX, {} });
                break;
            case GGML_OP_SQRT:
                steps.push_back({ STEP_SQRT, {} });
                break;
            case GGML_OP_UNARY: {
                const char * name = ggml_unary_op_name(ggml_get_unary_op(t)); // not every version has every enumerator
                const bool sigmoid = strcmp(name, "SIGMOID") == 0;
                if (!sigmoid && strcmp(name, "SOFTPLUS") != 0) {
                    return nullptr;
                }
                steps.push_back({ sigmoid ? STEP_SIGMOID : STEP_SOFTPLUS, {} });
                break;
            }
            case GGML_OP_ADD: {
                const ggml_tensor * bias = t->src[1];
                if (!ggml_moe_is_constant(bias) || bias->type != GGML_TYPE_F32 || bias->ne[0] != t->ne[0] || bias->ne[1] != 1) {
                    return nullptr;
                }
                std::vector<char> copy;
                const char * values = ggml_moe_bytes(bias, copy);
                steps.push_back({ STEP_ADD, std::vector<float>(bias->ne[0]) });
                memcpy(steps.back().bias.data(), values, bias->ne[0]*sizeof(float));
                break;
            }
            case GGML_OP_MUL_MAT: {
                const ggml_tensor * w = t->src[0];
                if (!sorted || !ggml_moe_is_constant(w) || w->ne[2] != 1 || ids->ne[0] < 1 || ids->ne[0] > w->ne[1] ||
                        (w->type != GGML_TYPE_F32 && ggml_get_type_traits(w->type)->to_float == nullptr)) {
                    return nullptr;
                }
                auto router = std::make_unique<ggml_moe_router>();
                router->type     = w->type;
                router->n_in     = w->ne[0];
                router->n_expert = w->ne[1];
                router->stride   = w->nb[1];
                router->data     = ggml_moe_bytes(w, router->copy);
                router->n_used   = ids->ne[0];
                router->steps.assign(steps.rbegin(), steps.rend());
                return router;
            }
            default:
                return nullptr;
        }
    }
    return nullptr;
}

// eight sums, so that a compiler may use vectors without reordering one
static float ggml_moe_dot(const float * a, const float * b, int64_t n) {
    float sums[8] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int k = 0; k < 8; k++) {
            sums[k] += a[i + k]*b[i + k];
        }
    }
    float sum = 0.0f;
    for (; i < n; i++) {
        sum += a[i]*b[i];
    }
    return std::accumulate(sums, sums + 8, sum);
}

static void ggml_moe_apply(const ggml_moe_router::step & step, std::vector<float> & scores) {
    if (step.kind == ggml_moe_router::STEP_SOFT_MAX) {
        const float max = *std::max_element(scores.begin(), scores.end());
        float sum = 0.0f;
        for (float & s : scores) {
            s = std::exp(s - max);
            sum += s;
        }
        for (float & s : scores) {
            s /= sum;
        }
        return;
    }
    for (size_t i = 0; i < scores.size(); i++) {
        float & s = scores[i];
        switch (step.kind) {
            case ggml_moe_router::STEP_SQRT:     s = std::sqrt(s);                               break;
            case ggml_moe_router::STEP_SIGMOID:  s = 1.0f/(1.0f + std::exp(-s));                 break;
            case ggml_moe_router::STEP_SOFTPLUS: s = s > 20.0f ? s : std::log1p(std::exp(s));    break;
            case ggml_moe_router::STEP_ADD:      s = s + step.bias[i];                           break;
            case ggml_moe_router::STEP_SOFT_MAX: break;
        }
    }
}

std::vector<int32_t> ggml_moe_router::select(const std::vector<float> & x) const {
    const ggml_type_traits * traits = ggml_get_type_traits(type);
    const size_t n_tokens = x.size()/n_in;

    std::vector<float> row(n_in);
    std::vector<std::vector<float>> scores(n_tokens, std::vector<float>(n_expert));
    for (int64_t e = 0; e < n_expert; e++) {
        const float * values = (const float *) (data + e*stride);
        if (type != GGML_TYPE_F32) {
            traits->to_float(data + e*stride, row.data(), n_in);
            values = row.data();
        }
        for (size_t t = 0; t < n_tokens; t++) {
            scores[t][e] = ggml_moe_dot(values, x.data() + t*n_in, n_in);
        }
    }

    std::vector<std::vector<int32_t>> orders(n_tokens, std::vector<int32_t>(n_expert));
    for (size_t t = 0; t < n_tokens; t++) {
        auto & s     = scores[t];
        auto & order = orders[t];
        for (const step & step : steps) {
            ggml_moe_apply(step, s);
        }
        for (float & score : s) {
            score = std::isnan(score) ? -INFINITY : score; // else there is no order
        }
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + n_used, order.end(), [&](int32_t a, int32_t b) { return s[a] > s[b]; });
    }
    std::vector<int32_t> found;
    std::vector<bool>    selected(n_expert);
    for (int64_t i = 0; i < n_used; i++) {
        for (const auto & order : orders) {
            if (!selected[order[i]]) {
                selected[order[i]] = true;
                found.push_back(order[i]);
            }
        }
    }
    return found;
}
