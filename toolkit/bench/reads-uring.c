// io_uring: one thread, as many direct reads under way as there are readers.

#include "reads.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#define HAVE_URING 1
#endif

#if HAVE_URING

struct ring {
    int                   fd;
    uint32_t              mask_sq, mask_cq;
    _Atomic uint32_t *    sq_tail;
    uint32_t *            sq_array;
    _Atomic uint32_t *    cq_head;
    _Atomic uint32_t *    cq_tail;
    struct io_uring_sqe * sqes;
    struct io_uring_cqe * cqes;
};

static uint8_t * ring_map(int fd, size_t size, off_t offset) {
    void * at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
    if (at == MAP_FAILED) {
        refuse("mmap of io_uring");
    }
    return at;
}

static struct ring ring_new(unsigned depth) {
    struct io_uring_params p = { 0 };
    struct ring            r = { .fd = (int) syscall(SYS_io_uring_setup, depth, &p) };
    if (r.fd < 0) {
        refuse("io_uring_setup");
    }
    uint8_t * sq = ring_map(r.fd, p.sq_off.array + p.sq_entries * sizeof(uint32_t), IORING_OFF_SQ_RING);
    uint8_t * cq = ring_map(r.fd, p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe), IORING_OFF_CQ_RING);
    r.sqes       = (void *) ring_map(r.fd, p.sq_entries * sizeof(struct io_uring_sqe), IORING_OFF_SQES);
    r.sq_tail    = (void *) (sq + p.sq_off.tail);
    r.sq_array   = (void *) (sq + p.sq_off.array);
    r.mask_sq    = *(uint32_t *) (sq + p.sq_off.ring_mask);
    r.cq_head    = (void *) (cq + p.cq_off.head);
    r.cq_tail    = (void *) (cq + p.cq_off.tail);
    r.mask_cq    = *(uint32_t *) (cq + p.cq_off.ring_mask);
    r.cqes       = (void *) (cq + p.cq_off.cqes);
    return r;
}

static void ring_push(struct ring * r, int fd, uint8_t * to, uint32_t size, uint64_t offset, uint64_t tag) {
    const uint32_t tail = atomic_load_explicit(r->sq_tail, memory_order_relaxed);
    const uint32_t at   = tail & r->mask_sq;
    r->sqes[at] = (struct io_uring_sqe) {
        .opcode = IORING_OP_READ, .fd = fd, .addr = (uintptr_t) to, .len = size, .off = offset, .user_data = tag,
    };
    r->sq_array[at] = at;
    atomic_store_explicit(r->sq_tail, tail + 1, memory_order_release);
}

static void ring_enter(struct ring * r, unsigned submit, unsigned wait) {
    while (submit + wait > 0) {
        const long n = syscall(SYS_io_uring_enter, r->fd, submit, wait, wait ? IORING_ENTER_GETEVENTS : 0, NULL, 0);
        if (n < 0 && errno != EINTR) {
            refuse("io_uring_enter");
        }
        submit -= n > 0 ? (unsigned) n : 0;
        if (n >= 0 && submit == 0) {
            return;
        }
    }
}

void run_uring(struct job * job) {
    struct ring r     = ring_new((unsigned) job->readers);
    uint8_t **  own   = calloc((size_t) job->readers, sizeof(*own));
    long *      slice = calloc((size_t) job->readers, sizeof(*slice)); // that each buffer is for
    for (int b = 0; b < job->readers; b++) {
        own[b] = scratch_new(job);
    }
    job->start = now();
    while (next_group(job)) {
        long     next    = job->first;
        unsigned pushed  = 0;
        long     pending = 0;
        for (int b = 0; b < job->readers && next < job->end; b++, pushed++, pending++) {
            slice[b] = next++;
            const uint64_t begin = page_down(job, job->offsets[slice[b]]);
            const uint64_t end   = page_up(job, job->offsets[slice[b]] + job->slice);
            ring_push(&r, job->fd, own[b], (uint32_t) (end - begin), begin, (uint64_t) b);
        }
        while (pending > 0) {
            ring_enter(&r, pushed, 1);
            pushed = 0;
            uint32_t head = atomic_load_explicit(r.cq_head, memory_order_relaxed);
            for (; head != atomic_load_explicit(r.cq_tail, memory_order_acquire); head++) {
                const struct io_uring_cqe done   = r.cqes[head & r.mask_cq];
                const uint64_t            b      = done.user_data;
                const uint64_t            offset = job->offsets[slice[b]];
                const uint64_t            begin  = page_down(job, offset);
                if (done.res < 0) {
                    errno = -done.res;
                    refuse("read by io_uring");
                }
                if ((uint64_t) done.res < offset + job->slice - begin) { // rare: the rest the plain way
                    read_fully(job, own[b] + (size_t) done.res, page_up(job, offset + job->slice) - begin - (size_t) done.res,
                               begin + (uint64_t) done.res, offset + job->slice - begin - (size_t) done.res);
                }
                if (job->check) {
                    add_check(job, slice[b], own[b] + (offset - begin));
                }
                pending--;
                if (next < job->end) {
                    slice[b] = next++;
                    const uint64_t again = page_down(job, job->offsets[slice[b]]);
                    ring_push(&r, job->fd, own[b], (uint32_t) (page_up(job, job->offsets[slice[b]] + job->slice) - again), again, b);
                    pushed++;
                    pending++;
                }
            }
            atomic_store_explicit(r.cq_head, head, memory_order_release);
        }
    }
    for (int b = 0; b < job->readers; b++) {
        free(own[b]);
    }
    free(own);
    free(slice);
    close(r.fd);
}

#else

void run_uring(struct job * job) {
    (void) job;
    fail(EXIT_CANNOT, "built without linux/io_uring.h");
}

#endif
