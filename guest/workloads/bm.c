/*
 * The benchmark of the 2010 async-page-fault talk: faulting processes that access random places
 * in all of the arena, half of the accesses writes, beside counting processes that need no
 * memory. Who gets how far tells what a fault costs those who did not cause it. The first entry of
 * the status page counts to 1 when all memory is populated, if asked to, and everybody runs.
 */
#include "lacuna.h"

#define PAGE 4096ull

/* On the arena's first page, which everybody shares and nobody faults on at random. */
struct control {
    volatile uint64_t stop;
    uint64_t faulters_left;
};

static struct control *control(void) { return (struct control *)lacuna_arena(); }

static const char *number_name(char *out, const char *name, uint64_t i) {
    size_t n = 0;
    for (; name[n]; n++)
        out[n] = name[n];
    if (i > 9)
        out[n++] = (char)('0' + i / 10);
    out[n++] = (char)('0' + i % 10);
    out[n] = 0;
    return out;
}

/*
 * The host decides who runs: so it can compare, within one run, faulters with and without. Looked
 * at rarely: on a host that emulates kernel code, a look a millisecond costs the others 30 %, and
 * one every 20 ms still 2 %.
 */
static void while_paused(uint32_t kind) {
    while (lacuna_paused(kind) && !control()->stop)
        lacuna_sleep_ns(lacuna_param("look_ms", 20) * 1000000);
}

static int worker(uint64_t index) {
    char name[24];
    struct lacuna_status_entry *me =
        lacuna_status(LACUNA_KIND_WORKER, number_name(name, "worker", index), 0);
    while (!control()->stop) {
        for (int i = 0; i < 1024; i++)
            me->counter++;
        while_paused(LACUNA_KIND_WORKER);
    }
    return 0;
}

static uint64_t bytes_in_use(void) {
    uint64_t bytes = lacuna_param("bytes", lacuna_arena_bytes());
    return bytes < lacuna_arena_bytes() ? bytes : lacuna_arena_bytes();
}

static int faulter(uint64_t index) {
    char name[24];
    uint64_t goal = lacuna_param("accesses", 0), x = lacuna_mix(lacuna_param("seed", 1) + index);
    uint64_t bytes = bytes_in_use(), pages = bytes / PAGE > 1 ? bytes / PAGE - 1 : 1;
    char *base = lacuna_arena() + PAGE;
    struct lacuna_status_entry *me =
        lacuna_status(LACUNA_KIND_FAULTER, number_name(name, "faulter", index), goal);
    x |= 1;
    while (!control()->stop && (!goal || me->counter < goal)) {
        while_paused(LACUNA_KIND_FAULTER);
        uint64_t r = lacuna_random(&x);
        volatile uint64_t *p =
            (volatile uint64_t *)(base + lacuna_below(r, pages) * PAGE + (r & 511) * 8);
        if (r & 512)
            *p = r;
        else
            (void)*p;
        me->counter++;
    }
    if (!__atomic_sub_fetch(&control()->faulters_left, 1, __ATOMIC_SEQ_CST) && goal)
        control()->stop = 1;
    return 0;
}

/* A process; or with processes=0 a thread of this one, which spares the host changes of CR3. */
static int begin(lacuna_main_fn *fn, uint64_t index, uint64_t cpu) {
    return (lacuna_param("processes", 1) ? lacuna_spawn : lacuna_thread)(fn, index, cpu);
}

static void report(const char *kind, int slot, uint64_t *total) {
    struct lacuna_status_entry *e = lacuna_status_of(slot);
    lacuna_printf("RESULT thread=%s kind=%s cpu=%u count=%lu\n", e->name, kind, e->cpu, e->counter);
    *total += e->counter;
}

int main(void) {
    uint64_t faulters = lacuna_param("faulters", lacuna_cpus());
    uint64_t workers = lacuna_param("workers", lacuna_cpus());
    uint64_t goal = lacuna_param("accesses", 0), worked = 0, accessed = 0;
    int slots[LACUNA_MAX_THREADS];
    if (faulters + workers >= LACUNA_MAX_THREADS || faulters + workers == 0 ||
        (goal && !faulters)) {
        lacuna_printf("bm: faulters=%lu workers=%lu cannot be\n", faulters, workers);
        return 2;
    }
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "bm", 0);
    control()->stop = 0;
    control()->faulters_left = faulters;
    for (uint64_t at = PAGE; lacuna_param("populate", 0) && at < bytes_in_use(); at += PAGE)
        *(volatile uint64_t *)(lacuna_arena() + at) = at;
    uint64_t start = lacuna_now_ns();
    for (uint64_t i = 0; i < faulters + workers; i++) {
        bool f = i < faulters;
        uint64_t index = f ? i : i - faulters;
        slots[i] = begin(f ? faulter : worker, index, index % lacuna_cpus());
        if (slots[i] < 0) {
            lacuna_printf("bm: no memory for process %lu\n", i);
            return 2;
        }
    }
    me->counter = 1; /* the host may begin to measure */
    if (!goal) {
        lacuna_sleep_ns(lacuna_param("seconds", 10) * 1000000000);
        control()->stop = 1;
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
