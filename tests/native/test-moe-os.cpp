// The native operating system: cgroup limits from a made-up tree, and a real file whose slices become resident.

#include "helpers.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#if !defined(__linux__) && !defined(__APPLE__)

int main() {
    return T_EXIT_SKIP; // no early reads on this platform: every request is refused with ENOSYS
}

#else

#include <fcntl.h>
#if defined(__linux__)
#    include <sched.h>
#endif
#include <sys/mman.h>
#include <unistd.h>

namespace fs = std::filesystem;

static void write_file(const fs::path & path, const std::string & text) {
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text;
}

static void test_cgroup(const fs::path & root) {
    const std::string r = root.string();

    // v2: "max" in the leaf, 2 GiB in its parent, 3 GiB above
    write_file(root / "a/b/c/memory.max", "max\n");
    write_file(root / "a/b/memory.max",   "2147483648\n");
    write_file(root / "a/memory.max",     "3221225472\n");
    CHECK_EQ(ggml_moe_os_cgroup_limit("0::/a/b/c\n", r.c_str()), 2147483648u);
    CHECK_EQ(ggml_moe_os_cgroup_limit("0::/a\n",     r.c_str()), 3221225472u);
    CHECK_EQ(ggml_moe_os_cgroup_limit("0::/\n",      r.c_str()), UINT64_MAX);

    // v2: memory.high throttles before memory.max kills
    write_file(root / "h/memory.max",  "4294967296\n");
    write_file(root / "h/memory.high", "1073741824\n");
    CHECK_EQ(ggml_moe_os_cgroup_limit("0::/h\n", r.c_str()), 1073741824u);

    // v1: the huge number means none and never beats a real limit; other controllers do not matter
    write_file(root / "memory/memory.limit_in_bytes",   "9223372036854771712\n");
    write_file(root / "memory/x/memory.limit_in_bytes", "1610612736\n");
    CHECK_EQ(ggml_moe_os_cgroup_limit("5:cpu,cpuacct:/y\n4:memory:/x\n0::/\n", r.c_str()), 1610612736u);
    CHECK_EQ(ggml_moe_os_cgroup_limit("4:memory:/x/gone\n", r.c_str()), 1610612736u);
    CHECK_EQ(ggml_moe_os_cgroup_limit("4:memory:/\n", r.c_str()), 9223372036854771712u);

    // v2: 100 anonymous, 20 of a file in memory, 3 locked, 1 of the kernel's are held; pages of files are not
    write_file(root / "s/memory.max",  "1000\n");
    write_file(root / "s/memory.stat", "anon 100\nfile 500\nkernel 1\nshmem 20\nfile_mapped 90\nunevictable 3\n");
    CHECK_EQ(ggml_moe_os_cgroup_spare("0::/s\n", r.c_str()), 1000u - 124u);

    // v1: the figures of the group with its children, not its own
    write_file(root / "memory/s/memory.limit_in_bytes",      "1000\n");
    write_file(root / "memory/s/memory.kmem.usage_in_bytes", "1\n");
    write_file(root / "memory/s/memory.stat", "rss 7\nshmem 7\nunevictable 7\ntotal_rss 100\ntotal_shmem 20\ntotal_unevictable 3\n");
    CHECK_EQ(ggml_moe_os_cgroup_spare("4:memory:/s\n", r.c_str()), 1000u - 124u);

    CHECK_EQ(ggml_moe_os_cgroup_limit("",         r.c_str()), UINT64_MAX);
    CHECK_EQ(ggml_moe_os_cgroup_limit("rubbish\n", r.c_str()), UINT64_MAX);
}

// returns false when the file could not be evicted (tmpfs), so that there is nothing to show
static bool test_file(const fs::path & path) {
    const ggml_moe_os & os = *ggml_moe_os_native();

    const size_t size = 8 << 20;
    { std::ofstream(path, std::ios::binary) << std::string(size, 'x'); }
    const int fd = open(path.c_str(), O_RDONLY);
    CHECK(fd >= 0);
    CHECK(fsync(fd) == 0);
#if defined(__linux__)
    CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
#endif
    void * addr = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(addr != MAP_FAILED);

    auto n_resident = [&](uintptr_t begin, size_t n_bytes) {
        std::vector<uint8_t> pages(n_bytes/os.page_size);
        CHECK(os.resident(begin, n_bytes, pages.data()) == 0);
        size_t n = 0;
        for (const uint8_t p : pages) {
            n += p & 1;
        }
        return n;
    };
    const bool evicted = n_resident((uintptr_t) addr, size) == 0;

    if (evicted) {
        CHECK(os.read_window(fd) >= 128*1024);
        CHECK(os.resident_known(fd)); // we have just written it

        // 4 experts of 2 MiB; only expert 2 is selected
        t_graph g;
        const size_t slice = 2 << 20;
        g.add(GGML_OP_MUL_MAT_ID, g.weights((uintptr_t) addr, 4, slice), g.ids(1, 4, {{ 2 }}));

        CHECK(ggml_moe_prefetch_set_mode(GGML_MOE_PREFETCH_MODE_HINT));
        ggml_moe_prefetch_map_add(addr, size, fd);
        g.run();
        CHECK_EQ(t_counter("errors"), 0u);
        CHECK_EQ(t_counter("bytes_hinted"), slice);

        // reads are asynchronous: they arrive, without any access of ours
        const uintptr_t begin = (uintptr_t) addr + 2*slice;
        for (int i = 0; i < 1000 && n_resident(begin, slice) < slice/os.page_size; i++) {
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
        CHECK_EQ(n_resident(begin, slice), slice/os.page_size);
        CHECK_EQ(n_resident((uintptr_t) addr, slice), 0u);

        // a second look finds all of it in memory and asks for nothing
        ggml_moe_prefetch_counter_reset();
        g.run();
        CHECK_EQ(t_counter("calls"), 0u);
        CHECK_EQ(t_counter("bytes_resident"), slice);

#if defined(__linux__)
        // what is dropped goes though it is mapped and in use, and nothing else does
        intptr_t file;
        if (os.direct_open(fd, &file) == 0) {
            CHECK(*(const char *) begin == 'x' && *(const char *) (begin + slice) == 'x');
            const size_t n_after = n_resident(begin + slice, slice);
            CHECK(n_after > 0);
            CHECK(os.page_drop(file, begin, 0, 2*slice) == 0);
            CHECK_EQ(n_resident(begin, slice), slice/os.page_size);
            CHECK(os.page_drop(file, begin, slice, 2*slice) == 0);
            CHECK_EQ(n_resident(begin, slice), 0u);
            CHECK_EQ(n_resident(begin + slice, slice), n_after);
            CHECK(*(const char *) begin == 'x'); // read again
            os.direct_close(file);
        }
#endif

        // after unmapping, a request for the stale address is refused by our registry, not by the kernel
        ggml_moe_prefetch_map_remove(addr, size);
        CHECK(munmap(addr, size) == 0);
        ggml_moe_prefetch_counter_reset();
        g.run();
        CHECK_EQ(t_counter("unmapped"), 1u);
        CHECK_EQ(t_counter("calls"), 0u);

        // and the kernel's own refusal arrives as an errno
        CHECK(os.advise_willneed(begin + 1, os.page_size) < 0);
    } else {
        munmap(addr, size);
    }

    close(fd);
    return evicted;
}

// a thread stays on one of the CPUs that it had before, another one for each number
static void test_thread_pin() {
#if defined(__linux__)
    cpu_set_t all;
    CHECK(sched_getaffinity(0, sizeof(all), &all) == 0);
    cpu_set_t seen;
    CPU_ZERO(&seen);
    for (int i = 0; i < CPU_COUNT(&all); i++) {
        std::thread([&, i] {
            cpu_set_t one;
            CHECK(ggml_moe_os_native()->thread_pin(i) == 0);
            CHECK(sched_getaffinity(0, sizeof(one), &one) == 0);
            CHECK_EQ(CPU_COUNT(&one), 1u);
            CPU_OR(&seen, &seen, &one);
        }).join();
    }
    CHECK(CPU_EQUAL(&seen, &all));
    CHECK(ggml_moe_os_native()->thread_pin(CPU_COUNT(&all)) == -EINVAL);
#endif
}

int main() {
    const fs::path dir = fs::current_path() / ("test-moe-os." + std::to_string(getpid()));
    fs::create_directories(dir);
    test_cgroup(dir / "cgroup");
    test_thread_pin();
    const bool shown = test_file(dir / "weights");
    fs::remove_all(dir);
    CHECK(ggml_moe_os_native()->memory_available() > 0);
    if (!shown) {
        fprintf(stderr, "skipped: the file system here keeps files in memory\n");
        return T_EXIT_SKIP;
    }
    return 0;
}

#endif
