// Several contexts compute while modes change and models come and go. Meaningful under a thread sanitizer.

#include "helpers.h"

#include <atomic>
#include <chrono>
#include <thread>

static std::atomic<uint64_t> n_requests{0};
static std::atomic<bool>     mapped[4];

static uintptr_t base(int m) { return 0x10000000ull*(m + 1); }

// what a kernel would notice: a request for memory that is not mapped
static int fake_advise(uintptr_t addr, size_t) {
    n_requests++;
    return mapped[addr/0x10000000ull - 1] ? 0 : -12;
}

int main() {
    static ggml_moe_os os = t_os();
    os.advise_willneed  = fake_advise;
    os.advise_random    = fake_advise;
    os.advise_normal    = fake_advise;
    os.page_drop        = [](intptr_t, uintptr_t addr, size_t size, uint64_t) { return fake_advise(addr, size); };
    os.direct_open      = [](int, intptr_t * file) { *file = 0; return 0; };
    os.lock             = fake_advise;
    os.unlock           = fake_advise;
    os.memory_available = [] { return (uint64_t) 1 << 40; };
    os.memory_spare     = [] { return (uint64_t) 32*1024*1024 + 1000; }; // next to nothing for experts: they are dropped at once
    ggml_moe_prefetch_set_os(&os);

    std::atomic<bool>        stop{false};
    std::vector<std::thread> threads;

    for (int m = 0; m < 4; m++) {
        // one context per model
        threads.emplace_back([&stop, m] {
            t_graph g;
            ggml_tensor * ids = g.ids(2, 8, {{ 1, 6 }});
            for (int i = 0; i < 3; i++) {
                g.add(GGML_OP_MUL_MAT_ID, g.weights(base(m) + i*8*8192, 8, 8192), ids);
            }
            while (!stop) {
                g.run();
            }
        });
        // its loader; the mapping is gone only after it was unregistered
        threads.emplace_back([&stop, m] {
            while (!stop) {
                mapped[m] = true;
                ggml_moe_prefetch_map_add((const void *) base(m), 1 << 20, -1);
                std::this_thread::yield();
                ggml_moe_prefetch_map_remove((const void *) base(m), 1 << 20);
                mapped[m] = false;
            }
        });
    }

    for (int i = 0; i < 100; i++) {
        CHECK(ggml_moe_prefetch_set_mode((enum ggml_moe_prefetch_mode) (i % GGML_MOE_PREFETCH_MODE_COUNT)));
        std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    stop = true;
    for (auto & thread : threads) {
        thread.join();
    }

    CHECK(n_requests > 0);
    CHECK(t_counter("bytes_dropped") > 0);
    CHECK_EQ(t_counter("errors"), 0u); // no request ever met an unmapped address
    return 0;
}
