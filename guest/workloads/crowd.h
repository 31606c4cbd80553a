/*
 * Threads or processes that run side by side until one of them finds something wrong or they are
 * told to stop. They pause when the host asks for it.
 */
#ifndef CROWD_H
#define CROWD_H

#include "lacuna.h"

#define PAGE 4096ull
#define BLOCK (512 * PAGE)

/* On the arena's first page, which all processes share and no random access touches. */
struct crowd {
    volatile uint64_t stop;
    uint64_t left; /* members that are not prepared yet; the others wait for them */
    volatile uint64_t begun; /* bm: all processes are there */
};

static inline struct crowd *crowd(void) { return (struct crowd *)lacuna_arena(); }

/*
 * Pauses while the host wants this kind of thread to pause. So the host can compare, within one
 * run, a crowd with this kind and without it. A paused thread reads the page rarely. On a host that
 * emulates kernel code, a read each millisecond costs the other threads 30 %, and one every 20 ms
 * still 2 %.
 */
static inline void crowd_while_paused(uint32_t kind) {
    while (lacuna_paused(kind) && !crowd()->stop)
        lacuna_sleep_ns(lacuna_param("look_ms", 20) * 1000000);
}

/* Describes this thread on the status page, as number `index` of those called `name`. */
static inline struct lacuna_status_entry *crowd_member(uint32_t kind, const char *name,
                                                       uint64_t index, uint64_t goal) {
    char numbered[24];
    size_t n = 0;
    for (; name[n]; n++)
        numbered[n] = name[n];
    for (uint64_t unit = index > 99 ? 100 : index > 9 ? 10 : 1; unit; unit /= 10)
        numbered[n++] = (char)('0' + index / unit % 10);
    numbered[n] = 0;
    return lacuna_status(kind, numbered, goal);
}

/* A member waits for others. Each processor has about one that waits, so the machine has one
 * wake-up in a millisecond, however many they are. */
static inline void crowd_wait(void) { lacuna_sleep_ns(lacuna_cpus() * 1000000ull); }

/* The caller is prepared. Waits until all members are, or one has failed. */
static inline void crowd_prepared(void) {
    __atomic_sub_fetch(&crowd()->left, 1, __ATOMIC_SEQ_CST);
    while (crowd()->left && !crowd()->stop)
        crowd_wait();
}

/* Whether this member continues: until the crowd stops or its counter has reached its goal. */
static inline bool crowd_continues(const struct lacuna_status_entry *me) {
    return !crowd()->stop && (!me->goal || me->counter < me->goal);
}

/* Ends a member. If it found something wrong, all others end too. */
static inline int crowd_end(bool wrong) {
    if (wrong)
        crowd()->stop = 1;
    return wrong;
}

/* The bytes of the arena to be used. */
static inline uint64_t crowd_bytes(void) {
    uint64_t bytes = lacuna_param("bytes", lacuna_arena_bytes());
    return bytes < lacuna_arena_bytes() ? bytes : lacuna_arena_bytes();
}

/* What main starts, and the results. */
struct crowd_run {
    const char *name; /* the workload's */
    lacuna_main_fn *member;
    int (*start)(lacuna_main_fn *fn, uint64_t arg, uint64_t cpu); /* as thread or as process */
    uint64_t members; /* fewer than LACUNA_MAX_THREADS */
    uint64_t goal;    /* of each; 0: run for the parameter `seconds` */
    uint64_t began, ns, total; /* time all were prepared; run time; sum of counters */
    int worst;                 /* exit status */
};

/* Sleeps until the time is over or a member has failed; looks every 100 ms. */
static inline void crowd_sleep(uint64_t end) {
    for (uint64_t now = lacuna_now_ns(); now < end && !crowd()->stop; now = lacuna_now_ns())
        lacuna_sleep_ns(end - now < 100000000 ? end - now : 100000000);
}

/* Runs the crowd until it ends. The first entry of the status page counts to 1 when all members
 * are prepared: the host may begin to measure. If it cannot start, it prints why and returns
 * false. */
static inline bool crowd_run(struct crowd_run *run) {
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "main", 0);
    int slots[LACUNA_MAX_THREADS];
    crowd()->stop = 0;
    crowd()->left = run->members;
    for (uint64_t i = 0; i < run->members; i++) {
        slots[i] = run->start(run->member, i, i % lacuna_cpus());
        if (slots[i] < 0) {
            lacuna_printf("%s: no memory for member %lu: give more memory or fewer\n", run->name,
                          i);
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
