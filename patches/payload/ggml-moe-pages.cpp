#include "ggml-moe-pages.h"

#include <algorithm>
#include <utility>

size_t ggml_moe_pages_layer::expert_bytes() const {
    size_t n = 0;
    for (const auto & part : parts) {
        n += part.slice;
    }
    return n;
}

// with the mutex held: the layer's index, a new one when it is not known
size_t ggml_moe_pages::find(const std::vector<ggml_moe_pages_part> & parts, int64_t n_expert) {
    const auto same = [&](const ggml_moe_pages_layer & layer) {
        return layer.parts == parts && (int64_t) layer.held.size() == n_expert;
    };
    const size_t i = std::find_if(layers.begin(), layers.end(), same) - layers.begin();
    if (i == layers.size()) {
        ggml_moe_pages_layer layer; // whole, or not at all
        layer.parts = parts;
        layer.held.resize((size_t) n_expert);
        layer.uses.experts.resize((size_t) n_expert);
        layers.push_back(std::move(layer));
    }
    return i;
}

void ggml_moe_pages::hold(ggml_moe_pages_layer & layer, const std::vector<int32_t> & experts) {
    for (const int32_t id : experts) {
        n_bytes += layer.held[id] ? 0 : layer.expert_bytes();
        layer.held[id] = true;
    }
}

bool ggml_moe_pages::learn(const std::vector<ggml_moe_pages_part> & parts, int64_t n_expert) {
    std::lock_guard<std::mutex> lock(mutex);
    return !std::exchange(layers[find(parts, n_expert)].learned, true);
}

void ggml_moe_pages::ahead(const std::vector<ggml_moe_pages_part> & parts, int64_t n_expert, const std::vector<int32_t> & experts) {
    std::lock_guard<std::mutex> lock(mutex);
    ggml_moe_pages_layer & layer = layers[find(parts, n_expert)];
    layer.ahead = true;
    hold(layer, experts);
}

void ggml_moe_pages::select(const std::vector<ggml_moe_pages_part> & parts, int64_t n_expert, const ggml_moe_ids & ids, bool prompt,
        std::vector<ggml_moe_range> & dropped) {
    std::lock_guard<std::mutex> lock(mutex);

    const size_t running = find(parts, n_expert);
    ggml_moe_pages_layer & layer = layers[running];
    layer.ahead = false;
    policy.touch(layer.uses, ids, prompt);
    hold(layer, ids.distinct);
    if (n_bytes <= budget) {
        return;
    }

    struct victim {
        float   worth;
        size_t  layer;
        int32_t expert;
    };
    std::vector<victim> victims;
    for (size_t l = 0; l < layers.size(); l++) {
        if (layers[l].ahead) {
            continue;
        }
        const float due = ggml_moe_due(l, running, layers.size());
        for (int32_t id = 0; id < (int32_t) layers[l].held.size(); id++) {
            if (layers[l].held[id] && (l != running || !std::binary_search(ids.distinct.begin(), ids.distinct.end(), id))) {
                victims.push_back({ due*policy.counts(layers[l].uses, id), l, id });
            }
        }
    }
    // Those worth least come up one by one: how many it takes depends on their sizes. A budget that shrank is caught up
    // with over some layers, since this takes the time of the thread that computes.
    uint64_t most = 2*ids.distinct.size()*layer.expert_bytes();
    const auto later = [](const victim & a, const victim & b) { return a.worth > b.worth; };
    std::make_heap(victims.begin(), victims.end(), later);
    while (n_bytes > budget && most > 0 && !victims.empty()) {
        std::pop_heap(victims.begin(), victims.end(), later);
        ggml_moe_pages_layer & from = layers[victims.back().layer];
        const int32_t          id   = victims.back().expert;
        victims.pop_back();
        from.held[id] = false;
        n_bytes -= from.expert_bytes();
        most    -= std::min<uint64_t>(most, from.expert_bytes());
        for (const auto & part : from.parts) {
            dropped.push_back({ part.begin + id*part.slice, part.begin + (id + 1)*part.slice });
        }
    }
}

void ggml_moe_pages::forget(ggml_moe_range range) {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto layer = layers.begin(); layer != layers.end();) {
        const bool gone = std::any_of(layer->parts.begin(), layer->parts.end(), [&](const ggml_moe_pages_part & part) {
            return part.begin < range.end && range.begin < part.begin + part.slice*layer->held.size();
        });
        n_bytes -= gone ? std::count(layer->held.begin(), layer->held.end(), true)*layer->expert_bytes() : 0;
        layer = gone ? layers.erase(layer) : layer + 1;
    }
}
