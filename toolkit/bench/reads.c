// reads METHOD FILE SLICE READERS SECONDS WINDOW GROUP: reads slices of a file in one way and says how fast.
//
// Offsets come on stdin, one a line. Slices are read in groups, as the experts of a layer are: a group starts when
// the one before it has arrived. Ends when the time or the offsets are over, after a whole group. Prints one JSON
// object. With a last argument it adds up the bytes of all slices, to show that they are the right ones. Exit code
// 77: this system has no such call, with the reason on stderr.

#include "reads.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

struct method {
    const char * name;
    int          advice;   // for the mapping
    int          flags;    // for open
    void (*run)(struct job * job); // all groups, on the main thread
    void (*get)(struct job * job, uint64_t offset, uint8_t * scratch, const uint8_t ** data); // one slice, on a reader
};

void fail(int code, const char * format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(code);
}

void refuse(const char * call) {
    const bool absent = errno == ENOSYS || errno == EPERM || errno == EINVAL || errno == EOPNOTSUPP || errno == EACCES;
    fail(absent ? EXIT_CANNOT : 1, "%s: %s", call, strerror(errno));
}

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

uint64_t page_down(const struct job * job, uint64_t x) { return x & ~(uint64_t) (job->page - 1); }
uint64_t page_up  (const struct job * job, uint64_t x) { return page_down(job, x + job->page - 1); }

static size_t scratch_size(const struct job * job) { return page_up(job, job->slice) + job->page; }

uint8_t * scratch_new(const struct job * job) {
    void * data = NULL;
    if (posix_memalign(&data, job->page, scratch_size(job)) != 0) {
        fail(1, "no memory for a buffer");
    }
    memset(data, 1, scratch_size(job)); // its own page faults are not to be measured
    return data;
}

static void touch(const struct job * job, uint64_t offset) {
    for (uint64_t at = page_down(job, offset); at < offset + job->slice; at += job->page) {
        (void) *(volatile const uint8_t *) (job->map + at);
    }
}

void add_check(struct job * job, long i, const uint8_t * data) {
    uint64_t sum = 0;
    for (size_t j = 0; j < job->slice; j++) {
        sum += data[j];
    }
    atomic_fetch_add(&job->checksum, (unsigned long long) (sum * (uint64_t) (i + 1)));
}

// one piece of a hint; pieces of a slice are numbered from 0

static long n_pieces(const struct job * job, uint64_t offset) {
    return (long) ((page_up(job, offset + job->slice) - page_down(job, offset) + job->window - 1) / job->window);
}

static void willneed_piece(struct job * job, uint64_t offset, long piece) {
    const uint64_t begin = page_down(job, offset) + (uint64_t) piece * job->window;
    uint64_t       end   = page_up(job, offset + job->slice);
    end = end < begin + job->window ? end : begin + job->window;
    if (madvise((void *) (job->map + begin), end - begin, MADV_WILLNEED) != 0) {
        refuse("madvise(MADV_WILLNEED)");
    }
}

// --- one slice on a reader's own thread

static void get_fault(struct job * job, uint64_t offset, uint8_t * scratch, const uint8_t ** data) {
    (void) scratch;
    touch(job, offset);
    *data = job->map + offset;
}

static void get_willneed(struct job * job, uint64_t offset, uint8_t * scratch, const uint8_t ** data) {
    for (long piece = 0; piece < n_pieces(job, offset); piece++) {
        willneed_piece(job, offset, piece);
    }
    get_fault(job, offset, scratch, data);
}

static void get_readahead(struct job * job, uint64_t offset, uint8_t * scratch, const uint8_t ** data) {
    const uint64_t end = page_up(job, offset + job->slice);
    for (uint64_t at = page_down(job, offset); at < end; at += job->window) {
        if (readahead(job->fd, (off64_t) at, end - at < job->window ? end - at : job->window) != 0) {
            refuse("readahead");
        }
    }
    get_fault(job, offset, scratch, data);
}

static void get_populate(struct job * job, uint64_t offset, uint8_t * scratch, const uint8_t ** data) {
    (void) scratch;
    const uint64_t begin = page_down(job, offset);
    if (madvise((void *) (job->map + begin), page_up(job, offset + job->slice) - begin, MADV_POPULATE_READ) != 0) {
        refuse("madvise(MADV_POPULATE_READ)");
    }
    *data = job->map + offset;
}

void read_fully(struct job * job, uint8_t * to, size_t size, uint64_t offset, size_t enough) {
    size_t done = 0;
    while (done < enough) {
        const ssize_t n = pread(job->fd, to + done, size - done, (off_t) (offset + done));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            n == 0 ? fail(1, "the file ends early") : refuse("pread");
        }
        done += (size_t) n;
    }
}

static void get_pread(struct job * job, uint64_t offset, uint8_t * scratch, const uint8_t ** data) {
    read_fully(job, scratch, job->slice, offset, job->slice);
    *data = scratch;
}

static void get_direct(struct job * job, uint64_t offset, uint8_t * scratch, const uint8_t ** data) {
    const uint64_t begin = page_down(job, offset);
    read_fully(job, scratch, page_up(job, offset + job->slice) - begin, begin, offset + job->slice - begin);
    *data = scratch + (offset - begin);
}

// --- groups

bool next_group(struct job * job) {
    const double t = now();
    if (job->end > 0) {
        job->group_seconds[job->n_groups++] = t - job->group_start;
    }
    job->first = job->end;
    job->end   = job->first + job->group;
    job->over  = job->end > job->n_offsets || t - job->start >= job->seconds;
    atomic_store(&job->next, job->first);
    job->group_start = t;
    return !job->over;
}

struct reader {
    struct job *          job;
    const struct method * method;
};

static void * reader_main(void * arg) {
    const struct reader * reader = arg;
    struct job *          job    = reader->job;
    uint8_t *             own    = scratch_new(job);
    for (;;) {
        pthread_barrier_wait(&job->barrier);
        if (job->over) {
            break;
        }
        for (long i; (i = atomic_fetch_add(&job->next, 1)) < job->end;) {
            const uint8_t * data = NULL;
            reader->method->get(job, job->offsets[i], own, &data);
            if (job->check) {
                add_check(job, i, data);
            }
        }
        pthread_barrier_wait(&job->barrier);
    }
    free(own);
    return NULL;
}

static void * hinter_main(void * arg) {
    struct job * job = ((const struct reader *) arg)->job;
    for (;;) {
        pthread_barrier_wait(&job->barrier);
        if (job->over) {
            break;
        }
        // piece by piece, so that the slice that is waited for first is hinted by all
        for (long i; (i = atomic_fetch_add(&job->next, 1)) >= 0;) {
            long slice = job->first, piece = i - job->first;
            while (slice < job->end && piece >= n_pieces(job, job->offsets[slice])) {
                piece -= n_pieces(job, job->offsets[slice++]);
            }
            if (slice >= job->end) {
                break;
            }
            willneed_piece(job, job->offsets[slice], piece);
        }
        pthread_barrier_wait(&job->barrier);
    }
    return NULL;
}

static void with_threads(struct job * job, void * (*body)(void *), const struct method * method,
                         void (*meanwhile)(struct job * job)) {
    struct reader reader  = { job, method };
    pthread_t *   threads = calloc((size_t) job->readers, sizeof(*threads));
    pthread_barrier_init(&job->barrier, NULL, (unsigned) job->readers + 1);
    for (int i = 0; i < job->readers; i++) {
        if (pthread_create(&threads[i], NULL, body, &reader) != 0) {
            fail(1, "cannot start %d threads", job->readers);
        }
    }
    job->start = now();
    bool more;
    do {
        more = next_group(job);
        pthread_barrier_wait(&job->barrier);
        if (more) {
            meanwhile(job);
            pthread_barrier_wait(&job->barrier);
        }
    } while (more);
    for (int i = 0; i < job->readers; i++) {
        pthread_join(threads[i], NULL);
    }
    free(threads);
}

static void nothing(struct job * job) { (void) job; }

static void touch_group(struct job * job) {
    for (long i = job->first; i < job->end; i++) {
        touch(job, job->offsets[i]);
        if (job->check) {
            add_check(job, i, job->map + job->offsets[i]);
        }
    }
}

static void run_pool(struct job * job) { with_threads(job, hinter_main, NULL, touch_group); }

// --- the whole

static const struct method METHODS[] = {
    { "fault",     MADV_NORMAL, 0,        NULL,      get_fault     },
    { "willneed",  MADV_RANDOM, 0,        NULL,      get_willneed  },
    { "pool",      MADV_RANDOM, 0,        run_pool,  NULL          },
    { "populate",  MADV_NORMAL, 0,        NULL,      get_populate  },
    { "readahead", MADV_RANDOM, 0,        NULL,      get_readahead },
    { "pread",     MADV_NORMAL, 0,        NULL,      get_pread     },
    { "direct",    MADV_NORMAL, O_DIRECT, NULL,      get_direct    },
    { "uring",     MADV_NORMAL, O_DIRECT, run_uring, NULL          },
};

static unsigned long long bytes_from_disk(void) {
    unsigned long long n = 0;
    FILE *             f = fopen("/proc/self/io", "r");
    char               line[128];
    while (f != NULL && fgets(line, sizeof(line), f) != NULL) {
        sscanf(line, "read_bytes: %llu", &n);
    }
    if (f != NULL) {
        fclose(f);
    }
    return n;
}

static double cpu_seconds(const struct rusage * u) {
    return u->ru_utime.tv_sec + u->ru_stime.tv_sec + (u->ru_utime.tv_usec + u->ru_stime.tv_usec) * 1e-6;
}

static int by_size(const void * a, const void * b) {
    const double x = *(const double *) a, y = *(const double *) b;
    return (x > y) - (x < y);
}

int main(int argc, char ** argv) {
    if (argc != 8 && argc != 9) {
        fail(2, "usage: reads METHOD FILE SLICE READERS SECONDS WINDOW GROUP [check]");
    }
    const struct method * method = NULL;
    for (size_t i = 0; i < sizeof(METHODS) / sizeof(METHODS[0]); i++) {
        method = strcmp(METHODS[i].name, argv[1]) == 0 ? &METHODS[i] : method;
    }
    if (method == NULL) {
        fail(2, "there is no method %s", argv[1]);
    }
    struct job job = {
        .page    = (size_t) sysconf(_SC_PAGESIZE),
        .slice   = strtoull(argv[3], NULL, 10),
        .readers = atoi(argv[4]),
        .seconds = atof(argv[5]),
        .window  = strtoull(argv[6], NULL, 10),
        .group   = atol(argv[7]),
        .check   = argc == 9,
    };
    struct stat file;
    job.fd = open(argv[2], O_RDONLY | O_CLOEXEC | method->flags);
    if (job.fd < 0) {
        refuse("open");
    }
    if (fstat(job.fd, &file) != 0) {
        refuse("fstat");
    }
    if (method->flags == 0) {
        void * map = mmap(NULL, (size_t) file.st_size, PROT_READ, MAP_SHARED, job.fd, 0);
        if (map == MAP_FAILED || madvise(map, (size_t) file.st_size, method->advice) != 0) {
            refuse("mmap");
        }
        job.map = map;
    }
    for (long room = 0; ; job.n_offsets++) {
        if (job.n_offsets == room) {
            room        = room ? 2 * room : 1024;
            job.offsets = realloc(job.offsets, (size_t) room * sizeof(*job.offsets));
        }
        if (job.offsets == NULL || scanf("%" SCNu64, &job.offsets[job.n_offsets]) != 1) {
            break;
        }
        if (job.offsets[job.n_offsets] + job.slice > (uint64_t) file.st_size) {
            fail(2, "a slice ends behind the file");
        }
    }
    job.group_seconds = calloc((size_t) job.n_offsets + 1, sizeof(*job.group_seconds));

    struct rusage            before, after;
    const unsigned long long bytes_before = bytes_from_disk();
    getrusage(RUSAGE_SELF, &before);
    if (method->run != NULL) {
        method->run(&job);
    } else {
        with_threads(&job, reader_main, method, nothing);
    }
    const double elapsed = now() - job.start;
    getrusage(RUSAGE_SELF, &after);
    const unsigned long long from_disk = bytes_from_disk() - bytes_before;

    qsort(job.group_seconds, (size_t) job.n_groups, sizeof(*job.group_seconds), by_size);
    const long n = job.n_groups;
    printf("{\"groups\": %ld, \"bytes\": %llu, \"seconds\": %.6f, \"cpu_s\": %.6f, \"read_bytes\": %llu, "
           "\"minor_faults\": %ld, \"major_faults\": %ld, \"group_p50_s\": %.6f, \"group_p95_s\": %.6f, "
           "\"checksum\": %llu}\n",
           n, (unsigned long long) n * (unsigned long long) job.group * job.slice, elapsed,
           cpu_seconds(&after) - cpu_seconds(&before), from_disk, after.ru_minflt - before.ru_minflt,
           after.ru_majflt - before.ru_majflt, n ? job.group_seconds[n / 2] : 0.0, n ? job.group_seconds[n * 95 / 100] : 0.0,
           (unsigned long long) atomic_load(&job.checksum));
    return 0;
}
