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
#    include <sys/stat.h>
#    include <unistd.h>
#endif

#if defined(__linux__)
#    include <sys/sysmacros.h>
#elif defined(__APPLE__)
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

uint64_t ggml_moe_os_cgroup_limit(const char * self_cgroup, const char * root) {
    uint64_t limit = UINT64_MAX;

    // lines are "id:controllers:path"; the unified hierarchy has no controllers
    const std::string text = self_cgroup;
    for (size_t pos = 0; pos < text.size();) {
        const size_t eol  = std::min(text.find('\n', pos), text.size());
        const std::string line = text.substr(pos, eol - pos);
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

        // above memory.high a process is throttled while its pages are reclaimed, which is a limit for a big read
        const std::string base = std::string(root) + (unified ? "" : "/memory");
        std::vector<std::string> names = { unified ? "/memory.max" : "/memory.limit_in_bytes" };
        if (unified) {
            names.push_back("/memory.high");
        }

        // a parent's limit holds for its children, so the smallest one on the way to the root counts
        for (std::string path = line.substr(c1 + 1); ; path.resize(path.rfind('/'))) {
            if (path == "/") {
                path.clear();
            }
            for (const std::string & name : names) {
                limit = std::min(limit, ggml_moe_os_parse_limit(ggml_moe_os_read_file(base + path + name)));
            }
            if (path.rfind('/') == std::string::npos) {
                break;
            }
        }
    }

    return limit;
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

#else

static int ggml_moe_os_advise_none(uintptr_t, size_t) {
    return -ENOSYS;
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
    return geteuid() == 0 || (fstat(fd, &st) == 0 && st.st_uid == geteuid()) || access(path.c_str(), W_OK) == 0;
#elif defined(__APPLE__)
    (void) fd;
    return true;
#else
    (void) fd;
    return false;
#endif
}

static uint64_t ggml_moe_os_memory_available(void) {
#if defined(__linux__)
    uint64_t          available = 0;
    const std::string meminfo   = ggml_moe_os_read_file("/proc/meminfo");
    const size_t      pos       = meminfo.find("MemAvailable:");
    if (pos != std::string::npos) {
        available = strtoull(meminfo.c_str() + pos + strlen("MemAvailable:"), nullptr, 10) * 1024;
    }
    const std::string self  = ggml_moe_os_read_file("/proc/self/cgroup");
    const uint64_t    limit = ggml_moe_os_cgroup_limit(self.c_str(), "/sys/fs/cgroup");
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

const ggml_moe_os * ggml_moe_os_native(void) {
    static const ggml_moe_os os = {
#if defined(GGML_MOE_OS_POSIX)
        /*.page_size        =*/ (size_t) sysconf(_SC_PAGESIZE),
        /*.advise_willneed  =*/ ggml_moe_os_advise_willneed,
        /*.advise_random    =*/ ggml_moe_os_advise_random,
        /*.advise_normal    =*/ ggml_moe_os_advise_normal,
#else
        /*.page_size        =*/ 4096,
        /*.advise_willneed  =*/ ggml_moe_os_advise_none,
        /*.advise_random    =*/ ggml_moe_os_advise_none,
        /*.advise_normal    =*/ ggml_moe_os_advise_none,
#endif
        /*.resident         =*/ ggml_moe_os_resident,
        /*.file_normal      =*/ ggml_moe_os_file_normal,
        /*.read_window      =*/ ggml_moe_os_read_window,
        /*.resident_known   =*/ ggml_moe_os_resident_known,
        /*.memory_available =*/ ggml_moe_os_memory_available,
    };
    return &os;
}
