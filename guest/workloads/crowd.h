/* Processes that run side by side until they are told to stop, and pause when the host asks. */
#ifndef CROWD_H
#define CROWD_H

#include "lacuna.h"

#define PAGE 4096ull
#define BLOCK (512 * PAGE)

/* On the arena's first page, which everybody shares and nobody faults on at random. */
struct crowd {
    volatile uint64_t stop;
    uint64_t left; /* how many are not as far as the others wait for */
};

static inline struct crowd *crowd(void) { return (struct crowd *)lacuna_arena(); }

/*
 * The host decides who runs: so it can compare, within one run, a crowd with one part and without.
 * Looked at rarely: on a host that emulates kernel code, a look a millisecond costs the others
 * 30 %, and one every 20 ms still 2 %.
 */
static inline void crowd_while_paused(uint32_t kind) {
    while (lacuna_paused(kind) && !crowd()->stop)
        lacuna_sleep_ns(lacuna_param("look_ms", 20) * 1000000);
}

/* Describes this thread as number `index` of those called `name`. */
static inline struct lacuna_status_entry *crowd_member(uint32_t kind, const char *name,
                                                       uint64_t index, uint64_t goal) {
    char numbered[24];
    size_t n = 0;
    for (; name[n]; n++)
        numbered[n] = name[n];
    if (index > 9)
        numbered[n++] = (char)('0' + index / 10);
    numbered[n++] = (char)('0' + index % 10);
    numbered[n] = 0;
    return lacuna_status(kind, numbered, goal);
}

/* How much of the arena, in bytes, is to be used. */
static inline uint64_t crowd_bytes(void) {
    uint64_t bytes = lacuna_param("bytes", lacuna_arena_bytes());
    return bytes < lacuna_arena_bytes() ? bytes : lacuna_arena_bytes();
}

#endif
