#include "ggml-moe-policy.h"

#include <algorithm>
#include <cmath>

ggml_moe_decay::ggml_moe_decay(float half) {
    for (int n = 0; n == 0 || powers.back() > 1e-6f; n++) {
        powers.push_back(std::exp2(-(float) n/half));
    }
}

void ggml_moe_policy::touch(ggml_moe_uses & uses, const ggml_moe_ids & ids, bool prompt) const {
    uses.pass += prompt ? 0 : 1;
    for (const int32_t id : ids.distinct) {
        ggml_moe_use & use = uses.experts[id];
        use.recent   *= recent  (uses.pass - use.pass);
        use.frequent *= frequent(uses.pass - use.pass);
        use.recent    = prompt ? std::max(use.recent,   1.0f) : use.recent   + 1.0f;
        use.frequent  = prompt ? std::max(use.frequent, 1.0f) : use.frequent + 1.0f;
        use.pass      = uses.pass;
    }
    for (const auto & row : ids.rows) {
        uses.token++;
        for (const int32_t id : row) {
            ggml_moe_use & use = uses.experts[id];
            use.tail  = use.tail*tail(uses.token - use.token) + 1.0f;
            use.token = uses.token;
        }
    }
}

float ggml_moe_policy::counts(const ggml_moe_uses & uses, int32_t expert) const {
    const ggml_moe_use & use = uses.experts[expert];

    const uint32_t n_passes = uses.pass - use.pass;
    return 4.0f*use.recent*recent(n_passes) + use.frequent*frequent(n_passes) + 0.001f*use.tail*tail(uses.token - use.token);
}

float ggml_moe_due(size_t layer, size_t running, size_t n) {
    const int64_t behind = ((int64_t) layer - (int64_t) running - 1)%(int64_t) n;
    const float   cycles = (float) ((behind + (int64_t) n)%(int64_t) n + 1)/(float) n; // until the layer runs again, (0, 1]
    return std::exp2(-0.2f*cycles);
}
