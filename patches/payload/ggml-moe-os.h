#pragma once

// What the payload needs from an operating system. The table form lets a test stand in for a kernel.

#include <cstddef>
#include <cstdint>

struct ggml_moe_os {
    size_t page_size;

    // all return 0 or -errno; -ENOSYS where the platform has no such call
    int (*advise_willneed)(uintptr_t addr, size_t size); // start reading, do not wait
    int (*advise_random)  (uintptr_t addr, size_t size); // a fault reads its own page only
    int (*advise_normal)  (uintptr_t addr, size_t size);
    int (*resident)       (uintptr_t addr, size_t size, uint8_t * pages); // bit 0 of pages[i]: page i is in memory

    int (*file_normal)(int fd); // undo a sequential-access advice given to the open file

    size_t   (*read_window)(int fd);          // the most bytes of one willneed request that are honoured
    bool     (*resident_known)(int fd);       // whether `resident` tells this process the truth about the file
    uint64_t (*memory_available)(void);       // bytes this process could still fill, its cgroup's limit included; 0: unknown
};

const ggml_moe_os * ggml_moe_os_native(void);

// memory limit of the process's cgroup in bytes, UINT64_MAX when there is none; the two arguments are
// the content of /proc/self/cgroup and the folder where cgroups are mounted
uint64_t ggml_moe_os_cgroup_limit(const char * self_cgroup, const char * root);
