/*
 * Random reads of 8 bytes over much memory, by a thread a processor: what a translation costs that
 * is in no cache. All pages are written first; the first entry of the status page counts to 1 then.
 */
#include "crowd.h"

#define AT_ONCE 64 /* reads between two looks at the rest of the world */

static uint64_t words_in_use(void) { return crowd_bytes() / 8; }

static int reader(uint64_t index) {
    uint64_t goal = lacuna_param("reads", 0), words = words_in_use(), sum = 0;
    uint64_t random = lacuna_mix(lacuna_param("seed", 1) + index) | 1;
    const volatile uint64_t *arena = (const volatile uint64_t *)lacuna_arena();
    struct lacuna_status_entry *me = crowd_member(LACUNA_KIND_FAULTER, "reader", index, goal);
    while (!crowd()->stop && (!goal || me->counter < goal)) {
        crowd_while_paused(LACUNA_KIND_FAULTER);
        for (int i = 0; i < AT_ONCE; i++)
            sum += arena[lacuna_below(lacuna_random(&random), words)];
        me->counter += AT_ONCE;
    }
    return sum == 0; /* every page has something in it */
}

int main(void) {
    uint64_t threads = lacuna_param("threads", lacuna_cpus()), total = 0;
    int slots[LACUNA_MAX_THREADS];
    if (!threads || threads >= LACUNA_MAX_THREADS || words_in_use() < PAGE) {
        lacuna_printf("reads: threads=%lu bytes=%lu cannot be\n", threads, crowd_bytes());
        return 2;
    }
    struct lacuna_status_entry *me = lacuna_status(LACUNA_KIND_OTHER, "main", 0);
    for (uint64_t at = 0; at < crowd_bytes(); at += PAGE)
        *(volatile uint64_t *)(lacuna_arena() + at + at / PAGE % 512 * 8) = at + 1;
    crowd()->stop = 0;
    for (uint64_t i = 0; i < threads; i++) {
        slots[i] = lacuna_thread(reader, i, i % lacuna_cpus());
        if (slots[i] < 0) {
            lacuna_printf("reads: no memory for thread %lu\n", i);
            return 2;
        }
    }
    me->counter = 1; /* the host may begin to measure */
    uint64_t start = lacuna_now_ns();
    if (!lacuna_param("reads", 0)) {
        lacuna_sleep_ns(lacuna_param("seconds", 10) * 1000000000);
        crowd()->stop = 1;
    }
    int worst = lacuna_wait();
    uint64_t ns = lacuna_now_ns() - start;
    for (uint64_t i = 0; i < threads; i++)
        total += lacuna_status_of(slots[i])->counter;
    lacuna_printf("RESULT threads=%lu reads=%lu ns=%lu\n", threads, total, ns);
    return worst;
}
