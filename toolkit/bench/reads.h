// Shared by the files of `reads`.

#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define _FILE_OFFSET_BITS 64

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { EXIT_CANNOT = 77 };

struct job {
    int             fd;
    const uint8_t * map;
    size_t          page;
    size_t          slice;
    size_t          window; // most bytes in one hint
    int             readers;
    double          seconds;

    uint64_t * offsets;
    long       n_offsets;
    long       group;

    // the group under way
    long              first;
    long              end;
    atomic_long       next;
    double            start;
    double            group_start;
    bool              over;
    pthread_barrier_t barrier;

    double *      group_seconds;
    long          n_groups;
    atomic_ullong checksum; // of all bytes, weighted by the place of the slice in the list
    bool          check;
};

_Noreturn void fail(int code, const char * format, ...);
_Noreturn void refuse(const char * call); // by errno: EXIT_CANNOT where the system has no such call

double now(void);

// down and up to whole pages
uint64_t page_down(const struct job * job, uint64_t x);
uint64_t page_up  (const struct job * job, uint64_t x);

uint8_t * scratch_new(const struct job * job); // room for a slice and the pages it begins and ends in
void      read_fully (struct job * job, uint8_t * to, size_t size, uint64_t offset, size_t enough);
void      add_check  (struct job * job, long i, const uint8_t * data);

bool next_group(struct job * job); // false: it is over

void run_uring(struct job * job);
