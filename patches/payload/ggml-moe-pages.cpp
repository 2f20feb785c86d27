#include "ggml-moe-pages.h"

#include <algorithm>

size_t ggml_moe_pages_layer::expert_bytes() const {
    size_t n = 0;
    for (const auto & part : parts) {
        n += part.slice;
    }
    return n;
}

bool ggml_moe_pages::select(std::vector<ggml_moe_pages_part> parts, int64_t n_expert, const ggml_moe_ids & ids, bool prompt,
        std::vector<ggml_moe_range> & dropped) {
    std::lock_guard<std::mutex> lock(mutex);

    const size_t running = std::find_if(layers.begin(), layers.end(), [&](const auto & l) { return l.parts == parts; }) - layers.begin();
    const bool   is_new  = running == layers.size();
    if (is_new) {
        layers.emplace_back();
        layers.back().parts = std::move(parts);
        layers.back().held.resize(n_expert);
        layers.back().uses.experts.resize(n_expert);
    }
    ggml_moe_pages_layer & layer = layers[running];

    policy.touch(layer.uses, ids, prompt);
    for (const int32_t id : ids.distinct) {
        if (!layer.held[id]) {
            layer.held[id] = true;
            n_bytes += layer.expert_bytes();
        }
    }
    if (n_bytes <= budget) {
        return is_new;
    }

    struct victim {
        float   worth;
        size_t  layer;
        int32_t expert;
    };
    std::vector<victim> victims;
    for (size_t l = 0; l < layers.size(); l++) {
        const float due = ggml_moe_due(l, running, layers.size());
        for (int32_t id = 0; id < (int32_t) layers[l].held.size(); id++) {
            if (layers[l].held[id] && (l != running || !std::binary_search(ids.distinct.begin(), ids.distinct.end(), id))) {
                victims.push_back({ due*policy.counts(layers[l].uses, id), l, id });
            }
        }
    }
    // those worth least come up one by one: how many it takes depends on their sizes
    const auto later = [](const victim & a, const victim & b) { return a.worth > b.worth; };
    std::make_heap(victims.begin(), victims.end(), later);
    while (n_bytes > budget && !victims.empty()) {
        std::pop_heap(victims.begin(), victims.end(), later);
        ggml_moe_pages_layer & from = layers[victims.back().layer];
        const int32_t          id   = victims.back().expert;
        victims.pop_back();
        from.held[id] = false;
        n_bytes -= from.expert_bytes();
        for (const auto & part : from.parts) {
            dropped.push_back({ part.begin + id*part.slice, part.begin + (id + 1)*part.slice });
        }
    }
    return is_new;
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
