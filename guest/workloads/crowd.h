/*
 * Threads or processes that run side by side until they are told to stop, or one finds something
 * wrong, and that pause when the host asks.
 */
#ifndef CROWD_H
#define CROWD_H

#include "lacuna.h"

#define PAGE 4096ull
#define BLOCK (512 * PAGE)

/* On the arena's first page, which everybody shares and nobody faults on at random. */
struct crowd {
    volatile uint64_t stop;
    uint64_t left; /* how many are not prepared yet: the others wait for them */
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

/* This one is prepared: waits until all are, or one has failed. */
static inline void crowd_prepared(void) {
    __atomic_sub_fetch(&crowd()->left, 1, __ATOMIC_SEQ_CST);
    while (crowd()->left && !crowd()->stop)
        lacuna_sleep_ns(1000000);
}

/* Is this one to go on? With a goal, until its counter is there. */
static inline bool crowd_goes_on(const struct lacuna_status_entry *me) {
    return !crowd()->stop && (!me->goal || me->counter < me->goal);
}

/* How a member ends: one that found something wrong takes all others with it. */
static inline int crowd_end(bool wrong) {
    if (wrong)
        crowd()->stop = 1;
    return wrong;
}

/* How much of the arena, in bytes, is to be used. */
static inline uint64_t crowd_bytes(void) {
    uint64_t bytes = lacuna_param("bytes", lacuna_arena_bytes());
    return bytes < lacuna_arena_bytes() ? bytes : lacuna_arena_bytes();
}

/* What main starts, and what came of it. */
struct crowd_run {
    const char *name; /* the workload's */
    lacuna_main_fn *member;
    int (*start)(lacuna_main_fn *fn, uint64_t arg, uint64_t cpu); /* as thread or as process */
    uint64_t members; /* fewer than LACUNA_MAX_THREADS */
    uint64_t goal;    /* of each; 0: they run for the parameter `seconds` */
    uint64_t began, ns, total; /* when all were prepared; until all ended; all their counters */
    int worst;                 /* exit status */
};

/* Until the time is over or a member failed, which is looked at every 100 ms. */
static inline void crowd_sleep(uint64_t end) {
    for (uint64_t now = lacuna_now_ns(); now < end && !crowd()->stop; now = lacuna_now_ns())
        lacuna_sleep_ns(end - now < 100000000 ? end - now : 100000000);
}

/* Runs the crowd until it ends. The first entry of the status page counts to 1 when all are
 * prepared: the host may begin to measure. Returns false, and has said so, if it did not start. */
static inline bool crowd_run(struct crowd_run *run) {
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "main", 0);
    int slots[LACUNA_MAX_THREADS];
    crowd()->stop = 0;
    crowd()->left = run->members;
    for (uint64_t i = 0; i < run->members; i++) {
        slots[i] = run->start(run->member, i, i % lacuna_cpus());
        if (slots[i] < 0) {
            lacuna_printf("%s: no memory for member %lu\n", run->name, i);
            return false;
        }
    }
    while (crowd()->left && !crowd()->stop)
        lacuna_sleep_ns(1000000);
    me->counter = !crowd()->left;
    run->began = lacuna_now_ns();
    if (!run->goal) {
        crowd_sleep(run->began + lacuna_param("seconds", 10) * 1000000000);
        crowd()->stop = 1;
    }
    run->worst = lacuna_wait();
    run->ns = lacuna_now_ns() - run->began;
    run->total = 0;
    for (uint64_t i = 0; i < run->members; i++)
        run->total += lacuna_status_of(slots[i])->counter;
    return true;
}

#endif
