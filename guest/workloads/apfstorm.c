/*
 * Async page faults are switched off and on, and vCPUs go offline, in random order, while threads
 * on all of them touch random pages and check what they find. If the host forgets a fault and its
 * thread is not woken, this workload hangs. A wrong word ends it with exit code 1.
 */
#include "checked.h"

static uint64_t seed, accesses, switches, share;
static volatile uint64_t left; /* touching threads that have not ended */
static volatile uint64_t wrong, switched;
static uint64_t enables, disables, offlines;

static void count(volatile uint64_t *counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

static int toucher(uint64_t index) {
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_FAULTER, "toucher", accesses);
    struct checked part = checked_new(lacuna_arena() + index * share, share, seed + index);
    while ((me->counter < accesses || switched < switches) && !wrong) {
        if (checked_access(&part))
            count(&wrong);
        me->counter++;
    }
    __atomic_sub_fetch(&left, 1, __ATOMIC_SEQ_CST);
    return 0;
}

/* Runs on one vCPU, until that vCPU goes offline. */
static int switcher(uint64_t cpu) {
    uint64_t x = lacuna_mix(seed ^ cpu << 32) | 1, every = lacuna_param("every_us", 2000) * 1000;
    uint64_t odds = lacuna_param("offline", 64);
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "switcher", 0);
    for (; left; me->counter++) {
        uint64_t r = lacuna_random(&x);
        count(&switched);
        if (r & 1) {
            lacuna_apf_disable();
            count(&disables);
        } else if (!lacuna_apf_enable()) {
            count(&enables);
        }
        if (odds && !lacuna_below(r << 8, odds) && !lacuna_cpu_offline()) {
            count(&offlines);
            return me->cpu != 0; /* the thread has been moved to CPU 0 */
        }
        lacuna_sleep_ns(lacuna_below(lacuna_random(&x), every + 1));
    }
    return 0;
}

int main(void) {
    uint64_t threads = lacuna_param("threads", 2ull * lacuna_cpus());
    uint64_t bytes = lacuna_param("bytes", lacuna_arena_bytes());
    if (bytes > lacuna_arena_bytes())
        bytes = lacuna_arena_bytes();
    seed = lacuna_mix(lacuna_param("seed", 1));
    accesses = lacuna_param("accesses", 20000);
    switches = lacuna_param("switches", 100);
    share = threads ? bytes / threads & ~(CHECKED_PAGE - 1) : 0;
    if (share < 16 * CHECKED_PAGE || threads + lacuna_cpus() >= LACUNA_MAX_THREADS) {
        lacuna_printf("apfstorm: cannot run with threads=%lu bytes=%lu: give at least 64K for each "
                      "thread, and fewer than %u threads and vCPUs\n",
                      threads, bytes, LACUNA_MAX_THREADS);
        return 2;
    }
    lacuna_status(LACUNA_KIND_OTHER, "main", 0);
    left = threads;
    uint64_t start = lacuna_now_ns();
    int failed = 0;
    for (uint64_t i = 0; i < threads; i++)
        failed |= lacuna_thread(toucher, i, i % lacuna_cpus()) < 0;
    for (uint64_t i = 0; i < lacuna_cpus(); i++)
        failed |= lacuna_thread(switcher, i, i) < 0;
    if (failed) {
        lacuna_printf("apfstorm: no memory for %lu threads: give more memory or fewer\n", threads);
        return 2;
    }
    int worst = lacuna_wait();
    const struct lacuna_status *s = lacuna_status_page();
    lacuna_printf("RESULT enables=%lu disables=%lu offlines=%lu not_present=%u ready=%u "
                  "wake_all=%u dummy=%u idle=%u lost=%u\n",
                  enables, disables, offlines, s->apf_not_present, s->apf_ready, s->apf_wake_all,
                  s->apf_dummy, s->apf_idle, s->apf_lost);
    lacuna_printf("RESULT threads=%lu switches=%lu wrong=%lu ns=%lu\n", threads, switched, wrong,
                  lacuna_now_ns() - start);
    return wrong ? 1 : worst;
}
