/*
 * The benchmark of the 2010 async-page-fault talk: faulting processes that access random places in
 * all of the arena, half of the accesses writes, beside counting processes that need no memory. The
 * counters show what one process's faults cost the others. When all processes are there, and all
 * memory is populated if that was asked for, the first entry of the status page counts to 1, and
 * all processes begin. Processes that begin earlier delay the creation of the others, and an ended
 * process frees its entry of the status page for another one.
 */
#include "crowd.h"

static void wait_for_all(void) {
    while (!crowd()->begun)
        crowd_wait();
}

static int worker(uint64_t index) {
    struct lacuna_status_entry *me = crowd_member(LACUNA_KIND_WORKER, "worker", index, 0);
    wait_for_all();
    while (!crowd()->stop) {
        for (int i = 0; i < 1024; i++)
            me->counter++;
        crowd_while_paused(LACUNA_KIND_WORKER);
    }
    return 0;
}

static int faulter(uint64_t index) {
    uint64_t goal = lacuna_param("accesses", 0), x = lacuna_mix(lacuna_param("seed", 1) + index);
    uint64_t bytes = crowd_bytes(), pages = bytes / PAGE > 1 ? bytes / PAGE - 1 : 1;
    char *base = lacuna_arena() + PAGE;
    struct lacuna_status_entry *me = crowd_member(LACUNA_KIND_FAULTER, "faulter", index, goal);
    x |= 1;
    wait_for_all();
    while (!crowd()->stop && (!goal || me->counter < goal)) {
        crowd_while_paused(LACUNA_KIND_FAULTER);
        uint64_t r = lacuna_random(&x);
        volatile uint64_t *p =
            (volatile uint64_t *)(base + lacuna_below(r, pages) * PAGE + (r & 511) * 8);
        if (r & 512)
            *p = r;
        else
            (void)*p;
        me->counter++;
    }
    if (!__atomic_sub_fetch(&crowd()->left, 1, __ATOMIC_SEQ_CST) && goal)
        crowd()->stop = 1;
    return 0;
}

/* Starts a process; with processes=0 a thread of this process, which keeps the address space. */
static int begin(lacuna_main_fn *fn, uint64_t index, uint64_t cpu) {
    return (lacuna_param("processes", 1) ? lacuna_spawn : lacuna_thread)(fn, index, cpu);
}

static void report(const char *kind, int slot, uint64_t *total) {
    struct lacuna_status_entry *e = lacuna_status_of(slot);
    lacuna_printf("RESULT thread=%s kind=%s cpu=%u count=%lu\n", e->name, kind, e->cpu, e->counter);
    *total += e->counter;
}

int main(void) {
    uint64_t faulters = lacuna_param("faulters", lacuna_threads_each(2));
    uint64_t workers = lacuna_param("workers", lacuna_threads_each(2));
    uint64_t goal = lacuna_param("accesses", 0), worked = 0, accessed = 0;
    int slots[LACUNA_MAX_THREADS];
    if (faulters + workers >= LACUNA_MAX_THREADS || faulters + workers == 0 ||
        (goal && !faulters)) {
        lacuna_printf("bm: cannot run with faulters=%lu workers=%lu: give 1 to %u processes, and "
                      "a faulter if accesses= is given\n",
                      faulters, workers, LACUNA_MAX_THREADS - 1);
        return 2;
    }
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "bm", 0);
    crowd()->stop = 0;
    crowd()->left = faulters;
    crowd()->begun = 0;
    for (uint64_t at = PAGE; lacuna_param("populate", 0) && at < crowd_bytes(); at += PAGE)
        *(volatile uint64_t *)(lacuna_arena() + at) = at;
    for (uint64_t i = 0; i < faulters + workers; i++) {
        bool f = i < faulters;
        uint64_t index = f ? i : i - faulters;
        slots[i] = begin(f ? faulter : worker, index, index % lacuna_cpus());
        if (slots[i] < 0) {
            lacuna_printf("bm: no memory for process %lu: give more memory or fewer\n", i);
            return 2;
        }
    }
    uint64_t start = lacuna_now_ns();
    crowd()->begun = 1;
    me->counter = 1; /* the host may begin to measure */
    if (!goal) {
        lacuna_sleep_ns(lacuna_param("seconds", 10) * 1000000000);
        crowd()->stop = 1;
    }
    int worst = lacuna_wait();
    uint64_t ns = lacuna_now_ns() - start;
    for (uint64_t i = 0; i < faulters + workers; i++) {
        bool f = i < faulters;
        report(f ? "faulter" : "worker", slots[i], f ? &accessed : &worked);
    }
    lacuna_printf("RESULT workers_total=%lu faulters_total=%lu ns=%lu\n", worked, accessed, ns);
    return worst;
}
