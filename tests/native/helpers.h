#pragma once

#include "ggml-moe-graph.h"
#include "ggml-moe-prefetch.h"
#include "ggml-moe-prefetch-impl.h"

#include <cerrno>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#define T_EXIT_SKIP 77

#define CHECK(cond)                                                              \
    do {                                                                         \
        if (!(cond)) {                                                           \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #cond);   \
            exit(1);                                                             \
        }                                                                        \
    } while (0)

// for unsigned integers of any width
#define CHECK_EQ(a, b)                                                           \
    do {                                                                         \
        const uint64_t t_a = (a);                                                \
        const uint64_t t_b = (b);                                                \
        if (t_a != t_b) {                                                        \
            fprintf(stderr, "%s:%d: %s is %llu, expected %llu\n", __FILE__, __LINE__, #a, \
                    (unsigned long long) t_a, (unsigned long long) t_b);         \
            exit(1);                                                             \
        }                                                                        \
    } while (0)

// tensors and nodes of a graph, kept alive together
struct t_graph {
    std::deque<ggml_tensor>              tensors;
    std::deque<std::vector<int32_t>>     data;
    std::vector<ggml_tensor *>           nodes;
    ggml_cgraph                          cgraph = {};

    ggml_tensor * weights(uintptr_t addr, int64_t n_expert, size_t slice) {
        tensors.emplace_back();
        ggml_tensor & t = tensors.back();
        memset(&t, 0, sizeof(t));
        t.data  = (void *) addr;
        t.ne[0] = t.ne[1] = t.ne[3] = 1;
        t.ne[2] = n_expert;
        t.nb[2] = slice;
        return &t;
    }

    // ids as llama.cpp has them: the first n_used columns of rows that are n_expert wide
    ggml_tensor * ids(int64_t n_used, int64_t n_expert, std::vector<std::vector<int32_t>> rows) {
        data.emplace_back(n_expert*rows.size(), -7);
        for (size_t i = 0; i < rows.size(); i++) {
            std::copy(rows[i].begin(), rows[i].end(), data.back().begin() + i*n_expert);
        }
        ggml_tensor * t = weights((uintptr_t) data.back().data(), 1, 0);
        t->type  = GGML_TYPE_I32;
        t->ne[0] = n_used;
        t->ne[1] = (int64_t) rows.size();
        t->nb[0] = sizeof(int32_t);
        t->nb[1] = n_expert*sizeof(int32_t);
        return t;
    }

    int add(enum ggml_op op, ggml_tensor * src0 = nullptr, ggml_tensor * ids = nullptr) {
        ggml_tensor * t = weights(0, 1, 0);
        t->op     = op;
        t->src[0] = src0;
        t->src[2] = ids;
        nodes.push_back(t);
        cgraph.nodes   = nodes.data();
        cgraph.n_nodes = (int) nodes.size();
        return cgraph.n_nodes - 1;
    }

    void run(int first = 0) {
        for (int i = first; i < cgraph.n_nodes; i++) {
            ggml_moe_prefetch_node(&cgraph, i);
        }
    }
};

// a system on which nothing is in memory, every advice is taken, and nothing can be read past the page cache
inline ggml_moe_os t_os() {
    ggml_moe_os os = {};
    os.page_size        = 4096;
    os.advise_willneed  = [](uintptr_t, size_t) { return 0; };
    os.advise_random    = [](uintptr_t, size_t) { return 0; };
    os.advise_normal    = [](uintptr_t, size_t) { return 0; };
    os.resident         = [](uintptr_t, size_t size, uint8_t * pages) { memset(pages, 0, size/4096); return 0; };
    os.lock             = [](uintptr_t, size_t) { return 0; };
    os.unlock           = [](uintptr_t, size_t) { return 0; };
    os.file_normal      = [](int) { return 0; };
    os.read_window      = [](int) { return (size_t) 16*4096; };
    os.resident_known   = [](int) { return true; };
    os.direct_open      = [](int, intptr_t *) { return -EINVAL; };
    os.direct_read      = [](intptr_t, void *, size_t, uint64_t) { return (int64_t) -EINVAL; };
    os.direct_close     = [](intptr_t) {};
    os.page_drop        = [](intptr_t, uintptr_t, size_t, uint64_t) { return 0; };
    os.memory_reserve   = [](size_t) { return (void *) nullptr; };
    os.memory_discard   = [](void *, size_t) { return 0; };
    os.memory_free      = [](void *, size_t) {};
    os.thread_pin       = [](int) { return -ENOSYS; };
    os.memory_available = [] { return (uint64_t) 0; };
    os.memory_spare     = [] { return (uint64_t) 0; };
    os.major_faults     = [] { static std::atomic<uint64_t> n{0}; return (uint64_t) ++n; };
    return os;
}

// what a stand-in kernel was asked for; each test has letters of its own
struct t_request {
    char      what;
    uintptr_t addr;
    size_t    size;

    bool operator==(const t_request & other) const {
        return what == other.what && addr == other.addr && size == other.size;
    }
};

// those of one kind that start in [begin, end)
inline std::vector<t_request> t_only(const std::vector<t_request> & requests, char what, uintptr_t begin = 0, uintptr_t end = UINTPTR_MAX) {
    std::vector<t_request> found;
    for (const auto & r : requests) {
        if (r.what == what && begin <= r.addr && r.addr < end) {
            found.push_back(r);
        }
    }
    return found;
}

inline uint64_t t_counter(const char * name) {
    for (int i = 0; i < ggml_moe_prefetch_counter_count(); i++) {
        if (strcmp(ggml_moe_prefetch_counter_name(i), name) == 0) {
            return ggml_moe_prefetch_counter_value(i);
        }
    }
    fprintf(stderr, "no counter %s\n", name);
    exit(1);
}
