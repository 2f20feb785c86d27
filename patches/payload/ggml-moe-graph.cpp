#include "ggml-moe-graph.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>

//
// ranges
//

ggml_moe_range ggml_moe_range_outer(ggml_moe_range range, size_t page_size) {
    const uintptr_t mask = page_size - 1;
    return { range.begin & ~mask, (range.end + mask) & ~mask };
}

ggml_moe_range ggml_moe_range_inner(ggml_moe_range range, size_t page_size) {
    const uintptr_t mask = page_size - 1;
    range.begin = (range.begin + mask) & ~mask;
    range.end   = std::max(range.begin, range.end & ~mask);
    return range;
}

ggml_moe_range ggml_moe_tensor_range(const ggml_tensor * tensor) {
    const uintptr_t begin = (uintptr_t) tensor->data;
    return { begin, begin + ggml_nbytes(tensor) };
}

bool ggml_moe_in_host_memory(const ggml_tensor * tensor) {
    return tensor != nullptr && tensor->data != nullptr &&
        (tensor->buffer == nullptr || ggml_backend_buffer_is_host(tensor->buffer));
}

//
// ids
//

static void ggml_moe_ids_begin(int64_t n_expert, int64_t n_tokens, ggml_moe_ids & out) {
    out.n_expert  = n_expert;
    out.n_ignored = 0;
    out.rows.resize(n_tokens);
}

static void ggml_moe_ids_row(const char * data, size_t stride, int64_t n_used, std::vector<int32_t> & row, ggml_moe_ids & out) {
    row.clear();
    for (int64_t i = 0; i < n_used; i++) {
        int32_t id;
        memcpy(&id, data + i*stride, sizeof(id));
        if (id >= 0 && id < out.n_expert) {
            row.push_back(id);
        } else {
            out.n_ignored++;
        }
    }
}

static void ggml_moe_ids_end(ggml_moe_ids & out) {
    static thread_local std::vector<uint8_t> selected;
    selected.assign(out.n_expert, 0);
    for (const auto & row : out.rows) {
        for (const int32_t id : row) {
            selected[id] = 1;
        }
    }
    out.distinct.clear();
    for (int64_t id = 0; id < out.n_expert; id++) {
        if (selected[id]) {
            out.distinct.push_back((int32_t) id);
        }
    }
}

void ggml_moe_ids_read(const ggml_tensor * ids, int64_t n_expert, ggml_moe_ids & out) {
    ggml_moe_ids_begin(n_expert, ids->ne[1], out);
    for (int64_t i1 = 0; i1 < ids->ne[1]; i1++) {
        ggml_moe_ids_row((const char *) ids->data + i1*ids->nb[1], ids->nb[0], ids->ne[0], out.rows[i1], out);
    }
    ggml_moe_ids_end(out);
}

bool ggml_moe_ids_read_early(const ggml_tensor * ids, int64_t n_expert, ggml_moe_ids & out) {
    if (ids->op != GGML_OP_GET_ROWS) {
        return false;
    }
    const ggml_tensor * table = ids->src[0];
    const ggml_tensor * rows  = ids->src[1];
    if (!ggml_moe_in_host_memory(table) || table->op != GGML_OP_NONE || table->type != GGML_TYPE_I32 ||
        !ggml_moe_in_host_memory(rows)  || rows->op  != GGML_OP_NONE || rows->type  != GGML_TYPE_I32) {
        return false;
    }
    ggml_moe_ids_begin(n_expert, rows->ne[0], out);
    for (int64_t i = 0; i < rows->ne[0]; i++) {
        int32_t row;
        memcpy(&row, (const char *) rows->data + i*rows->nb[0], sizeof(row));
        if (row < 0 || row >= table->ne[1]) {
            return false;
        }
        ggml_moe_ids_row((const char *) table->data + row*table->nb[1], table->nb[0], table->ne[0], out.rows[i], out);
    }
    ggml_moe_ids_end(out);
    return true;
}

//
// groups
//

ggml_moe_matrices ggml_moe_group::weights() const {
    ggml_moe_matrices matrices;
    for (const ggml_tensor * node : nodes) {
        matrices.push_back(node->src[0]);
    }
    return matrices;
}

bool ggml_moe_is_expert_matmul(const ggml_tensor * node) {
    return node->op == GGML_OP_MUL_MAT_ID && ggml_moe_in_host_memory(node->src[0]);
}

// Matmuls of one group share the ids tensor and follow each other, with other nodes between them. Comparing
// neighbours needs no plan of the graph, so it holds for reused graphs, graph splits and several contexts.
ggml_moe_group ggml_moe_group_at(const ggml_cgraph * cgraph, int i) {
    ggml_moe_group group;

    if (!ggml_moe_is_expert_matmul(cgraph->nodes[i])) {
        return group;
    }
    const ggml_tensor * ids = cgraph->nodes[i]->src[2];

    for (int j = i - 1; j >= 0; j--) {
        if (ggml_moe_is_expert_matmul(cgraph->nodes[j])) {
            if (cgraph->nodes[j]->src[2] == ids) {
                return group;
            }
            break;
        }
    }

    for (int j = i; j < cgraph->n_nodes; j++) {
        const ggml_tensor * node = cgraph->nodes[j];
        if (ggml_moe_is_expert_matmul(node)) {
            if (node->src[2] != ids) {
                break;
            }
            group.nodes.push_back(node);
        }
    }
    return group;
}

int ggml_moe_group_next(const ggml_cgraph * cgraph, int i) {
    const ggml_tensor * ids = nullptr;
    for (int j = i - 1; j >= 0 && ids == nullptr; j--) {
        if (ggml_moe_is_expert_matmul(cgraph->nodes[j])) {
            ids = cgraph->nodes[j]->src[2];
        }
    }
    for (; i < cgraph->n_nodes; i++) {
        const ggml_tensor * node = cgraph->nodes[i];
        if (ggml_moe_is_expert_matmul(node) && node->src[2] != ids) {
            break;
        }
    }
    return i;
}

std::vector<ggml_moe_range> ggml_moe_always_used(const ggml_cgraph * cgraph, int i0, int i1) {
    std::vector<ggml_moe_range> found;
    for (int i = i0; i < i1; i++) {
        const ggml_tensor * node = cgraph->nodes[i];
        if (node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE) {
            continue; // reads nothing
        }
        for (int k = 0; k < GGML_MAX_SRC; k++) {
            const ggml_tensor * src = node->src[k];
            const bool by_row    = node->op == GGML_OP_GET_ROWS   && k == 0;
            const bool by_expert = (node->op == GGML_OP_MUL_MAT_ID || node->op == GGML_OP_ADD_ID) && k == 0;
            if (src == nullptr || by_row || by_expert) {
                continue;
            }
            const ggml_tensor * whole = src->view_src != nullptr ? src->view_src : src;
            if (whole->op != GGML_OP_NONE || !ggml_moe_in_host_memory(whole)) {
                continue;
            }
            const ggml_moe_range range = ggml_moe_tensor_range(src);
            if (std::none_of(found.begin(), found.end(), [&](const ggml_moe_range & r) { return r.begin == range.begin; })) {
                found.push_back(range);
            }
        }
    }
    return found;
}
