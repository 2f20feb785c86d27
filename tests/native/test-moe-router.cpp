// How a layer selects its experts, read off the graph and computed for another input.

#include "helpers.h"

#include "ggml-moe-router.h"

// logits = weights x; then some operations; then the n_used largest
struct t_router {
    t_graph            g;
    std::vector<float> matrix;
    std::vector<float> bias;
    ggml_tensor *      last;

    t_router(int64_t n_in, int64_t n_expert, std::vector<float> values) : matrix(std::move(values)) {
        ggml_tensor * w = g.weights((uintptr_t) matrix.data(), 1, matrix.size()*sizeof(float));
        w->type  = GGML_TYPE_F32;
        w->ne[0] = n_in;
        w->ne[1] = n_expert;
        w->nb[1] = n_in*sizeof(float);
        last = op(GGML_OP_MUL_MAT);
        last->src[0] = w;
        last->ne[0]  = n_expert;
    }

    ggml_tensor * op(enum ggml_op op) {
        ggml_tensor * t = g.weights(0, 1, 0);
        t->op = op;
        return t;
    }

    t_router & then(enum ggml_op kind, int unary = 0) {
        ggml_tensor * t = op(kind);
        t->src[0] = last;
        t->ne[0]  = last->ne[0];
        t->op_params[0] = unary;
        last = t;
        return *this;
    }

    t_router & add(std::vector<float> values) {
        bias = std::move(values);
        then(GGML_OP_ADD);
        last->src[1] = g.weights((uintptr_t) bias.data(), 1, 0);
        last->src[1]->type  = GGML_TYPE_F32;
        last->src[1]->ne[0] = (int64_t) bias.size();
        return *this;
    }

    std::unique_ptr<ggml_moe_router> top(int64_t n_used) {
        then(GGML_OP_ARGSORT).then(GGML_OP_VIEW);
        last->ne[0] = n_used;
        return ggml_moe_router::of(last);
    }
};

using ids = std::vector<int32_t>;

static void test_select() {
    // expert e answers to input e, but 3 to all of them a little; nine inputs: one more than a round of the dot product
    std::vector<float> rows(4*9);
    rows[0*9 + 0] = rows[1*9 + 1] = rows[2*9 + 8] = 1.0f;
    for (int i = 0; i < 9; i++) {
        rows[3*9 + i] = 0.25f;
    }
    t_router plain(9, 4, rows);
    const auto router = plain.then(GGML_OP_SOFT_MAX).top(2);
    CHECK(router != nullptr);
    CHECK_EQ(router->n_in, 9u);
    CHECK_EQ(router->n_expert, 4u);
    CHECK((router->select({ 1, 0, 0, 0, 0, 0, 0, 0, 0 }) == ids{ 0, 3 }));        // 1, 0, 0, 0.25
    CHECK((router->select({ 3, 2, 0, 0, 0, 0, 0, 0, 1 }) == ids{ 0, 1 }));        // 3, 2, 1, 1.5
    CHECK((router->select({ 3, 2, 0, 0, 0, 0, 0, 0, 1,                            // two tokens: 0 and 1, 2 and 3; the surest first
                            0, 0, 0, 0, 0, 0, 0, 0, 2 }) == ids{ 0, 2, 1, 3 }));
    CHECK((router->select({ 0, 1, 0, 0, 0, 0, 0, 0, 4 }) == ids{ 2, 3 }));        // 0, 1, 4, 1.25
}

static void test_steps() {
    const std::vector<float> rows = { 4, 2, 1 }; // one input, three experts

    // sigmoid: 0.982, 0.881, 0.731; the bias makes the last two the largest, which it would not do to the logits
    t_router gated(1, 3, rows);
    const auto router = gated.then(GGML_OP_UNARY, GGML_UNARY_OP_SIGMOID).add({ 0, 0.2f, 0.3f }).top(2);
    CHECK((router->select({ 1 }) == ids{ 1, 2 })); // 0.982, 1.081, 1.031

    // sqrt(softplus): 2.005, 1.458, 1.146; with the bias 2.005, 1.858, 1.946
    t_router root(1, 3, rows);
    const auto other = root.then(GGML_OP_UNARY, GGML_UNARY_OP_SOFTPLUS).then(GGML_OP_SQRT).add({ 0, 0.4f, 0.8f }).top(2);
    CHECK((other->select({ 1 }) == ids{ 0, 2 }));
    CHECK((other->select({ 30 }) == ids{ 0, 1 })); // 10.95, 8.15, 6.28: softplus is its argument there
}

// what is not known is not foreseen
static void test_unknown() {
    const std::vector<float> rows = { 4, 2, 1 };
    CHECK(t_router(1, 3, rows).then(GGML_OP_UNARY, GGML_UNARY_OP_RELU).top(2) == nullptr);
    CHECK(t_router(1, 3, rows).then(GGML_OP_ARGSORT).top(2) == nullptr);  // in groups
    CHECK(t_router(1, 3, rows).then(GGML_OP_GET_ROWS).top(2) == nullptr); // hash-routed
    t_router half(1, 3, rows);
    CHECK(half.add({ 1, 2 }).top(2) == nullptr);                          // a bias of another length
    t_router unsorted(1, 3, rows);
    CHECK(ggml_moe_router::of(unsorted.last) == nullptr);
    CHECK(ggml_moe_router::of(t_router(1, 3, rows).g.ids(2, 4, {{ 0, 1 }})) == nullptr);
}

int main() {
    test_select();
    test_steps();
    test_unknown();
    return 0;
}
