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
    int (*lock)           (uintptr_t addr, size_t size); // keep in memory until unmapped or unlocked
    int (*unlock)         (uintptr_t addr, size_t size);

    int (*file_normal)(int fd); // undo a sequential-access advice given to the open file

    size_t (*read_window)(int fd);    // the most bytes of one willneed request that are honoured
    bool   (*resident_known)(int fd); // whether `resident` tells this process the truth about the file

    // a second handle of an open file that reads past the page cache; address, size and offset are multiples of the page
    int     (*direct_open) (int fd, intptr_t * file);
    int64_t (*direct_read) (intptr_t file, void * data, size_t size, uint64_t offset); // bytes, fewer only at the end of the file
    void    (*direct_close)(intptr_t file);

    // drops the page cache's copy of a mapped range, but for what another process maps; its next use reads the file again
    int (*page_drop)(intptr_t file, uintptr_t addr, size_t size, uint64_t offset);

    // memory of the process's own; it counts only once it is touched; NULL: none to be had
    void * (*memory_reserve)(size_t size);
    int    (*memory_discard)(void * data, size_t size); // give the pages back, keep the addresses
    void   (*memory_free)   (void * data, size_t size);

    int (*thread_pin)(int i); // the calling thread to the i-th of the CPUs that it may run on

    uint64_t (*memory_available)(void); // bytes this process could still fill, its cgroup's limit included; 0: unknown
    uint64_t (*memory_spare)(void);     // the same without what this process and its cgroup hold for good; 0: unknown
    uint64_t (*major_faults)(void);     // of the calling thread, where the system tells, else of the process, since its start
};

const ggml_moe_os * ggml_moe_os_native(void);

// memory limit of the process's cgroup in bytes, UINT64_MAX when there is none; the two arguments are
// the content of /proc/self/cgroup and the folder where cgroups are mounted
uint64_t ggml_moe_os_cgroup_limit(const char * self_cgroup, const char * root);

// the same less what the cgroup cannot give back: anonymous memory, files in memory only, locked pages and the kernel's own
uint64_t ggml_moe_os_cgroup_spare(const char * self_cgroup, const char * root);
