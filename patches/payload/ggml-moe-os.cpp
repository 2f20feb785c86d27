#include "ggml-moe-os.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if defined(__linux__) || defined(__APPLE__)
#    define GGML_MOE_OS_POSIX
#    include <fcntl.h>
#    include <sys/mman.h>
#    include <sys/resource.h>
#    include <sys/stat.h>
#    include <unistd.h>
#endif

#if defined(__linux__)
#    include <sched.h>
#    include <sys/sysmacros.h>
#    include <sys/vfs.h>
#elif defined(__APPLE__)
#    include <limits.h>
#    include <mach/mach.h>
#    include <sys/sysctl.h>
#    include <sys/types.h>
#endif

//
// cgroup
//

static std::string ggml_moe_os_read_file(const std::string & path) {
    std::string text;
    if (FILE * file = fopen(path.c_str(), "r")) {
        char   buf[4096];
        size_t n;
        while ((n = fread(buf, 1, sizeof(buf), file)) > 0) {
            text.append(buf, n);
        }
        fclose(file);
    }
    return text;
}

// "max", an empty file and a missing one are no limit; the huge number of an unlimited v1 group is never the smallest
static uint64_t ggml_moe_os_parse_limit(const std::string & text) {
    char * end = nullptr;
    const unsigned long long value = strtoull(text.c_str(), &end, 10);
    return end == text.c_str() ? UINT64_MAX : (uint64_t) value;
}

// value of a "name value" line, 0 when there is none
static uint64_t ggml_moe_os_stat(const std::string & text, const std::string & name) {
    for (size_t pos = 0; pos < text.size();) {
        const size_t eol = std::min(text.find('\n', pos), text.size());
        if (text.compare(pos, name.size(), name) == 0 && text[pos + name.size()] == ' ') {
            return strtoull(text.c_str() + pos + name.size(), nullptr, 10);
        }
        pos = eol + 1;
    }
    return 0;
}

struct ggml_moe_os_cgroup {
    std::string dir;
    bool        unified; // version 2
    uint64_t    limit;   // bytes
};

// the process's cgroups with a memory limit, each with all its parents: a parent's limit holds for its children
static std::vector<ggml_moe_os_cgroup> ggml_moe_os_cgroups(const std::string & self_cgroup, const std::string & root) {
    std::vector<ggml_moe_os_cgroup> found;

    // lines are "id:controllers:path"; the unified hierarchy has no controllers
    for (size_t pos = 0; pos < self_cgroup.size();) {
        const size_t eol  = std::min(self_cgroup.find('\n', pos), self_cgroup.size());
        const std::string line = self_cgroup.substr(pos, eol - pos);
        pos = eol + 1;

        const size_t c0 = line.find(':');
        const size_t c1 = c0 == std::string::npos ? c0 : line.find(':', c0 + 1);
        if (c1 == std::string::npos) {
            continue;
        }
        const std::string controllers = "," + line.substr(c0 + 1, c1 - c0 - 1) + ",";
        const bool        unified     = controllers == ",,";
        if (!unified && controllers.find(",memory,") == std::string::npos) {
            continue;
        }

        const std::string base = root + (unified ? "" : "/memory");
        for (std::string path = line.substr(c1 + 1); ; path.resize(path.rfind('/'))) {
            if (path == "/") {
                path.clear();
            }
            const std::string dir = base + path;
            // above memory.high a process is throttled while its pages are reclaimed, which is a limit for a big read
            const uint64_t limit = unified
                ? std::min(ggml_moe_os_parse_limit(ggml_moe_os_read_file(dir + "/memory.max")),
                           ggml_moe_os_parse_limit(ggml_moe_os_read_file(dir + "/memory.high")))
                : ggml_moe_os_parse_limit(ggml_moe_os_read_file(dir + "/memory.limit_in_bytes"));
            if (limit != UINT64_MAX) {
                found.push_back({ dir, unified, limit });
            }
            if (path.rfind('/') == std::string::npos) {
                break;
            }
        }
    }

    return found;
}

uint64_t ggml_moe_os_cgroup_limit(const char * self_cgroup, const char * root) {
    uint64_t limit = UINT64_MAX;
    for (const auto & cgroup : ggml_moe_os_cgroups(self_cgroup, root)) {
        limit = std::min(limit, cgroup.limit);
    }
    return limit;
}

uint64_t ggml_moe_os_cgroup_spare(const char * self_cgroup, const char * root) {
    uint64_t spare = UINT64_MAX;
    for (const auto & cgroup : ggml_moe_os_cgroups(self_cgroup, root)) {
        const std::string stat = ggml_moe_os_read_file(cgroup.dir + "/memory.stat");
        // files in memory only are not part of what is anonymous; what is locked may be counted twice, the safe way round
        const uint64_t    held = cgroup.unified
            ? ggml_moe_os_stat(stat, "anon") + ggml_moe_os_stat(stat, "shmem") + ggml_moe_os_stat(stat, "unevictable") +
              ggml_moe_os_stat(stat, "kernel")
            : ggml_moe_os_stat(stat, "total_rss") + ggml_moe_os_stat(stat, "total_shmem") + ggml_moe_os_stat(stat, "total_unevictable") +
              strtoull(ggml_moe_os_read_file(cgroup.dir + "/memory.kmem.usage_in_bytes").c_str(), nullptr, 10);
        spare = std::min(spare, cgroup.limit - std::min(cgroup.limit, held));
    }
    return spare;
}

#if defined(GGML_MOE_OS_POSIX)

static int ggml_moe_os_advise(uintptr_t addr, size_t size, int advice) {
    return madvise((void *) addr, size, advice) == 0 ? 0 : -errno;
}

static int ggml_moe_os_advise_willneed(uintptr_t addr, size_t size) {
    return ggml_moe_os_advise(addr, size, MADV_WILLNEED);
}

static int ggml_moe_os_advise_random(uintptr_t addr, size_t size) {
    return ggml_moe_os_advise(addr, size, MADV_RANDOM);
}

static int ggml_moe_os_advise_normal(uintptr_t addr, size_t size) {
    return ggml_moe_os_advise(addr, size, MADV_NORMAL);
}

static int ggml_moe_os_lock(uintptr_t addr, size_t size) {
    return mlock((const void *) addr, size) == 0 ? 0 : -errno;
}

static int ggml_moe_os_unlock(uintptr_t addr, size_t size) {
    return munlock((const void *) addr, size) == 0 ? 0 : -errno;
}

static int ggml_moe_os_resident(uintptr_t addr, size_t size, uint8_t * pages) {
#if defined(__APPLE__)
    return mincore((const void *) addr, size, (char *) pages) == 0 ? 0 : -errno;
#else
    return mincore((void *) addr, size, pages) == 0 ? 0 : -errno;
#endif
}

static int ggml_moe_os_file_normal(int fd) {
#if defined(__linux__)
    return -posix_fadvise(fd, 0, 0, POSIX_FADV_NORMAL);
#else
    (void) fd;
    return 0; // llama.cpp gives the sequential advice on Linux only
#endif
}

static int ggml_moe_os_direct_open(int fd, intptr_t * file) {
    int flags = O_RDONLY | O_CLOEXEC;
#if defined(__linux__)
    struct statfs fs;
    if (fstatfs(fd, &fs) == 0 && (fs.f_type == 0x01021994 || (unsigned long) fs.f_type == 0x858458f6)) {
        return -EOPNOTSUPP; // tmpfs and ramfs are memory already
    }
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    flags |= O_DIRECT;
#else
    char path_buf[PATH_MAX];
    if (fcntl(fd, F_GETPATH, path_buf) != 0) {
        return -errno;
    }
    const std::string path = path_buf;
#endif
    const int direct = open(path.c_str(), flags);
    if (direct < 0) {
        return -errno;
    }
#if defined(__APPLE__)
    if (fcntl(direct, F_NOCACHE, 1) != 0) {
        const int result = -errno;
        close(direct);
        return result;
    }
#endif
    *file = direct;
    return 0;
}

static int64_t ggml_moe_os_direct_read(intptr_t file, void * data, size_t size, uint64_t offset) {
    size_t done = 0;
    while (done < size) {
        const ssize_t n = pread((int) file, (char *) data + done, size - done, (off_t) (offset + done));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return -errno;
        }
        if (n == 0) {
            break;
        }
        done += (size_t) n;
        if (n % 512 != 0) {
            break; // the end of the file: nothing more, and an odd offset would be refused
        }
    }
    return (int64_t) done;
}

static void ggml_moe_os_direct_close(intptr_t file) {
    close((int) file);
}

// The kernel drops no page that is mapped. Nothing is lost: the loader maps files to be read only.
static int ggml_moe_os_page_drop(intptr_t file, uintptr_t addr, size_t size, uint64_t offset) {
#if defined(__linux__)
    if (size == 0) {
        return 0; // it would mean the rest of the file
    }
    const int result = ggml_moe_os_advise(addr, size, MADV_DONTNEED);
    return result != 0 ? result : -posix_fadvise((int) file, (off_t) offset, (off_t) size, POSIX_FADV_DONTNEED);
#else
    (void) file;
    (void) addr;
    (void) size;
    (void) offset;
    return -ENOSYS;
#endif
}

static void * ggml_moe_os_memory_reserve(size_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#if defined(MAP_NORESERVE)
    flags |= MAP_NORESERVE;
#endif
    void * data = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (data == MAP_FAILED) {
        return nullptr;
    }
    // larger pages are left to the system's policy: asked for, their first touch took longer than the read into them,
    // and decode was no faster (results/larger-pages.md)
#if defined(MADV_DONTFORK)
    // a child does without: sharing would copy each page that a direct read fills
    (void) madvise(data, size, MADV_DONTFORK);
#endif
    return data;
}

static int ggml_moe_os_memory_discard(void * data, size_t size) {
#if defined(__APPLE__)
    // MADV_DONTNEED keeps the pages there; a new mapping over the old one does not
    return mmap(data, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == data ? 0 : -errno;
#else
    return ggml_moe_os_advise((uintptr_t) data, size, MADV_DONTNEED);
#endif
}

static void ggml_moe_os_memory_free(void * data, size_t size) {
    munmap(data, size);
}

static uint64_t ggml_moe_os_major_faults(void) {
#if defined(RUSAGE_THREAD)
    const int who = RUSAGE_THREAD; // adding up all threads takes as long as all else that a layer is looked at for
#else
    const int who = RUSAGE_SELF;
#endif
    struct rusage usage;
    return getrusage(who, &usage) == 0 ? (uint64_t) usage.ru_majflt : 0;
}

#else

static int ggml_moe_os_advise_none(uintptr_t, size_t) {
    return -ENOSYS;
}

static int ggml_moe_os_direct_open(int, intptr_t *) {
    return -ENOSYS;
}

static int64_t ggml_moe_os_direct_read(intptr_t, void *, size_t, uint64_t) {
    return -ENOSYS;
}

static void ggml_moe_os_direct_close(intptr_t) {
}

static int ggml_moe_os_page_drop(intptr_t, uintptr_t, size_t, uint64_t) {
    return -ENOSYS;
}

static void * ggml_moe_os_memory_reserve(size_t) {
    return nullptr;
}

static int ggml_moe_os_memory_discard(void *, size_t) {
    return -ENOSYS;
}

static void ggml_moe_os_memory_free(void *, size_t) {
}

static uint64_t ggml_moe_os_major_faults(void) {
    return 0;
}

static int ggml_moe_os_resident(uintptr_t, size_t, uint8_t *) {
    return -ENOSYS;
}

static int ggml_moe_os_file_normal(int) {
    return 0;
}

#endif

// Linux clamps one request to the larger of the device's read-ahead and its largest transfer (mm/readahead.c,
// force_page_cache_ra). Only the read-ahead is sure to be honoured, and every block device takes 128 KiB.
static size_t ggml_moe_os_read_window(int fd) {
    const size_t least = 128 * 1024;
#if defined(__linux__)
    struct stat st;
    if (fstat(fd, &st) != 0) {
        return least;
    }
    const std::string dev = std::to_string(major(st.st_dev)) + ":" + std::to_string(minor(st.st_dev));
    // a whole disk and a network filesystem have a bdi of their own, a partition uses the one of its disk
    std::string text = ggml_moe_os_read_file("/sys/class/bdi/" + dev + "/read_ahead_kb");
    if (text.empty()) {
        text = ggml_moe_os_read_file("/sys/dev/block/" + dev + "/../queue/read_ahead_kb");
    }
    const size_t window = (size_t) strtoull(text.c_str(), nullptr, 10) * 1024;
    return std::max(window, least);
#elif defined(__APPLE__)
    (void) fd;
    (void) least;
    return SIZE_MAX; // no clamp is documented
#else
    (void) fd;
    return least;
#endif
}

// Linux tells who neither owns nor may write a file that all of its pages are resident (mm/mincore.c, can_do_mincore).
static bool ggml_moe_os_resident_known(int fd) {
#if defined(__linux__)
    struct stat st;
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    if ((fstat(fd, &st) == 0 && st.st_uid == geteuid()) || faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) == 0) {
        return true;
    }
    const std::string status = ggml_moe_os_read_file("/proc/self/status");
    const size_t      at     = status.find("CapEff:");
    const int         fowner = 3; // CAP_FOWNER: counts as the owner
    return at != std::string::npos && (strtoull(status.c_str() + at + 7, nullptr, 16) >> fowner & 1) != 0;
#elif defined(__APPLE__)
    (void) fd;
    return true;
#else
    (void) fd;
    return false;
#endif
}

static int ggml_moe_os_thread_pin(int i) {
#if defined(__linux__)
    cpu_set_t all;
    if (sched_getaffinity(0, sizeof(all), &all) != 0) {
        return -errno;
    }
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &all) && i-- == 0) {
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            return sched_setaffinity(0, sizeof(one), &one) == 0 ? 0 : -errno;
        }
    }
    return -EINVAL;
#else
    (void) i;
    return -ENOSYS;
#endif
}

#if defined(__linux__)
static uint64_t ggml_moe_os_meminfo(const char * name) {
    return ggml_moe_os_stat(ggml_moe_os_read_file("/proc/meminfo"), name)*1024;
}
#endif

static uint64_t ggml_moe_os_memory_available(void) {
#if defined(__linux__)
    const uint64_t    available = ggml_moe_os_meminfo("MemAvailable:");
    const std::string self      = ggml_moe_os_read_file("/proc/self/cgroup");
    const uint64_t    limit     = ggml_moe_os_cgroup_limit(self.c_str(), "/sys/fs/cgroup");
    if (limit == UINT64_MAX) {
        return available;
    }
    return available == 0 ? limit : std::min(available, limit);
#elif defined(__APPLE__)
    uint64_t total = 0;
    size_t   size  = sizeof(total);
    return sysctlbyname("hw.memsize", &total, &size, nullptr, 0) == 0 ? total : 0;
#else
    return 0;
#endif
}

static uint64_t ggml_moe_os_memory_spare(void) {
#if defined(__linux__)
    const uint64_t    available = ggml_moe_os_meminfo("MemAvailable:");
    const std::string self      = ggml_moe_os_read_file("/proc/self/cgroup");
    const uint64_t    spare     = ggml_moe_os_cgroup_spare(self.c_str(), "/sys/fs/cgroup");
    if (available == 0 && spare == UINT64_MAX) {
        return 0;
    }
    return std::max<uint64_t>(1, std::min(available == 0 ? UINT64_MAX : available, spare)); // known, and be it nothing
#elif defined(__APPLE__)
    // no figure says what reclaim could give: half of the machine leaves room for everybody else
    task_vm_info_data_t    info;
    mach_msg_type_number_t count = TASK_VM_INFO_COUNT;
    const bool     known = task_info(mach_task_self(), TASK_VM_INFO, (task_info_t) &info, &count) == KERN_SUCCESS;
    const uint64_t half  = ggml_moe_os_memory_available()/2;
    return half - std::min<uint64_t>(half, known ? info.phys_footprint : half);
#else
    return 0;
#endif
}

const ggml_moe_os * ggml_moe_os_native(void) {
    static const ggml_moe_os os = {
#if defined(GGML_MOE_OS_POSIX)
        /*.page_size        =*/ (size_t) sysconf(_SC_PAGESIZE),
        /*.advise_willneed  =*/ ggml_moe_os_advise_willneed,
        /*.advise_random    =*/ ggml_moe_os_advise_random,
        /*.advise_normal    =*/ ggml_moe_os_advise_normal,
        /*.resident         =*/ ggml_moe_os_resident,
        /*.lock             =*/ ggml_moe_os_lock,
        /*.unlock           =*/ ggml_moe_os_unlock,
#else
        /*.page_size        =*/ 4096,
        /*.advise_willneed  =*/ ggml_moe_os_advise_none,
        /*.advise_random    =*/ ggml_moe_os_advise_none,
        /*.advise_normal    =*/ ggml_moe_os_advise_none,
        /*.resident         =*/ ggml_moe_os_resident,
        /*.lock             =*/ ggml_moe_os_advise_none,
        /*.unlock           =*/ ggml_moe_os_advise_none,
#endif
        /*.file_normal      =*/ ggml_moe_os_file_normal,
        /*.read_window      =*/ ggml_moe_os_read_window,
        /*.resident_known   =*/ ggml_moe_os_resident_known,
        /*.direct_open      =*/ ggml_moe_os_direct_open,
        /*.direct_read      =*/ ggml_moe_os_direct_read,
        /*.direct_close     =*/ ggml_moe_os_direct_close,
        /*.page_drop        =*/ ggml_moe_os_page_drop,
        /*.memory_reserve   =*/ ggml_moe_os_memory_reserve,
        /*.memory_discard   =*/ ggml_moe_os_memory_discard,
        /*.memory_free      =*/ ggml_moe_os_memory_free,
        /*.thread_pin       =*/ ggml_moe_os_thread_pin,
        /*.memory_available =*/ ggml_moe_os_memory_available,
        /*.memory_spare     =*/ ggml_moe_os_memory_spare,
        /*.major_faults     =*/ ggml_moe_os_major_faults,
    };
    return &os;
}
