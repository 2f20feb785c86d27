#include "ggml-moe-cache.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <system_error>

uint64_t ggml_moe_now_ns(void) {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return (uint64_t) std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

ggml_moe_cache::ggml_moe_cache(const ggml_moe_os & os, ggml_moe_counters & counters, int n_readers, float half_life,
        std::function<void()> watch) : os(os), counters(counters), policy(half_life), watch(std::move(watch)) {
    // Where readers share all the CPUs with the matmuls, the interrupts of a disk draw them to one CPU and two threads
    // of the matmuls end up on another, waiting for each other.
    const int  n_cores = (int) std::thread::hardware_concurrency();
    const bool spread  = n_readers >= n_cores && n_cores > 0;
    for (int i = 0; i < n_readers; i++) {
        try {
            readers.emplace_back([this, i, n_cores, spread] {
                if (spread) {
                    (void) this->os.thread_pin(i % n_cores); // a kindness that not every system knows
                }
                read(i == 0);
            });
        } catch (const std::system_error &) {
            break; // fewer do as well
        }
    }
}

ggml_moe_cache::~ggml_moe_cache() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stop = true;
    }
    work.notify_all();
    for (auto & reader : readers) {
        reader.join();
    }
    for (auto & pool : pools) {
        for (const auto & region : pool->regions) {
            os.memory_free(region.first, region.second);
        }
    }
}

//
// layers and memory
//

bool ggml_moe_cache_layer::overlaps(ggml_moe_range range) const {
    return std::any_of(parts.begin(), parts.end(), [&](const ggml_moe_cache_part & part) {
        return part.begin < range.end && range.begin < part.begin + part.slice*slots.size();
    });
}

ggml_moe_cache_layer * ggml_moe_cache::find(uintptr_t begin) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto it = layers.find(begin);
    return it == layers.end() ? nullptr : it->second.get();
}

int ggml_moe_cache::add(std::vector<ggml_moe_cache_part> parts, int64_t n_expert, size_t index, ggml_moe_layer_stats & stats) {
    if (parts.empty() || parts.size() > ggml_moe_cache_slot::MAX_PARTS) {
        return -EINVAL;
    }

    // a slice may start anywhere in a page, and whole pages are read
    size_t slot_size = 0;
    for (auto & part : parts) {
        part.slot_offset = slot_size;
        slot_size += ((part.slice + os.page_size - 1)/os.page_size + 1)*os.page_size;
    }

    std::lock_guard<std::mutex> lock(mutex);

    const auto it = std::find_if(pools.begin(), pools.end(), [&](const auto & p) { return p->slot_size == slot_size; });
    auto fresh = std::make_unique<ggml_moe_cache_pool>();
    ggml_moe_cache_pool * pool = it != pools.end() ? it->get() : fresh.get();
    pool->slot_size = slot_size;

    // addresses for all of the layer's experts, those of layers that have gone first; memory comes as they are read,
    // within the budget
    const size_t n_all  = pool->n_experts + (size_t) n_expert;
    const size_t n_new  = n_all - std::min<size_t>(pool->slots.size(), n_all);
    void *       region = n_new == 0 ? nullptr : os.memory_reserve(slot_size*n_new);
    if (n_new > 0 && region == nullptr) {
        return -ENOMEM;
    }
    if (n_new > 0) {
        pool->regions.push_back({ region, slot_size*n_new });
    }
    if (pool == fresh.get()) {
        pools.push_back(std::move(fresh));
    }
    for (size_t i = 0; i < n_new; i++) {
        pool->slots.emplace_back();
        pool->slots.back().data = (char *) region + i*slot_size;
        pool->spare.push_back(&pool->slots.back());
    }
    pool->free.reserve(pool->slots.size());
    // from the lowest address up, so that neighbours share larger pages where the system has them
    std::sort(pool->spare.begin(), pool->spare.end(), [](const auto * a, const auto * b) { return a->data > b->data; });
    pool->n_experts += n_expert;

    auto layer = std::make_unique<ggml_moe_cache_layer>();
    layer->parts = std::move(parts);
    layer->slots.resize(n_expert);
    layer->uses.experts.resize(n_expert);
    layer->pool  = pool;
    layer->index = index;
    layer->stats = &stats;
    layers[layer->parts[0].begin] = std::move(layer);

    share_budget();
    return 0;
}

void ggml_moe_cache::remove(ggml_moe_range range) {
    std::unique_lock<std::mutex> lock(mutex);

    for (auto it = layers.begin(); it != layers.end();) {
        ggml_moe_cache_layer & layer = *it->second;
        if (!layer.overlaps(range)) {
            ++it;
            continue;
        }
        for (auto * queue : { &demand, &early }) {
            for (auto job = queue->begin(); job != queue->end();) {
                if (job->slot->layer == &layer) {
                    job->slot->n_pins--;
                    job = queue->erase(job);
                } else {
                    ++job;
                }
            }
        }
        for (auto * slot : layer.slots) {
            if (slot == nullptr) {
                continue;
            }
            // while the lock is released, a budget that shrinks may take the slot
            ready.wait(lock, [&] { return slot->layer != &layer || slot->n_pins == 0; });
            if (slot->layer == &layer) {
                evict(*slot);
            }
        }
        layer.pool->n_experts -= layer.slots.size();
        it = layers.erase(it);
    }

    for (auto it = pools.begin(); it != pools.end();) {
        if ((*it)->n_experts > 0) {
            ++it;
            continue;
        }
        for (const auto & region : (*it)->regions) {
            os.memory_free(region.first, region.second);
        }
        it = pools.erase(it);
    }
    share_budget();
}

void ggml_moe_cache::set_budget(uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    budget = bytes;
    share_budget();
}

size_t ggml_moe_cache::bytes(size_t ggml_moe_cache_pool::* n_slots) {
    std::lock_guard<std::mutex> lock(mutex);
    size_t n = 0;
    for (const auto & pool : pools) {
        n += (*pool).*n_slots*pool->slot_size;
    }
    return n;
}

size_t ggml_moe_cache::bytes_filled() { return bytes(&ggml_moe_cache_pool::n_filled);  }
size_t ggml_moe_cache::bytes_full()   { return bytes(&ggml_moe_cache_pool::n_experts); }

// every layer routes every token, so the same share of each layer's experts is worth keeping
void ggml_moe_cache::share_budget() {
    double total = 0;
    for (const auto & pool : pools) {
        total += (double) pool->n_experts*pool->slot_size;
    }
    for (auto & pool : pools) {
        const double share = (double) budget*((double) pool->n_experts*pool->slot_size/total);
        pool->n_max = std::min(pool->n_experts, (size_t) (share/pool->slot_size));
        trim(*pool);
    }
}

// gives back memory above the budget: free slots first, then the least wanted experts
void ggml_moe_cache::trim(ggml_moe_cache_pool & pool) {
    if (pool.n_held <= pool.n_max) {
        return;
    }
    const size_t n_over = pool.n_held - pool.n_max;
    if (pool.free.size() < n_over) {
        std::vector<ggml_moe_cache_slot *> found;
        acquire(pool, n_over, found);
        pool.free.insert(pool.free.end(), found.begin(), found.end());
    }
    while (pool.n_held > pool.n_max && !pool.free.empty()) {
        ggml_moe_cache_slot * slot = pool.free.back();
        pool.free.pop_back();
        if (os.memory_discard(slot->data, pool.slot_size) != 0) {
            counters.add(GGML_MOE_PREFETCH_COUNTER_ERRORS);
        }
        pool.n_filled -= slot->filled;
        slot->filled = false;
        pool.spare.push_back(slot);
        pool.n_held--;
    }
}

void ggml_moe_cache::evict(ggml_moe_cache_slot & slot) {
    ggml_moe_cache_pool & pool = *slot.layer->pool;
    set_ahead(slot, false);
    slot.layer->slots[slot.expert] = nullptr;
    slot.layer = nullptr;
    pool.free.push_back(&slot);
}

//
// which experts to keep
//

void ggml_moe_cache::set_ahead(ggml_moe_cache_slot & slot, bool ahead) {
    slot.layer->pool->n_ahead += (size_t) ahead - (size_t) slot.ahead;
    slot.ahead = ahead;
}

// up to n slots that nobody needs: free ones, new ones within the budget, then those of the lowest scores
size_t ggml_moe_cache::acquire(ggml_moe_cache_pool & pool, size_t n, std::vector<ggml_moe_cache_slot *> & found) {
    const size_t n_before = found.size();
    std::vector<std::pair<float, ggml_moe_cache_slot *>> victims;
    found.reserve(n_before + n); // short of memory is found out before a slot is taken
    victims.reserve(pool.n_held);

    while (n > 0 && !pool.free.empty()) {
        found.push_back(pool.free.back());
        pool.free.pop_back();
        n--;
    }
    while (n > 0 && pool.n_held < pool.n_max && !pool.spare.empty()) {
        found.push_back(pool.spare.back());
        pool.spare.pop_back();
        pool.n_held++;
        n--;
    }
    if (n > 0) {
        for (const auto & entry : layers) {
            const ggml_moe_cache_layer & layer = *entry.second;
            if (layer.pool != &pool) {
                continue;
            }
            const float due = ggml_moe_due(layer.index, running, layers.size());
            for (ggml_moe_cache_slot * slot : layer.slots) {
                if (slot != nullptr && slot->n_pins == 0 && !slot->ahead) {
                    victims.push_back({ due*policy.counts(layer.uses, slot->expert), slot });
                }
            }
        }
        n = std::min(n, victims.size());
        std::nth_element(victims.begin(), victims.begin() + n, victims.end());
        for (size_t i = 0; i < n; i++) {
            evict(*victims[i].second);
            found.push_back(pool.free.back());
            pool.free.pop_back();
        }
        counters.add(GGML_MOE_PREFETCH_COUNTER_EVICTED, n);
    }
    return found.size() - n_before;
}

void ggml_moe_cache::place(ggml_moe_cache_layer & layer, int32_t expert, ggml_moe_cache_slot & slot) {
    slot.layer  = &layer;
    slot.expert = expert;
    for (auto & state : slot.state) {
        state.store(GGML_MOE_CACHE_ABSENT, std::memory_order_relaxed);
    }
    layer.slots[expert] = &slot;
}

//
// selections
//

size_t ggml_moe_cache::begin(ggml_moe_cache_plan & plan, const ggml_moe_ids & ids, std::vector<int32_t> & overflow) {
    ggml_moe_cache_layer & layer = *plan.layer;
    const size_t n_parts = layer.parts.size();

    plan.order.clear();
    plan.slots.clear();
    overflow.clear();

    std::vector<ggml_moe_cache_slot *> incomplete; // on its way already
    std::vector<int32_t>               missing;

    // short of memory is found out before anything is pinned
    plan.order.reserve(layer.slots.size());
    plan.slots.reserve(ids.distinct.size());
    incomplete.reserve(ids.distinct.size());
    missing.reserve(ids.distinct.size());

    std::unique_lock<std::mutex> lock(mutex);
    running = layer.index;
    policy.touch(layer.uses, ids, ids.rows.size() >= GGML_MOE_N_PROMPT);
    cancel(layer, ids);
    for (const int32_t id : ids.distinct) {
        ggml_moe_cache_slot * slot = layer.slots[id];
        bool complete = true;
        bool failed   = false;
        for (size_t p = 0; slot != nullptr && p < n_parts; p++) {
            const uint8_t state = slot->state[p].load(std::memory_order_acquire);
            complete = complete && state != GGML_MOE_CACHE_ABSENT;
            failed   = failed   || state == GGML_MOE_CACHE_FAILED;
        }
        if (slot != nullptr && failed && slot->n_pins == 0) {
            evict(*slot);
            slot = nullptr;
        }
        if (slot == nullptr) {
            missing.push_back(id);
            continue;
        }
        slot->n_pins++;
        if (complete) {
            plan.order.push_back(id);
            plan.slots.push_back(slot);
        } else {
            incomplete.push_back(slot);
        }
    }
    counters.add(GGML_MOE_PREFETCH_COUNTER_EXPERTS_RESIDENT, plan.slots.size());
    counters.add(GGML_MOE_PREFETCH_COUNTER_EXPERTS_MISSED,   missing.size());

    std::vector<job> due;

    // what was queued to be read ahead is wanted now: what is being read first, then in the order of the queue
    if (!incomplete.empty()) {
        const auto has = [](const auto & slots, const auto * slot) { return std::find(slots.begin(), slots.end(), slot) != slots.end(); };

        std::deque<job> later;
        std::vector<ggml_moe_cache_slot *> queued;
        for (const job & job : early) {
            if (!has(incomplete, job.slot)) {
                later.push_back(job);
                continue;
            }
            due.push_back({ job.slot, job.part, false });
            if (!has(queued, job.slot)) {
                queued.push_back(job.slot);
            }
        }
        early = std::move(later);
        incomplete.erase(std::remove_if(incomplete.begin(), incomplete.end(), [&](const auto * slot) { return has(queued, slot); }), incomplete.end());
        incomplete.insert(incomplete.end(), queued.begin(), queued.end());
    }
    for (auto * slot : incomplete) {
        plan.order.push_back(slot->expert);
        plan.slots.push_back(slot);
    }

    std::vector<ggml_moe_cache_slot *> found;
    if (layer.readable()) {
        acquire(*layer.pool, missing.size(), found);
    }
    for (size_t i = 0; i < found.size(); i++) {
        place(layer, missing[i], *found[i]);
        found[i]->n_pins += 1 + (int) n_parts;
        plan.order.push_back(missing[i]);
        plan.slots.push_back(found[i]);
        for (uint32_t p = 0; p < n_parts; p++) {
            due.push_back({ found[i], p, false });
        }
    }
    // matrix by matrix, as they are computed, so that the first matmul waits for a part of the bytes only
    std::stable_sort(due.begin(), due.end(), [](const job & a, const job & b) { return a.part < b.part; });
    demand.insert(demand.end(), due.begin(), due.end());
    for (size_t i = found.size(); i < missing.size(); i++) {
        overflow.push_back(missing[i]);
        plan.order.push_back(missing[i]);
        plan.slots.push_back(nullptr);
    }
    lock.unlock();

    if (!found.empty() || !incomplete.empty()) {
        work.notify_all();
    }

    // the rest, which no row selects, so that `order` is a permutation
    std::vector<bool> in_order(layer.slots.size());
    for (const int32_t id : plan.order) {
        in_order[id] = true;
    }
    for (size_t id = 0; id < in_order.size(); id++) {
        if (!in_order[id]) {
            plan.order.push_back((int32_t) id);
        }
    }
    return missing.size();
}

void ggml_moe_cache::finish(ggml_moe_cache_plan & plan) {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto * slot : plan.slots) {
        if (slot != nullptr) {
            slot->n_pins--;
        }
    }
    trim(*plan.layer->pool);
    plan.layer = nullptr;
    plan.slots.clear();
    plan.nodes.clear();
    ready.notify_all(); // for `remove`
}

// a selection of the layer is known: what was read ahead is due now, or was for nothing
void ggml_moe_cache::cancel(ggml_moe_cache_layer & layer, const ggml_moe_ids & ids) {
    const auto selected = [&](int32_t id) { return std::binary_search(ids.distinct.begin(), ids.distinct.end(), id); };

    if (!layer.foreseen.empty()) {
        const size_t n_right = std::count_if(layer.foreseen.begin(), layer.foreseen.end(), selected);
        counters.add(GGML_MOE_PREFETCH_COUNTER_EXPERTS_FORESEEN,       layer.foreseen.size());
        counters.add(GGML_MOE_PREFETCH_COUNTER_EXPERTS_FORESEEN_RIGHT, n_right);
        trust += 0.02f*((float) n_right/(float) layer.foreseen.size() - trust);
        layer.foreseen.clear();
    }
    for (ggml_moe_cache_slot * slot : layer.slots) {
        if (slot == nullptr || !slot->ahead) {
            continue;
        }
        set_ahead(*slot, false);
        if (selected(slot->expert)) {
            continue;
        }
        // one of whose matrices a read has begun is read to its end: some of it would be missing for ever
        const auto used = [](const std::atomic<uint8_t> & state) { return state == GGML_MOE_CACHE_USED; };
        if (!unqueue(*slot) && std::none_of(slot->state, slot->state + layer.parts.size(), used)) { // else it was there before
            counters.add(GGML_MOE_PREFETCH_COUNTER_EXPERTS_AHEAD_UNUSED);
        }
    }
}

// with the mutex held
size_t ggml_moe_cache::ahead(ggml_moe_cache_layer & layer, const std::vector<int32_t> & experts, bool guess) {
    const size_t n_parts = layer.parts.size();
    std::vector<ggml_moe_cache_slot *> found;
    std::vector<int32_t> missing;
    if (no_ahead || !layer.readable()) {
        return 0;
    }
    for (const int32_t id : experts) {
        if (layer.slots[id] == nullptr) {
            missing.push_back(id);
        }
    }
    // half of the slots stay with the experts in use
    const size_t & n_ahead = layer.pool->n_ahead;
    const size_t   most    = layer.pool->n_max/2;
    for (const int32_t id : experts) {
        ggml_moe_cache_slot * slot = layer.slots[id];
        if (slot != nullptr && !slot->ahead && n_ahead < most) {
            set_ahead(*slot, true); // no victim of the others
        }
    }
    missing.resize(std::min(missing.size(), most - std::min(most, n_ahead)));

    // of guesses the surest whole, so that what proves wrong has not begun; else as the matrices are computed.
    // Short of memory is found out before a slot is taken: one that nobody reads would be waited for without end.
    std::vector<job> jobs(missing.size()*n_parts);
    acquire(*layer.pool, missing.size(), found);
    jobs.resize(found.size()*n_parts);
    for (size_t i = 0; i < jobs.size(); i++) {
        const size_t k = guess ? i/n_parts : i%found.size();
        const size_t p = guess ? i%n_parts : i/found.size();
        jobs[i] = { found[k], (uint32_t) p, guess };
    }
    try {
        early.insert(early.end(), jobs.begin(), jobs.end());
    } catch (const std::exception &) {
        layer.pool->free.insert(layer.pool->free.end(), found.begin(), found.end());
        throw;
    }
    for (size_t i = 0; i < found.size(); i++) {
        place(layer, missing[i], *found[i]);
        set_ahead(*found[i], true);
        found[i]->n_pins += (int) n_parts;
    }
    counters.add(GGML_MOE_PREFETCH_COUNTER_EXPERTS_AHEAD, found.size());
    if (!found.empty()) {
        work.notify_all();
    }
    return found.size();
}

size_t ggml_moe_cache::ahead(ggml_moe_cache_layer * layer, const std::vector<int32_t> & experts) {
    std::lock_guard<std::mutex> lock(mutex);
    return ahead(*layer, experts, false);
}

void ggml_moe_cache::foresee(uintptr_t begin, std::function<std::vector<int32_t>()> select) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto it = layers.find(begin);
    if (it != layers.end() && !no_ahead) {
        guesses.clear(); // of a layer that has begun by now
        guesses.push_back({ begin, it->second->uses.token, std::move(select) });
        work.notify_one();
    }
}

void ggml_moe_cache::settle() {
    std::unique_lock<std::mutex> lock(mutex);
    guesses.clear();
    ready.wait(lock, [&] { return n_guessing == 0; });
}

void ggml_moe_cache::drop_ahead() {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto & pool : pools) {
        for (auto & slot : pool->slots) {
            slot.ahead = false;
        }
        pool->n_ahead = 0;
        trim(*pool);
    }
}

void ggml_moe_cache::stop_ahead() {
    std::unique_lock<std::mutex> lock(mutex);
    no_ahead = true;
    guesses.clear();
    for (const auto & entry : layers) {
        for (ggml_moe_cache_slot * slot : entry.second->slots) {
            if (slot != nullptr) {
                unqueue(*slot);
            }
        }
    }
    ready.wait(lock, [&] { return n_guessing == 0 && early.empty() && n_early == 0; });
}

// an expert none of whose matrices a read has begun leaves the queue and the cache
bool ggml_moe_cache::unqueue(ggml_moe_cache_slot & slot) {
    const auto of_slot = [&](const job & job) { return job.slot == &slot; };
    const size_t n_parts = slot.layer->parts.size();
    if (early.empty() || (size_t) std::count_if(early.begin(), early.end(), of_slot) != n_parts) {
        return false;
    }
    early.erase(std::remove_if(early.begin(), early.end(), of_slot), early.end());
    slot.n_pins -= (int) n_parts;
    evict(slot);
    return true;
}

const char * ggml_moe_cache::wait(const ggml_moe_cache_plan & plan, size_t part, size_t i_selected) {
    ggml_moe_cache_slot * slot = plan.slots[i_selected];
    if (slot == nullptr) {
        return nullptr;
    }

    ggml_moe_layer_stats & stats = *plan.layer->stats;
    std::atomic<uint8_t> & state = slot->state[part];
    bool late = false;
    if (state.load(std::memory_order_acquire) == GGML_MOE_CACHE_ABSENT) {
        const uint64_t start = ggml_moe_now_ns();
        std::unique_lock<std::mutex> lock(mutex);
        ready.wait(lock, [&] { return state.load(std::memory_order_acquire) != GGML_MOE_CACHE_ABSENT; });
        late = true;
        if (plan.owner == std::this_thread::get_id()) {
            const uint64_t ns = ggml_moe_now_ns() - start;
            counters.add(GGML_MOE_PREFETCH_COUNTER_WAIT_NS, ns);
            stats.wait_ns += ns;
        }
    }

    // the first of the threads to ask counts
    uint8_t expected = GGML_MOE_CACHE_READY;
    if (state.compare_exchange_strong(expected, GGML_MOE_CACHE_USED, std::memory_order_acq_rel)) {
        counters.add(late ? GGML_MOE_PREFETCH_COUNTER_READS_LATE : GGML_MOE_PREFETCH_COUNTER_READS_IN_TIME);
        (late ? stats.n_late : stats.n_in_time)++;
    } else if (expected == GGML_MOE_CACHE_FAILED) {
        return nullptr;
    }

    const ggml_moe_cache_part & p = plan.layer->parts[part];
    const uint64_t offset = p.file_offset + (uint64_t) slot->expert*p.slice;
    return slot->data + p.slot_offset + offset % os.page_size;
}

//
// readers
//

// with the mutex held. Guesses keep as many of the readers as their share of hits so far: a demand that comes meanwhile
// waits for the others
bool ggml_moe_cache::next_job(job & next) {
    const bool guess = demand.empty() && !early.empty() && early.front().guess;
    std::deque<job> & queue = demand.empty() ? early : demand;
    if (queue.empty() || (guess && n_guessed >= std::max<size_t>(1, (size_t) std::lround(trust*readers.size())))) {
        return false;
    }
    next = queue.front();
    next.early = &queue == &early;
    queue.pop_front();
    n_guessed += guess;
    n_early   += next.early;
    return true;
}

void ggml_moe_cache::read(bool watches) {
    std::unique_lock<std::mutex> lock(mutex);
    job next;
    bool found = false;
    const auto due = [&] { return stop || (demand.empty() && !guesses.empty()) || (found = next_job(next)); };
    for (;;) {
        found = false;
        if (!watches) {
            work.wait(lock, due);
        } else if (!work.wait_for(lock, std::chrono::milliseconds(100), due)) {
            lock.unlock();
            watch();
            lock.lock();
            continue;
        }
        if (stop) {
            return;
        }
        if (!found) {
            follow(lock);
            continue;
        }

        lock.unlock();
        const ggml_moe_cache_state state = read_part(next);
        lock.lock();

        // who sees the state may count on the slot being free of this read
        n_guessed -= next.guess;
        n_early   -= next.early;
        ggml_moe_cache_slot  & slot  = *next.slot;
        ggml_moe_cache_layer & layer = *slot.layer;
        slot.n_pins--;
        slot.state[next.part].store(state, std::memory_order_release);
        layer.n_failed = state == GGML_MOE_CACHE_FAILED ? layer.n_failed + 1 : 0;
        layer.pool->n_filled += !slot.filled;
        slot.filled = true;
        lock.unlock();
        ready.notify_all();
        if (watches) {
            watch();
        }
        lock.lock();
    }
}

// the next guess, with the mutex held but while it is made
void ggml_moe_cache::follow(std::unique_lock<std::mutex> & lock) {
    const guess next = std::move(guesses.front());
    guesses.pop_front();

    n_guessing++;
    lock.unlock();
    std::vector<int32_t> experts;
    try {
        experts = next.select();
    } catch (const std::exception &) {
        // no guess then
    }
    lock.lock();
    n_guessing--;

    const auto it = layers.find(next.begin);
    try {
        if (it != layers.end() && it->second->uses.token == next.token && !experts.empty()) {
            ahead(*it->second, experts, true);
            it->second->foreseen = std::move(experts);
        }
    } catch (const std::exception &) {
        // short of memory: nothing was taken, the layer asks for what it needs
    }
    ready.notify_all(); // for `settle`
}

// What the page cache holds is copied instead of read again: after a prompt that a device computed, or of a file that
// was in use before. The page cache's copy is dropped.
bool ggml_moe_cache::copy_part(const job & job) {
    const ggml_moe_cache_part & part = job.slot->layer->parts[job.part];
    if (!part.resident_known) {
        return false;
    }
    const uintptr_t begin = part.begin + (uintptr_t) job.slot->expert*part.slice;
    const uintptr_t first = begin/os.page_size*os.page_size;
    const size_t    size  = (begin + part.slice + os.page_size - 1)/os.page_size*os.page_size - first;

    // most often nothing is there, and the first page tells
    uint8_t pages[256];
    for (size_t done = 0, n = 1; done < size/os.page_size; done += n, n = std::min(sizeof(pages), size/os.page_size - done)) {
        if (os.resident(first + done*os.page_size, n*os.page_size, pages) != 0 ||
                !std::all_of(pages, pages + n, [](uint8_t page) { return page & 1; })) {
            return false;
        }
    }
    memcpy(job.slot->data + part.slot_offset + begin % os.page_size, (const void *) begin, part.slice);
    const ggml_moe_range whole = ggml_moe_range_inner({ begin, begin + part.slice }, os.page_size); // neighbours share the rest
    (void) os.page_drop(part.file, whole.begin, whole.size(), part.file_offset + (whole.begin - part.begin)); // not every system can

    counters.add(GGML_MOE_PREFETCH_COUNTER_BYTES_COPIED, part.slice);
    return true;
}

ggml_moe_cache_state ggml_moe_cache::read_part(const job & job) {
    const ggml_moe_cache_layer & layer = *job.slot->layer;
    const ggml_moe_cache_part  & part  = layer.parts[job.part];

    const uint64_t offset = part.file_offset + (uint64_t) job.slot->expert*part.slice;
    const uint64_t begin  = offset/os.page_size*os.page_size;
    const uint64_t end    = (offset + part.slice + os.page_size - 1)/os.page_size*os.page_size;

    const uint64_t start = ggml_moe_now_ns();
    if (copy_part(job)) {
        layer.stats->last_read.store(ggml_moe_now_ns(), std::memory_order_relaxed);
        return GGML_MOE_CACHE_READY;
    }
    const int64_t  n     = os.direct_read(part.file, job.slot->data + part.slot_offset, end - begin, begin);
    const uint64_t now   = ggml_moe_now_ns();

    layer.stats->last_read.store(now, std::memory_order_relaxed);
    counters.add(GGML_MOE_PREFETCH_COUNTER_READS);
    counters.add(GGML_MOE_PREFETCH_COUNTER_READ_NS, now - start);
    const bool whole = n >= (int64_t) (offset + part.slice - begin);
    if (whole) {
        counters.add(GGML_MOE_PREFETCH_COUNTER_BYTES_READ, n);
        layer.stats->bytes += n;
    } else {
        counters.add(GGML_MOE_PREFETCH_COUNTER_ERRORS);
        counters.values[GGML_MOE_PREFETCH_COUNTER_LAST_ERRNO].store(n < 0 ? (uint64_t) -n : EIO, std::memory_order_relaxed);
    }
    return whole ? GGML_MOE_CACHE_READY : GGML_MOE_CACHE_FAILED;
}
